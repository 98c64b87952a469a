//! Reads a byte string from front to back; every read is checked against the end.

use super::field::{Field, FieldType};
use crate::error::{Error, Result};

/// Deepest nesting of arrays in arrays.
const MAX_DEPTH: usize = 4;

pub(super) struct Bytes<'a> {
    location: &'a str,
    all: &'a [u8],
    at: usize,
}

impl<'a> Bytes<'a> {
    pub fn new(location: &'a str, all: &'a [u8]) -> Self {
        Self { location, all, at: 0 }
    }

    pub fn position(&self) -> usize {
        self.at
    }

    /// The next `n` bytes; `what` names the bytes in the error if the file ends first.
    pub fn take(&mut self, n: u64, what: &str) -> Result<&'a [u8]> {
        let left = &self.all[self.at..];
        let n = usize::try_from(n).ok().filter(|&n| n <= left.len()).ok_or_else(|| {
            let problem =
                format!("{what} at byte {} needs {n} bytes, {} are left: truncated?", self.at, left.len());
            Error::malformed(self.location, problem)
        })?;
        self.at += n;
        Ok(&left[..n])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let bytes = self.take(N as u64, what)?;
        Ok(bytes.try_into().expect("take gave N bytes"))
    }

    pub fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A string: its length, then that many bytes of UTF-8.
    pub fn string(&mut self, what: &str) -> Result<&'a str> {
        let n = self.u64(what)?;
        let at = self.at;
        let bytes = self.take(n, what)?;
        std::str::from_utf8(bytes)
            .map_err(|_| Error::malformed(self.location, format!("{what} at byte {at} is not UTF-8")))
    }

    /// A metadata value: its type and its position; the value itself is skipped.
    pub fn field(&mut self, key: &str) -> Result<Field> {
        let kind = self.kind(key)?;
        let start = self.at;
        self.skip(kind, key, 0)?;
        Ok(Field { kind, bytes: start..self.at })
    }

    pub fn kind(&mut self, key: &str) -> Result<FieldType> {
        let number = self.u32(key)?;
        FieldType::from_number(number).ok_or_else(|| {
            Error::malformed(self.location, format!("metadata key {key:?} has unknown type {number}"))
        })
    }

    fn skip(&mut self, kind: FieldType, key: &str, depth: usize) -> Result<()> {
        match kind {
            FieldType::String => self.u64(key).and_then(|n| self.take(n, key)).map(|_| ()),
            FieldType::Array => {
                let kind = self.kind(key)?;
                let n = self.u64(key)?;
                if let Some(size) = kind.size() {
                    // A product that overflows exceeds any file, so the saturated product is refused too.
                    return self.take(n.saturating_mul(size), key).map(|_| ());
                }
                if depth == MAX_DEPTH {
                    return Err(Error::malformed(
                        self.location,
                        format!("metadata key {key:?} nests too deep"),
                    ));
                }
                // Every element takes at least the 8 bytes of its length, so a false count fails at the end of the
                // file.
                for _ in 0..n {
                    self.skip(kind, key, depth + 1)?;
                }
                Ok(())
            }
            _ => self.take(kind.size().unwrap_or(0), key).map(|_| ()),
        }
    }
}
