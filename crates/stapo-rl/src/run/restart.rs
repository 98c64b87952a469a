//! How this program is started again: for the runs of an experiment, and as launcher of a verifier. The running
//! executable need not be this program: inside Python it is the interpreter.

use std::ffi::OsString;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// On Linux the name of the running executable that stays valid when its file is replaced.
const RUNNING: &str = "/proc/self/exe";

static WORDS: OnceLock<(PathBuf, Vec<OsString>)> = OnceLock::new();

/// Names the executable that starts this program and the arguments that come before the program's own. The first call in
/// a process counts.
pub fn set(executable: PathBuf, first_arguments: Vec<OsString>) {
    WORDS.get_or_init(|| (executable, first_arguments));
}

/// Names the running executable as the one that starts this program.
pub fn set_running_executable() {
    let running = if cfg!(target_os = "linux") { Ok(RUNNING.into()) } else { std::env::current_exe() };
    if let Ok(running) = running {
        set(running, Vec::new());
    }
}

/// A command that starts this program again; its own arguments are to be added.
pub fn command() -> Result<Command> {
    let (executable, first_arguments) = WORDS.get().ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "nothing names the executable that starts this program")
    })?;
    let mut command = Command::new(executable);
    command.args(first_arguments);
    #[cfg(unix)]
    if executable == Path::new(RUNNING)
        && let Some(name) = std::env::args_os().next()
    {
        // Lists of processes, locks and events show the name that the user typed.
        std::os::unix::process::CommandExt::arg0(&mut command, name);
    }
    Ok(command)
}
