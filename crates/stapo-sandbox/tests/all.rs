//! The sandbox's tests: one executable.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::print_stdout, reason = "tests print what they tried and why they skip")]

mod attacks;
mod common;
mod escapes;
mod languages;
