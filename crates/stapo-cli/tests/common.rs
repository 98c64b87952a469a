//! Calls of the program in tests.

use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// A folder below `/tmp`, wherever other tests have theirs: an external verifier has a `/tmp` of its own, where only such
/// folders must be made visible again.
pub fn folder_below_tmp() -> TempDir {
    if cfg!(unix) { TempDir::new_in("/tmp").unwrap() } else { TempDir::new().unwrap() }
}

/// The call leaves no trace in the state folder of the user who runs the tests.
pub fn stapo(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(folder).args(args).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.output().unwrap()
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
