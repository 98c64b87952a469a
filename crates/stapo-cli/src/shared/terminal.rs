//! What the program prints. Control characters in the names, texts and errors of files never reach a terminal.

use std::fmt::{Arguments, Write as _};
use std::io::{ErrorKind, IsTerminal, Result, Write, stderr, stdout};
use std::sync::atomic::{AtomicBool, Ordering};

static QUIET: AtomicBool = AtomicBool::new(false);

/// Says whether everything on standard error but errors is left out, from here on.
pub fn set_quiet(is_quiet: bool) {
    QUIET.store(is_quiet, Ordering::Relaxed);
}

/// Whether notes, warnings and progress are left out.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Whether an output is coloured: never with NO_COLOR, always with CLICOLOR_FORCE, else on a terminal that is not dumb.
pub fn has_color(output: &impl IsTerminal) -> bool {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if variable("NO_COLOR").is_some() {
        return false;
    }
    let is_forced = variable("CLICOLOR_FORCE").is_some_and(|value| value != "0");
    is_forced || (output.is_terminal() && variable("TERM").is_none_or(|term| term != "dumb"))
}

/// The words that begin a line of a message, with their colours.
const WORDS: [(&str, &str); 4] =
    [("error:", "1;31"), ("warning:", "1;33"), ("hint:", "1;36"), ("note:", "1;36")];

/// A message with its first words coloured.
fn colored(text: &str) -> String {
    let color = |line: &str| {
        let word = WORDS.iter().find_map(|(word, color)| Some((word, color, line.strip_prefix(word)?)));
        word.map_or(line.to_string(), |(word, color, rest)| format!("\x1b[{color}m{word}\x1b[0m{rest}"))
    };
    text.split('\n').map(color).collect::<Vec<_>>().join("\n")
}

/// The text with lines of at most `width` columns where blanks allow; every line but the first begins with `indent`
/// blanks, and the first has `indent` columns taken already.
pub fn wrapped(text: &str, indent: usize, width: usize) -> String {
    let mut out = String::new();
    let mut column = indent;
    for word in text.split_whitespace() {
        let n = word.chars().count();
        if column > indent && column + 1 + n > width {
            let _ = write!(out, "\n{:indent$}", "");
            column = indent;
        } else if column > indent {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += n;
    }
    out
}

/// The columns of a line that fits every terminal.
pub const COLUMNS: usize = 80;

/// The first cell of a row, filled up to `width` columns. A longer text has a line to itself, above the row.
pub fn first_cell(text: &str, width: usize) -> String {
    if text.chars().count() <= width { format!("{text:<width$}") } else { format!("{text}\n{:width$}", "") }
}

/// The text with every control character but line break and tab written as `\u001b`, the way JSON writes it. Characters
/// that turn the direction of writing, and so make a text look like another, count as control characters.
pub fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if turns || (c.is_control() && c != '\n' && c != '\t') {
            write!(out, "\\u{:04x}", u32::from(c)).expect("a string takes every text");
        } else {
            out.push(c);
        }
    }
    out
}

/// Prints a line on standard output. A reader that has left ends the program quietly; any other failure ends it with an
/// error and status 2.
pub fn print_line(text: Arguments) {
    if let Err(error) = stdout().write_all(format!("{}\n", plain(&text.to_string())).as_bytes()) {
        std::process::exit(i32::from(output_failed(&error)));
    }
}

/// Prints a line on standard error; a quiet program prints only errors. A failure is ignored: standard error may be
/// closed.
pub fn print_note(text: Arguments) {
    let text = plain(&text.to_string());
    if is_quiet() && !text.starts_with("error:") {
        return;
    }
    let text = if has_color(&stderr()) { colored(&text) } else { text };
    let _ = stderr().write_all(format!("{text}\n").as_bytes());
}

/// Reports that standard output cannot be written, and returns the exit status.
pub fn output_failed(error: &std::io::Error) -> u8 {
    if error.kind() == ErrorKind::BrokenPipe {
        return 0;
    }
    print_note(format_args!("error: standard output: {error}"));
    2
}

/// Standard output for texts and JSON lines. Bytes go through as they are, except to a terminal, where control
/// characters are written as JSON writes them.
pub fn output() -> Output {
    Output { is_terminal: stdout().is_terminal(), unfinished: Vec::new() }
}

pub struct Output {
    is_terminal: bool,
    /// The first bytes of a character whose last bytes have not been written yet.
    unfinished: Vec<u8>,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        if !self.is_terminal {
            return stdout().write(bytes);
        }
        self.unfinished.extend_from_slice(bytes);
        let pending = std::mem::take(&mut self.unfinished);
        let n_whole = match std::str::from_utf8(&pending) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            _ => pending.len(),
        };
        self.unfinished = pending[n_whole..].to_vec();
        stdout().write_all(plain(&String::from_utf8_lossy(&pending[..n_whole])).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        stdout().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_spelled_out() {
        assert_eq!(
            plain("a\u{1b}]0;x\u{7}\u{9b}2J\u{7f}\r\n\té"),
            "a\\u001b]0;x\\u0007\\u009b2J\\u007f\\u000d\n\té"
        );
        assert_eq!(plain("\u{202e}abc"), "\\u202eabc");
        assert_eq!((first_cell("ab", 2), first_cell("abc", 2)), ("ab".to_string(), "abc\n  ".to_string()));
    }

    #[test]
    fn only_the_first_word_of_a_line_is_colored() {
        assert_eq!(
            colored("error: x: error: y\nhint: z"),
            "\x1b[1;31merror:\x1b[0m x: error: y\n\x1b[1;36mhint:\x1b[0m z"
        );
    }

    #[test]
    fn lines_break_at_blanks_and_keep_their_indent() {
        assert_eq!(wrapped("one two three", 4, 12), "one two\n    three");
        assert_eq!(wrapped("one two three", 4, 11), "one two\n    three");
        assert_eq!(wrapped("one two three", 4, 10), "one\n    two\n    three");
        assert_eq!(wrapped("one two three", 0, 13), "one two three");
        assert_eq!(wrapped("unbreakable", 4, 8), "unbreakable");
        assert_eq!(wrapped("", 4, 8), "");
    }
}
