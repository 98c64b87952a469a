//! `stapo`: parses the command line and runs one command. Each command is a file or folder of `commands/` with an
//! `Args` and a `run`. [`main`] is the executable, [`run_inside`] the same program inside another one, which is Python.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this crate is the one that talks to people")]

/// Prints a line for people on standard output. This macro and the next stand in for those of the same name in the
/// standard library, so that no line goes around `terminal::plain`.
macro_rules! println {
    ($($text:tt)*) => { $crate::shared::terminal::print_line(format_args!($($text)*)) };
}

/// Prints a line for people on standard error.
macro_rules! eprintln {
    ($($text:tt)*) => { $crate::shared::terminal::print_note(format_args!($($text)*)) };
}

mod commands;
mod help;
mod reference;
mod shared;
#[cfg(test)]
mod tests;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use commands::{
    completions, config, counterfactual, doctor, eval, experiment, explain, export, fetch, generate, grade,
    init, inspect, judge_test, launch, man, model, objective, plan, pretrain, problems, report, runs, score,
    serve, train, tutorial, verify, version,
};
use shared::terminal::{output_failed, set_quiet};
use stapo_rl::device::cuda;
use stapo_rl::reward::{code, launcher, show_prints};
use stapo_rl::run::restart;
use stapo_rl::untrusted::THREAD_NAME;
use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::Once;

/// Trains language models by reinforcement learning on your problems, evaluates them, and shows what every token learned.
#[derive(Parser)]
#[command(name = "stapo", version, propagate_version = true)]
struct Cli {
    /// Prints errors and the result only: no progress, notes or warnings.
    #[arg(short, long, global = true)]
    quiet: bool,

    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    Train(train::Args),
    Launch(launch::Args),
    Pretrain(pretrain::Args),
    Sft(pretrain::SftArgs),
    Prefer(pretrain::PreferArgs),
    Rm(pretrain::RmArgs),
    Export(export::Args),
    Runs(runs::Args),
    Report(report::Args),
    Inspect(inspect::Args),
    Serve(serve::Args),
    Plan(plan::Args),
    Config(config::Args),
    Eval(Box<eval::Args>),
    Compare(eval::CompareArgs),
    Experiment(experiment::Args),
    Fetch(fetch::Args),
    Init(init::Args),
    Problems(problems::Args),
    Tutorial(tutorial::Args),
    Explain(explain::Args),
    Doctor(doctor::Args),
    Version(version::Args),
    Completions(completions::Args),
    Man(man::Args),
    Verify(verify::Args),
    /// The name that verify --replay had in earlier programs.
    #[command(hide = true)]
    VerifyRun {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    Counterfactual(counterfactual::Args),
    Generate(generate::Args),
    Score(score::Args),
    Grade(grade::Args),
    JudgeTest(judge_test::Args),
    Objective(objective::Args),
    Model(model::Args),
    /// Starts and guards an external verifier; this program calls itself so.
    #[command(name = launcher::SUBCOMMAND, hide = true)]
    LaunchVerifier {
        launch: String,
    },
    /// Starts and guards an interpreter for programs of a model; this program calls itself so.
    #[command(name = code::SUBCOMMAND, hide = true)]
    LaunchSandbox {
        jail: String,
    },
}

/// The executable `stapo`: runs the command that the arguments of this process name.
pub fn main() -> ExitCode {
    restart::set_running_executable();
    shared::stop::let_writes_fail_at_the_limit_of_files();
    run_words(std::env::args_os())
}

/// Runs the command that `words` name, the first of which is the name of the program, and returns its exit status. The
/// caller has named with `restart::set` how this program is started again.
pub fn run_inside(words: impl IntoIterator<Item = OsString>) -> u8 {
    let status = run_words(words);
    // An exit code does not give its number; there are 256.
    (0..=u8::MAX).find(|number| ExitCode::from(*number) == status).unwrap_or(2)
}

fn run_words(words: impl IntoIterator<Item = OsString>) -> ExitCode {
    set_panic_hook();
    show_prints(|text| eprintln!("{text}"));
    launch::end_with_launcher();
    let parsed = program().try_get_matches_from(words).and_then(|matches| Cli::from_arg_matches(&matches));
    let command = match parsed {
        Ok(cli) => {
            set_quiet(cli.quiet);
            cli.command
        }
        Err(usage) if usage.use_stderr() => {
            eprintln!("{}", usage.render().to_string().trim_end());
            return ExitCode::from(2);
        }
        Err(help) => {
            let printed = help.print().and_then(|()| std::io::stdout().flush());
            return printed
                .map_or_else(|error| ExitCode::from(output_failed(&error)), |()| ExitCode::SUCCESS);
        }
    };
    // A GPU that fails in the middle of a command unwinds to this guard and becomes an ordinary error; files already
    // written stay.
    let outcome = cuda::guard(|| run(command)).unwrap_or_else(|lost| Err(lost.into()));
    let status = outcome.unwrap_or_else(|error| complain(&error));
    // What standard output still holds back is written here, where a failure can be reported.
    std::io::stdout().flush().map_or_else(|error| ExitCode::from(output_failed(&error)), |()| status)
}

/// The command line of this program.
fn program() -> clap::Command {
    help::with_groups(Cli::command())
}

fn run(command: Option<Command>) -> anyhow::Result<ExitCode> {
    let Some(command) = command else {
        println!("{}", help::FIRST_LINES);
        return Ok(ExitCode::SUCCESS);
    };
    match command {
        Command::Train(args) => train::run(&args),
        Command::Launch(args) => launch::run(&args),
        Command::Pretrain(args) => pretrain::run(&args),
        Command::Sft(args) => pretrain::run_sft(&args),
        Command::Prefer(args) => pretrain::run_prefer(&args),
        Command::Rm(args) => pretrain::run_rm(&args),
        Command::Export(args) => export::run(&args),
        Command::Runs(args) => runs::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Compare(args) => eval::run_compare(&args),
        Command::Fetch(args) => fetch::run(&args),
        Command::Experiment(args) => experiment::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Config(args) => config::run(&args),
        Command::Init(args) => init::run(&args),
        Command::Problems(args) => problems::run(&args),
        Command::Tutorial(args) => tutorial::run(&args),
        Command::Explain(args) => explain::run(&args, &program()),
        Command::Doctor(args) => doctor::run(&args),
        Command::Version(args) => Ok(version::run(&args)),
        Command::Completions(args) => completions::run(&args, program()),
        Command::Man(args) => man::run(&args, program()),
        Command::Verify(args) => verify::run(&args),
        Command::VerifyRun { words } => verify::refuse_earlier_name(&words),
        Command::Counterfactual(args) => counterfactual::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Score(args) => score::run(&args),
        Command::Grade(args) => grade::run(&args),
        Command::JudgeTest(args) => judge_test::run(&args),
        Command::Objective(args) => objective::run(&args),
        Command::Model(args) => model::run(&args),
        Command::LaunchVerifier { launch } => Ok(launcher::run(&launch)),
        Command::LaunchSandbox { jail } => Ok(code::launch(&jail)),
    }
}

/// Silences two panics that become errors where they are caught: a failing GPU unwinds to the guard in `main`, and a
/// library that fails on an untrusted file unwinds to its caller.
fn set_panic_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let is_untrusted = std::thread::current().name() == Some(THREAD_NAME);
            if !cuda::is_failing() && !is_untrusted {
                usual(panic);
            }
        }));
    });
}

/// The error and its causes, without causes whose text an earlier one already contains, and then the hints of all.
fn chain_text(error: &anyhow::Error) -> String {
    let mut problems = String::new();
    let mut hints = String::new();
    for cause in error.chain().map(ToString::to_string) {
        let (problem, hint) = cause.split_once("\nhint: ").unwrap_or((&cause, ""));
        if problems.is_empty() {
            problems = problem.to_string();
        } else if !problems.contains(problem) {
            problems = format!("{problems}: {problem}");
        }
        if !hint.is_empty() && !hints.contains(hint) {
            hints = format!("{hints}\nhint: {hint}");
        }
    }
    problems + &hints
}

/// Prints the error as `error: …` with its causes and hints. A closed standard output (`stapo … | head`) is no error.
fn complain(error: &anyhow::Error) -> ExitCode {
    let reader_left = error
        .chain()
        .any(|e| e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe));
    if reader_left {
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {}", chain_text(error));
    ExitCode::from(2)
}
