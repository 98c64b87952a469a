//! Laid out in ARCHITECTURE.md.

pub mod random;
pub mod stats;
