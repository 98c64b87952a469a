//! Where a command's lines come from: a file, or standard input for `-`.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Error, ErrorKind, stdin};

/// The longest line that is read.
pub const MAX_LINE_BYTES: usize = 64 << 20;
/// How much of a line that is too long is passed over to find the next one.
const MAX_SKIPPED_BYTES: usize = 1 << 30;

/// Opens `path` for reading lines; `-` is standard input. A pipe is fine here: lines are read once.
pub fn open(path: &str) -> Result<Box<dyn BufRead + Send>> {
    if path == "-" {
        return Ok(Box::new(BufReader::with_capacity(1 << 20, stdin())));
    }
    let file = File::open(path).with_context(|| format!("input {path}"))?;
    if file.metadata().is_ok_and(|m| m.is_dir()) {
        anyhow::bail!("input {path}: is a folder, expected a file of JSON lines");
    }
    Ok(Box::new(BufReader::with_capacity(1 << 20, file)))
}

/// The name of the input in messages.
pub fn name(path: &str) -> &str {
    if path == "-" { "<stdin>" } else { path }
}

/// A line of input, without its line break.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    Text(Vec<u8>),
    /// Longer than the limit; its bytes were passed over.
    TooLong,
}

/// The next line of at most `max_bytes`; `None` at the end. A line that does not end within 1 GiB is an error.
pub fn next_line(input: &mut dyn BufRead, max_bytes: usize) -> std::io::Result<Option<Line>> {
    let mut line = Vec::new();
    let mut n_bytes = 0;
    loop {
        let available = input.fill_buf()?;
        if available.is_empty() {
            return Ok((n_bytes > 0).then(|| whole(line, n_bytes, max_bytes)));
        }
        // `contains` looks at a word at a time, and the bytes of a long line are passed over quickly.
        let has_newline = available.contains(&b'\n');
        let newline = has_newline.then(|| available.iter().position(|&byte| byte == b'\n')).flatten();
        let length = newline.unwrap_or(available.len());
        n_bytes += length;
        if n_bytes <= max_bytes {
            line.extend_from_slice(&available[..length]);
        } else {
            line = Vec::new();
        }
        input.consume(length + usize::from(newline.is_some()));
        if newline.is_some() {
            return Ok(Some(whole(line, n_bytes, max_bytes)));
        }
        if n_bytes > MAX_SKIPPED_BYTES {
            let problem = format!("a line does not end within {} MiB", MAX_SKIPPED_BYTES >> 20);
            return Err(Error::new(ErrorKind::InvalidData, problem));
        }
    }
}

fn whole(line: Vec<u8>, n_bytes: usize, max_bytes: usize) -> Line {
    if n_bytes > max_bytes { Line::TooLong } else { Line::Text(line) }
}

/// The problem of a line that is too long.
pub fn too_long(max_bytes: usize) -> String {
    format!("the line is longer than {} MiB", max_bytes >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_is_passed_over_and_the_next_is_read() {
        let mut input: &[u8] = b"abc\n\nabcd\nx";
        let mut next = || next_line(&mut input, 3).unwrap();
        let text = |text: &str| Some(Line::Text(text.into()));
        assert_eq!(
            [next(), next(), next(), next(), next()],
            [text("abc"), text(""), Some(Line::TooLong), text("x"), None]
        );
    }

    #[test]
    fn a_line_without_end_is_an_error() {
        let mut endless = BufReader::new(std::io::repeat(b'x'));
        let error = next_line(&mut endless, 3).unwrap_err().to_string();
        assert!(error.contains("1024 MiB"), "{error}");
    }
}
