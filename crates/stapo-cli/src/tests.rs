//! Test: every command of README and docs is one that this program accepts.

use crate::Cli;
use clap::Parser;
use std::path::{Path, PathBuf};

/// The words of a shell command up to a pipe, a redirection or a comment; quotes of both kinds keep a word together.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quote = None;
    for c in line.chars() {
        match quote {
            Some(end) if c == end => quote = None,
            None if c == '"' || c == '\'' => quote = Some(c),
            None if matches!(c, '|' | '>' | '<' | '#' | ';' | '&') => break,
            None if c.is_whitespace() => words.push(String::new()),
            _ => words.last_mut().expect("there is always a last word").push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// The commands of a page that call this program: lines of blocks, indented or fenced.
fn commands(page: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut is_fenced = false;
    for line in page.replace("\\\n", " ").lines() {
        if line.starts_with("```") {
            is_fenced = !is_fenced;
        } else if is_fenced || line.starts_with("    ") {
            let words = words(line.trim().trim_start_matches("$ "));
            let command = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                ["stapo", ..] => Some(words),
                ["cargo", "run", "--release", "--", ref rest @ ..] => {
                    Some(std::iter::once("stapo").chain(rest.iter().copied()).map(String::from).collect())
                }
                _ => None,
            };
            found.extend(command);
        }
    }
    found
}

/// README and the pages of docs, those in folders too.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut folders = vec![root.join("docs")];
    let mut found = vec![root.join("README.md")];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found
}

#[test]
fn every_documented_command_parses() {
    let mut n_commands = 0;
    for page in pages() {
        for command in commands(&std::fs::read_to_string(&page).unwrap()) {
            n_commands += 1;
            if let Err(usage) = Cli::try_parse_from(&command) {
                assert!(!usage.use_stderr(), "{}: {command:?}: {usage}", page.display());
            }
        }
    }
    assert!(n_commands > 10, "only {n_commands} commands were found");
}

#[test]
fn a_wrong_command_is_found() {
    let page = "text `stapo train`\n\n    stapo train --no-such-flag\n\n```sh\nstapo runs  # a list\n```\n";
    let found = commands(page);
    assert_eq!(found, [vec!["stapo", "train", "--no-such-flag"], vec!["stapo", "runs"]]);
    assert!(Cli::try_parse_from(&found[0]).is_err());
    assert_eq!(words("stapo train --set 'a = 1' | head"), ["stapo", "train", "--set", "a = 1"]);
}
