//! Where a command's lines come from: a file, or standard input for `-`.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, stdin};

/// Opens `path` for reading lines; `-` is standard input.
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
