//! Calls of the program in tests.

use std::path::Path;
use std::process::{Command, Output};

/// Calls the program in a folder, which also keeps the user's records.
pub fn stapo(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(folder).args(args).env("XDG_STATE_HOME", folder.join(".state")).output().unwrap()
}

/// The standard output of a call that must succeed.
pub fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The standard error of a call that must be refused with exit status 2.
pub fn complaint(folder: &Path, args: &[&str]) -> String {
    let output = stapo(folder, args);
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}
