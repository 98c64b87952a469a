//! How tests call the program.

use std::path::Path;
use std::process::{Command, Output};

pub fn stapo(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stapo")).current_dir(folder).args(args).output().unwrap()
}

/// What a call that must succeed printed.
pub fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The complaint of a refused call.
pub fn complaint(folder: &Path, args: &[&str]) -> String {
    let output = stapo(folder, args);
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}
