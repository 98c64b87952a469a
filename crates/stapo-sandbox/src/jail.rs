//! The process between a pool and an interpreter: it takes away what the interpreter may not have, and starts it.
//!
//! The pool starts this program again with [`SUBCOMMAND`] and a description of the jail. The new process has one thread,
//! which namespaces ask for. It enters the jail, starts the interpreter inside, reports once on its standard output and
//! waits for the interpreter's end. Standard input is the socket by which pool and interpreter talk.

mod calls;
mod files;
mod namespaces;

pub(crate) use calls::{for_command, for_program};

use crate::privileges::{drop_capabilities, lower};
use crate::{Layers, Level};
use rustix::process::Resource;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

/// The first argument of the launcher, which is this program; the second is what [`launch`] takes.
pub const SUBCOMMAND: &str = "launch-sandbox";

/// Descriptors that a zygote and a program may have open.
const MAX_OPEN_FILES: u64 = 256;

/// What a launcher starts, and what the interpreter may see.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Jail {
    pub program: PathBuf,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    pub level: Level,
    /// Files and folders that can be read; the interpreter finds them under the same paths.
    pub reads: Vec<PathBuf>,
    /// The size of the private `/tmp`.
    pub tmp_mib: u64,
    /// A folder of this machine to write in where there is no private `/tmp`.
    pub scratch: Option<PathBuf>,
}

/// The launcher's only line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    Started(Layers),
    /// The interpreter cannot be started at all.
    Refused(String),
    /// This system has not got the level; another launcher must try a weaker one.
    WithoutLevel(String),
}

/// Serves as launcher until the interpreter has ended.
pub fn launch(jail: &str) -> ExitCode {
    let jail: Jail = match serde_json::from_str(jail) {
        Ok(jail) => jail,
        Err(error) => {
            send(&Report::Refused(format!("the launcher's argument: {error}")));
            return ExitCode::from(2);
        }
    };
    let layers = match enter(&jail) {
        Ok(layers) => layers,
        Err(problem) => {
            send(&Report::WithoutLevel(problem));
            return ExitCode::from(2);
        }
    };
    let mut command = Command::new(&jail.program);
    command.args(&jail.args).env_clear().envs(jail.env.iter().cloned()).stdout(Stdio::null());
    match command.spawn() {
        Ok(mut child) => {
            // The pool sees the interpreter's end only if the launcher does not hold the socket as well.
            if let Ok(nowhere) = File::options().read(true).write(true).open("/dev/null") {
                let _ = rustix::stdio::dup2_stdin(&nowhere);
                let _ = rustix::stdio::dup2_stderr(&nowhere);
            }
            send(&Report::Started(layers));
            let _ = child.wait();
            ExitCode::SUCCESS
        }
        Err(error) => {
            send(&Report::Refused(format!("{}: {error}", jail.program.display())));
            ExitCode::from(2)
        }
    }
}

/// A pool that does not read has ended, and the interpreter ends with its socket.
fn send(report: &Report) {
    let line = serde_json::to_string(report).expect("a report holds strings and truth values only");
    let mut out = stdout().lock();
    let _ = out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush());
}

/// Enters the jail. The error says what this system has not got.
fn enter(jail: &Jail) -> Result<Layers, String> {
    use nix::sys::personality::{Persona, get, set};
    rustix::thread::set_no_new_privs(true).map_err(|error| format!("no_new_privs: {error}"))?;
    // Equal addresses give equal orders of sets. Not all systems allow it, and no border depends on it.
    let _ = get().and_then(|persona| set(persona | Persona::ADDR_NO_RANDOMIZE));
    if jail.level == Level::Namespaces {
        namespaces::enter(jail).map_err(|problem| format!("namespaces: {problem}"))?;
    } else if let Some(scratch) = &jail.scratch {
        std::env::set_current_dir(scratch).map_err(|error| format!("{}: {error}", scratch.display()))?;
    }
    drop_capabilities().map_err(|error| format!("capabilities: {error}"))?;
    lower(Resource::Core, 0).map_err(|error| format!("limit of core files: {error}"))?;
    lower(Resource::Nofile, MAX_OPEN_FILES).map_err(|error| format!("limit of open files: {error}"))?;
    let files = files::restrict(jail);
    let calls = calls::restrict();
    if jail.level == Level::Filters {
        files.clone().map_err(|problem| format!("Landlock: {problem}"))?;
    }
    if jail.level != Level::None {
        calls.clone().map_err(|problem| format!("seccomp: {problem}"))?;
    }
    Ok(Layers {
        level: jail.level,
        without_namespaces: None,
        has_landlock: files.is_ok(),
        has_seccomp: calls.is_ok(),
    })
}
