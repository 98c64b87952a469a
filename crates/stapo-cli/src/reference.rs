//! The reference: every command, config key, metric, objective, file and variable, read from the program itself, and the
//! glossary. `stapo explain` prints single entries, and writes the pages of `docs/reference`.

mod command_line;
mod environment;
mod files;
mod glossary;
mod keys;
mod markdown;
mod metrics;
mod objectives;

use serde::ser::{Serialize, SerializeMap, Serializer};

/// One thing that a reader can look up.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// What the thing is, as in `config key`.
    pub kind: &'static str,
    pub name: String,
    /// Other names of the thing.
    pub aliases: Vec<String>,
    /// Labelled facts, such as type and default.
    pub facts: Vec<(&'static str, String)>,
    /// Markdown; paragraphs are separated by empty lines.
    pub text: String,
}

/// A page of `docs/reference`.
pub struct Page {
    pub file: &'static str,
    pub title: &'static str,
    pub intro: &'static str,
    pub sections: Vec<Section>,
}

/// A heading, what is below it, and a table.
#[derive(Default)]
pub struct Section {
    pub title: String,
    /// True for a heading below the one before.
    pub is_nested: bool,
    /// The thing that the section is about, where it is about a single one.
    pub subject: Option<Entry>,
    pub intro: String,
    pub rows: Vec<Entry>,
}

impl Entry {
    pub fn new(kind: &'static str, name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { kind, name: name.into(), aliases: Vec::new(), facts: Vec::new(), text: text.into() }
    }

    /// Adds a fact, unless its value is empty.
    #[must_use]
    pub fn with_fact(mut self, label: &'static str, value: impl Into<String>) -> Self {
        let value = value.into();
        if !value.is_empty() {
            self.facts.push((label, value));
        }
        self
    }

    /// Every word that finds the entry: the name, its parts after a dot, and the aliases.
    fn words(&self) -> impl Iterator<Item = String> + '_ {
        let name = normalized(&self.name);
        let starts = name.match_indices('.').map(|(at, _)| at + 1).collect::<Vec<_>>();
        let parts: Vec<String> =
            std::iter::once(0).chain(starts).map(|start| name[start..].to_string()).collect();
        parts.into_iter().chain(self.aliases.iter().map(|alias| normalized(alias)))
    }
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("kind", self.kind)?;
        map.serialize_entry("name", &self.name)?;
        for (label, value) in &self.facts {
            map.serialize_entry(label, value)?;
        }
        map.serialize_entry("text", &self.text)?;
        map.end()
    }
}

impl Page {
    pub fn to_markdown(&self) -> String {
        markdown::page(self)
    }
}

/// The pages of `docs/reference`. `program` is the command line of this program.
pub fn pages(program: &clap::Command) -> Vec<Page> {
    vec![
        command_line::page(program),
        keys::page(),
        metrics::page(),
        objectives::page(),
        files::page(),
        environment::page(),
    ]
}

/// Everything that can be looked up.
pub fn entries(program: &clap::Command) -> Vec<Entry> {
    let sections = pages(program).into_iter().flat_map(|page| page.sections);
    let listed = sections.flat_map(|mut section| {
        // On its page an option is below its command; elsewhere its name has the command.
        if let Some(command) =
            section.subject.as_ref().filter(|subject| subject.kind == command_line::COMMAND)
        {
            section.rows.iter_mut().for_each(|row| row.name = format!("{} {}", command.name, row.name));
        }
        section.subject.into_iter().chain(section.rows)
    });
    glossary::entries().into_iter().chain(listed).collect()
}

/// The entries that a word names, or the last part of a path that nothing has as its whole name. An option that several
/// commands share is one entry.
pub fn find(entries: &[Entry], word: &str) -> Vec<Entry> {
    let word = normalized(word);
    let found = named(entries, &word);
    match word.rsplit_once('.') {
        Some((_, last)) if found.is_empty() => named(entries, last),
        _ => found,
    }
}

fn named(entries: &[Entry], word: &str) -> Vec<Entry> {
    let mut found: Vec<Entry> = Vec::new();
    for entry in entries.iter().filter(|entry| entry.words().any(|known| known == word)) {
        let earlier = found.iter_mut().find(|other| {
            other.kind == command_line::OPTION && entry.kind == other.kind && entry.text == other.text
        });
        match earlier {
            Some(other) => other.name = format!("{}, {}", other.name, entry.name),
            None => found.push(entry.clone()),
        }
    }
    found
}

/// The names nearest to a word that names nothing, the nearest first.
pub fn nearest(entries: &[Entry], word: &str) -> Vec<String> {
    let word = normalized(word);
    let mut scored: Vec<(f64, String)> = entries
        .iter()
        .flat_map(Entry::words)
        .map(|known| (strsim::jaro_winkler(&word, &known), known))
        .filter(|(similarity, _)| *similarity > 0.75)
        .collect();
    scored.sort_by(|(a, x), (b, y)| b.total_cmp(a).then_with(|| x.len().cmp(&y.len())).then(x.cmp(y)));
    scored.dedup_by(|(_, x), (_, y)| x == y);
    scored.into_iter().map(|(_, name)| name).take(5).collect()
}

/// A name as it is compared: in lower case, without dashes in front or a number of a list, and `_` for dash and blank.
fn normalized(name: &str) -> String {
    let name = name.trim().trim_start_matches('-').to_lowercase().replace(['-', ' '], "_");
    let is_number = |part: &&str| *part == "n" || part.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Vec<&str> = name.split('.').filter(|part| !is_number(part) || *part == name).collect();
    parts.join(".")
}

#[cfg(test)]
mod tests;
