//! Metadata values, decoded from the mapped file when asked for.

use super::Gguf;
use super::bytes::Bytes;
use crate::error::{Error, Result};
use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

/// The type of a value and where it lies in the file; within bounds.
#[derive(Debug, Clone)]
pub(super) struct Field {
    pub kind: Kind,
    pub bytes: Range<usize>,
}

impl Kind {
    pub fn from_number(number: u32) -> Option<Self> {
        use Kind::{Array, Bool, F32, F64, I8, I16, I32, I64, String, U8, U16, U32, U64};
        let all = [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64];
        all.get(number as usize).copied()
    }

    /// Bytes of a value, where they are always as many.
    pub fn size(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }

    fn unsigned(self, bytes: &[u8]) -> Option<u64> {
        let signed = |value: i64| u64::try_from(value).ok();
        match self {
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => {
                let mut wide = [0; 8];
                wide[..bytes.len()].copy_from_slice(bytes);
                Some(u64::from_le_bytes(wide))
            }
            Self::I8 => signed(i64::from(bytes[0].cast_signed())),
            Self::I16 => signed(i64::from(i16::from_le_bytes(bytes.try_into().ok()?))),
            Self::I32 => signed(i64::from(i32::from_le_bytes(bytes.try_into().ok()?))),
            Self::I64 => signed(i64::from_le_bytes(bytes.try_into().ok()?)),
            Self::F32 | Self::F64 | Self::Bool | Self::String | Self::Array => None,
        }
    }

    fn number(self, bytes: &[u8]) -> Option<f64> {
        match self {
            Self::F32 => Some(f64::from(f32::from_le_bytes(bytes.try_into().ok()?))),
            Self::F64 => Some(f64::from_le_bytes(bytes.try_into().ok()?)),
            _ => self.unsigned(bytes).map(|value| value as f64),
        }
    }
}

impl Field {
    pub fn unsigned(&self, file: &[u8]) -> Option<u64> {
        self.kind.unsigned(&file[self.bytes.clone()])
    }
}

/// Typed reading; `None` is an absent key, a value of the wrong type an error that names it.
impl Gguf {
    pub(super) fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "a whole number", Kind::unsigned)
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
        self.typed(key, "a number", Kind::number)
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", |kind, bytes| (kind == Kind::Bool).then(|| bytes[0] != 0))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>> {
        let Some(field) = self.fields.get(key) else { return Ok(None) };
        if field.kind != Kind::String {
            return Err(self.wrong_type(key, "a string"));
        }
        Bytes::new(&self.place, &self.file[field.bytes.clone()]).string(key).map(Some)
    }

    pub(super) fn strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let Some((mut bytes, kind, n)) = self.array(key)? else { return Ok(None) };
        if kind != Kind::String {
            return Err(self.wrong_type(key, "a list of strings"));
        }
        (0..n).map(|_| bytes.string(key)).collect::<Result<_>>().map(Some)
    }

    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some((mut bytes, kind, n)) = self.array(key)? else { return Ok(None) };
        let wrong = || self.wrong_type(key, "a list of numbers");
        let size = kind.size().filter(|_| kind != Kind::Bool).ok_or_else(wrong)?;
        let signed = |bytes: &[u8]| match kind {
            Kind::I32 => bytes.try_into().ok().map(|b| f64::from(i32::from_le_bytes(b))),
            _ => kind.number(bytes),
        };
        (0..n).map(|_| signed(bytes.take(size, key)?).ok_or_else(wrong)).collect::<Result<_>>().map(Some)
    }

    pub(super) fn is_array(&self, key: &str) -> bool {
        self.fields.get(key).is_some_and(|field| field.kind == Kind::Array)
    }

    pub(super) fn absent(&self, key: &str) -> Error {
        Error::missing(format!("{}: {key}", self.place), "is missing from the metadata", "")
    }

    /// An array's bytes after its head, the kind of its elements and their number.
    fn array(&self, key: &str) -> Result<Option<(Bytes<'_>, Kind, u64)>> {
        let Some(field) = self.fields.get(key) else { return Ok(None) };
        if field.kind != Kind::Array {
            return Err(self.wrong_type(key, "a list"));
        }
        let mut bytes = Bytes::new(&self.place, &self.file[field.bytes.clone()]);
        let (kind, n) = (bytes.kind(key)?, bytes.u64(key)?);
        Ok(Some((bytes, kind, n)))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(Kind, &[u8]) -> Option<T>,
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
        Error::malformed(format!("{}: {key}", self.place), problem)
    }
}
