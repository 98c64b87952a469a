//! Tables, written as HTML and as CSV from the same cells.

use crate::shared::html::{escape, visible};
use std::fmt::Write;

#[derive(Debug, Clone)]
pub struct Table {
    /// The stem of the CSV file's name.
    pub name: &'static str,
    pub head: Vec<Column>,
    pub rows: Vec<TableRow>,
}

#[derive(Debug, Clone)]
pub struct Column {
    pub title: String,
    pub is_number: bool,
}

#[derive(Debug, Clone)]
pub struct TableRow {
    pub cells: Vec<Cell>,
    pub kind: RowKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    Plain,
    /// The proposed method.
    Best,
    Total,
}

#[derive(Debug, Clone)]
pub enum Cell {
    Text(String),
    /// Tokens, each with a note.
    Tokens(Vec<(String, String)>),
    /// Text before the token, the token, text after the token.
    Context(String, String, String),
}

pub fn text(value: impl Into<String>) -> Cell {
    Cell::Text(value.into())
}

pub fn token(value: &str) -> Cell {
    Cell::Tokens(vec![(value.to_string(), String::new())])
}

impl Table {
    /// A title that begins with `#` marks a column of numbers; the `#` is not shown.
    pub fn new(name: &'static str, titles: &[&str]) -> Self {
        let column = |title: &&str| match title.strip_prefix('#') {
            Some(rest) => Column { title: rest.to_string(), is_number: true },
            None => Column { title: (*title).to_string(), is_number: false },
        };
        Table { name, head: titles.iter().map(column).collect(), rows: Vec::new() }
    }

    pub fn push(&mut self, cells: Vec<Cell>) {
        self.push_as(RowKind::Plain, cells);
    }

    pub fn push_as(&mut self, kind: RowKind, cells: Vec<Cell>) {
        self.rows.push(TableRow { cells, kind });
    }

    pub fn to_html(&self) -> String {
        let class =
            |column: Option<&Column>| if column.is_some_and(|c| c.is_number) { " class=\"n\"" } else { "" };
        let mut out = String::from("<div class=\"scroll\"><table><thead><tr>");
        for column in &self.head {
            let _ = write!(out, "<th{}>{}</th>", class(Some(column)), escape(&column.title));
        }
        out.push_str("</tr></thead><tbody>");
        for row in &self.rows {
            out.push_str(match row.kind {
                RowKind::Plain => "<tr>",
                RowKind::Best => "<tr class=\"best\">",
                RowKind::Total => "<tr class=\"total\">",
            });
            for (idx, cell) in row.cells.iter().enumerate() {
                let _ = write!(out, "<td{}>{}</td>", class(self.head.get(idx)), cell.to_html());
            }
            out.push_str("</tr>");
        }
        out.push_str("</tbody></table></div>");
        out
    }

    /// RFC 4180.
    pub fn to_csv(&self) -> String {
        let titles: Vec<String> = self.head.iter().map(|column| column.title.clone()).collect();
        let rows = self.rows.iter().map(|row| row.cells.iter().map(Cell::to_plain).collect());
        std::iter::once(titles).chain(rows).map(|cells: Vec<String>| csv_line(&cells)).collect()
    }
}

impl Cell {
    fn to_html(&self) -> String {
        match self {
            Cell::Text(text) => escape(text),
            Cell::Tokens(tokens) => {
                let one = |(token, note): &(String, String)| {
                    format!("<span class=\"tok\">{}</span> {}", escape(&visible(token)), escape(note))
                };
                tokens.iter().map(one).collect::<Vec<_>>().join(" ")
            }
            Cell::Context(before, token, after) => format!(
                "<span class=\"ctx\">{}<span class=\"tok out\">{}</span>{}</span>",
                escape(before),
                escape(&visible(token)),
                escape(after)
            ),
        }
    }

    pub fn to_plain(&self) -> String {
        match self {
            Cell::Text(text) => text.clone(),
            Cell::Tokens(tokens) => {
                let one = |(token, note): &(String, String)| format!("{token} {note}").trim_end().to_string();
                tokens.iter().map(one).collect::<Vec<_>>().join(" | ")
            }
            Cell::Context(before, token, after) => format!("{before}[{token}]{after}"),
        }
    }
}

/// A name in lower case with `-` for every character that is not alphanumeric in ASCII, for file names.
pub fn slug(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect()
}

/// One line of a CSV file.
pub fn csv_line(cells: &[String]) -> String {
    let quoted = |cell: &String| {
        if cell.contains([',', '"', '\n', '\r']) {
            format!("\"{}\"", cell.replace('"', "\"\""))
        } else {
            cell.clone()
        }
    };
    cells.iter().map(quoted).collect::<Vec<_>>().join(",") + "\r\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_escaped_in_the_page_and_quoted_in_the_file() {
        let mut table = Table::new("t", &["token", "#p"]);
        table.push(vec![token("</script>"), text("0.1, \"so\"")]);
        let html = table.to_html();
        assert!(html.contains("&lt;/script&gt;") && !html.contains("</script>"), "{html}");
        assert!(html.contains("<th class=\"n\">p</th>"), "{html}");
        assert_eq!(table.to_csv(), "token,p\r\n</script>,\"0.1, \"\"so\"\"\"\r\n");
    }
}
