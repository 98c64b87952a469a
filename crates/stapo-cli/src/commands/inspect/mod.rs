//! `stapo inspect`: every token of recorded responses, with its numbers, its fate, and what its fate would be under
//! other settings.

mod terminal;
mod viewer;

use crate::shared::{page, run_folder};
use anyhow::{Result, bail};
use stapo_core::record::{Metrics, ResponseRecord};
use stapo_rl::Plan;
use stapo_rl::run::Run;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use terminal::By;

/// Shows the recorded responses of a step token by token: a page that needs nothing else, or the terminal.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder.
    run: PathBuf,

    /// Which step; by default the last that has recorded responses.
    #[arg(long)]
    step: Option<u64>,

    /// The page; by default inspect-step-N.html in the run folder.
    #[arg(short, long, visible_alias = "out", value_name = "FILE", conflicts_with = "terminal")]
    output: Option<PathBuf>,

    /// Prints to the terminal instead. NO_COLOR, or an output that is no terminal, takes the colours away.
    #[arg(long)]
    terminal: bool,

    /// What the colours of --terminal mean.
    #[arg(long, value_enum, default_value_t = By::Fate, requires = "terminal")]
    by: By,
}

/// The recorded responses of one step, with the step's metrics and the run's plan.
pub struct Inspected {
    pub run: String,
    pub plan: Plan,
    pub step: u64,
    pub metrics: Option<Metrics>,
    pub responses: Vec<ResponseRecord>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let inspected = Inspected::open(&args.run, args.step)?;
    if args.terminal {
        terminal::print(&inspected, args.by)?;
        return Ok(ExitCode::SUCCESS);
    }
    let file = format!("inspect-step-{:06}.html", inspected.step);
    let page = page::write(args.output.as_deref(), &args.run, &file, &viewer::to_html(&inspected))?;
    println!("{}", page.display());
    Ok(ExitCode::SUCCESS)
}

impl Inspected {
    fn open(run: &Path, step: Option<u64>) -> Result<Self> {
        let plan = run_folder::plan(run)?;
        let files = run_folder::part_files(run, "rollouts")?;
        let steps: Vec<u64> = files.iter().filter_map(|path| step_of(path)).collect();
        let Some(&last) = steps.last() else {
            bail!(
                "run {}: no recorded responses\nhint: a run records them in step 1 and every record.responses_every_steps",
                run.display()
            );
        };
        let step = step.unwrap_or(last);
        let Some(path) = files.iter().find(|path| step_of(path) == Some(step)) else {
            let known: Vec<String> = steps.iter().map(u64::to_string).collect();
            bail!("--step {step}: no responses are recorded for it\nhint: steps {}", known.join(", "));
        };
        let responses = run_folder::responses_of_file(path, &plan.objective)?;
        let metrics: Vec<Metrics> = Run::read_metrics(run)?;
        Ok(Inspected {
            run: run.file_name().map_or(plan.config.name.clone(), |name| name.to_string_lossy().into_owned()),
            plan,
            step,
            metrics: metrics.into_iter().find(|m| m.step == step),
            responses,
        })
    }
}

/// The step in `step-000010.jsonl`.
fn step_of(path: &Path) -> Option<u64> {
    path.file_stem()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

/// The fate of a token in the update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Kept,
    /// A candidate that no mask silenced: its advantage is positive and its probability below τp.
    Candidate,
    Clipped,
    Silenced,
}

/// The fate of token `t` as the run recorded it.
pub fn fate(response: &ResponseRecord, t: usize) -> Fate {
    let tokens = &response.tokens;
    if tokens.silenced_by[t].is_some() {
        Fate::Silenced
    } else if tokens.clipped[t] {
        Fate::Clipped
    } else if tokens.is_candidate[t] {
        Fate::Candidate
    } else {
        Fate::Kept
    }
}

/// Gradient norm of a token at the logits, computed as if no mask silenced it; `None` if the run recorded no weights.
pub fn gradient_norm(response: &ResponseRecord, t: usize) -> Option<f64> {
    let tokens = &response.tokens;
    let weight = *tokens.weight.get(t)?;
    let squared = stapo_core::diagnostics::theory::gradient_norm_squared(
        tokens.logp[t].exp(),
        tokens.collision[t],
        weight,
    );
    Some(squared.sqrt())
}
