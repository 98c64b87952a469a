//! `stapo generate --tools`: conversations in which tools answer the model.

use super::{Args, one_record};
use crate::shared::prompts::{PromptRecord, for_each_record};
use crate::shared::terminal::output;
use anyhow::{Result, bail};
use serde_json::{Value, json};
use stapo_core::{Finish, Problem, Turn};
use stapo_rl::LoadedModel;
use stapo_rl::inference::{EngineMemory, EngineSettings};
use stapo_rl::plan::config::{EpisodeConfig, PromptStyle};
use stapo_rl::reward::Programs;
use stapo_rl::rollout::{ConversationSampling, EndedEpisode, converse};
use stapo_rl::tasks::{EnvironmentSpec, UnjudgedTools};
use std::io::Write;
use std::process::ExitCode;

/// A prompt with its line of the input and its id.
struct Asked {
    line: usize,
    id: Option<Value>,
    problem: Problem,
    is_chat: bool,
}

pub fn run(
    args: &Args,
    model: &LoadedModel,
    memory: &mut EngineMemory,
    settings: EngineSettings,
    tools: &str,
) -> Result<ExitCode> {
    let Some(spec) = EnvironmentSpec::of_tools(tools)? else {
        bail!("--tools none: names no tool\nhint: leave --tools out");
    };
    let tools = UnjudgedTools::open(&spec, Programs::Allowed)?;
    for warning in tools.warnings() {
        eprintln!("warning: {warning}");
    }
    let mut asked: Vec<Asked> = Vec::new();
    let mut n_refused = 0;
    match &args.input {
        Some(path) => {
            let take = |_: usize, _: PromptRecord, made: Asked| {
                asked.push(made);
                Ok(())
            };
            (_, n_refused) = for_each_record(path, question, take)?;
        }
        None => asked.push(question(1, &one_record(args))?),
    }
    let Some(first) = asked.first() else { bail!("input: no prompt to continue") };
    let is_chat = first.is_chat;
    if asked.iter().any(|other| other.is_chat != is_chat) {
        bail!(
            "--tools: some prompts are conversations and others are texts\nhint: give all as messages, or all as prompt"
        );
    }
    let stop = args.prompts.stop.clone();
    let style = PromptStyle { chat: is_chat, chat_arguments: args.prompts.chat_arguments.clone(), stop };
    let limits = EpisodeConfig { max_turns: args.max_turns, ..EpisodeConfig::default() };
    let (n_samples, max_tokens) = (args.n, args.max_tokens);
    let sampling = ConversationSampling { settings, n_samples, max_tokens, style: &style, limits: &limits };
    let problems: Vec<Problem> = asked.iter().map(|asked| asked.problem.clone()).collect();
    let mut out = output();
    for episode in converse(model, memory, &tools, &problems, sampling)? {
        let asked = &asked[episode.ticket.0 as usize];
        if args.json {
            writeln!(out, "{}", line(model, asked, &episode)?)?;
        } else {
            write_text(&mut out, model, asked, &episode)?;
        }
    }
    Ok(if n_refused == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// The conversation, or the text, that a record asks to continue.
fn question(line: usize, record: &PromptRecord) -> Result<Asked> {
    let turn = |role: &str, content: &str| Turn { role: role.into(), content: content.into() };
    let (mut turns, is_chat) = match (&record.prompt, &record.chat, &record.messages) {
        (Some(text), None, None) => (vec![turn("user", text)], false),
        (None, Some(text), None) => (vec![turn("user", text)], true),
        (None, None, Some(messages)) => (messages.iter().map(|m| turn(&m.role, &m.content)).collect(), true),
        _ => bail!("with --tools, expected one of prompt, chat, messages"),
    };
    let Some(last) = turns.pop().filter(|last| last.role == "user") else {
        bail!("messages: the last is not the user's\nhint: tools answer the model's own turns");
    };
    let id = format!("line {line}");
    let problem = Problem { id, earlier_turns: turns, prompt: last.content, reference: String::new() };
    Ok(Asked { line, id: record.id.clone(), problem, is_chat })
}

/// The word of records for the end of a conversation.
fn finish(episode: &EndedEpisode) -> &'static str {
    match episode.finish {
        Finish::Stop { .. } => "stop",
        Finish::LengthLimit => "length",
        Finish::TurnLimit => "turns",
    }
}

fn n_prompt(episode: &EndedEpisode) -> usize {
    episode.is_sampled.iter().position(|&is_sampled| is_sampled).unwrap_or(episode.tokens.len())
}

/// One line of `--json`. Log-probs and entropies are those of the sampled tokens.
fn line(model: &LoadedModel, asked: &Asked, episode: &EndedEpisode) -> Result<Value> {
    let n_prompt = n_prompt(episode);
    let tokens = &episode.tokens[n_prompt..];
    let mut line = json!({
        "line": asked.line,
        "sample": episode.sample,
        "prompt_tokens": n_prompt,
        "tokens": tokens,
        "is_sampled": &episode.is_sampled[n_prompt..],
        "text": model.text(tokens)?,
        "logp": episode.logp,
        "entropy": episode.entropy,
        "finish": finish(episode),
        "turns": episode.episode.turns,
    });
    if let (Some(id), Some(line)) = (&asked.id, line.as_object_mut()) {
        line.insert("id".into(), id.clone());
    }
    Ok(line)
}

/// The conversation, with what the model was given between `[=` and `=]`.
fn write_text(
    out: &mut impl Write,
    model: &LoadedModel,
    asked: &Asked,
    episode: &EndedEpisode,
) -> Result<()> {
    let tokenizer = model.tokenizer()?;
    let (n_turns, n_tokens) = (episode.episode.turns.len(), episode.logp.len());
    let sample = episode.sample + 1;
    let end = finish(episode);
    writeln!(out, "--- prompt {}, sample {sample}: {n_tokens} tokens, {n_turns} turns, {end}", asked.line)?;
    let mut position = n_prompt(episode);
    for run in episode.is_sampled[position..].chunk_by(|a, b| a == b) {
        let tokens = &episode.tokens[position..position + run.len()];
        position += run.len();
        if run[0] {
            write!(out, "{}", tokenizer.decode(tokens)?)?;
        } else {
            write!(out, "[={}=]", tokenizer.decode_all(tokens)?)?;
        }
    }
    Ok(writeln!(out)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_goes_on_after_what_the_user_said() {
        let asked = |text: &str| {
            let record: PromptRecord = serde_json::from_str(text).unwrap();
            question(4, &record).map_err(|error| error.to_string())
        };
        let plain = asked(r#"{"prompt": "1+1=", "id": 7}"#).unwrap();
        assert_eq!((plain.line, plain.id, plain.is_chat), (4, Some(json!(7)), false));
        assert_eq!((plain.problem.prompt.as_str(), plain.problem.earlier_turns.len()), ("1+1=", 0));
        assert!(asked(r#"{"chat": "hi"}"#).unwrap().is_chat);
        let turns = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}"#;
        let problem = asked(turns).unwrap().problem;
        assert_eq!((problem.prompt.as_str(), problem.earlier_turns[0].role.as_str()), ("u", "system"));
        let answered =
            r#"{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}"#;
        assert!(asked(answered).err().unwrap().contains("the last is not the user's"));
        for text in ["{}", r#"{"prompt": "a", "chat": "b"}"#, r#"{"tokens": [1]}"#] {
            assert!(asked(text).err().unwrap().contains("expected one of prompt, chat, messages"), "{text}");
        }
    }
}
