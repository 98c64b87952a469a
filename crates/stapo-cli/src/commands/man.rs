//! `stapo man`

use anyhow::{Context, Result};
use clap_mangen::Man;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Prints the manual page of the program, or writes the pages of all commands into a folder.
#[derive(clap::Args)]
pub struct Args {
    /// Writes stapo.1, stapo-train.1 and so on into this folder.
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// `program` is the command line of this program.
pub fn run(args: &Args, mut program: clap::Command) -> Result<ExitCode> {
    program.build();
    match &args.out {
        None => println!("{}", page(&program)?.trim_end()),
        Some(folder) => {
            std::fs::create_dir_all(folder).with_context(|| format!("folder {}", folder.display()))?;
            write_pages(&program, folder)?;
            println!("{}", folder.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn page(command: &clap::Command) -> Result<String> {
    let mut text = Vec::new();
    Man::new(command.clone()).render(&mut text)?;
    Ok(String::from_utf8(text)?)
}

/// Writes the page of a command and those of the commands below it.
fn write_pages(command: &clap::Command, folder: &Path) -> Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let path = folder.join(format!("{name}.1"));
    std::fs::write(&path, page(command)?).with_context(|| format!("file {}", path.display()))?;
    let shown = command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help");
    shown.into_iter().try_for_each(|below| write_pages(below, folder))
}
