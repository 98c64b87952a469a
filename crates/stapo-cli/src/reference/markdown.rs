//! Pages as Markdown.

use super::{Entry, Page, Section};
use std::fmt::Write;

/// What every page begins with.
const PRINTED: &str =
    "<!-- Written by the program. Change the source, then run: stapo explain --write docs/reference -->";

pub fn page(page: &Page) -> String {
    let mut text = format!("{PRINTED}\n# {}\n{}\n", page.title, page.intro);
    for section in &page.sections {
        write_section(&mut text, section);
    }
    text
}

fn write_section(text: &mut String, section: &Section) {
    let mark = if section.is_nested { "###" } else { "##" };
    let _ = write!(text, "\n{mark} {}\n", section.title);
    if let Some(subject) = &section.subject {
        let _ = writeln!(text, "{}", subject.text);
        let separator = if subject.facts.is_empty() { "" } else { "\n" };
        let _ = write!(text, "{separator}");
        for (label, value) in &subject.facts {
            let _ = writeln!(text, "- **{label}**: {value}");
        }
    }
    if !section.intro.is_empty() {
        let _ = writeln!(text, "{}{}", if section.subject.is_some() { "\n" } else { "" }, section.intro);
    }
    if !section.rows.is_empty() {
        text.push('\n');
        write_table(text, &section.rows);
    }
}

/// The columns of tables, in their order.
const COLUMNS: [&str; 8] =
    ["kind", "type", "unit", "better", "values", "default", "changes results", "TensorBoard"];

/// A table with a column for each fact that a row has.
fn write_table(text: &mut String, rows: &[Entry]) {
    let has = |label: &&str| rows.iter().flat_map(|row| &row.facts).any(|(known, _)| known == label);
    let labels: Vec<&str> = COLUMNS.into_iter().filter(has).collect();
    let heads: Vec<&str> =
        std::iter::once("name").chain(labels.iter().copied()).chain(["what it is"]).collect();
    let _ = writeln!(text, "| {} |\n|{}", heads.join(" | "), "---|".repeat(heads.len()));
    for row in rows {
        let mut cells = vec![format!("`{}`", row.name)];
        for label in &labels {
            let value = row.facts.iter().find(|(known, _)| known == label);
            cells.push(value.map_or(String::new(), |(_, value)| value.clone()));
        }
        cells.push(row.text.clone());
        let cells: Vec<String> = cells.iter().map(|cell| cell_text(cell)).collect();
        let _ = writeln!(text, "|{}|", cells.join("|"));
    }
}

/// A text as a cell of a table, with a blank on each side.
fn cell_text(text: &str) -> String {
    let text = text.trim().replace('|', "\\|").replace("\n\n", "<br>").replace('\n', " ");
    if text.is_empty() { " ".to_string() } else { format!(" {text} ") }
}
