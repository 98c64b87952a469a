//! Verdicts on responses, and the rewards that verdicts give.

pub mod code;
pub(crate) mod judged;
mod permission;
pub(crate) mod spec;
pub(crate) mod verdict;

pub use judged::Judged;
pub use permission::{Programs, fingerprint, is_program, record_program};
pub use spec::{
    CodeReward, CodeSpec, CodeStyle, CommandSpec, CountdownRule, NumberUse, ProcessLimits, PythonSpec,
    RuleSpec, VerifierSpec,
};
pub use stapo_sandbox::launcher;
pub use verdict::{left_to_grader, show_prints};
