//! How long a run takes: simulated from a machine's rates, without weights, data or the machine, or measured.

mod cost;
mod episodes;
mod fitting;
mod lengths;
mod links;
mod machine;
mod measured;
#[cfg(test)]
mod pinned;
mod ranks;
mod rate;
mod sampling;
mod simulated;
mod supervised;

pub use episodes::EpisodeMeans;
pub use fitting::{Change, Remedy, remedy};
pub use lengths::{Lengths, SPREAD};
pub use links::{Links, World};
pub use machine::{CPU_CORES, Machine, Origin, Processor, Rate};
pub use measured::{Measurement, measure};
pub use ranks::{Exchange, RankedStep};
pub use simulated::{Phase, Phases, Prediction, RunShape};
pub use supervised::{RowCounts, SupervisedPrediction, SupervisedShape};
