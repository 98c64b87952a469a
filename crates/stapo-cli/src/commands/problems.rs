//! `stapo problems`

use crate::shared::run_folder;
use crate::shared::terminal::output;
use anyhow::Result;
use serde_json::json;
use stapo_rl::task::{Mistakes, Programs, Split, Task};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Shows what a config's task asks: prompts and references, in the order a run draws them.
#[derive(clap::Args)]
pub struct Args {
    /// A training config, as TOML, or a run folder; the built-in run where absent.
    config: Option<PathBuf>,

    /// Changes one value of the config, as in task.max_operators=5; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    #[arg(long, value_enum, default_value_t = Which::Train)]
    split: Which,

    /// How many.
    #[arg(short, default_value_t = 10)]
    n: usize,

    /// With a worked solution each (arithmetic and countdown).
    #[arg(long)]
    solutions: bool,

    /// JSON lines.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Which {
    Train,
    HeldOut,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let (_, plan) = run_folder::read_plan(args.config.as_deref(), &args.set)?;
    // Nothing is judged, so a verifier program has no reason to start, whosever the config is.
    let task = Task::open_with(&plan.task, Programs::Never)?;
    let problems = match args.split {
        Which::HeldOut => task.held_out(args.n),
        Which::Train => (0..args.n as u64)
            .map(|position| task.problem(plan.config.seed, Split::Train, position))
            .collect::<Result<_, _>>()?,
    };
    let mut out = std::io::BufWriter::new(output());
    for problem in problems {
        let solution = if args.solutions { Some(task.solution(&problem, &Mistakes::NONE)?) } else { None };
        if args.json {
            let mut line =
                json!({"id": problem.id, "prompt": problem.prompt, "reference": problem.reference});
            if let Some(solution) = solution {
                line["solution"] = solution.into();
            }
            writeln!(out, "{line}")?;
        } else {
            let answer = solution.unwrap_or(problem.reference);
            writeln!(out, "{}\n    {answer}", problem.prompt)?;
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}
