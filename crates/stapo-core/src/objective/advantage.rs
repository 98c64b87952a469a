//! The first stage of an objective: the rewards of a whole rollout batch become advantages.
//!
//! Advantages are constants of the update, so this stage runs once per rollout batch, before mini-batches are cut:
//! [`ObjectiveSpec::advantages`]. A response has one advantage for all its tokens wherever the settings allow; only KL
//! in the reward, discounting and a teacher need one per token.

mod distillation;
mod scale;

pub use distillation::{Distillation, Normalizer};

use super::signals::{Kind, check_column};
use super::{Advantages, Kl, ObjectiveError, ObjectiveSpec};
use scale::{batch_std, centred, group_z_score, left_out, whiten};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How rewards become an advantage. A spread of rewards below 1e-9 of the largest reward is rounding, and counts as
/// none: all advantages are then 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Advantage {
    /// `(R - mean) / (std + epsilon)` over the group.
    /// `ddof` 1 is the sample deviation, with which the advantages printed in the STAPO paper come out.
    GroupZScore {
        /// What is subtracted from the number of rewards in the deviation's divisor: 1 for the sample deviation, 0 for that of the population.
        #[serde(default = "one")]
        ddof: u8,
        /// The addition to the deviation.
        #[serde(default)]
        epsilon: f64,
    },
    /// `R - mean` over the group (Dr. GRPO).
    GroupMean,
    /// `R` minus the mean reward of the group's other responses (RLOO).
    LeaveOneOut,
    /// `(R - mean) / (std + epsilon)` with the mean over the group and the deviation of all rewards of the rollout batch
    /// (LitePPO; TRL's `scale_rewards = "batch"`).
    GroupMeanBatchStd {
        /// What is subtracted from the number of rewards in the deviation's divisor: 1 for the sample deviation, 0 for that of the population.
        #[serde(default = "one")]
        ddof: u8,
        /// The addition to the deviation.
        #[serde(default)]
        epsilon: f64,
    },
    /// `R` minus the mean reward of the group in which every response counts by its length: the baseline with the least
    /// variance where the norm of a gradient grows with the length (OPO, Hao 2025).
    LengthWeightedMean,
    /// `(R - mean) n / m` with the mean over the group, for `m` rewards of the `n` of the rollout batch that are not 0: a
    /// batch with few right answers weighs these more (GPG, Chu 2025).
    GroupMeanNonzeroShare,
    /// The best response of a group has what its reward is above the second best, the others 0: the gradient of the best
    /// of k (Pass@k, Walder 2025, with k the size of the group).
    BestAboveSecond,
    /// The return from a token on, without a baseline: `sum_(s >= t) gamma^(s - t) r_s`, where `R` is the reward of the
    /// last token and KL in the reward falls on every token (REINFORCE++, with `whiten`).
    Return {
        /// The discount; 1 for none.
        #[serde(default = "undiscounted")]
        gamma: f64,
    },
}

/// When several rewards of a response become one number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MultipleRewards {
    /// The advantage is that of the weighted sum of the rewards.
    #[default]
    Sum,
    /// Each reward has its advantage, and the weighted sum is over these: a reward with a large spread does
    /// not drown the others (GDPO).
    NormalizeEach,
}

/// Last normalisation of the advantages, over the whole rollout batch: `(A - mean) / (std + epsilon)`, sample deviation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Whiten {
    /// No normalisation.
    #[default]
    None,
    /// Every response counts once (GDPO in TRL).
    Responses {
        /// The addition to the deviation.
        #[serde(default)]
        epsilon: f64,
    },
    /// Every token counts once, so long responses count more (REINFORCE++ and GDPO in verl).
    Tokens {
        /// The addition to the deviation.
        #[serde(default)]
        epsilon: f64,
    },
}

fn one() -> u8 {
    1
}
fn undiscounted() -> f64 {
    1.0
}

impl Default for Advantage {
    fn default() -> Self {
        Advantage::GroupZScore { ddof: 1, epsilon: 0.0 }
    }
}

/// What the advantages read of one response of a rollout batch. Columns have one entry per response token.
#[derive(Debug, Clone, Copy)]
pub struct ScoredResponse<'a> {
    /// Responses to one problem have the same number.
    pub group: usize,
    /// One entry per reward, in the order of the weights.
    pub rewards: &'a [f64],
    pub n_tokens: usize,
    /// Read by KL in the reward and by a teacher.
    pub behavior_logp: Option<&'a [f64]>,
    /// Nats; read by `dasd`.
    pub behavior_entropy: Option<&'a [f64]>,
    /// Read by KL in the reward.
    pub reference_logp: Option<&'a [f64]>,
    /// Of the teacher that distillation learns from.
    pub teacher_logp: Option<&'a [f64]>,
}

impl<'a> ScoredResponse<'a> {
    /// A response with rewards and a length alone.
    pub fn new(group: usize, rewards: &'a [f64], n_tokens: usize) -> Self {
        ScoredResponse {
            group,
            rewards,
            n_tokens,
            behavior_logp: None,
            behavior_entropy: None,
            reference_logp: None,
            teacher_logp: None,
        }
    }
}

impl Advantage {
    /// The advantages of one group of responses of equal length, in the order of `rewards`. The group is the whole batch.
    pub fn of_group(self, rewards: &[f64]) -> Result<Vec<f64>, ObjectiveError> {
        self.of_batch(rewards, &vec![1; rewards.len()], &[(0..rewards.len()).collect()])
    }

    /// The advantages of a batch of responses, in the order of `rewards` and their lengths. `groups` are the indices of
    /// each group.
    fn of_batch(
        self,
        rewards: &[f64],
        lengths: &[usize],
        groups: &[Vec<usize>],
    ) -> Result<Vec<f64>, ObjectiveError> {
        let n_nonzero = rewards.iter().filter(|reward| **reward != 0.0).count();
        let nonzero_scale = rewards.len() as f64 / n_nonzero.max(1) as f64;
        let std = match self {
            Advantage::GroupMeanBatchStd { ddof, .. } => batch_std(rewards, ddof)?,
            _ => 0.0,
        };
        let mut advantages = vec![0.0; rewards.len()];
        for group in groups {
            let group_rewards: Vec<f64> = group.iter().map(|&idx| rewards[idx]).collect();
            if let Some(reward_idx) = group_rewards.iter().position(|reward| !reward.is_finite()) {
                return Err(ObjectiveError::Reward { reward_idx, value: group_rewards[reward_idx] });
            }
            let named = |error: ObjectiveError| error.of_group(group[0]);
            let of_group = match self {
                Advantage::GroupZScore { ddof, epsilon } => {
                    group_z_score(&group_rewards, ddof, epsilon).map_err(named)?
                }
                Advantage::GroupMean => centred(&group_rewards),
                Advantage::LeaveOneOut => left_out(&group_rewards).map_err(named)?,
                Advantage::GroupMeanBatchStd { epsilon, .. } => {
                    let scaled = |d: f64| if std > 0.0 { d / (std + epsilon) } else { 0.0 };
                    centred(&group_rewards).into_iter().map(scaled).collect()
                }
                Advantage::LengthWeightedMean => {
                    let group_lengths: Vec<f64> = group.iter().map(|&idx| lengths[idx] as f64).collect();
                    above_weighted_mean(&group_rewards, &group_lengths)
                }
                Advantage::GroupMeanNonzeroShare => {
                    centred(&group_rewards).into_iter().map(|d| nonzero_scale * d).collect()
                }
                Advantage::BestAboveSecond => best_above_second(&group_rewards),
                Advantage::Return { .. } => group_rewards,
            };
            for (&idx, advantage) in group.iter().zip(of_group) {
                advantages[idx] = advantage;
            }
        }
        Ok(advantages)
    }
}

impl ObjectiveSpec {
    /// The advantages of a whole rollout batch, in the order of `batch`. `weights` has one entry per reward.
    pub fn advantages(
        &self,
        batch: &[ScoredResponse],
        weights: &[f64],
    ) -> Result<Vec<Advantages>, ObjectiveError> {
        for (response_idx, response) in batch.iter().enumerate() {
            self.check_scored(response_idx, response, weights.len())?;
        }
        let mut by_number: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (idx, response) in batch.iter().enumerate() {
            by_number.entry(response.group).or_default().push(idx);
        }
        let groups: Vec<Vec<usize>> = by_number.into_values().collect();
        let mut advantages = match (self.advantage, self.multiple_rewards) {
            (Advantage::Return { gamma }, _) => self.returns(batch, weights, gamma),
            (_, MultipleRewards::Sum) => self.of_sum(batch, weights, &groups)?,
            (_, MultipleRewards::NormalizeEach) => self.of_each(batch, weights, &groups)?,
        };
        whiten(self.whiten, &lengths(batch), &mut advantages)?;
        for (response, advantage) in batch.iter().zip(&mut advantages) {
            self.distillation.add(response, advantage);
        }
        Ok(advantages)
    }

    /// True if advantages read columns of the rollouts, not rewards and lengths alone.
    pub fn advantages_read_tokens(&self) -> bool {
        self.kl_in_reward != Kl::None || self.distillation != Distillation::None
    }

    /// The advantages of the weighted sum of rewards.
    fn of_sum(
        &self,
        batch: &[ScoredResponse],
        weights: &[f64],
        groups: &[Vec<usize>],
    ) -> Result<Vec<Advantages>, ObjectiveError> {
        let rewards: Vec<f64> = batch
            .iter()
            .map(|response| {
                weighted_sum(response, weights) - self.kl_of_tokens(response).map_or(0.0, Iterator::sum)
            })
            .collect();
        let advantages = self.advantage.of_batch(&rewards, &lengths(batch), groups)?;
        Ok(advantages.into_iter().map(Advantages::Response).collect())
    }

    /// The weighted sum of the advantages of each reward.
    fn of_each(
        &self,
        batch: &[ScoredResponse],
        weights: &[f64],
        groups: &[Vec<usize>],
    ) -> Result<Vec<Advantages>, ObjectiveError> {
        let mut sums = vec![0.0; batch.len()];
        for (reward_idx, weight) in weights.iter().enumerate() {
            let rewards: Vec<f64> = batch.iter().map(|response| response.rewards[reward_idx]).collect();
            for (sum, advantage) in
                sums.iter_mut().zip(self.advantage.of_batch(&rewards, &lengths(batch), groups)?)
            {
                *sum += weight * advantage;
            }
        }
        Ok(sums.into_iter().map(Advantages::Response).collect())
    }

    fn returns(&self, batch: &[ScoredResponse], weights: &[f64], gamma: f64) -> Vec<Advantages> {
        let of_response = |response: &ScoredResponse| {
            let reward = weighted_sum(response, weights);
            let kl: Option<Vec<f64>> = self.kl_of_tokens(response).map(Iterator::collect);
            if kl.is_none() && gamma == 1.0 {
                return Advantages::Response(reward);
            }
            let mut returns = vec![0.0; response.n_tokens];
            let mut rest = 0.0;
            for (t, value) in returns.iter_mut().enumerate().rev() {
                let at_end = if t + 1 == response.n_tokens { reward } else { 0.0 };
                rest = at_end - kl.as_ref().map_or(0.0, |kl| kl[t]) + gamma * rest;
                *value = rest;
            }
            Advantages::Tokens(returns)
        };
        batch.iter().map(of_response).collect()
    }

    /// The KL penalty of each token between the policy that sampled and the reference; absent without KL in the reward.
    fn kl_of_tokens<'a>(&self, response: &ScoredResponse<'a>) -> Option<impl Iterator<Item = f64> + 'a> {
        let kl = self.kl_in_reward;
        let (behavior, reference) = response.behavior_logp.zip(response.reference_logp)?;
        let pairs = behavior.iter().zip(reference);
        (kl != Kl::None).then(|| pairs.map(move |(&logp, &reference)| kl.penalty(logp, reference, logp).0))
    }

    /// Checks the rewards of a response, and that every column the advantages read is there and possible.
    fn check_scored(
        &self,
        response_idx: usize,
        response: &ScoredResponse,
        n_rewards: usize,
    ) -> Result<(), ObjectiveError> {
        if response.rewards.len() != n_rewards {
            let got = response.rewards.len();
            return Err(ObjectiveError::RewardCount { response_idx, got, expected: n_rewards });
        }
        check_column(response_idx, "reward", response.rewards, n_rewards, Kind::Finite)?;
        let has_kl = self.kl_in_reward != Kl::None;
        let has_teacher = self.distillation != Distillation::None;
        let is_dasd = matches!(self.distillation, Distillation::Dasd { .. });
        let needs = [
            (has_kl || has_teacher, response.behavior_logp, "behavior_logp", Kind::Logp, "the advantage"),
            (is_dasd, response.behavior_entropy, "behavior_entropy", Kind::Entropy, "distillation dasd"),
            (has_kl, response.reference_logp, "reference_logp", Kind::Logp, "kl_in_reward"),
            (has_teacher, response.teacher_logp, "teacher_logp", Kind::Logp, "distillation"),
        ];
        for (is_needed, values, field, kind, needed_by) in needs {
            match values {
                _ if !is_needed => {}
                Some(values) => check_column(response_idx, field, values, response.n_tokens, kind)?,
                None => {
                    let remedy =
                        "give that column for every response, or set what needs it to kind = \"none\"";
                    return Err(ObjectiveError::Missing { response_idx, field, needed_by, remedy });
                }
            }
        }
        Ok(())
    }
}

fn lengths(batch: &[ScoredResponse]) -> Vec<usize> {
    batch.iter().map(|response| response.n_tokens).collect()
}

/// True if rewards differ by rounding at most.
fn is_unanimous(rewards: &[f64]) -> bool {
    centred(rewards).iter().all(|above| *above == 0.0)
}

/// Rewards above their mean, in which each counts by its weight; equally where all weights are 0.
fn above_weighted_mean(rewards: &[f64], weights: &[f64]) -> Vec<f64> {
    let total: f64 = weights.iter().sum();
    if total == 0.0 {
        return centred(rewards);
    }
    let baseline = rewards.iter().zip(weights).map(|(reward, weight)| reward * weight).sum::<f64>() / total;
    if is_unanimous(rewards) {
        return vec![0.0; rewards.len()];
    }
    rewards.iter().map(|reward| reward - baseline).collect()
}

/// What the best reward is above the second best, for the first response with the best reward; 0 for the others and for
/// a response alone.
fn best_above_second(rewards: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..rewards.len()).collect();
    order.sort_by(|&a, &b| rewards[b].total_cmp(&rewards[a]));
    let mut advantages = vec![0.0; rewards.len()];
    if let [best, second, ..] = order[..]
        && !is_unanimous(rewards)
    {
        advantages[best] = rewards[best] - rewards[second];
    }
    advantages
}

fn weighted_sum(response: &ScoredResponse, weights: &[f64]) -> f64 {
    response.rewards.iter().zip(weights).map(|(reward, weight)| reward * weight).sum()
}
