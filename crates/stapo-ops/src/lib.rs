//! Laid out in ARCHITECTURE.md.

pub mod mapped;
