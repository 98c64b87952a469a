//! What commands show on a terminal, where bars and clocks are drawn and questions are asked.

#![cfg(unix)]

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, ExitStatus};

/// Runs the program on a terminal; see [`shown`].
pub fn on_terminal(folder: &Path, args: &[&str], typed: &str) -> (ExitStatus, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(folder).args(args).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    shown(command, typed)
}

/// Runs a command with a terminal as its standard input, output and error; `typed` is read as if somebody had typed it.
/// Returns what the terminal was sent, with the echo of what was typed.
pub fn shown(mut command: Command, typed: &str) -> (ExitStatus, String) {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap();
    let terminal = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let mut controller = File::from(controller);
    command.env("TERM", "xterm").env_remove("NO_COLOR").stdin(terminal.try_clone().unwrap());
    command.stdout(terminal.try_clone().unwrap()).stderr(terminal);
    let mut child = command.spawn().unwrap();
    // The command holds copies of the terminal, and reading ends when the last one is closed.
    drop(command);
    controller.write_all(typed.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    // Linux reports the end of a terminal as an error.
    let _ = controller.read_to_end(&mut bytes);
    (child.wait().unwrap(), String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
}
