//! What commands show on a terminal, where bars and clocks are drawn and questions are asked.

#![cfg(unix)]

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};

/// Runs the program on a terminal; see [`shown`].
pub fn on_terminal(folder: &Path, args: &[&str], typed: &str) -> (ExitStatus, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(folder).args(args).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    shown(command, typed)
}

/// Runs a command with a terminal as its standard input, output and error; `typed` is read as if somebody had typed it.
/// Returns what the terminal was sent, with the echo of what was typed.
pub fn shown(command: Command, typed: &str) -> (ExitStatus, String) {
    let (mut child, mut terminal) = started(command);
    terminal.write_all(typed.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    // Linux reports the end of a terminal as an error.
    let _ = terminal.read_to_end(&mut bytes);
    (child.wait().unwrap(), text(&bytes))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace("\r\n", "\n")
}

/// Starts a command on a terminal, and returns the other end of the terminal.
fn started(mut command: Command) -> (Child, File) {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap();
    let terminal = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    command.env("TERM", "xterm").env_remove("NO_COLOR").stdin(terminal.try_clone().unwrap());
    command.stdout(terminal.try_clone().unwrap()).stderr(terminal);
    // The command holds copies of the terminal, and reading ends when the last one is closed.
    (command.spawn().unwrap(), File::from(controller))
}

/// A terminal writes `^C` into the line of the clock, which is taken back, so that the clock finds its lines.
#[test]
fn ctrl_c_leaves_no_trace_in_a_clock() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(folder.path()).args(["plan", "--set", "rollout.group_size=64"]);
    let (mut child, mut terminal) = started(command);
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    while !text(&bytes).contains("measuring: ") {
        let n = terminal.read(&mut part).unwrap();
        bytes.extend_from_slice(&part[..n]);
    }
    // A signal that was ignored when this test started stays ignored.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = ignored.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap());
    let is_ignored = mask & 2 != 0;
    let signal = if is_ignored { Signal::TERM } else { Signal::INT };
    kill_process(Pid::from_child(&child), signal).unwrap();
    let _ = terminal.read_to_end(&mut bytes);
    let (status, said) = (child.wait().unwrap(), text(&bytes));
    assert!(said.contains("measuring was stopped; the times of the plan are simulated"), "{said}");
    assert_eq!(said.contains("\r\u{1b}[2K\u{1b}[1A"), !is_ignored, "{said:?}");
    assert_eq!(status.code(), Some(if is_ignored { 143 } else { 130 }));
}
