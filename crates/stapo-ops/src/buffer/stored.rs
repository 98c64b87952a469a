//! Elements in the form in which a device stores them: what checkpoints keep and state hashes read.

use super::{Elements, ElementsMut, View, ViewMut};
use crate::cuda::{Cuda, ElementType};
use crate::dtype::{append_f32, read_bf16, read_f32};
use std::ops::Range;

/// How the elements of a buffer are stored. On a GPU with f32 master weights, the form of a weight is that of its
/// master, from which the rounded copy follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    F32,
    Bf16,
    /// Adam's first moment in 8 bits: `scale * sign(c) (c / 127)^2` for the signed code c.
    First8,
    /// Adam's second moment in 8 bits: `scale * (c / 255)^4` for the unsigned code c.
    Second8,
}

impl Form {
    /// Elements of 8-bit moments that share a scale.
    pub const SCALED: usize = 256;

    /// Bytes of an element, without its share of a scale.
    pub fn n_bytes(self) -> usize {
        match self {
            Form::F32 => 4,
            Form::Bf16 => 2,
            Form::First8 | Form::Second8 => 1,
        }
    }

    /// The number of scales of `len` elements.
    pub fn n_scales(self, len: usize) -> usize {
        match self {
            Form::F32 | Form::Bf16 => 0,
            Form::First8 | Form::Second8 => len.div_ceil(Self::SCALED),
        }
    }

    /// The first element of little-endian `bytes` that is not a finite number. The codes of an 8-bit form are all finite.
    pub fn first_non_finite(self, bytes: &[u8]) -> Option<usize> {
        // The exponent of an infinity or a NaN is all ones.
        let is_finite = |high: &[u8]| u16::from_le_bytes([high[0], high[1]]) & 0x7f80 != 0x7f80;
        match self {
            Form::F32 => bytes.chunks_exact(4).position(|bytes| !is_finite(&bytes[2..])),
            Form::Bf16 => bytes.chunks_exact(2).position(|bytes| !is_finite(bytes)),
            Form::First8 | Form::Second8 => None,
        }
    }
}

/// Elements as a device stores them.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    pub form: Form,
    /// Little-endian.
    pub bytes: Vec<u8>,
    /// One for each [`Form::SCALED`] elements of an 8-bit form; empty for the others.
    pub scales: Vec<f32>,
}

impl Stored {
    /// The number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.form.n_bytes()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements of a range, which starts where a block of an 8-bit form starts.
    #[must_use]
    pub fn range(&self, range: Range<usize>) -> Stored {
        let n_bytes = self.form.n_bytes();
        let bytes = self.bytes[range.start * n_bytes..range.end * n_bytes].to_vec();
        if self.form.n_scales(1) == 0 {
            return Stored { form: self.form, bytes, scales: Vec::new() };
        }
        assert!(range.start.is_multiple_of(Form::SCALED), "8-bit moments: a range from {}", range.start);
        let scales = self.scales[range.start / Form::SCALED..range.end.div_ceil(Form::SCALED)].to_vec();
        Stored { form: self.form, bytes, scales }
    }

    /// The elements as the host sees them.
    pub fn to_f32(&self) -> Vec<f32> {
        let bytes = &self.bytes;
        let scaled = |of: fn(u8) -> f32| {
            bytes.iter().enumerate().map(|(i, &code)| of(code) * self.scales[i / Form::SCALED]).collect()
        };
        let read = |read: fn(&[u8], &mut [f32])| {
            let mut numbers = vec![0.0; self.len()];
            read(bytes, &mut numbers);
            numbers
        };
        match self.form {
            Form::F32 => read(read_f32),
            Form::Bf16 => read(read_bf16),
            Form::First8 => scaled(|code| {
                let x = f32::from(code.cast_signed()) / 127.0;
                x * x.abs()
            }),
            Form::Second8 => scaled(|code| {
                let x = f32::from(code) / 255.0;
                (x * x) * (x * x)
            }),
        }
    }

    /// The first element that is not a finite number; of an 8-bit form, the first element of a block whose scale is not.
    pub fn first_non_finite(&self) -> Option<usize> {
        let of_scales = || Some(Form::SCALED * self.scales.iter().position(|scale| !scale.is_finite())?);
        self.form.first_non_finite(&self.bytes).or_else(of_scales)
    }
}

fn form_of(kind: ElementType, has_master: bool) -> Form {
    match kind {
        _ if has_master => Form::F32,
        ElementType::F32 => Form::F32,
        ElementType::Bf16 => Form::Bf16,
        ElementType::First8 => Form::First8,
        ElementType::Second8 => Form::Second8,
        ElementType::F64 | ElementType::U32 => panic!("only buffers of f32 have a form in files"),
    }
}

impl View<'_, f32> {
    /// How the elements are stored.
    pub fn form(&self) -> Form {
        match self.0 {
            Elements::Host(_) => Form::F32,
            Elements::Cuda(part) => {
                let slice = part.slice();
                form_of(slice.kind, slice.masters.is_some())
            }
        }
    }

    /// The bytes of the elements and of the scales that [`View::copy_stored`] writes.
    pub fn n_stored_bytes(&self) -> (usize, usize) {
        let (form, len) = (self.form(), self.len());
        (len * form.n_bytes(), 4 * form.n_scales(len))
    }

    /// Copies the elements as they are stored, and their scales, little-endian, to host memory. Waits for the
    /// device.
    ///
    /// # Panics
    /// If the lengths are others than [`View::n_stored_bytes`].
    pub fn copy_stored(&self, elements: &mut [u8], scales: &mut [u8]) {
        self.copy_stored_on(None, elements, scales);
    }

    /// As [`View::copy_stored`], by another stream of the same GPU where there is one.
    pub(crate) fn copy_stored_on(&self, stream: Option<&Cuda>, elements: &mut [u8], scales: &mut [u8]) {
        assert_eq!((elements.len(), scales.len()), self.n_stored_bytes(), "copy_stored: bytes");
        match self.0 {
            Elements::Host(slice) => {
                for (to, x) in elements.as_chunks_mut().0.iter_mut().zip(slice) {
                    *to = x.to_le_bytes();
                }
            }
            Elements::Cuda(part) => stream.unwrap_or(part.cuda()).copy_stored(part.slice(), elements, scales),
        }
    }

    /// The elements as they are stored. Waits for the device.
    pub fn read_stored(&self) -> Stored {
        let form = self.form();
        match self.0 {
            Elements::Host(slice) => {
                let mut bytes = Vec::new();
                append_f32(slice, &mut bytes);
                Stored { form, bytes, scales: Vec::new() }
            }
            Elements::Cuda(part) => {
                let (bytes, scales) = part.cuda().read_stored(part.slice(), form.n_scales(part.len));
                Stored { form, bytes, scales }
            }
        }
    }
}

impl ViewMut<'_, f32> {
    /// Overwrites the elements with bytes as [`View::copy_stored`] gave them, of a buffer without masters and scales. On a GPU
    /// pages of a [`crate::HostBuffer`] are copied at the speed of the bus; the copy is done when the function returns.
    pub fn copy_from_stored(&mut self, bytes: &[u8]) {
        assert_eq!((bytes.len(), 0), self.view().n_stored_bytes(), "copy_from_stored: bytes");
        match &mut self.0 {
            ElementsMut::Host(slice) => {
                for (x, from) in slice.iter_mut().zip(bytes.as_chunks().0) {
                    *x = f32::from_le_bytes(*from);
                }
            }
            ElementsMut::Cuda(part) => part.cuda().copy_from_stored(bytes, part.slice()),
        }
    }

    /// Takes over elements from their stored form, as they are where this buffer has the same form.
    pub fn write_stored(&mut self, from: &Stored) {
        assert_eq!(from.len(), self.len(), "write_stored: {} elements into {}", from.len(), self.len());
        let is_same = self.view().form() == from.form && from.form != Form::F32;
        match &mut self.0 {
            ElementsMut::Cuda(part) if is_same => {
                part.cuda().write_stored(&from.bytes, &from.scales, part.slice());
            }
            _ => self.write(&from.to_f32()),
        }
    }
}
