//! `stapo explain`

use crate::reference::{Entry, entries, find, nearest, pages};
use crate::shared::terminal::{COLUMNS, wrapped};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Explains a config key, a metric, a command, an option, an objective preset, a file or a word.
///
/// Prints the entry of the reference: type, default and effect on results of a key, unit of a metric, formula of an
/// objective. For an unknown word it prints the nearest names, and the exit status is 2.
#[derive(clap::Args)]
pub struct Args {
    /// The word, such as tau_p, update.learning_rate, accuracy, --resume or grpo.
    #[arg(required_unless_present = "write", allow_hyphen_values = true)]
    word: Option<String>,

    /// Prints one JSON array.
    #[arg(long)]
    json: bool,

    /// Writes the whole reference as Markdown pages into this folder, instead of explaining a word.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["word", "json"])]
    write: Option<PathBuf>,
}

/// `program` is the command line of this program.
pub fn run(args: &Args, program: &clap::Command) -> Result<ExitCode> {
    if let Some(folder) = &args.write {
        return write_pages(folder, program);
    }
    let word = args.word.as_deref().unwrap_or_default();
    let entries = entries(program);
    let found = find(&entries, word);
    if found.is_empty() {
        let nearest = nearest(&entries, word).join(", ");
        let hint = if nearest.is_empty() {
            "stapo --help lists the commands, and docs/reference everything".to_string()
        } else {
            format!("the nearest are {nearest}")
        };
        bail!("explain {word}: nothing has this name\nhint: {hint}");
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&found)?);
    } else {
        println!("{}", found.iter().map(text).collect::<Vec<_>>().join("\n\n"));
    }
    Ok(ExitCode::SUCCESS)
}

fn write_pages(folder: &Path, program: &clap::Command) -> Result<ExitCode> {
    std::fs::create_dir_all(folder).with_context(|| format!("folder {}", folder.display()))?;
    for page in pages(program) {
        let path = folder.join(page.file);
        std::fs::write(&path, page.to_markdown()).with_context(|| format!("file {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// An entry for the terminal: its name and kind, its facts, and its text.
fn text(entry: &Entry) -> String {
    const INDENT: usize = 2;
    let width = entry.facts.iter().map(|(label, _)| label.len()).max().unwrap_or(0) + INDENT + 2;
    let mut lines = vec![wrapped(&format!("{} ({})", entry.name, entry.kind), INDENT, COLUMNS)];
    for paragraph in without_links(&entry.text).split("\n\n").filter(|paragraph| !paragraph.is_empty()) {
        let is_code = paragraph.lines().any(|line| line.starts_with("  "));
        let paragraph =
            if is_code { paragraph.replace('\n', "\n  ") } else { wrapped(paragraph, INDENT, COLUMNS) };
        lines.push(format!("{:INDENT$}{paragraph}", ""));
    }
    for (label, value) in &entry.facts {
        let label = format!("{:INDENT$}{label}", "");
        lines.push(format!("{label:<width$}{}", wrapped(&without_links(value), width, COLUMNS)));
    }
    lines.join("\n")
}

/// Markdown with links replaced by their texts.
fn without_links(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](") {
        let Some((start, label)) = before.rsplit_once('[') else { break };
        let Some((_, behind)) = after.split_once(')') else { break };
        out += start;
        out += label;
        rest = behind;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_stand_below_each_other_and_code_keeps_its_lines() {
        let entry = Entry::new("word", "name", "One [text](a.md).\n\nCode:\n  a = 1\n  b = 2")
            .with_fact("type", "x")
            .with_fact("unit of it", "y ".repeat(40));
        let lines = [
            "name (word)",
            "  One text.",
            "  Code:",
            "    a = 1",
            "    b = 2",
            "  type        x",
            &format!("  unit of it  {}", ["y"; 33].join(" ")),
            &format!("              {}", ["y"; 7].join(" ")),
        ];
        assert_eq!(text(&entry), lines.join("\n"));
    }

    #[test]
    fn links_become_their_texts() {
        assert_eq!(without_links("see [a](b.md#c) and [d](e), f[0]"), "see a and d, f[0]");
        assert_eq!(without_links("a list [1](open"), "a list [1](open");
    }
}
