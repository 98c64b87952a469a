//! Metadata values by key, decoded from the mapped file on request.

use super::Gguf;
use super::bytes::Bytes;
use super::field::FieldType;
use crate::error::{Error, Result};

/// Typed reading: `None` for an absent key, an error that names the key for a value of the wrong type.
impl Gguf {
    pub(super) fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "a whole number", FieldType::unsigned)
    }

    pub(super) fn whole(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number", |kind, bytes| {
            kind.unsigned(bytes).and_then(|n| usize::try_from(n).ok())
        })
    }

    pub(super) fn required_whole(&self, key: &str) -> Result<usize> {
        self.whole(key)?.ok_or_else(|| self.absent(key))
    }

    pub(super) fn token_id(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a token id", |kind, bytes| kind.unsigned(bytes).and_then(|n| u32::try_from(n).ok()))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", FieldType::number)
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", |kind, bytes| (kind == FieldType::Bool).then(|| bytes[0] != 0))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>> {
        let Some(field) = self.fields.get(key) else { return Ok(None) };
        if field.kind != FieldType::String {
            return Err(self.wrong_type(key, "a string"));
        }
        Bytes::new(&self.location, &self.file[field.bytes.clone()]).string(key).map(Some)
    }

    pub(super) fn strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let Some((mut bytes, kind, n)) = self.array(key)? else { return Ok(None) };
        if kind != FieldType::String {
            return Err(self.wrong_type(key, "a list of strings"));
        }
        (0..n).map(|_| bytes.string(key)).collect::<Result<_>>().map(Some)
    }

    /// A list of numbers, or of true and false as 1 and 0.
    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some((mut bytes, kind, n)) = self.array(key)? else { return Ok(None) };
        let wrong = || self.wrong_type(key, "a list of numbers");
        let size = kind.size().ok_or_else(wrong)?;
        let signed = |bytes: &[u8]| match kind {
            FieldType::I32 => bytes.try_into().ok().map(|b| f64::from(i32::from_le_bytes(b))),
            FieldType::Bool => Some(f64::from(u8::from(bytes != [0]))),
            _ => kind.number(bytes),
        };
        (0..n).map(|_| signed(bytes.take(size, key)?).ok_or_else(wrong)).collect::<Result<_>>().map(Some)
    }

    pub(super) fn is_array(&self, key: &str) -> bool {
        self.fields.get(key).is_some_and(|field| field.kind == FieldType::Array)
    }

    pub(super) fn absent(&self, key: &str) -> Error {
        Error::missing(format!("{}: {key}", self.location), "is missing from the metadata", "")
    }

    /// The bytes of an array's elements, the type of the elements and their number.
    fn array(&self, key: &str) -> Result<Option<(Bytes<'_>, FieldType, u64)>> {
        let Some(field) = self.fields.get(key) else { return Ok(None) };
        if field.kind != FieldType::Array {
            return Err(self.wrong_type(key, "a list"));
        }
        let mut bytes = Bytes::new(&self.location, &self.file[field.bytes.clone()]);
        let kind = bytes.kind(key)?;
        let n = bytes.u64(key)?;
        Ok(Some((bytes, kind, n)))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(FieldType, &[u8]) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(field) = self.fields.get(key) else { return Ok(None) };
        read(field.kind, &self.file[field.bytes.clone()])
            .map(Some)
            .ok_or_else(|| self.wrong_type(key, expected))
    }

    fn wrong_type(&self, key: &str, expected: &str) -> Error {
        let kind = self.fields.get(key).map(|field| field.kind);
        let problem = match kind {
            Some(kind) => format!("is of type {kind:?} or out of range, expected {expected}"),
            None => format!("is missing, expected {expected}"),
        };
        Error::malformed(format!("{}: {key}", self.location), problem)
    }
}
