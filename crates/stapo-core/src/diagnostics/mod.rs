//! What theory says about one token, and a census of a batch.

mod census;
mod histogram;
pub mod theory;

pub use census::{Census, Observed, QuadrantCensus};
pub use histogram::Histogram;
pub use theory::{Quadrant, Risk, Thresholds};

#[cfg(test)]
mod tests;
