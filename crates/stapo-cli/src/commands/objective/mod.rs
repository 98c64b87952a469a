//! `stapo objective`: what an objective does to each token of a mini-batch, so that users can compare these numbers
//! with those of another trainer.

mod lines;

use crate::shared::input;
use anyhow::{Context, Result, anyhow, bail};
use lines::{ResponseInput, read_lines};
use serde::Serialize;
use stapo_core::diagnostics::{Census, Observed, QuadrantCensus, Thresholds};
use stapo_core::objective::{
    MaskKind, ObjectiveSpec, ResponseSignals, Tally, TokenEffect, UpdateKey, presets,
};
use std::collections::BTreeMap;
use std::io::{BufWriter, Write, stdout};
use std::path::Path;
use std::process::ExitCode;

/// Shows what an objective does to each token of a mini-batch.
///
/// Reads the mini-batch as JSON lines, one response each:
///
///   {"group": "id", "reward": 1.0, "logp": [..], "behavior_logp": [..], "entropy": [..]}
///
/// and optionally "reference_logp" (KL), "behavior_entropy" (mask_signals = "behavior"), "sampler_logp" (off_policy) and
/// "collision" (sums of squared probabilities, for gradient norms). Writes one JSON line per response, in order, with the
/// arrays kept, silenced_by, clipped, ratio and d_logp, then a last line with the totals. d_logp is the derivative of the
/// printed loss, which is minimised, by that token's logp; masks, soft weights and stop-gradients are constants in it.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// A preset, a preset with S2T added (NAME+spurious), or a TOML file.
    #[arg(long, default_value = "stapo", value_name = "PRESET|FILE.toml")]
    spec: String,

    /// Changes one value of the spec, as in masks.0.tau_p=0.001; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Number of the optimizer step: random masks draw anew in every step.
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
    if args.show {
        stdout().write_all(spec.to_toml().as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let pass = usize::from(args.pass) - 1;
    if pass >= spec.n_passes() {
        bail!("--pass {}: this objective has {} pass", args.pass, spec.n_passes());
    }
    let path = args.input.as_deref().unwrap_or("-");
    let lines = read_lines(input::open(path)?, input::name(path))?;
    if lines.is_empty() {
        bail!("input {}: no responses\nhint: give one JSON object per line", input::name(path));
    }
    let update = UpdateKey { step: args.step, pass };
    let evaluated = evaluate(&spec, &lines, update, input::name(path))?;
    // All of the batch is evaluated before the first byte is written: an error leaves no partial output.
    write(&evaluated, &lines)?;
    Ok(ExitCode::SUCCESS)
}

fn list_presets() -> Result<()> {
    let mut out = stdout().lock();
    for preset in presets() {
        let paper =
            if preset.paper.is_empty() { String::new() } else { format!(" (arXiv {})", preset.paper) };
        writeln!(out, "{:<10} {}{paper}", preset.name, preset.summary)?;
    }
    Ok(())
}

/// A TOML file if `name` is a file or ends in `.toml`, else a preset.
fn load(name: &str) -> Result<ObjectiveSpec> {
    let path = Path::new(name);
    if path.is_file() || path.extension().is_some_and(|e| e == "toml") {
        let text = std::fs::read_to_string(path).with_context(|| format!("spec {name}"))?;
        return ObjectiveSpec::from_toml(&text).with_context(|| format!("spec {name}"));
    }
    Ok(ObjectiveSpec::from_preset(name)?)
}

/// A mini-batch with its effects, scaled by 1/N.
struct Evaluated {
    advantages: Vec<f64>,
    effects: Vec<Vec<TokenEffect>>,
    tally: Tally,
    tau_h: Option<f64>,
    thresholds: Option<Thresholds>,
    has_entropy_bonus: bool,
}

fn evaluate(
    spec: &ObjectiveSpec,
    lines: &[ResponseInput],
    update: UpdateKey,
    file: &str,
) -> Result<Evaluated> {
    let advantages = advantages(spec, lines, file)?;
    let responses: Vec<ResponseSignals> =
        lines.iter().zip(&advantages).map(|(line, &a)| line.response(a)).collect();
    let named = |error: stapo_core::ObjectiveError| match error.response_idx() {
        Some(idx) => {
            let text = error.to_string();
            let what = text.strip_prefix(&format!("response {idx}: ")).unwrap_or(&text);
            anyhow!("{file}:{}: group {}: {what}", lines[idx].number, lines[idx].group)
        }
        None => anyhow!("{file}: {error}"),
    };
    let calibration = spec.calibrate(&responses, update).map_err(named)?;
    let mut tallies = Vec::with_capacity(lines.len());
    let mut effects = Vec::with_capacity(lines.len());
    for (idx, response) in responses.iter().enumerate() {
        let mut own = vec![TokenEffect::default(); response.logp.len()];
        tallies.push(spec.evaluate(&calibration, idx, response, &mut own).map_err(named)?);
        effects.push(own);
    }
    let tally = spec.total(&tallies);
    for own in &mut effects {
        tally.scale_effects(own);
    }
    let tau_h = calibration.tau_h();
    let has_entropy_bonus = spec.entropy_bonus != stapo_core::objective::EntropyBonus::None;
    let thresholds = tau_h.map(|tau_h| Thresholds { tau_p: spec.tau_p(), tau_h });
    Ok(Evaluated { advantages, effects, tally, tau_h, thresholds, has_entropy_bonus })
}

/// Advantages in the order of the lines; the lines of a group need not be adjacent.
fn advantages(spec: &ObjectiveSpec, lines: &[ResponseInput], file: &str) -> Result<Vec<f64>> {
    let mut members: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (idx, line) in lines.iter().enumerate() {
        members.entry(&line.group).or_default().push(idx);
    }
    let mut advantages = vec![0.0; lines.len()];
    for (group, members) in members {
        let rewards: Vec<f64> = members.iter().map(|&idx| lines[idx].reward).collect();
        let line = lines[members[0]].number;
        let own =
            spec.advantage.of_group(&rewards).with_context(|| format!("{file}:{line}: group {group}"))?;
        for (idx, advantage) in members.into_iter().zip(own) {
            advantages[idx] = advantage;
        }
    }
    Ok(advantages)
}

#[derive(Serialize)]
struct ResponseLine<'a> {
    group: &'a str,
    advantage: f64,
    kept: Vec<bool>,
    silenced_by: Vec<Option<MaskKind>>,
    clipped: Vec<bool>,
    ratio: Vec<f64>,
    d_logp: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    d_entropy: Option<Vec<f64>>,
    /// At the logits, of the un-normalised objective and as if no mask were there.
    #[serde(skip_serializing_if = "Option::is_none")]
    gradient_norm: Option<Vec<f64>>,
}

#[derive(Serialize)]
struct TotalLine {
    loss: f64,
    n_responses: usize,
    n_tokens: usize,
    n_kept: usize,
    n_candidates: usize,
    n_silenced: usize,
    tau_h: Option<f64>,
    clip_fraction: f64,
    ratio_min: f64,
    ratio_max: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    quadrants: Option<[QuadrantCensus; 4]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    silenced_gradient_share: Option<f64>,
}

fn write(evaluated: &Evaluated, lines: &[ResponseInput]) -> Result<()> {
    let mut out = BufWriter::new(stdout().lock());
    let has_collision = lines.iter().all(|line| line.collision.is_some());
    let mut census = evaluated.thresholds.filter(|_| has_collision).map(Census::new);
    for ((line, effects), &advantage) in lines.iter().zip(&evaluated.effects).zip(&evaluated.advantages) {
        let observed = line.observed(effects);
        if let Some(census) = &mut census {
            observed.iter().flatten().for_each(|token| census.add(token));
        }
        let record = ResponseLine {
            group: &line.group,
            advantage,
            kept: column(effects, |e| e.kept),
            silenced_by: column(effects, |e| e.silenced_by),
            clipped: column(effects, |e| e.clipped),
            ratio: column(effects, |e| e.ratio),
            d_logp: column(effects, |e| e.d_logp),
            d_entropy: evaluated.has_entropy_bonus.then(|| column(effects, |e| e.d_entropy)),
            gradient_norm: observed
                .map(|tokens| column(&tokens, |token| token.gradient_norm_squared().sqrt())),
        };
        serde_json::to_writer(&mut out, &record)?;
        out.write_all(b"\n")?;
    }
    let tally = &evaluated.tally;
    let total = TotalLine {
        loss: tally.loss,
        n_responses: tally.n_sequences,
        n_tokens: tally.n_tokens,
        n_kept: tally.n_kept,
        n_candidates: tally.n_candidates,
        n_silenced: tally.n_silenced,
        tau_h: evaluated.tau_h,
        clip_fraction: tally.clip_fraction,
        ratio_min: tally.ratio_min,
        ratio_max: tally.ratio_max,
        quadrants: census.as_ref().map(Census::rows),
        silenced_gradient_share: census.as_ref().map(Census::silenced_gradient_share),
    };
    serde_json::to_writer(&mut out, &total)?;
    out.write_all(b"\n")?;
    out.flush()?;
    Ok(())
}

fn column<T, C>(tokens: &[T], of: impl Fn(&T) -> C) -> Vec<C> {
    tokens.iter().map(of).collect()
}

impl ResponseInput {
    fn response(&self, advantage: f64) -> ResponseSignals<'_> {
        ResponseSignals {
            advantage,
            logp: &self.logp,
            behavior_logp: &self.behavior_logp,
            entropy: &self.entropy,
            behavior_entropy: self.behavior_entropy.as_deref(),
            reference_logp: self.reference_logp.as_deref(),
            sampler_logp: self.sampler_logp.as_deref(),
        }
    }

    /// The tokens as the census sees them, where the line has collisions.
    fn observed(&self, effects: &[TokenEffect]) -> Option<Vec<Observed>> {
        let collision = self.collision.as_ref()?;
        let token = |t: usize| Observed {
            logp: self.logp[t],
            entropy: self.entropy[t],
            collision: collision[t],
            effect: effects[t],
        };
        Some((0..effects.len()).map(token).collect())
    }
}
