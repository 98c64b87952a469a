//! Where rollouts and a teacher's log-probs come from.

use super::ModelSource;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Rollouts that come from elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RolloutSource {
    /// One response per line: `{"id", "prompt_tokens", "tokens", "logp", "reward"}`, the reward optional. The lines of
    /// one id form groups of `rollout.group_size` in the order of the file.
    Jsonl {
        path: PathBuf,
        #[serde(default)]
        behavior: Behavior,
    },
}

/// Whose log-probs the ratios of the first update divide by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Behavior {
    /// The policy at the start of the step, which scores the rollouts; the file's log-probs feed `objective.off_policy`.
    #[default]
    Policy,
    /// The sampler: the file's log-probs. The clip of the surrogate is then the only correction.
    Sampler,
}

/// What a distillation learns from: a policy that scores the student's own responses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TeacherSource {
    /// The policy itself with the reference solution in its prompt (DASD).
    Solution {
        /// A Jinja template over `prompt`, `solution`, `reference` and `id`; the task's own where absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        template: Option<String>,
    },
    /// The small model inside the program.
    Builtin,
    /// A Hugging Face folder or a GGUF file with the vocabulary of the model.
    Path { path: String },
}

impl TeacherSource {
    /// The frozen model; `None` where the teacher is the policy itself.
    pub fn model(&self) -> Option<ModelSource> {
        match self {
            TeacherSource::Solution { .. } => None,
            TeacherSource::Builtin => Some(ModelSource::Builtin),
            TeacherSource::Path { path } => Some(ModelSource::Path { path: path.clone() }),
        }
    }
}
