//! The sandbox's tests: one executable.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod attacks;
mod common;
mod escapes;
