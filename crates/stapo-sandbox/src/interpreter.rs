//! Which files of this machine a Python interpreter consists of.

use crate::{SandboxError, Settings};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the interpreter says about itself. A name on the PATH may be a script that starts another file. Folders outside of
/// the installation, such as projects that were installed in place, do not belong to the interpreter.
const QUESTION: &str = "import json, sys, sysconfig
paths = sysconfig.get_paths()
found = [path for path in sys.path if path.startswith((sys.prefix + '/', sys.base_prefix + '/'))]
print(json.dumps({'executable': sys.executable, 'version': list(sys.version_info[:2]),
    'files': [sys.prefix + '/pyvenv.cfg', paths['stdlib'], paths['platstdlib'], *found]}))";

/// What programs of any kind need to start: the loader, its cache and the shared libraries.
const SYSTEM: [&str; 7] =
    ["/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache"];

#[derive(Deserialize)]
struct Answer {
    executable: PathBuf,
    version: (u32, u32),
    files: Vec<PathBuf>,
}

/// An interpreter and the paths that it reads.
#[derive(Debug, Clone)]
pub(crate) struct Interpreter {
    pub executable: PathBuf,
    pub reads: Vec<PathBuf>,
}

impl Interpreter {
    /// Asks the interpreter, which is the user's and runs outside of the jail for this.
    pub(crate) fn find(settings: &Settings) -> Result<Self, SandboxError> {
        let name = settings.python.display();
        let refuse = |problem: String| {
            SandboxError::new(
                format!("Python interpreter {name}: {problem}"),
                "install Python 3.9 or later, or name an interpreter: python = \"PATH\" in a config, --python PATH in a command",
            )
        };
        let output = Command::new(&settings.python)
            .args(["-I", "-c", QUESTION])
            .current_dir("/")
            .output()
            .map_err(|error| refuse(error.to_string()))?;
        if !output.status.success() {
            let complaint = String::from_utf8_lossy(&output.stderr);
            return Err(refuse(format!("{}: {}", output.status, complaint.trim())));
        }
        let answer: Answer = serde_json::from_slice(&output.stdout)
            .map_err(|error| refuse(format!("does not answer as Python does: {error}")))?;
        if answer.version < (3, 9) {
            return Err(refuse(format!("its version is {}.{}", answer.version.0, answer.version.1)));
        }
        let executable = answer.executable.clone();
        let language = settings.language.iter().flat_map(|language| language.reads.iter().cloned());
        let all = answer.files.into_iter().chain([answer.executable]).chain(language);
        let reads = with_targets(all.chain(SYSTEM.map(PathBuf::from)));
        Ok(Self { executable, reads })
    }
}

/// The paths that exist, together with where links lead from them, none inside another.
fn with_targets(paths: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for path in paths.filter(|path| path.is_absolute() && path != Path::new("/")) {
        if let Ok(target) = path.canonicalize() {
            // A path through links is shown where its last link is.
            let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
            if let (Some(folder), Some(name)) = (folder, path.file_name()) {
                all.push(folder.join(name));
            }
            all.extend([path, target]);
        }
    }
    all.sort();
    all.dedup_by(|inner, outer| inner.starts_with(&*outer));
    all
}

#[cfg(test)]
mod tests {
    use super::with_targets;
    use std::path::PathBuf;

    #[test]
    fn paths_come_with_the_targets_of_links_and_without_what_lies_inside_another() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("real/inner")).unwrap();
        std::os::unix::fs::symlink(at("real"), at("link")).unwrap();
        let paths = [at("link"), at("real/inner"), at("missing"), PathBuf::from("relative")];
        assert_eq!(with_targets(paths.into_iter()), [at("link"), at("real")]);
    }
}
