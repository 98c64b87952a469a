//! The process between the trainer and an external verifier.
//!
//! The trainer starts the launcher, and the launcher starts the verifier's command with the launcher's own standard
//! streams, so no line passes through the launcher. The launcher sets limits, takes away the network and gives the
//! command a private `/tmp` where the system can, and waits. When the command ends, the launcher ends the command's
//! remaining descendants and then itself in the same way as the command. When the trainer ends in whatever way, the
//! trainer's end of the standard input closes, and the launcher ends the command with all its descendants.

mod descendants;
#[cfg(target_os = "linux")]
mod isolation;
#[cfg(not(target_os = "linux"))]
use std::os::unix::process::CommandExt as _;

use crate::privileges::lower;
#[cfg(target_os = "linux")]
use nix::sys::signal::SigSet;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Signal, WaitOptions, WaitStatus, getpid, kill_process, wait};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Write, stdin, stdout};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread;

/// The first argument of a launcher, which is the program that `restart` names; the second is what [`run`] takes.
pub const SUBCOMMAND: &str = "launch-verifier";

/// What a launcher is to start.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Launch {
    pub program: PathBuf,
    pub args: Vec<String>,
    /// Whether the command may use the network.
    pub network: bool,
    /// Whether the command sees this machine's `/tmp`.
    pub shared_tmp: bool,
    /// The most address space of the command and of each of its children, in MiB; 0 for no limit.
    pub memory_mib: u64,
    /// The largest file that the command may write, in MiB; 0 for no limit.
    pub file_mib: u64,
    pub open_files: u64,
    /// False after a first launcher reported that this system does not let it keep the command apart.
    pub isolated: bool,
}

/// The launcher's only line, written to standard output after the command has started or was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The command runs; `shared` says what could not be kept apart.
    Started { shared: Vec<String> },
    /// The command cannot be started.
    Refused { problem: String },
    /// This system started to keep the launcher apart and then failed, so that another launcher must do without.
    NotIsolated { problem: String },
}

/// Serves as launcher until the command has ended, and ends in the same way as the command.
pub fn run(launch: &str) -> ExitCode {
    let refused = |problem: String| {
        send(&Report::Refused { problem });
        ExitCode::from(2)
    };
    let launch: Launch = match serde_json::from_str(launch) {
        Ok(launch) => launch,
        Err(error) => return refused(format!("the launcher's argument: {error}")),
    };
    let mut command = Command::new(&launch.program);
    command.args(&launch.args);
    let mut shared = Vec::new();
    #[cfg(target_os = "linux")]
    // Nothing that the command starts may gain privileges, as a setuid program would.
    if let Err(error) = rustix::thread::set_no_new_privs(true) {
        return refused(format!("no_new_privs: {error}"));
    }
    #[cfg(target_os = "linux")]
    if launch.isolated {
        match isolation::enter(&launch) {
            Ok(isolation) => {
                if isolation.has_private_tmp {
                    command.env("TMPDIR", "/tmp");
                }
                shared = isolation.shared;
            }
            Err(problem) => {
                send(&Report::NotIsolated { problem });
                return ExitCode::from(2);
            }
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        // A process group of its own, which the launcher can end without ending itself.
        command.process_group(0);
        if !(launch.network && launch.shared_tmp) {
            shared.push("the network and /tmp (this system cannot keep them apart)".to_string());
        }
    }
    if let Err(error) = descendants::adopt().and_then(|()| limit(&launch)) {
        return refused(format!("limits: {error}"));
    }
    match command.spawn() {
        Ok(child) => {
            let child = Pid::from_child(&child);
            send(&Report::Started { shared });
            guard(child)
        }
        Err(error) => refused(error.to_string()),
    }
}

/// Sets limits for this process and all that it starts, none of which can raise them again.
fn limit(launch: &Launch) -> rustix::io::Result<()> {
    lower(Resource::Core, 0)?;
    lower(Resource::Nofile, launch.open_files)?;
    for (resource, mib) in [(Resource::Fsize, launch.file_mib), (Resource::As, launch.memory_mib)] {
        if mib > 0 {
            lower(resource, mib.saturating_mul(1 << 20))?;
        }
    }
    Ok(())
}

/// Writes the report in one piece. A trainer that does not read has ended, which `guard` finds.
fn send(report: &Report) {
    let line = serde_json::to_string(report).expect("a report holds strings only");
    let mut out = stdout().lock();
    let _ = out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush());
}

/// Waits for the end of the command, ends its descendants, and ends in the same way.
fn guard(command: Pid) -> ExitCode {
    // The trainer sees the end of the command's output only if the launcher does not hold the pipes as well.
    if let Ok(nowhere) = File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(&nowhere);
        let _ = rustix::stdio::dup2_stderr(&nowhere);
    }
    // The command shares the launcher's process group, to which the kernel sends SIGHUP when the trainer ends while a
    // member is stopped, as `descendants::end` stops them. The launcher must live to end those outside the group.
    #[cfg(target_os = "linux")]
    let _ = SigSet::from(nix::sys::signal::Signal::SIGHUP).thread_block();
    thread::spawn(move || {
        wait_for_the_trainers_end();
        descendants::end(command);
    });
    let status = loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == command => break Some(status),
            // An orphan that the launcher has adopted, or an interrupted call.
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => break None,
        }
    };
    descendants::end(command);
    status.map_or(ExitCode::from(2), end_like)
}

/// Returns when the trainer's end of the standard input is closed. Nothing is read: the lines are the command's.
fn wait_for_the_trainers_end() {
    let stdin = stdin();
    loop {
        let mut watched = [PollFd::new(&stdin, PollFlags::empty())];
        match poll(&mut watched, None) {
            Err(Errno::INTR) => {}
            Err(_) => return,
            Ok(_) if watched[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) => {
                return;
            }
            Ok(_) => {}
        }
    }
}

/// Ends this process by the command's signal, or returns the command's exit status.
fn end_like(status: WaitStatus) -> ExitCode {
    if let Some(signal) = status.terminating_signal() {
        if let Some(signal) = Signal::from_named_raw(signal) {
            let _ = kill_process(getpid(), signal);
        }
        // The launcher ignores or blocks some signals, such as those of a closed pipe and of a hangup.
        return ExitCode::from(128 + signal as u8);
    }
    ExitCode::from(status.exit_status().unwrap_or(2) as u8)
}
