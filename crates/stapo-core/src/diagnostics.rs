//! The theory of one token, and the census of a batch.

mod census;
mod histogram;
pub mod theory;

pub use census::{Census, Observed, QuadrantCensus};
pub use histogram::Histogram;
pub use theory::{Quadrant, Risk, Thresholds};

#[cfg(test)]
mod tests;
