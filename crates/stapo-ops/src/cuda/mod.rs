//! The GPU: libraries found at run time, kernels compiled at start.

mod libraries;
mod probe;
#[cfg(test)]
mod tests;

pub use libraries::{Library, SEARCH_VARIABLE};
pub use probe::{Found, Gpu, OLDEST_CAPABILITY, Part, probe};
