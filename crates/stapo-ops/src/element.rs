//! The element types of buffers.

/// A type that buffers can hold, as the host sees it.
pub trait Element: Copy + Default + PartialEq + Send + Sync + 'static {
    #[doc(hidden)]
    const IS_FLOAT32: bool;
    #[doc(hidden)]
    const N_BYTES: usize;
    #[doc(hidden)]
    const IS_INTEGER: bool;
    #[doc(hidden)]
    fn from_f32(x: f32) -> Self;
    #[doc(hidden)]
    fn to_bits64(self) -> u64;
}

macro_rules! element {
    ($type:ty, $integer:literal, $float32:literal, $bits:expr) => {
        impl Element for $type {
            const IS_FLOAT32: bool = $float32;
            const N_BYTES: usize = size_of::<$type>();
            const IS_INTEGER: bool = $integer;
            fn from_f32(x: f32) -> Self {
                x as $type
            }
            fn to_bits64(self) -> u64 {
                $bits(self)
            }
        }
    };
}
element!(f32, false, true, |x: f32| u64::from(x.to_bits()));
element!(f64, false, false, |x: f64| x.to_bits());
element!(u32, true, false, u64::from);
