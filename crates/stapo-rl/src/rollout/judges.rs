//! A judge with its model: prompts, forward passes, and the answers that are read from them.

use super::reward_models::ModelScorer;
use super::segments::{marks, split};
use super::verifier_model::{VerifierHome, VerifierModel, scoring_pass};
use crate::error::{Error, Result};
use crate::learn::memory::SamplingMemory;
use crate::plan::config::ModelSource;
use crate::plan::memory::{JUDGE_BATCH_TOKENS, judge_kv_bytes};
use crate::policy::loaded::LoadedModel;
use crate::reward::{AskJudge, JudgeAnswer, JudgeQuestion, JudgeReading, JudgeSpec, ScoreResponses};
use crate::tasks::template::Template;
use crate::tasks::unseen::listed;
use crate::tasks::{Task, TaskError};
use minijinja::Value;
use minijinja::value::Serde;
use rayon::prelude::*;
use stapo_core::Verdict;
use stapo_core::batch::pack_in_order;
use stapo_model::decoder::{HeadOptions, PackedBatch, Pass, PendingScores};
use stapo_model::generate::{Engine, EngineMemory, EngineSettings, Request, SamplingRule};
use stapo_model::{Device, Message, Segment, Tokenizer};
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

/// A model that judges. Answers are greedy and do not depend on what else is asked.
pub struct ModelJudge {
    spec: JudgeSpec,
    model: VerifierModel,
    template: Template,
    chat: bool,
    /// The longest prompt.
    limit: usize,
    work: Mutex<Work>,
    /// Set when the characters of the template were found to have tokens.
    is_readable: OnceLock<()>,
}

/// The memory that answers are computed in.
enum Work {
    /// One forward pass over prompts; the tokens of yes and no.
    Compare { pass: Box<Pass>, words: [u32; 2] },
    /// Texts that the judge writes.
    Write(Box<SamplingMemory>),
}

impl Task {
    /// Loads the models of the task's judges and its reward models.
    pub fn load_model_judges<'a>(&mut self, home: impl Into<VerifierHome<'a>>) -> Result<()> {
        let home = home.into();
        self.load_judges(
            |spec| Ok::<_, Error>(Box::new(ModelJudge::open(spec, home)?) as Box<dyn AskJudge>),
        )?;
        self.load_reward_models(
            |spec| Ok(Box::new(ModelScorer::open(spec, home)?) as Box<dyn ScoreResponses>),
        )
    }
}

impl ModelJudge {
    pub fn open<'a>(spec: &JudgeSpec, home: impl Into<VerifierHome<'a>>) -> Result<Self> {
        spec.check()?;
        let template = Template::new(spec.template())?;
        let found = ModelSource::named(&spec.model).find()?;
        let open = |device: &Device| LoadedModel::open_found(&found, spec.adapter.as_deref(), device);
        let placed = (spec.device.as_deref(), spec.keep);
        let (model, (chat, limit, work)) =
            VerifierModel::open(home.into(), placed, open, |model, memory| prepare(spec, model, memory))?;
        let work = Mutex::new(work);
        Ok(Self { spec: spec.clone(), model, template, chat, limit, work, is_readable: OnceLock::new() })
    }

    /// The answers to prompts, in their order.
    fn answers(&self, prompts: &[&[u32]]) -> Result<Vec<JudgeAnswer>> {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        self.model.at_work(|model| match &mut *work {
            Work::Compare { pass, words } => self.compare(model, (pass, *words), prompts),
            Work::Write(memory) => self.write(model, memory, prompts),
        })
    }

    /// Log-probs of yes and no as the first token after each prompt.
    fn compare(
        &self,
        model: &LoadedModel,
        (pass, words): (&mut Pass, [u32; 2]),
        prompts: &[&[u32]],
    ) -> Result<Vec<JudgeAnswer>> {
        let lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.len()).collect();
        let mut answers = Vec::with_capacity(prompts.len());
        let read = |pending: PendingScores| {
            let logp = pending.wait().logp;
            logp.chunks_exact(2).map(|logp| self.by_margin(logp)).collect::<Vec<_>>()
        };
        let mut pending = None;
        for microbatch in pack_in_order(&lengths, self.limit.max(JUDGE_BATCH_TOKENS))? {
            let mut batch = PackedBatch::new();
            for idx in microbatch.sequences {
                batch.push_choices(prompts[idx], &words);
            }
            let started = pass.start_score(&model.policy, &batch, HeadOptions::default())?;
            // A GPU runs a micro-batch while the host reads the one before.
            answers.extend(pending.replace(started).into_iter().flat_map(read));
        }
        answers.extend(pending.into_iter().flat_map(read));
        Ok(answers)
    }

    fn by_margin(&self, logp: &[f32]) -> JudgeAnswer {
        let margin = f64::from(logp[0]) - f64::from(logp[1]);
        let (verdict, word) = match margin > 0.0 {
            _ if margin.is_nan() => (Verdict::Unparsable, "neither word"),
            true => (Verdict::Right, self.spec.yes.as_str()),
            false => (Verdict::Wrong, self.spec.no.as_str()),
        };
        let reason = format!("the judge says {word} by {:.3} nats", margin.abs());
        JudgeAnswer { verdict, margin: Some(margin).filter(|margin| margin.is_finite()), text: None, reason }
    }

    /// What the judge writes after each prompt, sampled greedily.
    fn write(
        &self,
        model: &LoadedModel,
        memory: &mut SamplingMemory,
        prompts: &[&[u32]],
    ) -> Result<Vec<JudgeAnswer>> {
        let settings = EngineSettings { rule: SamplingRule::Greedy, ..memory.settings() };
        let mut engine = Engine::new(&model.policy, &mut memory.engine, settings)?;
        for (idx, prompt) in prompts.iter().enumerate() {
            let request = Request {
                problem: idx as u64,
                prompt: prompt.to_vec(),
                n_samples: 1,
                max_tokens: self.spec.max_tokens,
                stops: model.stops.clone(),
            };
            engine.submit(request).map_err(|error| self.failure("a prompt", &error.to_string()))?;
        }
        let tokenizer = model.tokenizer()?;
        let answer = |completion: stapo_model::generate::Completion| {
            let tokens: Vec<u32> = completion.tokens.iter().map(|sampled| sampled.token).collect();
            let text = tokenizer.decode(&tokens)?;
            let (verdict, found) = self.spec.read_text(&text);
            let reason = match found {
                Some(found) => format!("the judge writes {found}"),
                None => "the judge writes no verdict".to_string(),
            };
            Ok(JudgeAnswer { verdict, margin: None, text: Some(text), reason })
        };
        engine.generate()?.into_iter().map(answer).collect()
    }

    /// The judge's prompt about a response. Special tokens have their meaning in text of the templates, and are plain
    /// characters in problem, response and reference.
    fn prompt(&self, question: &JudgeQuestion) -> Result<Vec<u32>> {
        let model = self.model.read();
        let tokenizer = model.tokenizer()?;
        let segments = self.segments(&model, question)?;
        if self.is_readable.get().is_none() {
            self.check_characters(tokenizer, &segments)?;
            let _ = self.is_readable.set(());
        }
        if self.chat {
            return Ok(tokenizer.encode_segments(&segments)?);
        }
        // A plain text begins with the token that starts a sequence, where the model has one.
        let (first, rest) = match segments.split_first() {
            Some((Segment::Template(text), rest)) => (text.as_str(), rest),
            _ => ("", segments.as_slice()),
        };
        Ok([tokenizer.encode(first)?, tokenizer.encode_segments(rest)?].concat())
    }

    fn segments(&self, model: &LoadedModel, question: &JudgeQuestion) -> Result<Vec<Segment>> {
        let JudgeQuestion { problem, response, row } = *question;
        let contents = [problem.prompt.as_str(), response, problem.reference.as_str()];
        let shown = row.map(|row| serde_json::to_string(row).unwrap_or_default()).unwrap_or_default();
        let system = self.spec.system.as_deref().unwrap_or_default();
        let marks = marks([&contents[..], &[&shown, self.spec.template(), system]].concat().as_slice());
        let mut variables: BTreeMap<&str, Value> = BTreeMap::new();
        for (name, value) in row.into_iter().flatten() {
            variables.insert(name, Value::from(Serde(value)));
        }
        for (name, mark) in ["problem", "response", "reference"].into_iter().zip(&marks) {
            variables.insert(name, Value::from(mark.as_str()));
        }
        let mut text = self.template.fill(&problem.id, variables)?;
        if let (true, Some(template)) = (self.chat, &model.template) {
            let message = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
            let system = self.spec.system.iter().map(|system| message("system", system));
            let messages: Vec<Message> = system.chain([message("user", &text)]).collect();
            text = template.prompt(&messages, &self.spec.chat_arguments)?;
        }
        if !text.contains(&marks[1]) {
            return Err(TaskError::Template {
                template: self.spec.template().into(),
                problem: "does not show the response as it is".into(),
                remedy: "write {{ response }} without a filter".into(),
            }
            .into());
        }
        Ok(split(&text, &marks, contents))
    }

    /// Refuses a template whose characters the judge does not see.
    fn check_characters(&self, tokenizer: &Tokenizer, segments: &[Segment]) -> Result<()> {
        let text: String = segments
            .iter()
            .filter_map(|segment| match segment {
                Segment::Template(text) => Some(text.as_str()),
                Segment::Observation(_) => None,
            })
            .collect();
        let lost = tokenizer.lost_characters(&text)?;
        if lost.is_empty() {
            return Ok(());
        }
        let problem =
            format!("has characters that the judge {} has no token for: {}", self.spec.model, listed(&lost));
        Err(TaskError::setting("verifier.template", problem, "write a template that the judge can read")
            .into())
    }

    fn failure(&self, place: &str, problem: &str) -> TaskError {
        let (problem, hint) =
            problem.split_once("\nhint: ").unwrap_or((problem, "stapo judge-test asks the judge alone"));
        TaskError::Verifier {
            program: format!("judge {}", self.spec.model),
            place: place.into(),
            problem: problem.into(),
            remedy: hint.into(),
        }
    }
}

impl AskJudge for ModelJudge {
    fn ask(&self, questions: &[JudgeQuestion]) -> std::result::Result<Vec<JudgeAnswer>, TaskError> {
        let prompt = |question: &JudgeQuestion| {
            self.prompt(question).map_err(|error| match error {
                Error::Task(error) => error,
                other => self.failure(&format!("problem {:?}", question.problem.id), &other.to_string()),
            })
        };
        let prompts: Vec<Vec<u32>> =
            questions.par_iter().map(prompt).collect::<std::result::Result<_, _>>()?;
        let fitting: Vec<&[u32]> =
            prompts.iter().map(Vec::as_slice).filter(|prompt| prompt.len() <= self.limit).collect();
        let answers = self.answers(&fitting).map_err(|error| self.failure("a batch", &error.to_string()))?;
        let mut answers = answers.into_iter();
        let answer = |prompt: &Vec<u32>| {
            let computed = if prompt.len() <= self.limit { answers.next() } else { None };
            computed.unwrap_or_else(|| JudgeAnswer {
                verdict: Verdict::Unparsable,
                margin: None,
                text: None,
                reason: format!(
                    "the judge's prompt has {} tokens, the limit is {}",
                    prompt.len(),
                    self.limit
                ),
            })
        };
        Ok(prompts.iter().map(answer).collect())
    }
}

/// What a judge works with: whether its prompts are rendered, the longest of them, and memory.
fn prepare(
    spec: &JudgeSpec,
    model: &mut LoadedModel,
    memory: Option<&Device>,
) -> Result<(bool, usize, Work)> {
    let refuse = |key, problem: String, remedy: &str| Err(TaskError::setting(key, problem, remedy).into());
    let chat = spec.chat.unwrap_or(model.template.is_some());
    if chat && model.template.is_none() {
        let problem = format!("true, but the judge {} has no chat template", spec.model);
        return refuse("verifier.chat", problem, "leave it out");
    }
    if !chat && (spec.system.is_some() || !spec.chat_arguments.is_empty()) {
        let problem = format!("the prompts of the judge {} are plain text", spec.model);
        return refuse("verifier.chat", problem, "leave verifier.system and verifier.chat_arguments out");
    }
    let n_written = if spec.read == JudgeReading::YesNo { 0 } else { spec.max_tokens };
    model.policy.fit_longest(spec.max_prompt_tokens + n_written);
    let positions = model.policy.config().position_limit();
    if n_written >= positions {
        let problem = format!("{n_written}, and the judge has {positions} positions");
        return refuse("verifier.max_tokens", problem, "lower it");
    }
    let limit = spec.max_prompt_tokens.min(positions - n_written);
    if spec.read == JudgeReading::YesNo {
        let words = words(spec, model.tokenizer()?)?;
        let pass = Box::new(scoring_pass(&model.policy, memory, limit)?);
        return Ok((chat, limit, Work::Compare { pass, words }));
    }
    if model.stops.is_empty() {
        let problem = format!("the judge {} names no token that ends a response", spec.model);
        return refuse("verifier.model", problem, "add eos_token_id to its generation_config.json");
    }
    let kv_bytes = judge_kv_bytes(spec, model.policy.config(), model.policy.device()) as usize;
    let engine = memory.map_or_else(EngineMemory::new, |memory| EngineMemory::new_in(memory.clone()));
    let memory = SamplingMemory { engine, kv_bytes, ..SamplingMemory::small() };
    Ok((chat, limit, Work::Write(Box::new(memory))))
}

/// The first tokens of yes and no.
fn words(spec: &JudgeSpec, tokenizer: &Tokenizer) -> Result<[u32; 2]> {
    let first = |key: &'static str, word: &str| -> Result<u32> {
        let is_lost = word.is_empty() || !tokenizer.lost_characters(word)?.is_empty();
        let token = tokenizer.encode_literally(word)?.first().copied().filter(|_| !is_lost);
        let problem = || format!("{word:?} has no token of the judge {}", spec.model);
        Ok(token.ok_or_else(|| TaskError::setting(key, problem(), "a word that the judge can write"))?)
    };
    let words = [first("verifier.yes", &spec.yes)?, first("verifier.no", &spec.no)?];
    if words[0] == words[1] {
        let problem = format!("{:?} begins with the same token as {:?}", spec.no, spec.yes);
        return Err(
            TaskError::setting("verifier.no", problem, "two words with different first tokens").into()
        );
    }
    Ok(words)
}

#[cfg(test)]
mod tests;
