//! Where the weights of a judge or a reward model are while the policy samples and learns.

use crate::tasks::error::TaskError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where the weights are while the policy samples and learns on the same GPU. No verdict depends on it, and on the CPU it has no
/// effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KeepWeights {
    /// In separate memory on the device.
    #[default]
    Device,
    /// In pinned memory of the host. They are copied to the memory of sampling and updates before each judging.
    Host,
}

impl KeepWeights {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
    pub(super) fn is_default(&self) -> bool {
        *self == Self::Device
    }

    /// Refuses a device besides that of the run, whose memory is the model's own.
    pub(super) fn check(self, device: Option<&str>) -> Result<(), TaskError> {
        match device.filter(|_| self == Self::Host) {
            None => Ok(()),
            Some(name) => {
                let problem = format!("\"host\", but verifier.device is {name:?}");
                Err(TaskError::setting("verifier.keep", problem, "leave one of the two out"))
            }
        }
    }
}
