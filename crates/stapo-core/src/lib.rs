//! The pure core: every objective of the family as one value, the theory of a token, statistics, record formats.
//!
//! No files, no devices, no threads, no tokenizers: numbers and text in, numbers and text out.

pub mod batch;
pub mod diagnostics;
pub mod minibatch;
pub mod objective;
pub mod preference;
pub mod program;
pub mod random;
pub mod record;
pub mod reward_model;
pub mod rollout;
pub mod settings;
pub mod stats;

pub use batch::{Batch, Microbatch};
pub use objective::{ObjectiveError, ObjectiveSpec, TokenEffect};
pub use program::{ProgramEnd, ProgramRun, TokenCategory};
pub use rollout::{
    Episode, EpisodeTurn, Finish, Group, JudgeOpinion, Problem, Rollout, Scored, ToolCall, Turn, TurnVerdict,
    Verdict,
};
