//! Numbers: exact fractions with a size limit, and reals and complex numbers with a proven error.

pub(crate) mod complex;
pub(crate) mod elementary;
pub(crate) mod exact;
pub(crate) mod real;

#[cfg(test)]
mod tests;

/// Where the magnitudes of two operands differ by more bits than this, the smaller operand is lost in rounding.
const PRECISION_SLACK: usize = 16;

/// Bits of the first evaluation; enough that two unequal answers practically never agree.
pub(crate) const LOW_BITS: usize = 256;
/// Bits of the second evaluation, for expressions that cancel badly.
pub(crate) const HIGH_BITS: usize = 1024;
