//! `stapo objective`

use anyhow::Result;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    /// JSON lines, one response each; `-` = standard input.
    input: String,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let _ = crate::input::open(&args.input)?;
    anyhow::bail!("{}: the core is not there yet", crate::input::name(&args.input))
}
