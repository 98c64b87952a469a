//! A range of GPU memory, as kernels see it.

use crate::element::Element;

/// How elements are stored on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ElementType {
    F32,
    F64,
    U32,
    Bf16,
    /// Adam's first moment in 8 bits, see adamw8.cu.
    First8,
    /// Adam's second moment in 8 bits, see adamw8.cu.
    Second8,
}

impl ElementType {
    /// The type that stores a `T` without rounding.
    pub(super) fn exact<T: Element>() -> ElementType {
        match (T::IS_INTEGER, T::N_BYTES) {
            (true, _) => ElementType::U32,
            (false, 4) => ElementType::F32,
            (false, _) => ElementType::F64,
        }
    }

    pub(crate) fn n_bytes(self) -> usize {
        match self {
            ElementType::First8 | ElementType::Second8 => 1,
            ElementType::Bf16 => 2,
            ElementType::F32 | ElementType::U32 => 4,
            ElementType::F64 => 8,
        }
    }

    /// The suffix of a kernel's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ElementType::Bf16 => "bf16",
            ElementType::F32 => "float",
            ElementType::First8 => "first",
            ElementType::Second8 => "second",
            ElementType::F64 | ElementType::U32 => {
                panic!("kernels compute on bf16 and f32; f64 is for gradient checks on the CPU")
            }
        }
    }
}

/// Elements of 8-bit moments that share a scale.
pub(super) const MOMENT_BLOCK: usize = 256;

/// A range of GPU memory. The holder of a slice keeps the buffer it points into alive until the queued kernels that use
/// the slice have run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slice {
    pub address: u64,
    pub kind: ElementType,
    /// In elements.
    pub len: usize,
    /// The f32 master weights of the range; `None` if there is none.
    pub masters: Option<Masters>,
    /// Address of the scales of 8-bit moments.
    pub scales: Option<u64>,
}

/// The f32 master weights of a slice, or of a part of it: of several ranks, each holds those that it owns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Masters {
    /// Address of the first master.
    pub address: u64,
    /// The elements of the slice that have one, counted from the slice's start.
    pub start: usize,
    pub end: usize,
}

impl Masters {
    /// The masters of `len` elements from `start` on, possibly none.
    fn part(self, start: usize, len: usize) -> Masters {
        let first = self.start.clamp(start, start + len);
        let end = self.end.clamp(first, start + len);
        let skipped = (first.max(self.start) - self.start).min(self.end - self.start);
        Masters { address: self.address + 4 * skipped as u64, start: first - start, end: end - start }
    }
}

impl Slice {
    /// `len` elements of one type without masters or scales.
    pub(crate) fn plain(address: u64, kind: ElementType, len: usize) -> Slice {
        Slice { address, kind, len, masters: None, scales: None }
    }

    /// The address of the masters where every element has one.
    pub(crate) fn master(self) -> Option<u64> {
        let masters = self.masters.filter(|masters| masters.start == 0 && masters.end == self.len);
        masters.map(|masters| masters.address)
    }

    /// `len` elements from `start` on.
    pub(crate) fn part(self, start: usize, len: usize) -> Slice {
        assert!(start + len <= self.len, "range {start}..{} of {}", start + len, self.len);
        Slice {
            address: self.address + (start * self.kind.n_bytes()) as u64,
            len,
            masters: self.masters.map(|masters| masters.part(start, len)),
            scales: self.scales.map(|address| {
                assert!(
                    start.is_multiple_of(MOMENT_BLOCK),
                    "8-bit moments: a tensor at {start}, expected a multiple of {MOMENT_BLOCK}"
                );
                address + (4 * start / MOMENT_BLOCK) as u64
            }),
            ..self
        }
    }

    /// The f32 masters where every element has one, or else the elements themselves.
    pub(crate) fn exact_master(self) -> Slice {
        match self.master() {
            Some(address) => Slice { address, kind: ElementType::F32, masters: None, ..self },
            None => self,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        self.kind.name()
    }

    /// Panics unless the elements are stored in f32.
    #[track_caller]
    pub(crate) fn f32(self, what: &str) -> Slice {
        assert!(self.kind == ElementType::F32, "{what}: stored as {:?}, expected F32", self.kind);
        self
    }

    /// Panics unless the elements are stored as the host sees them.
    #[track_caller]
    pub(crate) fn exact<T: Element>(self) -> Slice {
        assert_eq!(self.kind, ElementType::exact::<T>(), "fetch: stored type");
        self
    }

    /// Panics unless `other` is stored in the same type.
    #[track_caller]
    pub(crate) fn same(self, other: Slice, what: &str) -> Slice {
        assert!(self.kind == other.kind, "{what}: stored as {:?} beside {:?}", self.kind, other.kind);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_masters_of_its_own_elements() {
        let masters = Some(Masters { address: 1000, start: 20, end: 60 });
        let slice = Slice { masters, ..Slice::plain(0, ElementType::Bf16, 100) };
        let part = |start, len| {
            let part = slice.part(start, len);
            let masters = part.masters.unwrap();
            (part.master(), masters.address, masters.start..masters.end)
        };
        assert_eq!(part(0, 100), (None, 1000, 20..60));
        assert_eq!(part(20, 40), (Some(1000), 1000, 0..40));
        assert_eq!(part(30, 10), (Some(1040), 1040, 0..10));
        assert_eq!(part(30, 50), (None, 1040, 0..30));
        assert_eq!(part(10, 20), (None, 1000, 10..20));
        assert_eq!(part(0, 10).2.len() + part(70, 30).2.len(), 0);
        let again = slice.part(10, 80).part(30, 10).masters.unwrap();
        assert_eq!((again.address, again.start..again.end), (1080, 0..10));
    }
}
