//! One metadata value: its type and its place in the file.

use std::ops::Range;

/// The type of a metadata value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FieldType {
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

/// The type of a value and its range of bytes, which lies within the file.
#[derive(Debug, Clone)]
pub(super) struct Field {
    pub kind: FieldType,
    pub bytes: Range<usize>,
}

impl FieldType {
    pub fn from_number(number: u32) -> Option<Self> {
        use FieldType::{Array, Bool, F32, F64, I8, I16, I32, I64, String, U8, U16, U32, U64};
        let all = [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64];
        all.get(number as usize).copied()
    }

    /// Bytes of a value; `None` for types without a fixed size.
    pub fn size(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }

    pub fn unsigned(self, bytes: &[u8]) -> Option<u64> {
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

    pub fn number(self, bytes: &[u8]) -> Option<f64> {
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
