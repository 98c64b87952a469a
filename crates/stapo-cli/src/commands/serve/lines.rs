//! Reading a file of lines that a training process adds to, from where the last reading ended.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Bytes before the place of reading that must still be there: a file that was rewritten differs in them, because every
/// line holds times.
const N_REMEMBERED: usize = 256;
/// A longer line is no line of a run.
const MAX_LINE: usize = 4 << 20;
const CHUNK: usize = 1 << 20;

/// A place in a growing file.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    offset: u64,
    /// The last bytes before `offset`.
    before: Vec<u8>,
}

/// What a reading found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NewLines {
    /// The file was replaced or shortened: the lines begin again.
    pub is_new: bool,
    /// Whole lines without their line breaks; a last line without its end waits for the next reading.
    pub n_lines: usize,
}

impl Tail {
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), offset: 0, before: Vec::new() }
    }

    /// Hands every new whole line to `take`. Where the file begins again, `forget` is called before the first line.
    pub fn read<S>(
        &mut self,
        state: &mut S,
        forget: impl FnOnce(&mut S),
        mut take: impl FnMut(&mut S, &[u8]),
    ) -> io::Result<NewLines> {
        let mut file = match open_plain(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.offset == 0 => {
                return Ok(NewLines::default());
            }
            Err(error) => return Err(error),
        };
        let mut found = NewLines::default();
        if !self.is_where_it_was(&mut file)? {
            found.is_new = true;
            self.offset = 0;
            self.before.clear();
            forget(state);
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut pending = Vec::new();
        let mut chunk = vec![0; CHUNK];
        loop {
            let n = file.read(&mut chunk)?;
            if n == 0 {
                return Ok(found);
            }
            pending.extend_from_slice(&chunk[..n]);
            let Some(end) = pending.iter().rposition(|&byte| byte == b'\n') else {
                if pending.len() > MAX_LINE {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        format!("a line of more than {MAX_LINE} bytes"),
                    ));
                }
                continue;
            };
            for line in pending[..end].split(|&byte| byte == b'\n') {
                found.n_lines += 1;
                take(state, line);
            }
            self.passed(&pending[..=end]);
            pending.drain(..=end);
        }
    }

    fn passed(&mut self, bytes: &[u8]) {
        self.offset += bytes.len() as u64;
        self.before.extend_from_slice(&bytes[bytes.len().saturating_sub(N_REMEMBERED)..]);
        self.before.drain(..self.before.len().saturating_sub(N_REMEMBERED));
    }

    fn is_where_it_was(&self, file: &mut File) -> io::Result<bool> {
        if file.metadata()?.len() < self.offset {
            return Ok(false);
        }
        let mut bytes = vec![0; self.before.len()];
        file.seek(SeekFrom::Start(self.offset - self.before.len() as u64))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes == self.before)
    }
}

/// Opens a plain file for reading; a link, a pipe or a device is refused, since a link leads out of the folder and a pipe
/// blocks its reader.
pub fn open_plain(path: &Path) -> io::Result<File> {
    if !path.symlink_metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a plain file"));
    }
    File::open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn read(tail: &mut Tail, lines: &mut Vec<String>) -> NewLines {
        tail.read(lines, Vec::clear, |lines, line| lines.push(String::from_utf8_lossy(line).into_owned()))
            .unwrap()
    }

    #[test]
    fn lines_come_once_and_a_torn_one_waits_for_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut tail = Tail::new(&path);
        let mut lines = Vec::new();
        assert_eq!(read(&mut tail, &mut lines), NewLines::default());
        let mut file = File::create(&path).unwrap();
        for (text, expected) in
            [("one\ntw", vec!["one"]), ("", vec!["one"]), ("o\nthree\n", vec!["one", "two", "three"])]
        {
            file.write_all(text.as_bytes()).unwrap();
            assert!(!read(&mut tail, &mut lines).is_new);
            assert_eq!(lines, expected);
        }
    }

    #[test]
    fn a_file_that_was_cut_or_replaced_is_read_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "one\ntwo\n").unwrap();
        let mut tail = Tail::new(&path);
        let mut lines = Vec::new();
        read(&mut tail, &mut lines);
        for text in ["one\n", "ONE\nTWO\nthree\n"] {
            std::fs::write(&path, text).unwrap();
            assert!(read(&mut tail, &mut lines).is_new, "{text}");
            assert_eq!(lines.join("\n") + "\n", text);
        }
        let long = "x".repeat(1000) + "\n";
        std::fs::write(&path, long.repeat(3000)).unwrap();
        read(&mut tail, &mut lines);
        assert_eq!((lines.len(), lines[2999].len()), (3000, 1000));
        assert_eq!(read(&mut tail, &mut lines), NewLines::default());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), "x\n").unwrap();
        std::os::unix::fs::symlink(folder.path().join("a"), folder.path().join("b")).unwrap();
        assert!(open_plain(&folder.path().join("b")).is_err());
    }

    #[test]
    fn a_line_without_end_is_an_error_and_not_held_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let read = |n_bytes: usize| {
            let text = [&b"one\n"[..], &vec![b'x'; n_bytes]].concat();
            std::fs::write(&path, text).unwrap();
            let mut lines = Vec::new();
            let read = Tail::new(&path).read(&mut lines, Vec::clear, |lines, line| lines.push(line.to_vec()));
            (lines.len(), read.map(|found| found.n_lines).map_err(|error| error.to_string()))
        };
        assert_eq!(read(MAX_LINE), (1, Ok(1)));
        assert_eq!(read(MAX_LINE + 1).1, Err(format!("a line of more than {MAX_LINE} bytes")));
    }
}
