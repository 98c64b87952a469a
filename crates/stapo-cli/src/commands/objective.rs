//! `stapo objective`: what an objective does to each token of a mini-batch, so that users can compare these numbers
//! with those of another trainer.

mod lines;

use crate::shared::input;
use crate::shared::terminal::output;
use anyhow::{Context, Result, anyhow, bail};
use lines::{Columns, ResponseInput, read_lines};
use serde::Serialize;
use stapo_core::minibatch::{self, ResponseColumns, Totals};
use stapo_core::objective::{
    Advantages, EntropyBonus, MaskKind, ObjectiveError, ObjectiveSpec, ScoredResponse, TokenEffect,
    UpdateKey, presets,
};
use stapo_rl::untrusted::read_text;
use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

/// Shows what an objective does to each token of a mini-batch, as JSON lines.
///
/// Reads the mini-batch as JSON lines, one response each:
///
/// {"group": "id", "reward": 1.0, "logp": [..], "behavior_logp": [..], "entropy": [..]}
///
/// Optional keys are "reference_logp" (KL), "behavior_entropy" (mask_signals = "behavior"), "sampler_logp" (off_policy),
/// "teacher_logp" (distillation) and "collision" (sums of squared probabilities, for gradient norms and the threshold
/// influence). "reward" may be a list, with --reward-weights. "advantage", a number or a list with one per token, is
/// given on all lines or on none; "reward" is then not read. "loss_mask" (true or 1: in the loss) leaves tokens out altogether.
///
/// Writes one JSON line per response, in order, with the arrays kept, silenced_by, clipped, ratio and d_logp, then a last
/// line with the totals. d_logp is the derivative of the printed loss, which is minimised, by that token's logp; masks,
/// soft weights and stop-gradients are constants in it. A token that the loss mask leaves out is not kept, and has a ratio
/// of null.
#[derive(clap::Args)]
pub struct Args {
    /// A preset, a preset with S2T added (NAME+spurious), or a TOML file.
    #[arg(long, default_value = "stapo", value_name = "PRESET|FILE.toml")]
    spec: String,

    /// Changes one value of the spec, as in masks.0.tau_p=0.001; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Weights of several rewards, in the order of the lines' lists; 1 each by default.
    #[arg(long, value_name = "W,..", value_delimiter = ',', allow_negative_numbers = true)]
    reward_weights: Vec<f64>,

    /// Number of the optimizer step; random masks differ from step to step.
    #[arg(long, default_value_t = 0)]
    step: u64,

    /// Which pass of a two-pass objective (lopti), 1 or 2.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pass: u8,

    /// Prints the resolved spec as TOML and stops.
    #[arg(long)]
    show: bool,

    /// Lists the presets and stops.
    #[arg(long)]
    list: bool,

    /// JSON lines; `-` is standard input.
    #[arg(required_unless_present_any = ["show", "list"])]
    input: Option<String>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.list {
        list_presets()?;
        return Ok(ExitCode::SUCCESS);
    }
    let spec = load(&args.spec)?.with_overrides(args.set.iter().map(String::as_str))?;
    for text in spec.warnings() {
        eprintln!("warning: {text}");
    }
    if args.show {
        output().write_all(spec.to_toml().as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let pass = usize::from(args.pass) - 1;
    if pass >= spec.n_passes() {
        bail!("--pass {}: this objective has {} pass", args.pass, spec.n_passes());
    }
    let path = args.input.as_deref().unwrap_or("-");
    let lines = read_lines(&mut *input::open(path)?, input::name(path))?;
    if lines.is_empty() {
        bail!("input {}: no responses\nhint: give one JSON object per line", input::name(path));
    }
    let update = UpdateKey { step: args.step, pass, ..UpdateKey::default() };
    let evaluated = evaluate(&spec, &lines, &args.reward_weights, update, input::name(path))?;
    // All of the batch is evaluated before the first byte is written: an error leaves no partial output.
    write(&spec, &evaluated, &lines)?;
    Ok(ExitCode::SUCCESS)
}

fn list_presets() -> Result<()> {
    let mut out = output();
    for preset in presets() {
        let paper =
            if preset.paper.is_empty() { String::new() } else { format!(" (arXiv {})", preset.paper) };
        writeln!(out, "{:<12} {}{paper}", preset.name, preset.summary)?;
    }
    Ok(())
}

/// A TOML file if `name` is a file or ends in `.toml`, else a preset.
fn load(name: &str) -> Result<ObjectiveSpec> {
    let path = Path::new(name);
    if path.is_file() || path.extension().is_some_and(|e| e == "toml") {
        let text = read_text(path).with_context(|| format!("spec {name}"))?;
        return ObjectiveSpec::from_toml(&text).with_context(|| format!("spec {name}"));
    }
    Ok(ObjectiveSpec::from_preset(name)?)
}

/// A mini-batch with its effects, scaled by 1/N.
struct Evaluated {
    advantages: Vec<Advantages>,
    effects: Vec<Vec<TokenEffect>>,
    totals: Totals,
}

fn evaluate(
    spec: &ObjectiveSpec,
    lines: &[ResponseInput],
    reward_weights: &[f64],
    update: UpdateKey,
    file: &str,
) -> Result<Evaluated> {
    let named = |error: ObjectiveError| match error.response_idx() {
        Some(idx) => {
            let line = &lines[idx];
            let text = error.map_token_idx(|token_idx| line.index_in_line(token_idx)).to_string();
            let what = text.strip_prefix(&format!("response {idx}: ")).unwrap_or(&text);
            anyhow!("{file}:{}: group {}: {what}", line.number, line.group)
        }
        None => anyhow!("{file}: {error}"),
    };
    let advantages = advantages(spec, lines, reward_weights).map_err(named)?;
    let responses: Vec<_> =
        lines.iter().zip(&advantages).map(|(line, own)| (line.columns.view(), own.view())).collect();
    let mut effects = Vec::with_capacity(lines.len());
    let take = |_, own: &[TokenEffect]| {
        effects.push(own.to_vec());
        Ok::<(), ObjectiveError>(())
    };
    let (tally, totals) = minibatch::evaluate(spec, &responses, update, take).map_err(named)?;
    for own in &mut effects {
        tally.scale_effects(own);
    }
    Ok(Evaluated { advantages, effects, totals })
}

/// Advantages in the order of the lines: as the lines give them, or from their rewards. The lines of a group need not be
/// adjacent.
fn advantages(
    spec: &ObjectiveSpec,
    lines: &[ResponseInput],
    reward_weights: &[f64],
) -> Result<Vec<Advantages>, ObjectiveError> {
    if let Some(given) = lines.iter().map(|line| line.advantage.clone()).collect() {
        return Ok(given);
    }
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let scored: Vec<ScoredResponse> = lines
        .iter()
        .map(|line| {
            let next = numbers.len();
            line.columns.view().scored(*numbers.entry(&line.group).or_insert(next), &line.rewards)
        })
        .collect();
    let equal = vec![1.0; lines.first().map_or(1, |line| line.rewards.len())];
    spec.advantages(&scored, if reward_weights.is_empty() { &equal } else { reward_weights })
}

#[derive(Serialize)]
struct ResponseLine<'a> {
    group: &'a str,
    advantage: AdvantageOut,
    kept: Vec<bool>,
    silenced_by: Vec<Option<MaskKind>>,
    clipped: Vec<bool>,
    ratio: Vec<Option<f64>>,
    d_logp: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    d_entropy: Option<Vec<f64>>,
    /// At the logits, of the un-normalised objective and as if no mask were there.
    #[serde(skip_serializing_if = "Option::is_none")]
    gradient_norm: Option<Vec<f64>>,
}

/// A number for all tokens, or one per token; null for a token that is not in the loss.
#[derive(Serialize)]
#[serde(untagged)]
enum AdvantageOut {
    Response(f64),
    Tokens(Vec<Option<f64>>),
}

fn write(spec: &ObjectiveSpec, evaluated: &Evaluated, lines: &[ResponseInput]) -> Result<()> {
    let mut out = BufWriter::new(output());
    let has_entropy_bonus = spec.entropy_bonus != EntropyBonus::None;
    for ((line, effects), advantage) in lines.iter().zip(&evaluated.effects).zip(&evaluated.advantages) {
        let observed = line.columns.view().observed(effects).map(Vec::from_iter);
        let record = ResponseLine {
            group: &line.group,
            advantage: match advantage {
                Advantages::Response(advantage) => AdvantageOut::Response(*advantage),
                Advantages::Tokens(own) => AdvantageOut::Tokens(line.column(own, |a| Some(*a))),
            },
            kept: line.column(effects, |e| e.kept),
            silenced_by: line.column(effects, |e| e.silenced_by),
            clipped: line.column(effects, |e| e.clipped),
            ratio: line.column(effects, |e| Some(e.ratio)),
            d_logp: line.column(effects, |e| e.d_logp),
            d_entropy: has_entropy_bonus.then(|| line.column(effects, |e| e.d_entropy)),
            gradient_norm: observed
                .map(|tokens| line.column(&tokens, |token| token.gradient_norm_squared().sqrt())),
        };
        serde_json::to_writer(&mut out, &record)?;
        out.write_all(b"\n")?;
    }
    serde_json::to_writer(&mut out, &evaluated.totals)?;
    out.write_all(b"\n")?;
    out.flush()?;
    Ok(())
}

impl ResponseInput {
    /// `of` each token that is in the loss, and the default for the others, in the order of the line.
    fn column<T, C: Default>(&self, tokens: &[T], of: impl Fn(&T) -> C) -> Vec<C> {
        let mut values = tokens.iter().map(of);
        match &self.loss_mask {
            None => values.collect(),
            Some(mask) => mask
                .iter()
                .map(|&in_loss| if in_loss { values.next().unwrap_or_default() } else { C::default() })
                .collect(),
        }
    }
}

impl Columns {
    fn view(&self) -> ResponseColumns<'_> {
        ResponseColumns {
            logp: &self.logp,
            behavior_logp: &self.behavior_logp,
            entropy: &self.entropy,
            reference_logp: self.reference_logp.as_deref(),
            behavior_entropy: self.behavior_entropy.as_deref(),
            sampler_logp: self.sampler_logp.as_deref(),
            collision: self.collision.as_deref(),
            teacher_logp: self.teacher_logp.as_deref(),
        }
    }
}
