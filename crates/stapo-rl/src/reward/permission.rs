//! Whether a task may start the program that its verifier names.
//!
//! A config that the user names is the user's own, and its program starts. A plan from a run folder may be another's:
//! its program starts only where this user has recorded the same program before, or allows the program by a flag. The
//! record is a folder of the user, `$XDG_STATE_HOME/stapo/verifiers` or `~/.local/state/stapo/verifiers`, with one file
//! per program, named by a hash of all that decides which code runs.

mod importable;

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
pub(crate) fn check(command: &CommandSpec, programs: Programs) -> Result<(), TaskError> {
    let permission = permission(command);
    if programs == Programs::Allowed {
        // A folder that is too large to be hashed is refused in a config of the user's own too: no later command could trust it.
        return match permission {
            Err(error) if error.kind() == ErrorKind::QuotaExceeded => Err(TaskError::Verifier {
                program: shown(command),
                place: "not started".into(),
                problem: error.to_string(),
                remedy: "put the verifier in a separate folder".into(),
            }),
            _ => Ok(()),
        };
    }
    let mut problem = "the plan may be another user's, and you have not started this program before, at this path and with these files next to it".to_string();
    match permission {
        Ok(hash) => {
            let record = folder().and_then(|folder| fs::symlink_metadata(folder.join(hash)).ok());
            if record.is_some_and(|record| record.is_file()) {
                return Ok(());
            }
        }
        Err(error) if error.kind() == ErrorKind::QuotaExceeded => {
            problem = format!("{error}; put the verifier in a separate folder");
        }
        Err(error) => problem = format!("{problem}: {error}"),
    }
    Err(TaskError::Verifier {
        program: shown(command),
        place: "not started".into(),
        problem,
        remedy: "read the command line, the program and the files next to it; --allow-command starts it"
            .into(),
    })
}

/// Records the program of a verifier, if the verifier is one, so that plans of run folders may start the program. The
/// error says what cannot be written.
pub fn record_program(verifier: &VerifierSpec) -> Result<(), String> {
    verifier.program().map_or(Ok(()), |command| record_command(&command))
}

/// Records a program, as [`record_program`] does that of a verifier.
pub fn record_command(command: &CommandSpec) -> Result<(), String> {
    let folder = folder().ok_or("neither XDG_STATE_HOME nor HOME names a folder")?;
    let hash = permission(command).map_err(|error| format!("{}: {error}", shown(command)))?;
    let write = || {
        fs::create_dir_all(&folder)?;
        let mut file = OpenOptions::new().write(true).create_new(true).open(folder.join(hash))?;
        // The file's existence is the record; the content shows a person what was recorded.
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

/// A hash of all that decides which code a command line runs: the settings; by its place and its content the program and
/// every file that an argument names; and every file next to these that Python would import. A copied folder has other paths.
fn permission(command: &CommandSpec) -> io::Result<String> {
    let mut all = Sha256::new();
    all.update(fingerprint(command)?);
    let program = located(&command.program)?;
    let mut folders = Vec::new();
    let folder = update_path(&mut all, &program)?;
    // A program on the PATH is no file of a run's author, and Python does not import what is next to an interpreter.
    if !is_name(&command.program) {
        folders.push(folder);
    }
    for file in command.args.iter().filter_map(|argument| named_file(argument)) {
        folders.push(update_path(&mut all, file)?);
    }
    let packages = command.args.iter().map(PathBuf::from);
    folders.extend(packages.filter(|path| path.join("__main__.py").is_file()));
    importable::update(&mut all, &folders)?;
    Ok(format!("{:x}", all.finalize()))
}

/// Hashes where a file lies and where links lead from there: an interpreter finds its packages by the first, a script its
/// modules by the second. Returns the folder of the second.
fn update_path(all: &mut Sha256, file: &Path) -> io::Result<PathBuf> {
    let target = file.canonicalize()?;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let link = folder.canonicalize()?.join(file.file_name().unwrap_or_default());
    for path in [&link, &target] {
        let bytes = path.as_os_str().as_encoded_bytes();
        all.update((bytes.len() as u64).to_le_bytes());
        all.update(bytes);
    }
    target.parent().map(Path::to_owned).ok_or_else(|| io::Error::other("has no folder"))
}

/// A hash of the verifier's settings and of the content of the program and of every file that an argument names.
pub fn fingerprint(command: &CommandSpec) -> io::Result<String> {
    let settings = serde_json::to_vec(command).map_err(io::Error::other)?;
    let mut all = Sha256::new();
    all.update(Sha256::digest(&settings));
    all.update(hash_file(&located(&command.program)?)?);
    for argument in &command.args {
        let file = named_file(argument);
        // A marker before each argument keeps the files of different arguments apart.
        all.update([u8::from(file.is_some())]);
        if let Some(file) = file {
            all.update(hash_file(file)?);
        }
    }
    Ok(format!("{:x}", all.finalize()))
}

/// The file that an argument names: `--rules=rules.json` does as well as `rules.json`.
fn named_file(argument: &str) -> Option<&Path> {
    let value = argument.split_once('=').map_or(argument, |(_, value)| value);
    [argument, value].into_iter().map(Path::new).find(|path| path.is_file())
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

/// Whether a program is a name on the PATH and no path.
fn is_name(program: &Path) -> bool {
    program.components().count() == 1 && !program.to_string_lossy().contains('/')
}

/// The file of a program: a path as it is, or the first file of that name on the PATH.
fn located(program: &Path) -> io::Result<PathBuf> {
    let found = if is_name(program) {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| path.is_file())
    } else {
        Some(program.to_owned()).filter(|path| path.is_file())
    };
    found.ok_or_else(|| io::Error::new(ErrorKind::NotFound, "no such program"))
}

/// The folder of this user's records; `None` if the environment names no place.
fn folder() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    Some(state.join("stapo/verifiers"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reward::spec::{ProcessLimits, VerifierSpec};

    #[test]
    fn an_interpreter_needs_permission_where_it_is_named_or_runs_programs_without_a_jail() {
        for (settings, program) in [
            ("", None),
            ("unsafe_code = true", Some("python3")),
            ("python = \"bin/python3\"", Some("bin/python3")),
            ("python = \"bin/python3\"\nunsafe_code = true", Some("bin/python3")),
        ] {
            let spec: VerifierSpec = toml::from_str(&format!("kind = \"code\"\n{settings}")).unwrap();
            assert_eq!(spec.program().map(|command| command.program), program.map(Into::into), "{settings}");
        }
    }

    /// Whatever form an argument names its file in.
    #[test]
    fn a_file_that_an_argument_names_is_part_of_the_permission() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rules.json");
        for argument in [file.display().to_string(), format!("--rules={}", file.display())] {
            let command =
                CommandSpec { program: "sh".into(), args: vec![argument], limits: ProcessLimits::default() };
            fs::write(&file, "{}").unwrap();
            let before = [permission(&command).unwrap(), fingerprint(&command).unwrap()];
            assert_eq!([permission(&command).unwrap(), fingerprint(&command).unwrap()], before);
            fs::write(&file, "[]").unwrap();
            assert_ne!(permission(&command).unwrap(), before[0], "{:?}", command.args);
            assert_ne!(fingerprint(&command).unwrap(), before[1], "{:?}", command.args);
        }
    }

    /// A permission is for one command line with its settings: what it may reach, its arguments and their order.
    #[test]
    fn other_settings_or_arguments_are_another_permission() {
        let limits = ProcessLimits::default;
        let words = |args: &[&str]| args.iter().map(ToString::to_string).collect::<Vec<_>>();
        let command = |args: &[&str], limits| CommandSpec { program: "sh".into(), args: words(args), limits };
        let known = command(&["-c", "a", "b"], limits());
        let hashes = |command: &CommandSpec| [permission(command).unwrap(), fingerprint(command).unwrap()];
        assert_eq!(hashes(&known.clone()), hashes(&known));
        let env = vec!["SECRET".to_string()];
        for other in [
            command(&["-c", "b", "a"], limits()),
            command(&["-c", "a"], limits()),
            command(&["-c", "a", "b", ""], limits()),
            command(&["-c", "ab"], limits()),
            CommandSpec { program: "cat".into(), ..known.clone() },
            command(&["-c", "a", "b"], ProcessLimits { network: true, ..limits() }),
            command(&["-c", "a", "b"], ProcessLimits { shared_tmp: true, ..limits() }),
            command(&["-c", "a", "b"], ProcessLimits { env, ..limits() }),
            command(&["-c", "a", "b"], ProcessLimits { memory_mib: 0, ..limits() }),
        ] {
            let (found, before) = (hashes(&other), hashes(&known));
            assert!(found[0] != before[0] && found[1] != before[1], "{}", shown(&other));
        }
        let open = command(&["a\n"], ProcessLimits { network: true, env: vec!["A".into()], ..limits() });
        assert_eq!(shown(&open), r#""sh" "a\n" with ["A"] of the environment with network"#);
    }

    #[test]
    fn a_program_is_a_file_at_its_path_or_of_its_name_on_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sh");
        assert!(is_program(Path::new("sh")) && !is_program(&file) && !is_program(folder.path()));
        fs::write(&file, "").unwrap();
        assert!(is_program(&file));
        assert!(is_name(Path::new("sh")) && !is_name(Path::new("./sh")) && !is_name(&file));
        assert!(!is_program(Path::new("no-program-of-this-name")));
    }
}
