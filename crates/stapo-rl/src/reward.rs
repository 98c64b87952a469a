//! Verdicts on responses, and the rewards that verdicts give.

pub mod code;
pub(crate) mod dialogue;
pub(crate) mod judge;
pub(crate) mod judged;
mod keep;
mod permission;
pub(crate) mod process;
pub(crate) mod reward_model;
mod rule;
pub(crate) mod spec;
pub(crate) mod verdict;

pub use judge::{AskJudge, JudgeAnswer, JudgeDecides, JudgeQuestion, JudgeReading, JudgeSpec};
pub use judged::Judged;
pub use keep::KeepWeights;
pub(crate) use permission::check as check_program;
pub use permission::{Programs, fingerprint, is_program, record_command, record_program};
pub use reward_model::{RewardModelSpec, ScoreResponses};
pub(crate) use rule::by_rule;
pub use spec::{
    CodeReward, CodeSpec, CodeStyle, CommandSpec, CountdownRule, JUDGE, NumberUse, ProcessLimits, PythonSpec,
    REWARD_MODEL, RuleSpec, VerifierSpec,
};
pub use stapo_sandbox::launcher;
pub(crate) use verdict::driver_greeting;
pub use verdict::{left_to_grader, show_prints};
