//! `stapo generate`: continues prompts.

mod conversing;

use crate::shared::model::ModelArgs;
use crate::shared::option::{KvMemory, fraction, positive, share, temperature_or_greedy};
use crate::shared::prompts::{Choice, PromptOptions, PromptRecord, choice, for_each_record, prompt};
use crate::shared::terminal::output;
use anyhow::{Result, bail};
use serde::Serialize;
use serde_json::Value;
use stapo_rl::LoadedModel;
use stapo_rl::inference::{
    Completion, Engine, EngineMemory, EngineSettings, Event, Filter, Request, SampledToken, SamplingRule,
    StopTexts, Ticket,
};
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write, stderr};
use std::process::ExitCode;
use std::time::Instant;

/// Continues prompts: prints text as it is sampled, or tokens, log-probs and entropies as JSON lines.
///
/// A response depends on the seed, its line, its sample and its prompt alone: other prompts do not change it.
#[derive(clap::Args)]
#[command(override_usage = "stapo generate --model MODEL (--prompt TEXT|--chat TEXT|--input FILE)")]
#[command(group = clap::ArgGroup::new("what").required(true).args(["prompt", "chat", "input"]))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to continue as it is.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// What a user says; the model's chat template makes the prompt.
    #[arg(long, value_name = "TEXT")]
    chat: Option<String>,
    /// JSON lines with `prompt`, `chat`, `messages` or `tokens`, and `id` if you like; `-` = standard input.
    #[arg(long, value_name = "FILE")]
    input: Option<String>,
    /// Responses to each prompt.
    #[arg(short, long = "samples", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    n: u32,
    /// Divides the logits before sampling.
    #[arg(long, default_value_t = 1.0, value_parser = temperature_or_greedy)]
    temperature: f64,
    /// Samples among the likeliest tokens that together have this probability.
    #[arg(long, default_value_t = 1.0, value_parser = fraction)]
    top_p: f64,
    /// Samples among this many likeliest tokens; by default all.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// Samples among tokens at least this likely relative to the likeliest.
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    min_p: f64,
    /// Takes the likeliest token each time.
    #[arg(long, conflicts_with_all = ["temperature", "top_p", "top_k", "min_p"])]
    greedy: bool,
    #[command(flatten)]
    prompts: PromptOptions,
    /// Tools that the model may call, by name: calculator, python, finish, search:FILE; or the table of an environment as in
    /// a config. Their answers count in the length of the response.
    #[arg(long, value_name = "TOOLS", conflicts_with = "alternatives")]
    tools: Option<String>,
    /// Turns of the model, at most, with tools.
    #[arg(long, value_name = "N", default_value_t = 4, requires = "tools", value_parser = positive)]
    max_turns: usize,
    /// Longest response.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = positive)]
    max_tokens: usize,
    /// Seed of sampling.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// One JSON object per response: tokens, text, logp, entropy, finish.
    #[arg(long)]
    json: bool,
    /// Likeliest tokens to list in each place, with --json.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "json")]
    alternatives: usize,
    #[command(flatten)]
    kv: KvMemory,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.prompt.is_some() && !args.prompts.chat_arguments.is_empty() {
        bail!(
            "--chat-arguments: has no effect together with --prompt, which is continued as it is\nhint: give the text as --chat, or leave it out"
        );
    }
    let model = args.model.open(args.max_tokens)?;
    let settings = EngineSettings {
        seed: args.seed,
        rule: rule(args),
        n_alternatives: args.alternatives,
        kv_bytes: args.kv.bytes()?,
        ..EngineSettings::default()
    };
    let mut memory = EngineMemory::new();
    if let Some(tools) = &args.tools {
        return conversing::run(args, &model, &mut memory, settings, tools);
    }
    let mut engine = Engine::new(&model.policy, &mut memory, settings)?;
    if !args.prompts.stop.is_empty() {
        engine.stop_at(StopTexts::new(model.tokenizer()?, &args.prompts.stop));
    }
    let mut submitted = BTreeMap::new();
    let mut submit = |line: usize, record: &PromptRecord| -> Result<(Ticket, usize)> {
        let prompt = prompt(&model, record, &args.prompts.chat_arguments)?;
        let n_prompt = prompt.len();
        let request = Request {
            problem: line as u64 - 1,
            prompt,
            n_samples: args.n,
            max_tokens: args.max_tokens,
            stops: model.policy.config().stops.clone(),
        };
        Ok((engine.submit(request)?, n_prompt))
    };
    let mut remember = |line, record: PromptRecord, (ticket, n_prompt)| {
        submitted.insert(ticket, SubmittedPrompt { line, id: record.id, n_prompt });
        Ok(())
    };
    let mut n_refused = 0;
    if let Some(path) = &args.input {
        let n_taken;
        (n_taken, n_refused) = for_each_record(path, &mut submit, &mut remember)?;
        if n_taken == 0 {
            bail!("input {}: no prompt to continue", crate::shared::input::name(path));
        }
    } else {
        let record = one_record(args);
        let made = submit(1, &record)?;
        remember(1, record, made)?;
    }
    let started = Instant::now();
    let is_alone = args.input.is_none() && args.n == 1;
    let (n_responses, n_tokens) = match (args.json, is_alone) {
        (false, true) => stream_one(&mut engine, &model)?,
        _ => print_in_order(&mut engine, &model, &submitted, args)?,
    };
    if stderr().is_terminal() {
        eprintln!("{}", pace(n_responses, n_tokens, started.elapsed().as_secs_f64()));
    }
    Ok(if n_refused == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn pace(n_responses: usize, n_tokens: usize, seconds: f64) -> String {
    let rate = n_tokens as f64 / seconds;
    format!("{n_responses} responses, {n_tokens} tokens, {seconds:.1} s, {rate:.0} tokens/s")
}

fn rule(args: &Args) -> SamplingRule {
    if args.greedy {
        return SamplingRule::Greedy;
    }
    let top_k = args.top_k.map(|k| k as usize);
    let filter = Filter { top_k, top_p: args.top_p, min_p: args.min_p };
    SamplingRule::Draw { temperature: args.temperature, filter }
}

/// The prompt after a ticket.
struct SubmittedPrompt {
    line: usize,
    id: Option<Value>,
    n_prompt: usize,
}

fn one_record(args: &Args) -> PromptRecord {
    PromptRecord { prompt: args.prompt.clone(), chat: args.chat.clone(), ..PromptRecord::default() }
}

/// Prints the text of one response as its tokens are sampled; returns the numbers of responses and tokens.
fn stream_one(engine: &mut Engine<'_>, model: &LoadedModel) -> Result<(usize, usize)> {
    let tokenizer = model.tokenizer()?;
    let mut stream = tokenizer.stream(&[]);
    let mut out = output();
    let mut n_tokens = 0;
    let mut outcome = Ok(());
    engine.run(|event| {
        if let Event::Token { sampled, .. } = event {
            n_tokens += 1;
            outcome = check_finite(sampled).and_then(|()| {
                out.write_all(stream.push(sampled.token)?.as_bytes())?;
                Ok(out.flush()?)
            });
        }
        outcome.is_ok()
    })?;
    outcome?;
    writeln!(out, "{}", stream.finish()?)?;
    Ok((1, n_tokens))
}

/// Prints each response once it and all responses before it are finished, so that the output does not depend on the
/// order in which they finish. Returns the numbers of responses and tokens.
fn print_in_order(
    engine: &mut Engine<'_>,
    model: &LoadedModel,
    submitted: &BTreeMap<Ticket, SubmittedPrompt>,
    args: &Args,
) -> Result<(usize, usize)> {
    let mut order =
        submitted.keys().flat_map(|&ticket| (0..args.n).map(move |sample| (ticket, sample))).peekable();
    let mut finished: BTreeMap<(Ticket, u32), Completion> = BTreeMap::new();
    let (mut n_responses, mut n_tokens) = (0, 0);
    let mut outcome = Ok(());
    let mut out = output();
    engine.run(|event| {
        if let Event::Finished(response) = event {
            n_responses += 1;
            n_tokens += response.tokens.len();
            outcome = response.tokens.iter().try_for_each(check_finite);
            finished.insert((response.ticket, response.sample), response);
            while outcome.is_ok()
                && let Some(response) = order.peek().and_then(|next| finished.remove(next))
            {
                order.next();
                let submitted = &submitted[&response.ticket];
                outcome = if args.json {
                    write_json(&mut out, model, submitted, &response)
                } else {
                    write_text(&mut out, model, submitted, &response)
                };
            }
        }
        outcome.is_ok()
    })?;
    outcome?;
    Ok((n_responses, n_tokens))
}

/// Refuses tokens of a model whose numbers are not finite, which mean nothing.
fn check_finite(sampled: &SampledToken) -> Result<()> {
    if !sampled.logp.is_finite() {
        bail!(
            "the model: the log-prob of a token is {}, so its weights are damaged\nhint: take an earlier checkpoint, or fetch the model again",
            sampled.logp
        );
    }
    Ok(())
}

/// One line of `--json`.
#[derive(Serialize)]
struct GeneratedLine<'a> {
    line: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a Value>,
    sample: u32,
    prompt_tokens: usize,
    tokens: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    logp: Vec<f32>,
    entropy: Vec<f32>,
    finish: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    alternatives: Option<Vec<Vec<Choice>>>,
}

fn write_json(
    out: &mut impl Write,
    model: &LoadedModel,
    submitted: &SubmittedPrompt,
    response: &Completion,
) -> Result<()> {
    let tokens: Vec<u32> = response.tokens.iter().map(|t| t.token).collect();
    let has_alternatives = response.tokens.iter().any(|t| !t.alternatives.is_empty());
    let alternatives =
        has_alternatives.then(|| response.tokens.iter().map(|t| choices(model, t)).collect::<Result<_>>());
    let line = GeneratedLine {
        line: submitted.line,
        id: submitted.id.as_ref(),
        sample: response.sample,
        prompt_tokens: submitted.n_prompt,
        text: model.text(&tokens)?,
        tokens,
        logp: response.tokens.iter().map(|t| t.logp).collect(),
        entropy: response.tokens.iter().map(|t| t.entropy).collect(),
        finish: response.finish.to_string(),
        alternatives: alternatives.transpose()?,
    };
    serde_json::to_writer(&mut *out, &line)?;
    Ok(writeln!(out)?)
}

fn choices(model: &LoadedModel, sampled: &SampledToken) -> Result<Vec<Choice>> {
    sampled.alternatives.iter().map(|listed| choice(model, listed.token, listed.logp)).collect()
}

fn write_text(
    out: &mut impl Write,
    model: &LoadedModel,
    submitted: &SubmittedPrompt,
    response: &Completion,
) -> Result<()> {
    let tokens: Vec<u32> = response.tokens.iter().map(|t| t.token).collect();
    let text = model.tokenizer()?.decode(&tokens)?;
    let line = submitted.line;
    let sample = response.sample + 1;
    writeln!(out, "--- prompt {line}, sample {sample}: {} tokens, {}", tokens.len(), response.finish)?;
    Ok(writeln!(out, "{text}")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_is_in_tokens_per_second() {
        assert_eq!(pace(3, 100, 2.5), "3 responses, 100 tokens, 2.5 s, 40 tokens/s");
    }

    #[derive(clap::Parser)]
    struct Given {
        #[command(flatten)]
        args: Args,
    }

    fn given(words: &[&str]) -> Args {
        let words = [&["generate", "--model", "builtin", "--prompt", "1"], words].concat();
        <Given as clap::Parser>::parse_from(words).args
    }

    #[test]
    fn sampling_follows_the_flags() {
        let rule_of = |words: &[&str]| rule(&given(words));
        assert_eq!(rule_of(&[]), SamplingRule::Draw { temperature: 1.0, filter: Filter::NONE });
        let filter = Filter { top_k: Some(5), top_p: 0.9, min_p: 0.05 };
        let words = ["--temperature", "0.7", "--top-p", "0.9", "--top-k", "5", "--min-p", "0.05"];
        assert_eq!(rule_of(&words), SamplingRule::Draw { temperature: 0.7, filter });
        assert_eq!(rule_of(&["--greedy"]), SamplingRule::Greedy);
    }

    #[test]
    fn a_prompt_is_text_or_what_a_user_says() {
        let record = one_record(&given(&[]));
        assert_eq!((record.prompt.as_deref(), record.chat), (Some("1"), None));
        let words = ["generate", "--model", "builtin", "--chat", "hi"];
        let record = one_record(&<Given as clap::Parser>::parse_from(words).args);
        assert_eq!((record.prompt, record.chat.as_deref()), (None, Some("hi")));
    }
}
