//! `stapo inspect`: every token of recorded responses, with its numbers, its fate, and what its fate would be under
//! other settings.

mod terminal;

use crate::shared::page;
use crate::shared::viewer::{self, Inspected};
use anyhow::Result;
use stapo_core::record::ResponseRecord;
use std::path::PathBuf;
use std::process::ExitCode;
use terminal::By;

/// Shows the recorded responses of a step token by token: a page that needs nothing else, or the terminal.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder.
    run: PathBuf,

    /// Which step; by default the last with a silenced token in its recorded responses, else the last with responses.
    #[arg(long)]
    step: Option<u64>,

    /// The page; by default inspect-step-N.html in the run folder.
    #[arg(short, long = "out", alias = "output", value_name = "FILE", conflicts_with = "terminal")]
    output: Option<PathBuf>,

    /// Prints to the terminal instead. There are no colours with NO_COLOR or if the output is not a terminal.
    #[arg(long)]
    terminal: bool,

    /// What the colours of --terminal mean.
    #[arg(long, value_enum, default_value_t = By::Fate, requires = "terminal")]
    by: By,
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
