//! Laid out in ARCHITECTURE.md.
