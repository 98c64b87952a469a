//! What the objective reads of a response, and the checks of these values.

use super::{Mask, MaskSignals, ObjectiveError, ObjectiveSpec, OffPolicy};

/// The advantages of one response: a number for all its tokens, or a number for each.
#[derive(Debug, Clone, PartialEq)]
pub enum Advantages {
    Response(f64),
    Tokens(Vec<f64>),
}

impl Advantages {
    pub fn view(&self) -> AdvantagesRef<'_> {
        match self {
            Advantages::Response(advantage) => AdvantagesRef::Response(*advantage),
            Advantages::Tokens(advantages) => AdvantagesRef::Tokens(advantages),
        }
    }

    /// The mean over the tokens; 0 for a response without tokens that has an advantage for each.
    pub fn mean(&self) -> f64 {
        match self {
            Advantages::Response(advantage) => *advantage,
            Advantages::Tokens(advantages) => advantages.iter().sum::<f64>() / advantages.len().max(1) as f64,
        }
    }
}

/// A view of [`Advantages`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AdvantagesRef<'a> {
    Response(f64),
    Tokens(&'a [f64]),
}

impl AdvantagesRef<'_> {
    #[inline]
    pub fn at(self, token_idx: usize) -> f64 {
        match self {
            AdvantagesRef::Response(advantage) => advantage,
            AdvantagesRef::Tokens(advantages) => advantages[token_idx],
        }
    }

    /// True if no token of the response can be a rewarded one.
    pub(super) fn rewards_nothing(self) -> bool {
        match self {
            AdvantagesRef::Response(advantage) => advantage <= 0.0,
            AdvantagesRef::Tokens(advantages) => advantages.iter().all(|&advantage| advantage <= 0.0),
        }
    }

    /// The sum over `n_tokens` tokens.
    pub(super) fn sum(self, n_tokens: usize) -> f64 {
        match self {
            AdvantagesRef::Response(advantage) => advantage * n_tokens as f64,
            AdvantagesRef::Tokens(advantages) => advantages.iter().sum(),
        }
    }
}

/// What the objective reads of one response. All slices have one entry per response token; prompt tokens have none, and
/// neither have tokens that a loss mask leaves out.
#[derive(Debug, Clone, Copy)]
pub struct ResponseSignals<'a> {
    pub advantage: AdvantagesRef<'a>,
    /// Under the current policy.
    pub logp: &'a [f64],
    /// Under the policy that sampled.
    pub behavior_logp: &'a [f64],
    /// Under the current policy, nats.
    pub entropy: &'a [f64],
    /// Under the policy that sampled, nats; read by masks under [`MaskSignals::Behavior`].
    pub behavior_entropy: Option<&'a [f64]>,
    /// Under the frozen reference policy; read by a KL penalty.
    pub reference_logp: Option<&'a [f64]>,
    /// As the sampling engine reported it; read by an off-policy correction.
    pub sampler_logp: Option<&'a [f64]>,
    /// Sums of squared probabilities under the current policy; read by the threshold `influence`.
    pub collision: Option<&'a [f64]>,
}

/// The columns that the masks read of one response.
#[derive(Debug, Clone, Copy)]
pub(super) struct MaskColumns<'a> {
    pub logp: &'a [f64],
    pub entropy: &'a [f64],
    pub collision: Option<&'a [f64]>,
}

impl ObjectiveSpec {
    /// The columns that the masks read. [`Self::check_response`] has checked that these are present.
    pub(super) fn columns<'a>(&self, response: &ResponseSignals<'a>) -> MaskColumns<'a> {
        let entropy = match self.mask_signals {
            MaskSignals::Current => response.entropy,
            MaskSignals::Behavior => response.behavior_entropy.unwrap_or(response.entropy),
        };
        let logp = self.signal_logp(response.logp, response.behavior_logp);
        MaskColumns { logp, entropy, collision: response.collision }
    }

    /// Checks that every column the objective reads is there, has one entry per token, and holds possible values.
    pub(super) fn check_response(
        &self,
        response_idx: usize,
        response: &ResponseSignals,
    ) -> Result<(), ObjectiveError> {
        self.check_present(response_idx, response)?;
        let n_tokens = response.logp.len();
        match response.advantage {
            AdvantagesRef::Response(value) if !value.is_finite() => {
                return Err(ObjectiveError::Advantage { response_idx, value });
            }
            AdvantagesRef::Response(_) => {}
            AdvantagesRef::Tokens(advantages) => {
                check_column(response_idx, "advantage", advantages, n_tokens, Kind::Finite)?;
            }
        }
        let columns = [
            ("logp", Some(response.logp), Kind::Logp),
            ("behavior_logp", Some(response.behavior_logp), Kind::Logp),
            ("entropy", Some(response.entropy), Kind::Entropy),
            ("behavior_entropy", response.behavior_entropy, Kind::Entropy),
            ("reference_logp", response.reference_logp, Kind::Logp),
            ("sampler_logp", response.sampler_logp, Kind::Logp),
            ("collision", response.collision, Kind::Collision),
        ];
        for (field, values, kind) in columns {
            if let Some(values) = values {
                check_column(response_idx, field, values, n_tokens, kind)?;
            }
        }
        Ok(())
    }

    fn check_present(&self, response_idx: usize, response: &ResponseSignals) -> Result<(), ObjectiveError> {
        let reads_behavior_entropy =
            self.mask_signals == MaskSignals::Behavior && self.masks.iter().any(Mask::reads_entropy);
        let needs = [
            (
                self.kl_needs_reference(),
                response.reference_logp,
                "reference_logp",
                "the KL penalty",
                "give reference_logp, or set kl.kind = \"none\"",
            ),
            (
                self.off_policy != OffPolicy::None,
                response.sampler_logp,
                "sampler_logp",
                "off_policy",
                "give sampler_logp, or set off_policy.kind = \"none\"",
            ),
            (
                reads_behavior_entropy,
                response.behavior_entropy,
                "behavior_entropy",
                "mask_signals = \"behavior\"",
                "give behavior_entropy, or set mask_signals = \"current\"",
            ),
            (
                self.reads_collision(),
                response.collision,
                "collision",
                "the threshold influence",
                "give collision, the sum of squared probabilities at each position, or take another threshold",
            ),
        ];
        for (is_needed, values, field, needed_by, remedy) in needs {
            if is_needed && values.is_none() {
                return Err(ObjectiveError::Missing { response_idx, field, needed_by, remedy });
            }
        }
        Ok(())
    }
}

/// What the values of a column are.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Logp,
    Entropy,
    Collision,
    Finite,
}

/// How far log-probs, entropies and sums of squared probabilities computed in f32 may leave their range by rounding.
const ROUNDING: f64 = 1e-3;

/// Checks the length of a column and its values.
pub(super) fn check_column(
    response_idx: usize,
    field: &'static str,
    values: &[f64],
    n_tokens: usize,
    kind: Kind,
) -> Result<(), ObjectiveError> {
    if values.len() != n_tokens {
        return Err(ObjectiveError::Length { response_idx, field, got: values.len(), expected: n_tokens });
    }
    let (bad, expected) = match kind {
        Kind::Logp => {
            (first_bad(values, |x| x <= ROUNDING && x > f64::NEG_INFINITY), "a finite log-prob, at most 0")
        }
        Kind::Entropy => {
            (first_bad(values, |x| (-ROUNDING..f64::INFINITY).contains(&x)), "a finite entropy, at least 0")
        }
        Kind::Collision => (
            first_bad(values, |x| (0.0..=1.0 + ROUNDING).contains(&x)),
            "a sum of squared probabilities in [0, 1]",
        ),
        Kind::Finite => (first_bad(values, f64::is_finite), "a finite number"),
    };
    match bad {
        Some(token_idx) => {
            Err(ObjectiveError::Value { response_idx, field, token_idx, value: values[token_idx], expected })
        }
        None => Ok(()),
    }
}

/// The first value that is not good. The check of all values has no branch per value, so that it vectorises; the
/// position is searched only after the check has failed.
fn first_bad(values: &[f64], is_good: impl Fn(f64) -> bool) -> Option<usize> {
    let all_good = values.iter().fold(true, |good, &x| good & is_good(x));
    if all_good { None } else { values.iter().position(|&x| !is_good(x)) }
}
