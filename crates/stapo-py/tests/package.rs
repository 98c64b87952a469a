//! The Python package with the extension module of this build: the tests of `python/tests` and the examples of the
//! docstrings, run by the Python that `STAPO_PYTHON` names, or the system's.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::print_stdout, reason = "a test that skips says why")]

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

/// The extension module of this build, which lies beside the executables of the tests.
fn extension() -> PathBuf {
    let executable = std::env::current_exe().unwrap();
    let name = format!("{}_stapo{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    executable.with_file_name(name)
}

/// A folder with the package as `pip install` would lay it out.
fn package() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python");
    let package = folder.join("stapo");
    if package.exists() {
        fs::remove_dir_all(&package).unwrap();
    }
    fs::create_dir_all(&package).unwrap();
    for entry in fs::read_dir(root().join("python/stapo")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, package.join(path.file_name().unwrap())).unwrap();
        }
    }
    fs::copy(extension(), package.join("_stapo.abi3.so")).unwrap();
    folder
}

/// Python 3.10 or newer; `None` where there is none.
fn python() -> Option<OsString> {
    let named = std::env::var_os("STAPO_PYTHON").unwrap_or_else(|| "python3".into());
    let check = "import sys; sys.exit(sys.version_info < (3, 10))";
    let status = Command::new(&named).args(["-c", check]).status();
    status.is_ok_and(|status| status.success()).then_some(named)
}

#[test]
fn the_package_passes_its_tests() {
    let Some(python) = python() else {
        println!("skipped: no Python 3.10 or newer; STAPO_PYTHON names one");
        return;
    };
    let output = Command::new(&python)
        .args(["-m", "unittest", "discover", "--start-directory"])
        .arg(root().join("python/tests"))
        .env("PYTHONPATH", package())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    println!("{message}");
    assert!(output.status.success(), "{}{message}", String::from_utf8_lossy(&output.stdout));
    assert!(message.contains("\nRan "), "no tests were found: {message}");
}
