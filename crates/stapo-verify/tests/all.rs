//! The tests of this crate from the outside, in one executable.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::print_stdout, reason = "tests print what they tried and why they skip")]

mod cases;
mod extract;
mod gold;
mod hostile;
mod limits;
mod modes;
mod properties;
mod readings;

// The arithmetic has no public name. Its source is compiled here once more, with its unit tests: a second build of the whole
// crate for them would take half a minute.
#[allow(dead_code, reason = "the rest of the crate uses it")]
#[path = "../src"]
mod source {
    pub mod budget;
    pub mod number;
}
use source::budget;
