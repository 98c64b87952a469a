//! `events.jsonl`: what happened to a run besides its steps, one object per line; and `lock`, the process that writes.

use super::{Change, Extra};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Something that happened to a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Version of the format.
    pub schema: u32,
    /// UTC, as in `2026-02-15T09:30:07Z`.
    pub time: String,
    pub event: EventKind,
    /// Training steps made before the event.
    pub step: u64,
    /// One line for a reader: the warning, the error, the reason of the stop.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// The process of a start or a resume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writer: Option<Writer>,
    /// What an acceptance or a setting changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
    /// The SHA-256 of `plan.toml` after a setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan_sha256: Option<String>,
    /// Why a run stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<StopReason>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    Start,
    Resume,
    /// A changed input that `--accept-changes` let pass.
    Accepted,
    /// A changed key of the plan: by `--set`, or a key on which no bit depends.
    Setting,
    Warning,
    /// A check that stopped the run.
    Canary,
    /// A checkpoint that gave way to the one before.
    CheckpointRefused,
    Stop,
    /// A kind that a newer program wrote.
    #[serde(other)]
    Unknown,
}

/// Why a run stopped. A process that was killed leaves no reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    Done,
    TargetReached,
    /// `evaluation.patience` evaluations in a row were no better than the best one before.
    NoImprovement,
    /// Every group had equal rewards in `evaluation.idle_patience` steps in a row.
    NothingLearned,
    /// SIGINT, SIGTERM or SIGHUP; `text` names the signal.
    Signal,
    Error,
    #[serde(other)]
    Unknown,
}

/// A process that writes a run folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Writer {
    pub pid: u32,
    pub host: String,
    /// The command line.
    pub command: String,
    /// UTC.
    pub started: String,
    /// Version and commit.
    pub program: String,
    /// `cpu`, `cuda:0`, ...
    pub device: String,
    /// Processes that train together.
    pub world: usize,
}

/// The content of the file `lock`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LockRecord {
    /// Version of the format.
    pub schema: u32,
    #[serde(flatten)]
    pub writer: Writer,
}
