//! The sandbox's tests: one executable.

mod attacks;
mod common;
mod escapes;
