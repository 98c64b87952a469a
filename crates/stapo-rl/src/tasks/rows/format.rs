//! Opens a file of rows and recognises its format.

use super::compressed;
use super::receiver::{AddRow, unreadable};
use super::{array, csv, jsonl, parquet};
use crate::tasks::TaskError;
use stapo_model::files;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::Path;

/// The first bytes of formats that are not read, with what to do instead.
const FOREIGN: [(&[u8], &str, &str); 6] = [
    (b"ARROW1", "an Arrow file", "write it as Parquet: Dataset.to_parquet in Python"),
    (b"PK\x03\x04", "a zip archive", "unpack it, and give the files inside"),
    (b"BZh", "compressed with bzip2", "compress it with gzip or zstd"),
    (b"\xfd7zXZ", "compressed with xz", "compress it with gzip or zstd"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "compress it with gzip or zstd"),
    (b"SQLite format 3", "an SQLite database", "write the table as CSV or JSON lines"),
];
/// Bytes that a format is recognised by. Blank lines may come first.
const SNIFFED_BYTES: usize = 1 << 16;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Calls `add` for each row of a file: Parquet, CSV, a JSON array or JSON lines, the last three also compressed with gzip or zstd.
/// The content says which; only CSV is known by its name, because any text could be CSV.
pub(crate) fn read(path: &Path, add: &mut AddRow) -> Result<(), TaskError> {
    let fail = |error: &std::io::Error| unreadable(path, error);
    let mut file = files::open(path).map_err(|error| fail(&error))?;
    let mut start = Vec::new();
    file.by_ref().take(16).read_to_end(&mut start).map_err(|error| fail(&error))?;
    file.rewind().map_err(|error| fail(&error))?;
    let has_end = |end: &str| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case(end));
    if start.starts_with(b"PAR1") || has_end("parquet") {
        return parquet::read(path, file, add);
    }
    if let Some((_, what, remedy)) = FOREIGN.iter().find(|(magic, _, _)| start.starts_with(magic)) {
        let (path, problem) = (path.to_path_buf(), format!("is {what}, which is not read"));
        return Err(TaskError::File { path, problem, remedy: (*remedy).into() });
    }
    let plain = compressed::plain(BufReader::new(file)).map_err(|error| fail(&error))?;
    let mut text = BufReader::with_capacity(SNIFFED_BYTES, plain);
    let start = text.fill_buf().map_err(|error| fail(&error))?;
    if start.starts_with(BYTE_ORDER_MARK) {
        text.consume(BYTE_ORDER_MARK.len());
    }
    let start = text.fill_buf().map_err(|error| fail(&error))?;
    match (separator(path), start.trim_ascii_start().first()) {
        (Some(separator), _) => csv::read(path, text, separator, add),
        (None, Some(b'[')) => array::read(path, text, add),
        (None, _) => jsonl::read(path, text, add),
    }
}

/// The separator of a table, by the file's name without the ending of a compression.
fn separator(path: &Path) -> Option<u8> {
    let name = path.file_name()?.to_str()?.to_ascii_lowercase();
    let bare = [".gz", ".zst"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
    match bare.rsplit_once('.')?.1 {
        "csv" => Some(b','),
        "tsv" => Some(b'\t'),
        _ => None,
    }
}
