//! The tests of this crate from the outside, in one executable.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod s2t_cases;
mod stats;
mod survival;
