use serde::{Deserialize, Serialize};
use stapo_core::{JudgeOpinion, ProgramRun, Verdict};

/// A verdict with the answer and the reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    pub verdict: Verdict,
    /// The reward that an external verifier gave; absent if the verdict decides the reward.
    pub reward: Option<f64>,
    /// The answer as written in the response.
    pub answer: Option<String>,
    /// The answer in canonical notation, where a rule can read the answer. maj@k counts equal canonical answers
    /// together.
    pub canonical: Option<String>,
    /// The reason for the verdict, in one line.
    pub reason: String,
    /// The program of the response and what its tests showed; `None` for other verifiers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<Box<ProgramRun>>,
    /// The judgements of judge and rule, for a verifier that is a judge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge: Option<Box<JudgeOpinion>>,
}

impl Judged {
    pub(crate) fn new(verdict: Verdict, answer: Option<String>, reason: String) -> Self {
        Self { verdict, reward: None, answer, canonical: None, reason, program: None, judge: None }
    }
}
