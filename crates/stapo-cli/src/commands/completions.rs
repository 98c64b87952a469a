//! `stapo completions`

use anyhow::Result;
use clap_complete::Shell;
use std::process::ExitCode;

/// Prints the completions of commands and options for a shell.
#[derive(clap::Args)]
pub struct Args {
    /// The shell.
    shell: Shell,
}

/// `program` is the command line of this program.
pub fn run(args: &Args, mut program: clap::Command) -> Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut program, "stapo", &mut text);
    println!("{}", String::from_utf8(text)?.trim_end());
    Ok(ExitCode::SUCCESS)
}
