//! Gives the program the names of its profile and target, and release builds the commit that they are made from, read
//! from `.git` as plain files. Debug builds have no commit, so that a commit does not make them anew. `STAPO_COMMIT`
//! names the commit where there is no `.git`.

use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=STAPO_COMMIT");
    let given = std::env::var("STAPO_COMMIT").ok().filter(|commit| !commit.is_empty());
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = match (given, is_release) {
        (Some(commit), _) => commit,
        (None, true) => commit().unwrap_or_else(|| "commit unknown".to_string()),
        (None, false) => "debug build".to_string(),
    };
    println!("cargo::rustc-env=STAPO_COMMIT={commit}");
    for (name, variable) in [("STAPO_PROFILE", "PROFILE"), ("STAPO_TARGET", "TARGET")] {
        println!("cargo::rustc-env={name}={}", std::env::var(variable).unwrap_or_default());
    }
}

/// The commit of `HEAD`; `None` outside a git repository.
fn commit() -> Option<String> {
    let git = git_folder(&PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR")?).join("../../.git"))?;
    let head = watched(&git.join("HEAD"))?;
    let Some(branch) = head.strip_prefix("ref: ") else { return Some(short(&head)) };
    // A linked worktree keeps its branches in the repository that it belongs to.
    let shared = fs::read_to_string(git.join("commondir")).map_or(git.clone(), |path| git.join(path.trim()));
    let hash = watched(&shared.join(branch)).or_else(|| {
        let packed = watched(&shared.join("packed-refs"))?;
        let line = packed.lines().find(|line| line.ends_with(branch))?;
        line.split_whitespace().next().map(str::to_owned)
    })?;
    Some(short(&hash))
}

/// The folder itself, or the one that the file `.git` of a linked worktree names.
fn git_folder(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        return Some(path.to_owned());
    }
    let text = fs::read_to_string(path).ok()?;
    Some(path.parent()?.join(text.trim().strip_prefix("gitdir: ")?))
}

/// The text of a file, whose changes make the build run anew.
fn watched(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    println!("cargo::rerun-if-changed={}", path.display());
    Some(text.trim().to_string())
}

fn short(hash: &str) -> String {
    hash.chars().take(12).collect()
}
