//! The borders of the house, checked: who may import whom, where `unsafe` may stand, how long a file may be.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The table of ARCHITECTURE.md: a crate and the crates of ours it may import.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("stapo-core", &[]),
    ("stapo-verify", &[]),
    ("stapo-ops", &[]),
    ("stapo-model", &["stapo-ops"]),
    ("stapo-rl", &["stapo-core", "stapo-verify", "stapo-model"]),
    ("stapo-cli", &["stapo-core", "stapo-verify", "stapo-rl"]),
    ("stapo-py", &["stapo-core", "stapo-verify", "stapo-rl"]),
];

const MAX_LINES: usize = 500;

/// Files that may be longer, each with its reason.
const LONG_FILES: &[(&str, &str)] = &[];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

/// Source files below a folder, build output aside.
fn sources(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            found.extend(sources(&path, extensions));
        } else if path.extension().is_some_and(|e| extensions.iter().any(|known| e == *known)) {
            found.push(path);
        }
    }
    found
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().to_string_lossy().into_owned()
}

/// Crates of ours that a manifest names, in any dependency table and under any target.
fn imports(manifest: &toml::Table) -> Vec<String> {
    let mut found = Vec::new();
    for (key, value) in manifest {
        let Some(table) = value.as_table() else { continue };
        if key.ends_with("dependencies") {
            let package = |(name, spec): (&String, &toml::Value)| {
                spec.get("package").and_then(toml::Value::as_str).unwrap_or(name).to_string()
            };
            found.extend(table.iter().map(package).filter(|name| name.starts_with("stapo")));
        } else {
            found.extend(imports(table));
        }
    }
    found
}

#[test]
fn crates_import_only_what_the_design_allows() {
    let allowed: BTreeMap<_, _> = MAY_IMPORT.iter().copied().collect();
    let mut n_crates = 0;
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let manifest = entry.unwrap().path().join("Cargo.toml");
        let table: toml::Table = fs::read_to_string(&manifest).unwrap().parse().unwrap();
        let name = table["package"]["name"].as_str().unwrap().to_string();
        let may =
            allowed.get(name.as_str()).unwrap_or_else(|| panic!("{name} is not in the table of crates"));
        for import in imports(&table) {
            assert!(may.contains(&import.as_str()), "{name} imports {import}; it may import {may:?}");
        }
        n_crates += 1;
    }
    assert!(n_crates >= 6, "{n_crates} crates found");
}

/// The text without comments, string and character literals, so that a word in prose does not count.
fn code_only(text: &str) -> String {
    let mut code = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(hashes) = raw_string_hashes(rest) {
            let close = format!("\"{}", "#".repeat(hashes));
            let body = 2 + hashes;
            rest[body..].find(&close).map_or(rest.len(), |end| body + end + close.len())
        } else if c == '"' {
            let mut escaped = false;
            let end = rest[1..].find(|c| {
                let closes = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                closes
            });
            end.map_or(rest.len(), |end| end + 2)
        } else if rest.starts_with("'\"'") {
            3
        } else {
            code.push(c);
            rest = &rest[c.len_utf8()..];
            continue;
        };
        code.push(' ');
        rest = &rest[skipped..];
    }
    code
}

fn raw_string_hashes(text: &str) -> Option<usize> {
    let hashes = text.strip_prefix('r')?.chars().take_while(|c| *c == '#').count();
    text[1 + hashes..].starts_with('"').then_some(hashes)
}

fn has_word(code: &str, word: &str) -> bool {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|part| part == word)
}

#[test]
fn unsafe_stands_in_one_crate_only() {
    assert!(has_word(&code_only("fn f() { unsafe { g() } }"), "unsafe"));
    assert!(!has_word(
        &code_only("// unsafe\nlet s = \"unsafe \\\" unsafe\"; r#\"unsafe\"#; /* unsafe */"),
        "unsafe"
    ));
    let guilty: Vec<String> = sources(&root().join("crates"), &["rs"])
        .into_iter()
        .filter(|path| !path.starts_with(root().join("crates/stapo-ops")))
        .filter(|path| has_word(&code_only(&fs::read_to_string(path).unwrap()), "unsafe"))
        .map(|path| relative(&path))
        .collect();
    assert!(guilty.is_empty(), "unsafe outside stapo-ops: {guilty:?}");
}

#[test]
fn files_stay_below_500_lines() {
    let mut too_long = Vec::new();
    for path in sources(&root(), &["rs", "cu", "py", "sh"]) {
        let n_lines = fs::read_to_string(&path).unwrap().lines().count();
        let name = relative(&path);
        if n_lines > MAX_LINES && !LONG_FILES.iter().any(|(known, _)| *known == name) {
            too_long.push(format!("{name}: {n_lines} lines"));
        }
    }
    assert!(too_long.is_empty(), "split these, or name them with a reason:\n{}", too_long.join("\n"));
    for (name, reason) in LONG_FILES {
        assert!(
            root().join(name).exists() && !reason.is_empty(),
            "{name}: an exception needs a file and a reason"
        );
    }
}
