//! Which verifier programs a command may start.

use stapo_rl::reward::{Programs, VerifierSpec, record_command, record_program};
use stapo_rl::tasks::{EnvironmentSpec, Task};
use std::path::Path;

/// The flag of commands that judge responses.
#[derive(clap::Args, Clone, Copy)]
pub struct AllowCommand {
    /// Starts the verifier program that a run's plan names, although you have not started this program before.
    #[arg(long)]
    allow_command: bool,
}

impl AllowCommand {
    /// For the plan of a run folder, which may be another's.
    pub fn of_run(self) -> Programs {
        if self.allow_command { Programs::Allowed } else { Programs::Recorded }
    }

    /// For a config named on the command line, which is the user's own unless it lies in a run folder.
    pub fn of_config(self, config: Option<&Path>) -> Programs {
        match config {
            Some(config) if is_in_run_folder(config) => self.of_run(),
            _ => Programs::Allowed,
        }
    }
}

/// Whether a path is a run folder or a file in one: next to it, or in it, is a `plan.toml`.
fn is_in_run_folder(path: &Path) -> bool {
    let Ok(path) = path.canonicalize() else { return false };
    let folder = if path.is_dir() { Some(path.as_path()) } else { path.parent() };
    folder.is_some_and(|folder| folder.join("plan.toml").exists())
}

/// Says what a run that starts shares with this machine, records its verifier programs, and prints its warnings.
pub fn announce<'a>(
    task: Option<&Task>,
    verifiers: impl IntoIterator<Item = &'a VerifierSpec>,
    environment: Option<&EnvironmentSpec>,
    warnings: impl IntoIterator<Item = impl std::fmt::Display>,
) {
    task.into_iter().for_each(warn);
    record(verifiers);
    record_environment(environment);
    for text in warnings {
        eprintln!("warning: {text}");
    }
}

/// Records the verifier programs of a run that starts, so that the run can be resumed and verified without a flag.
pub fn record<'a>(verifiers: impl IntoIterator<Item = &'a VerifierSpec>) {
    verifiers.into_iter().map(record_program).for_each(warn_unrecorded);
}

/// Records the programs of an environment in the same way.
pub fn record_environment(environment: Option<&EnvironmentSpec>) {
    for (_, command) in environment.into_iter().flat_map(EnvironmentSpec::programs) {
        warn_unrecorded(record_command(&command));
    }
}

fn warn_unrecorded(recorded: Result<(), String>) {
    if let Err(problem) = recorded {
        eprintln!(
            "warning: the verifier program could not be recorded: {problem}; to resume this run, pass --allow-command"
        );
    }
}

/// Says what the verifier program shares with this machine.
pub fn warn(task: &Task) {
    for warning in task.warnings() {
        eprintln!("warning: {warning}");
    }
}
