//! How a problem becomes the tokens that the model reads, and what happens to prompts that are too long.

use crate::error::{Error, Result};
use crate::plan::config::{LongPrompts, ModelSource, Plan, PromptStyle};
use crate::tasks::unseen::{Unseen, unseen};
use crate::tasks::{EnvironmentSpec, Split, Task};
use rayon::prelude::*;
use serde_json::{Map, Value};
use stapo_core::{Problem, Turn};
use stapo_model::{ChatTemplate, Message, Pretrained, Tokenizer, plain_continuation};
use std::borrow::Cow;

/// The parts of a model that prompts need. No weight is read.
pub struct PromptModel {
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
}

impl PromptModel {
    pub fn open(source: &ModelSource) -> Result<Self> {
        let files = source.find()?.files()?;
        let pretrained = Pretrained::open(&files.path)?;
        Ok(Self { tokenizer: pretrained.tokenizer()?, template: pretrained.chat_template()? })
    }

    pub fn prompting<'a>(&'a self, style: &'a PromptStyle) -> Result<Prompting<'a>> {
        Prompting::new(&self.tokenizer, self.template.as_ref(), style)
    }
}

/// Turns problems into tokens. The tokens are a function of the problem alone.
pub struct Prompting<'a> {
    tokenizer: &'a Tokenizer,
    /// Present where prompts are rendered as conversations.
    template: Option<&'a ChatTemplate>,
    /// Further variables of the template.
    variables: Cow<'a, Map<String, Value>>,
}

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Problems that one thread renders at a time.
const CHUNK: usize = 64;

impl<'a> Prompting<'a> {
    pub fn new(
        tokenizer: &'a Tokenizer,
        template: Option<&'a ChatTemplate>,
        style: &'a PromptStyle,
    ) -> Result<Self> {
        if style.chat && template.is_none() {
            return Err(Error::Misfit {
                key: "rollout.chat",
                problem: "true, but the model has no chat template".to_string(),
                remedy: "set it to false, or add chat_template.jinja to the model",
            });
        }
        let variables = Cow::Borrowed(&style.chat_arguments);
        Ok(Self { tokenizer, template: template.filter(|_| style.chat), variables })
    }

    /// Shows the policy these tools, by the variable `tools` of its chat template.
    #[must_use]
    pub fn with_tools(mut self, tools: Option<&Value>) -> Self {
        if let Some(tools) = tools {
            self.variables.to_mut().insert("tools".to_string(), tools.clone());
        }
        self
    }

    /// The tokens of a problem's prompt.
    pub fn tokens(&self, problem: &Problem) -> Result<Vec<u32>> {
        self.conversation(&problem.id, &problem.messages())
    }

    /// The tokens of the messages that the policy answers. Without chat, there is one message, and it is a text.
    pub fn conversation(&self, problem_id: &str, turns: &[Turn]) -> Result<Vec<u32>> {
        let Some(template) = self.template else {
            return Ok(self.tokenizer.encode(only_text(problem_id, turns)?)?);
        };
        let text = template.prompt(&messages(turns), &self.variables)?;
        Ok(self.tokenizer.encode_rendered(&text)?)
    }

    /// The tokens between two turns of the policy: the end of the first, unless the policy sampled it (`ended_with` is the
    /// stop token that it sampled), the observations, and what begins the next. `opening` is the conversation before the
    /// policy's first turn. No token of an earlier turn is encoded again.
    pub fn continuation(
        &self,
        opening: &[Turn],
        observations: &[Turn],
        ended_with: Option<u32>,
    ) -> Result<Vec<u32>> {
        let observations = messages(observations);
        let segments = match self.template {
            Some(template) => template.continuation(&messages(opening), &observations, &self.variables)?,
            None => plain_continuation(&observations),
        };
        Ok(self.tokenizer.encode_continuation(&segments, ended_with)?)
    }

    /// Checks that the chat template can continue a conversation about a problem after an observation. Returns what the user
    /// should know about it.
    fn check_episodes(&self, environment: &EnvironmentSpec, problem: &Problem) -> Result<Option<String>> {
        let Some(template) = self.template else { return Ok(None) };
        let observation =
            Message { role: environment.observation_role().to_string(), content: String::new() };
        template.continuation(&messages(&problem.messages()), &[observation], &self.variables)?;
        let note = "the chat template leaves out the thinking of earlier turns; episodes keep it (keep_thinking), because the past is what was sampled";
        Ok(template.drops_earlier_thinking(&self.variables).then(|| note.to_string()))
    }

    /// Cuts the middle out of an observation of more than `limit` tokens. Returns whether it was cut.
    pub fn cut(&self, observation: &mut Turn, limit: usize) -> Result<bool> {
        let ids = self.tokenizer.encode_literally(&observation.content)?;
        if ids.len() <= limit {
            return Ok(false);
        }
        let n_head = limit.div_ceil(2);
        let (head, tail) = (&ids[..n_head], &ids[ids.len() - (limit - n_head)..]);
        // A cut inside of a character leaves a replacement character.
        let (head, tail) = (self.tokenizer.decode(head)?, self.tokenizer.decode(tail)?);
        let (head, tail) = (head.trim_end_matches(REPLACEMENT), tail.trim_start_matches(REPLACEMENT));
        observation.content = format!("{head} [{} tokens cut] {tail}", ids.len() - limit);
        Ok(true)
    }

    /// The number of tokens of each problem's prompt, computed on all cores.
    pub fn lengths(&self, problems: &[&Problem]) -> Result<Vec<usize>> {
        let chunks: Vec<Result<Vec<usize>>> =
            problems.par_chunks(CHUNK).map(|chunk| self.chunk_lengths(chunk)).collect();
        Ok(chunks.into_iter().collect::<Result<Vec<_>>>()?.concat())
    }

    fn chunk_lengths(&self, problems: &[&Problem]) -> Result<Vec<usize>> {
        let Some(template) = self.template else {
            return problems.iter().map(|problem| Ok(self.tokens(problem)?.len())).collect();
        };
        let conversations: Vec<(Vec<Message>, bool)> =
            problems.iter().map(|problem| (messages(&problem.messages()), true)).collect();
        let Ok(texts) = template.render_all(&conversations, &self.variables) else {
            // One of the problems is refused; one by one, the error names it.
            return problems.iter().map(|problem| Ok(self.named_tokens(problem)?.len())).collect();
        };
        texts.iter().map(|text| Ok(self.tokenizer.encode_rendered(text)?.len())).collect()
    }

    /// What the model does not see of the prompts. Refused where no prompt is seen as it is.
    pub fn unseen(&self, problems: &[&Problem]) -> Result<Option<Unseen>> {
        let texts: Vec<Vec<&str>> = problems
            .iter()
            .map(|problem| {
                let earlier = problem.earlier_turns.iter().map(|turn| turn.content.as_str());
                earlier.chain([problem.prompt.as_str()]).collect()
            })
            .collect();
        match unseen(self.tokenizer, &texts)? {
            Some(Unseen { n_texts, first, characters }) if n_texts == problems.len() => {
                Err(Error::UnseenPrompts { characters, problem_id: problems[first].id.clone() })
            }
            found => Ok(found),
        }
    }

    /// As [`Prompting::tokens`], with the problem named in errors.
    fn named_tokens(&self, problem: &Problem) -> Result<Vec<u32>> {
        self.tokens(problem)
            .map_err(|error| Error::Prompt { problem_id: problem.id.clone(), source: Box::new(error) })
    }
}

fn messages(turns: &[Turn]) -> Vec<Message> {
    let message = |turn: &Turn| Message { role: turn.role.clone(), content: turn.content.clone() };
    turns.iter().map(message).collect()
}

/// The text of a conversation of one message.
fn only_text<'a>(problem_id: &str, turns: &'a [Turn]) -> Result<&'a str> {
    let first = match turns {
        [only] => return Ok(&only.content),
        [first, ..] => first,
        [] => return Err(Error::EmptyPrompt { problem_id: problem_id.to_string() }),
    };
    let problem = format!(
        "false, but the prompt of problem {problem_id:?} is a conversation that begins with a message of role {:?}",
        first.role
    );
    let remedy = "set rollout.chat=true for a model with a chat template; or leave task.system out and name the user's message alone: task.problem_field=\"prompt[].content\"";
    Err(Error::Misfit { key: "rollout.chat", problem, remedy })
}

/// Checks every prompt that is known before the run: the model sees its characters, and it has a token and at most
/// `rollout.max_prompt_tokens`. Longer prompts are refused, or left out of the task, as `rollout.long_prompts` says. Returns what
/// the user should know.
pub fn fit_prompts(plan: &Plan, prompting: &Prompting, task: &mut Task) -> Result<Vec<String>> {
    let limit = plan.config.rollout.max_prompt_tokens;
    let known = task.known_problems();
    let mut warnings: Vec<String> =
        prompting.unseen(&known)?.iter().map(|found| warning(found, &known)).collect();
    if let (Some(environment), Some(problem)) = (&plan.config.environment, known.first()) {
        warnings.extend(prompting.check_episodes(environment, problem)?);
    }
    let lengths = prompting.lengths(&known)?;
    if let Some(at) = lengths.iter().position(|&n| n == 0) {
        return Err(Error::EmptyPrompt { problem_id: known[at].id.clone() });
    }
    let n_known = known.len();
    let n_long = lengths.iter().filter(|&&n| n > limit).count();
    // Of several longest prompts the first is named.
    let longest = lengths.iter().enumerate().max_by_key(|&(idx, n)| (*n, std::cmp::Reverse(idx)));
    let Some((at, &n_tokens)) = longest.filter(|_| n_long > 0) else { return Ok(warnings) };
    let problem_id = known[at].id.clone();
    match plan.config.rollout.long_prompts {
        LongPrompts::Refuse => Err(Error::LongPrompts { n_long, n_known, problem_id, n_tokens, limit }),
        LongPrompts::Drop => {
            let is_long: Vec<bool> = lengths.iter().map(|&n| n > limit).collect();
            leave_out(task, &is_long, limit)?;
            warnings.push(format!(
                "{n_long} of {n_known} problems are left out, because their prompts are longer than rollout.max_prompt_tokens={limit}; the longest, {problem_id:?}, has {n_tokens} tokens"
            ));
            Ok(warnings)
        }
    }
}

/// Tells of prompts that the model does not see as they are.
pub fn warning(found: &Unseen, problems: &[&Problem]) -> String {
    let Unseen { n_texts, first, characters } = found;
    let (n, id) = (problems.len(), &problems[*first].id);
    format!(
        "{n_texts} of {n} prompts have characters that the model's tokenizer has no token for, and the model does not see them: {characters}; that of problem {id:?} is the first"
    )
}

const RAISE: &str = "raise it; stapo problems --json has the tokens of every prompt";

/// Leaves problems out; a split, and a source of a mixture, that loses its last problem is refused.
fn leave_out(task: &mut Task, is_long: &[bool], limit: usize) -> Result<()> {
    let splits = [Split::Train, Split::HeldOut];
    let before = splits.map(|split| task.n_problems(split));
    task.leave_out(is_long);
    for (split, before) in splits.into_iter().zip(before) {
        if before != Some(0) && task.n_problems(split) == Some(0) {
            return Err(Error::Misfit {
                key: "rollout.max_prompt_tokens",
                problem: format!("{limit} is below every prompt of the {} split", split.name()),
                remedy: RAISE,
            });
        }
    }
    match task.empty_source() {
        None => Ok(()),
        Some(entry_idx) => Err(Error::Misfit {
            key: "rollout.max_prompt_tokens",
            problem: format!(
                "{limit} is below every training prompt of entry {} of task.path, which has a weight",
                entry_idx + 1
            ),
            remedy: RAISE,
        }),
    }
}

#[cfg(test)]
mod tests;
