//! The disk that the checkpoints of a run take.

use crate::plan::config::{Keeping, KeptOptimizer, Plan, States};
use stapo_model::DeviceName;

/// Bytes on the disk, without the records of steps, which are small in comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskPlan {
    /// The first checkpoint with a state.
    pub first_bytes: u64,
    /// All that is there at one time: the newest checkpoints, the best one, and the one that is being written.
    pub most_bytes: u64,
    /// How many checkpoints that is.
    pub n_most: u64,
}

impl DiskPlan {
    /// For a run whose trained weights and their moments take so many bytes.
    pub fn new(plan: &Plan, weights_bytes: u64, moments_bytes: u64) -> Self {
        let record = &plan.config.record;
        let Keeping { checkpoints, optimizer } = record.keeping();
        let n_made = plan.config.steps.div_ceil(record.checkpoint_every_steps.max(1)).max(1);
        let n_most = n_made.min(checkpoints as u64 + 2);
        let n_with_moments = match optimizer {
            KeptOptimizer::All => n_most,
            // The one before has its moments until the newest is whole.
            KeptOptimizer::Last => n_most.min(2),
        };
        Self {
            first_bytes: weights_bytes + moments_bytes,
            most_bytes: n_most * weights_bytes + n_with_moments * moments_bytes,
            n_most,
        }
    }

    /// As [`DiskPlan::new`], for a number of trained weights.
    pub fn for_weights(plan: &Plan, n_trained: u64) -> Self {
        let is_8bit = plan.config.update.states == States::EightBit && plan.device() != DeviceName::Cpu;
        let (weights, moments) = if is_8bit { (2, 2) } else { (4, 8) };
        Self::new(plan, weights * n_trained, moments * n_trained)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::Config;

    fn disk(settings: [&str; 4]) -> DiskPlan {
        let plan = Plan::resolve(Config::from_toml("", settings).unwrap()).unwrap();
        DiskPlan::new(&plan, 10, 20)
    }

    #[test]
    fn kept_checkpoints_are_the_newest_the_best_and_the_one_in_flight() {
        let keeps_two = ["steps=100", "record.checkpoint_every_steps=10", "record.keep_checkpoints=2"];
        let [a, b, c] = keeps_two;
        let all = disk([a, b, c, "record.optimizer=\"all\""]);
        assert_eq!(all, DiskPlan { first_bytes: 30, most_bytes: 120, n_most: 4 });
        let last = disk([a, b, c, "record.optimizer=\"last\""]);
        assert_eq!(last, DiskPlan { first_bytes: 30, most_bytes: 80, n_most: 4 });
        let few = disk(["steps=20", b, c, "record.optimizer=\"all\""]);
        assert_eq!((few.n_most, few.most_bytes), (2, 60));
    }
}
