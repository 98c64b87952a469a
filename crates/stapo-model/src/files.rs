//! Opening and reading untrusted files. A pipe or a device is refused and not waited for.

use std::fs::{File, FileType};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// The largest text file that is read as a whole, such as a config.
const MAX_TEXT_BYTES: u64 = 16 << 20;

/// Opens a regular file, or a link to one.
pub fn open(path: &Path) -> Result<File> {
    check(path)?;
    File::open(path)
}

/// Refuses what is not a regular file or a link to one. Opening a pipe would wait for its writer.
pub fn check(path: &Path) -> Result<()> {
    let kind = std::fs::metadata(path)?.file_type();
    if kind.is_file() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidInput, format!("is {}, expected a file", name(kind))))
}

fn name(kind: FileType) -> &'static str {
    if kind.is_dir() { "a folder" } else { "a pipe or a device" }
}

/// The text of a file of at most 16 MiB.
pub fn read_text(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    open(path)?.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        return Err(invalid(format!("more than {MAX_TEXT_BYTES} bytes, too large for what it is")));
    }
    let (text, line) = valid(bytes);
    line.map_or(Ok(text), |line| Err(invalid(format!("line {line} is not UTF-8"))))
}

/// The text of a file of lines that a writer adds to. A writer that was killed may leave a last line that ends within a
/// character: that line is left out.
pub fn read_lines(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    let n_whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let is_torn = std::str::from_utf8(&bytes[n_whole..]).is_err();
    bytes.truncate(if is_torn { n_whole } else { bytes.len() });
    let (text, line) = valid(bytes);
    line.map_or(Ok(text), |line| Err(invalid(format!("line {line} is not UTF-8"))))
}

/// The text, and the first line that is not UTF-8.
fn valid(bytes: Vec<u8>) -> (String, Option<usize>) {
    String::from_utf8(bytes).map_or_else(
        |error| {
            let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            (String::new(), Some(before.split(|&byte| byte == b'\n').count()))
        },
        |text| (text, None),
    )
}

fn invalid(problem: String) -> Error {
    Error::new(ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_last_line_torn_within_a_character_is_left_out_and_any_other_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        for (bytes, lines, text) in [
            (&b"a\n\xc3\xa9\n\xc3"[..], Ok("a\n\u{e9}\n"), Err("line 3")),
            (b"a\nb", Ok("a\nb"), Ok("a\nb")),
            (b"\xf0\x9f\x98", Ok(""), Err("line 1")),
            (b"a\n\xff\nb\n", Err("line 2"), Err("line 2")),
        ] {
            std::fs::write(&path, bytes).unwrap();
            for (found, expected) in [(read_lines(&path), lines), (read_text(&path), text)] {
                match (found, expected) {
                    (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                    (Err(found), Err(word)) => assert!(found.to_string().contains(word), "{found}"),
                    (found, expected) => panic!("{found:?}, expected {expected:?}"),
                }
            }
        }
    }

    #[test]
    fn folders_devices_and_large_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(read_text(folder.path()).unwrap_err().to_string().contains("a folder"));
        #[cfg(unix)]
        assert!(read_text(Path::new("/dev/zero")).unwrap_err().to_string().contains("a pipe or a device"));
        let path = folder.path().join("large");
        File::create(&path).unwrap().set_len(MAX_TEXT_BYTES + 1).unwrap();
        assert!(read_text(&path).unwrap_err().to_string().contains("16777216 bytes"));
        File::options().write(true).open(&path).unwrap().set_len(MAX_TEXT_BYTES).unwrap();
        assert_eq!(read_text(&path).unwrap().len() as u64, MAX_TEXT_BYTES);
    }
}
