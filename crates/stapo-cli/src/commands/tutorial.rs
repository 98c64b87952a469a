//! `stapo tutorial`

use crate::shared::stop::{GivesUp, Stop, on_signals, pass_on};
use crate::shared::terminal::{COLUMNS, wrapped};
use anyhow::{Context, Result, bail};
use stapo_rl::run::restart;
use std::io::{IsTerminal, Write, stderr, stdin};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

/// Walks you through a first run: shows each command, explains it, and runs it when you press Enter.
///
/// The built-in model trains on the CPU for about a minute. Everything goes into one new folder, and nothing is deleted.
/// If standard input is not a terminal, the steps are printed but not run, unless you give --yes.
#[derive(clap::Args)]
pub struct Args {
    /// Runs all steps without asking.
    #[arg(long)]
    yes: bool,

    /// The folder to create; by default stapo-tutorial, or stapo-tutorial-2 and so on if it exists.
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Training steps of the run.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=80))]
    steps: u64,
}

/// A command and what it does.
struct Step {
    about: &'static str,
    words: Vec<String>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let folder = folder(args.out.as_deref())?;
    let steps = steps(&folder, args.steps);
    if !args.yes && !stdin().is_terminal() {
        for (idx, step) in steps.iter().enumerate() {
            println!("{}", announced(step, idx, steps.len()));
        }
        println!("\nNothing was run: standard input is not a terminal. stapo tutorial --yes runs all steps.");
        return Ok(ExitCode::SUCCESS);
    }
    let stop = on_signals()?;
    stop.show_by(|_, _| ());
    // The command that runs decides what a signal means; a third one ends the tutorial too.
    stop.give_up_by(|| GivesUp::IfUrgent);
    std::fs::create_dir_all(&folder).with_context(|| format!("folder {}", folder.display()))?;
    println!("{}", wrapped(&format!("All files go into the folder {}.", folder.display()), 0, COLUMNS));
    for (idx, step) in steps.iter().enumerate() {
        println!("{}", announced(step, idx, steps.len()));
        if !args.yes && !is_wanted(&stop)? {
            println!("Ended. The folder {} keeps what is there.", folder.display());
            return Ok(ExitCode::SUCCESS);
        }
        let status = run_step(step, &stop)?;
        if stop.is_raised() {
            println!("Stopped by {}. The folder {} keeps what is there.", stop.name(), folder.display());
            return Ok(ExitCode::from(stop.exit_status()));
        }
        if !status.success() {
            bail!(
                "tutorial: step {} failed\nhint: its message is above; stapo doctor checks this machine",
                idx + 1
            );
        }
    }
    println!("{}", end(&folder));
    Ok(ExitCode::SUCCESS)
}

/// The folder of the tutorial, which must not exist.
fn folder(given: Option<&Path>) -> Result<PathBuf> {
    const NAME: &str = "stapo-tutorial";
    match given {
        Some(folder) if folder.exists() => {
            bail!("--out {}: exists\nhint: name a folder that does not exist yet", folder.display())
        }
        Some(folder) => Ok(folder.to_path_buf()),
        None => {
            let names = (2..).map(|n| PathBuf::from(format!("{NAME}-{n}")));
            let mut names = std::iter::once(PathBuf::from(NAME)).chain(names);
            names.find(|folder| !folder.exists()).context("a name for the folder of the tutorial")
        }
    }
}

fn steps(folder: &Path, n_steps: u64) -> Vec<Step> {
    let path = |name: &str| folder.join(name).display().to_string();
    let (run, report, tokens) = (path("run"), path("report.html"), path("tokens.html"));
    let n_steps = format!("steps={n_steps}");
    let step = |about, words: &[&str]| Step { about, words: words.iter().map(ToString::to_string).collect() };
    vec![
        step(
            "Train the small model inside the program to solve arithmetic problems. Each step samples answers, grades them, \
             and makes right answers more likely.",
            &["train", "--out", &run, "--set", &n_steps],
        ),
        step("List your runs with their progress and accuracy.", &["runs", &folder.display().to_string()]),
        step(
            "Draw the curves of the run into one HTML page, which you can open in a browser.",
            &["report", &run, "--out", &report],
        ),
        step(
            "Write a page that shows answers token by token, with the tokens that STAPO took out of the loss.",
            &["inspect", &run, "--out", &tokens],
        ),
        step(
            "Ask the trained model a question.",
            &["generate", "--model", &run, "--prompt", "12+30=", "--max-tokens", "32"],
        ),
        step(
            "Check every file of the run against its receipt: anyone with the folder can do this.",
            &["verify", &run],
        ),
    ]
}

/// A step as it is shown before it runs.
fn announced(step: &Step, idx: usize, n_steps: usize) -> String {
    let about = format!("Step {} of {n_steps}. {}", idx + 1, step.about);
    let words: Vec<String> = step.words.iter().map(|word| quoted(word)).collect();
    format!("\n{}\n    stapo {}", wrapped(&about, 0, COLUMNS), words.join(" "))
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_./=+:,@%".contains(c);
    if word.chars().all(is_plain) { word.to_string() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

/// Waits for Enter; false for `q` and for the end of the input. A signal ends the program here, where nothing runs.
fn is_wanted(stop: &Stop) -> Result<bool> {
    stop.prepare();
    let _ = stderr().write_all(b"Enter runs it, q ends: ");
    let mut line = String::new();
    let n_bytes = stdin().read_line(&mut line).context("standard input")?;
    stop.begin_work();
    Ok(n_bytes > 0 && !line.trim().eq_ignore_ascii_case("q"))
}

/// Runs a command of this program. It receives signals too: a run saves its work before it ends.
fn run_step(step: &Step, stop: &Stop) -> Result<ExitStatus> {
    const PAUSE: Duration = Duration::from_millis(20);
    let mut child = restart::command()?.args(&step.words).spawn().context("starting the command")?;
    let mut n_passed_on = 0;
    loop {
        if let Some(status) = child.try_wait().context("waiting for the command")? {
            return Ok(status);
        }
        if stop.n_requests() > n_passed_on {
            n_passed_on = stop.n_requests();
            pass_on(&child, stop.signal());
        }
        std::thread::sleep(PAUSE);
    }
}

fn end(folder: &Path) -> String {
    format!(
        "\nDone. {folder} holds everything; delete it when you no longer need it.\n\
         Next, with your model and your data:\n    \
         stapo init --model MODEL --data FILE --out my.toml\n    \
         stapo train my.toml\n\
         stapo explain WORD explains a key, a metric or a word, such as silenced.",
        folder = folder.display()
    )
}
