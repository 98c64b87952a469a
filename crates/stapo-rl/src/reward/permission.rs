//! Whether a task may start the program that its verifier names.
//!
//! A config that the user names is the user's own, and its program starts. A plan from a run folder may be another's:
//! its program starts only where this user has recorded the same program before, or allows the program by a flag. The
//! record is a folder of the user, `$XDG_STATE_HOME/stapo/verifiers` or `~/.local/state/stapo/verifiers`, with one file
//! per program, named by the hash of the settings and of the files that the command line names.

use crate::reward::spec::{CommandSpec, VerifierSpec};
use crate::tasks::error::TaskError;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Which verifier programs a task may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Programs {
    /// Any: the user named the config, or allowed the program by a flag.
    Allowed,
    /// Those that this user has recorded; another is refused with its command line.
    Recorded,
    /// None, and no response can be judged.
    Never,
}

/// Refuses a verifier's program that may not start.
pub(super) fn check(command: &CommandSpec, programs: Programs) -> Result<(), TaskError> {
    let is_recorded = || {
        let hash = fingerprint(command).ok()?;
        fs::symlink_metadata(folder()?.join(hash)).ok().filter(fs::Metadata::is_file)
    };
    if programs == Programs::Allowed || is_recorded().is_some() {
        return Ok(());
    }
    Err(TaskError::Verifier {
        program: shown(command),
        place: "not started".into(),
        problem: "the plan is not known to be your own, and this user has not recorded this program".into(),
        remedy: "read the command line and the program; --allow-command starts it".into(),
    })
}

/// Records the program of a verifier, if the verifier is one, so that plans of run folders may start the program. The
/// error says what cannot be written.
pub fn record_program(verifier: &VerifierSpec) -> Result<(), String> {
    let Some(command) = &verifier.program() else { return Ok(()) };
    let folder = folder().ok_or("neither XDG_STATE_HOME nor HOME names a folder")?;
    let hash = fingerprint(command).map_err(|error| format!("{}: {error}", shown(command)))?;
    let write = || {
        fs::create_dir_all(&folder)?;
        let mut file = OpenOptions::new().write(true).create_new(true).open(folder.join(hash))?;
        // The file's existence is the record; the content tells a person what was recorded.
        writeln!(file, "{}", shown(command))
    };
    match write() {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(format!("{}: {error}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// The command line, each word quoted and with control characters escaped.
fn shown(command: &CommandSpec) -> String {
    let words = std::iter::once(command.program.display().to_string()).chain(command.args.iter().cloned());
    let line = words.map(|word| format!("{word:?}")).collect::<Vec<_>>().join(" ");
    let names = &command.limits.env;
    let env = if names.is_empty() { String::new() } else { format!(" with {names:?} of the environment") };
    format!("{line}{env}{}", if command.limits.network { " with network" } else { "" })
}

/// A hash of the verifier's settings and of the content of the program and of every file that an argument names.
pub fn fingerprint(command: &CommandSpec) -> io::Result<String> {
    let settings = serde_json::to_vec(command).map_err(io::Error::other)?;
    let mut all = Sha256::new();
    all.update(Sha256::digest(&settings));
    all.update(hash_file(&located(&command.program)?)?);
    for argument in &command.args {
        // `--rules=rules.json` names a file as well as `rules.json` does.
        let value = argument.split_once('=').map_or(argument.as_str(), |(_, value)| value);
        let file = [argument.as_str(), value].into_iter().map(Path::new).find(|path| path.is_file());
        // A marker before each argument keeps the files of different arguments apart.
        all.update([u8::from(file.is_some())]);
        if let Some(file) = file {
            all.update(hash_file(file)?);
        }
    }
    Ok(format!("{:x}", all.finalize()))
}

fn hash_file(path: &Path) -> io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    io::copy(&mut File::open(path)?, &mut hash)?;
    Ok(hash.finalize().into())
}

/// Whether a program is there: a file at the path, or of that name on the PATH.
pub fn is_program(program: &Path) -> bool {
    located(program).is_ok()
}

/// The file of a program: a path as it is, or the first file of that name on the PATH.
fn located(program: &Path) -> io::Result<PathBuf> {
    let is_name = program.components().count() == 1 && !program.to_string_lossy().contains('/');
    let found = if is_name {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| path.is_file())
    } else {
        Some(program.to_owned()).filter(|path| path.is_file())
    };
    found.ok_or_else(|| io::Error::new(ErrorKind::NotFound, "no such program"))
}

/// The folder of this user's records; `None` where the environment names no place.
fn folder() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    Some(state.join("stapo/verifiers"))
}
