//! What a distillation learns from: a policy that scores the student's own responses.

use crate::error::{Error, Result};
use crate::plan::config::{Plan, TeacherSource};
use crate::policy::loaded::LoadedModel;
use crate::tasks::template::Template;
use crate::tasks::{Mistakes, Task};
use minijinja::Value;
use stapo_core::{Batch, Problem};
use stapo_model::Device;
use stapo_model::decoder::Policy;
use std::collections::BTreeMap;

/// A teacher that is ready to score.
pub(crate) enum Teacher {
    /// The policy itself, with the reference solution in its prompt.
    Solution(Box<Template>),
    /// A frozen model.
    Model(Box<Policy>),
}

impl Teacher {
    /// The teacher of a plan; `None` for an objective without distillation.
    pub fn open(plan: &Plan, model: &LoadedModel, task: &Task, device: &Device) -> Result<Option<Self>> {
        let Some(source) = &plan.config.teacher else { return Ok(None) };
        if let TeacherSource::Solution { template } = source {
            let template = template.as_deref().unwrap_or_else(|| task.teacher_template());
            return Ok(Some(Teacher::Solution(Box::new(Template::new(template)?))));
        }
        let Some(source) = source.model() else { return Ok(None) };
        let teacher = LoadedModel::open(&source, &device.read_only())?;
        check_vocabulary(model, &teacher)?;
        Ok(Some(Teacher::Model(Box::new(teacher.policy))))
    }

    /// The policy that scores; `model` is the student.
    pub fn policy<'a>(&'a self, model: &'a LoadedModel) -> &'a Policy {
        match self {
            Teacher::Solution(_) => &model.policy,
            Teacher::Model(policy) => policy,
        }
    }

    /// The prompt that the teacher reads before each response of a batch.
    pub fn prompts(
        &self,
        model: &LoadedModel,
        task: &Task,
        plan: &Plan,
        batch: &Batch,
    ) -> Result<Vec<Vec<u32>>> {
        let mut prompts = Vec::new();
        for group in &batch.groups {
            let Teacher::Solution(template) = self else {
                prompts.extend(group.members.iter().map(|member| member.rollout.prompt_tokens.clone()));
                continue;
            };
            let prompt = solved_prompt(template, model, task, plan, &group.problem)?;
            let longest = group.members.iter().map(|member| member.rollout.tokens.len()).max().unwrap_or(0);
            let limit = model.policy.config().max_positions.min(plan.config.update.microbatch_tokens);
            if prompt.len() + longest > limit {
                return Err(Error::TeacherPrompt {
                    problem_id: group.problem.id.clone(),
                    n_tokens: prompt.len(),
                    n_response: longest,
                    limit,
                });
            }
            prompts.extend(group.members.iter().map(|_| prompt.clone()));
        }
        Ok(prompts)
    }
}

/// The tokens of a problem's prompt with its solution.
fn solved_prompt(
    template: &Template,
    model: &LoadedModel,
    task: &Task,
    plan: &Plan,
    problem: &Problem,
) -> Result<Vec<u32>> {
    let solution = task.solution(problem, &Mistakes::NONE)?;
    let variables = BTreeMap::from([
        ("prompt", Value::from(problem.prompt.as_str())),
        ("solution", Value::from(solution)),
        ("reference", Value::from(problem.reference.as_str())),
    ]);
    let prompt = template.fill(&problem.id, variables)?;
    model.prompting(&plan.style)?.tokens(&Problem { prompt, ..problem.clone() })
}

/// Refuses a teacher whose tokens are not those of the student: its log-probs would be of other texts.
fn check_vocabulary(student: &LoadedModel, teacher: &LoadedModel) -> Result<()> {
    let refuse = |problem| {
        let remedy =
            "distillation compares probabilities of the same tokens: take a teacher of the same family";
        Err(Error::Misfit { key: "teacher", problem, remedy })
    };
    let own = student.policy.config().vocabulary;
    let other = teacher.policy.config().vocabulary;
    if own != other {
        return refuse(format!("has a vocabulary of {other}, the model one of {own}"));
    }
    let (student, teacher) = (student.tokenizer()?, teacher.tokenizer()?);
    let different = (0..own as u32).find(|&id| student.token_of(id) != teacher.token_of(id));
    match different {
        None => Ok(()),
        Some(id) => {
            let text =
                |token: Option<String>| token.map_or("nothing".to_string(), |text| format!("{text:?}"));
            let (own, other) = (text(student.token_of(id)), text(teacher.token_of(id)));
            refuse(format!("token {id} is {other}, the model's is {own}"))
        }
    }
}
