//! What a distillation learns from: a policy that scores the student's own responses.

use crate::error::{Error, Result};
use crate::learn::scoring::MarkedTokens;
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
        let mut teacher = LoadedModel::open(&source, &device.read_only())?;
        teacher.policy.fit_longest(plan.longest_sequence());
        let remedy =
            "distillation compares probabilities of the same tokens: take a teacher of the same family";
        check_vocabulary(model, &teacher, ("teacher", remedy))?;
        Ok(Some(Teacher::Model(Box::new(teacher.policy))))
    }

    /// The policy that scores; `model` is the student.
    pub fn policy<'a>(&'a self, model: &'a LoadedModel) -> &'a Policy {
        match self {
            Teacher::Solution(_) => &model.policy,
            Teacher::Model(policy) => policy,
        }
    }

    /// The responses of a batch after the prompts that the teacher reads: tokens, and which of them the student sampled.
    /// `None` if the teacher reads the student's prompts.
    pub fn prompted(
        &self,
        model: &LoadedModel,
        task: &Task,
        plan: &Plan,
        batch: &Batch,
    ) -> Result<Option<Vec<MarkedTokens>>> {
        let Teacher::Solution(template) = self else { return Ok(None) };
        let mut prompted = Vec::new();
        for group in &batch.groups {
            let prompt = solved_prompt(template, model, task, plan, &group.problem)?;
            let rollouts = || group.members.iter().map(|member| &member.rollout);
            let longest = rollouts().map(|rollout| rollout.response().len()).max().unwrap_or(0);
            let limit = model.policy.config().position_limit().min(plan.config.update.microbatch_tokens);
            if prompt.len() + longest > limit {
                return Err(Error::TeacherPrompt {
                    problem_id: group.problem.id.clone(),
                    n_tokens: prompt.len(),
                    n_response: longest,
                    limit,
                });
            }
            prompted.extend(rollouts().map(|rollout| {
                let n_replaced = rollout.prompt().len();
                let is_sampled = [&vec![false; prompt.len()], &rollout.is_sampled[n_replaced..]].concat();
                ([&prompt, rollout.response()].concat(), is_sampled)
            }));
        }
        Ok(Some(prompted))
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

/// Refuses a model under `key` whose tokens are not those of the policy: its log-probs would be of other texts.
pub(super) fn check_vocabulary(
    student: &LoadedModel,
    teacher: &LoadedModel,
    (key, remedy): (&'static str, &'static str),
) -> Result<()> {
    let refuse = |problem| Err(Error::Misfit { key, problem, remedy });
    let n_student = student.policy.config().vocabulary;
    let n_teacher = teacher.policy.config().vocabulary;
    if n_student != n_teacher {
        return refuse(format!("has a vocabulary of {n_teacher}, the model one of {n_student}"));
    }
    let (student, teacher) = (student.tokenizer()?, teacher.tokenizer()?);
    let different = (0..n_student as u32).find(|&id| student.token_of(id) != teacher.token_of(id));
    match different {
        None => Ok(()),
        Some(id) => {
            let text =
                |token: Option<String>| token.map_or("nothing".to_string(), |text| format!("{text:?}"));
            let (student, teacher) = (text(student.token_of(id)), text(teacher.token_of(id)));
            refuse(format!("token {id} is {teacher}, the model's is {student}"))
        }
    }
}
