//! Steps 4 to 7 of a training step: advantages, calibration, forward, effects, backward, one optimizer step per mini-batch.

use crate::config::{Plan, Truncated};
use crate::error::{Error, Result};
use crate::run::Counters;
use stapo_core::batch::pack_in_order;
use stapo_core::diagnostics::{Census, Observed, Thresholds};
use stapo_core::objective::{ResponseSignals, SequenceTally, Tally, UpdateKey};
use stapo_core::{Finish, Group, Microbatch, Scored, TokenEffect};
use stapo_model::decoder::{Batch, Gradients, Keep, Pass, Policy, Reading};
use stapo_model::optimizer::{Optimizer, Update};
use std::hash::{DefaultHasher, Hasher};

/// One response of a mini-batch with its signals, widened to the objective's precision (exactly).
pub struct Member<'a> {
    pub group: &'a Group,
    pub scored: &'a Scored,
    pub advantage: f64,
    pub behavior_logp: Vec<f64>,
    pub behavior_entropy: Vec<f64>,
    pub logp: Vec<f64>,
    pub entropy: Vec<f64>,
    pub collision: Vec<f64>,
    pub reference_logp: Option<Vec<f64>>,
    pub alternatives: Vec<Vec<(u32, f32)>>,
    pub effects: Vec<TokenEffect>,
}

/// What one optimizer step did.
pub struct Learned<'a> {
    /// With effects scaled by 1/N.
    pub members: Vec<Member<'a>>,
    pub tally: Tally,
    pub tau_h: Option<f64>,
    pub census: Census,
    pub gradient_norm: f64,
    pub learning_rate: f64,
    /// max |logp - behavior_logp|; 0 where the policy is the one that sampled.
    pub exactness_max_abs: f64,
    /// Tensors that no gradient reached; looked at in the first step only.
    pub unreached: Vec<String>,
    /// Whether any weight changed; looked at in the first step only.
    pub has_moved: bool,
}

/// The parts of a trainer that an update touches.
pub struct Learner<'t> {
    pub policy: &'t mut Policy,
    pub optimizer: &'t mut Optimizer,
    pub gradients: &'t mut Gradients,
    /// Frozen, for the KL penalty.
    pub reference: Option<&'t Policy>,
}

/// Which mini-batch of a step this is.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    pub step: u64,
    /// The policy has not changed since it sampled.
    pub is_on_policy: bool,
    /// Pass of a two-pass objective.
    pub pass: usize,
}

/// One optimizer step over whole groups.
pub fn learn<'a>(
    learner: &mut Learner,
    plan: &Plan,
    groups: &'a [Group],
    turn: Turn,
    counters: &mut Counters,
) -> Result<Learned<'a>> {
    let objective = &plan.objective;
    let wrap = |source| Error::Objective { step: turn.step, microbatch: None, source };
    let mut members = members(plan, groups, turn)?;
    let lengths: Vec<usize> = members.iter().map(|m| m.scored.rollout.sequence_len()).collect();
    let microbatches = pack_in_order(&lengths, plan.config.update.microbatch_tokens)?;

    if let Some(reference) = learner.reference {
        score(reference, plan, &microbatches, &mut members, |m, s| m.reference_logp = Some(s.logp))?;
    }
    if !turn.is_on_policy && objective.calibrates_on_current_policy() {
        score(learner.policy, plan, &microbatches, &mut members, |m, s| {
            (m.logp, m.entropy) = (s.logp, s.entropy);
        })?;
    }
    let update = UpdateKey { step: counters.n_updates, pass: turn.pass };
    let responses: Vec<ResponseSignals> = members.iter().map(Member::response).collect();
    let calibration = objective.calibrate(&responses, update).map_err(wrap)?;

    let mut pass = Pass::new(learner.policy, plan.keep())?;
    let reading = Reading {
        temperature: plan.config.rollout.temperature,
        n_alternatives: plan.config.record.alternatives,
    };
    let mut tallies = vec![SequenceTally::default(); members.len()];
    for (place, microbatch) in microbatches.iter().enumerate() {
        let scores = pass.forward(learner.policy, &packed(microbatch, &members), reading)?;
        for (&idx, own) in microbatch.sequences.iter().zip(split(&scores, microbatch, &members)) {
            let member = &mut members[idx];
            (member.logp, member.entropy, member.collision) = (own.logp, own.entropy, own.collision);
            member.alternatives = own.alternatives;
            let mut effects = vec![TokenEffect::default(); member.logp.len()];
            tallies[idx] = objective
                .evaluate(&calibration, idx, &member.response(), &mut effects)
                .map_err(|source| Error::Objective { step: turn.step, microbatch: Some(place), source })?;
            member.effects = effects;
        }
        let (d_logp, d_entropy) = slopes(microbatch, &members);
        pass.backward(learner.policy, &d_logp, &d_entropy, learner.gradients)?;
    }
    let tally = objective.total(&tallies);
    let is_first = turn.step == 1;
    let unreached = if is_first { unreached(learner.gradients) } else { Vec::new() };
    let before = is_first.then(|| fingerprint(learner.policy));
    let learning_rate =
        plan.config.update.learning_rate * plan.config.update.schedule.factor(counters.n_updates);
    let update =
        Update { lr: learning_rate, scale: tally.scale, max_norm: plan.config.update.max_gradient_norm };
    let gradient_norm = match learner.optimizer.step(learner.policy, learner.gradients, update) {
        Ok(norm) => norm,
        Err(source) => {
            let microbatch = culprit(learner, &mut pass, &microbatches, &members, reading)?;
            return Err(Error::Gradient { step: turn.step, microbatch, source });
        }
    };
    counters.n_updates += 1;
    let has_moved = before.is_none_or(|before| before != fingerprint(learner.policy));

    let exactness_max_abs = members.iter().map(Member::distance).fold(0.0, f64::max);
    let thresholds =
        Thresholds { tau_p: objective.tau_p(), tau_h: calibration.tau_h().unwrap_or(f64::INFINITY) };
    let mut census = Census::new(thresholds);
    for member in &mut members {
        member.observed().iter().for_each(|token| census.add(token));
        for effect in &mut member.effects {
            effect.d_logp *= tally.scale;
            effect.d_entropy *= tally.scale;
        }
    }
    let tau_h = calibration.tau_h();
    Ok(Learned {
        members,
        tally,
        tau_h,
        census,
        gradient_norm,
        learning_rate,
        exactness_max_abs,
        unreached,
        has_moved,
    })
}

/// What backward starts from, for the tokens of a micro-batch.
fn slopes(microbatch: &Microbatch, members: &[Member]) -> (Vec<f32>, Vec<f32>) {
    let effects = || microbatch.sequences.iter().flat_map(|&idx| &members[idx].effects);
    (effects().map(|e| e.d_logp as f32).collect(), effects().map(|e| e.d_entropy as f32).collect())
}

/// The first micro-batch whose own gradient is not finite, found by going through them once more one by one; none
/// where only their sum is not.
fn culprit(
    learner: &mut Learner,
    pass: &mut Pass,
    microbatches: &[Microbatch],
    members: &[Member],
    reading: Reading,
) -> Result<Option<usize>> {
    let mut found = None;
    for (place, microbatch) in microbatches.iter().enumerate() {
        learner.gradients.clear();
        pass.forward(learner.policy, &packed(microbatch, members), reading)?;
        let (d_logp, d_entropy) = slopes(microbatch, members);
        pass.backward(learner.policy, &d_logp, &d_entropy, learner.gradients)?;
        let is_finite = |values: Vec<f32>| values.iter().all(|value| value.is_finite());
        if !learner.gradients.tensors().all(|(_, values)| is_finite(values)) {
            found = Some(place);
            break;
        }
    }
    learner.gradients.clear();
    Ok(found)
}

/// Groups -> responses that take part, each with its advantage and the signals known from the rollout.
fn members<'a>(plan: &Plan, groups: &'a [Group], turn: Turn) -> Result<Vec<Member<'a>>> {
    let mut members = Vec::new();
    for group in groups {
        let advantages = plan
            .objective
            .advantage
            .of_group(&group.rewards())
            .map_err(|source| Error::Objective { step: turn.step, microbatch: None, source })?;
        for (scored, advantage) in group.members.iter().zip(advantages) {
            let is_cut = scored.rollout.finish == Finish::LengthLimit;
            if is_cut && plan.config.rollout.truncated == Truncated::Drop {
                continue;
            }
            let (logp, entropy) = (widen(&scored.rollout.logp), widen(&scored.rollout.entropy));
            members.push(Member {
                group,
                scored,
                advantage,
                behavior_logp: logp.clone(),
                behavior_entropy: entropy.clone(),
                logp,
                entropy,
                collision: Vec::new(),
                reference_logp: None,
                alternatives: Vec::new(),
                effects: Vec::new(),
            });
        }
    }
    Ok(members)
}

impl Member<'_> {
    fn response(&self) -> ResponseSignals<'_> {
        ResponseSignals {
            advantage: self.advantage,
            logp: &self.logp,
            behavior_logp: &self.behavior_logp,
            entropy: &self.entropy,
            behavior_entropy: Some(&self.behavior_entropy),
            reference_logp: self.reference_logp.as_deref(),
            sampler_logp: None,
        }
    }

    /// max |logp - behavior_logp| over its tokens.
    fn distance(&self) -> f64 {
        self.logp.iter().zip(&self.behavior_logp).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    /// The tokens as the census sees them.
    pub fn observed(&self) -> Vec<Observed> {
        let token = |t: usize| Observed {
            logp: self.logp[t],
            entropy: self.entropy[t],
            collision: self.collision[t],
            effect: self.effects[t],
        };
        (0..self.effects.len()).map(token).collect()
    }
}

/// Numbers of one response, widened.
struct Scores {
    logp: Vec<f64>,
    entropy: Vec<f64>,
    collision: Vec<f64>,
    alternatives: Vec<Vec<(u32, f32)>>,
}

/// A forward-only pass over all micro-batches.
fn score(
    policy: &Policy,
    plan: &Plan,
    microbatches: &[Microbatch],
    members: &mut [Member],
    mut take: impl FnMut(&mut Member, Scores),
) -> Result<()> {
    let mut pass = Pass::new(policy, Keep::Nothing)?;
    let reading = Reading { temperature: plan.config.rollout.temperature, n_alternatives: 0 };
    for microbatch in microbatches {
        let scores = pass.forward(policy, &packed(microbatch, members), reading)?;
        let split = split(&scores, microbatch, members);
        for (&idx, own) in microbatch.sequences.iter().zip(split) {
            take(&mut members[idx], own);
        }
    }
    Ok(())
}

fn packed(microbatch: &Microbatch, members: &[Member]) -> Batch {
    let mut batch = Batch::new();
    for &idx in &microbatch.sequences {
        let rollout = &members[idx].scored.rollout;
        let tokens: Vec<u32> = rollout.prompt_tokens.iter().chain(&rollout.tokens).copied().collect();
        batch.push(&tokens, rollout.prompt_tokens.len());
    }
    batch
}

/// The numbers of each sequence of a micro-batch, in its order.
fn split(scores: &stapo_model::decoder::Scores, microbatch: &Microbatch, members: &[Member]) -> Vec<Scores> {
    let mut start = 0;
    let mut parts = Vec::with_capacity(microbatch.sequences.len());
    for &idx in &microbatch.sequences {
        let range = start..start + members[idx].scored.rollout.tokens.len();
        parts.push(Scores {
            logp: widen(&scores.logp[range.clone()]),
            entropy: widen(&scores.entropy[range.clone()]),
            collision: widen(&scores.collision[range.clone()]),
            alternatives: scores.alternatives.get(range.clone()).map(<[_]>::to_vec).unwrap_or_default(),
        });
        start = range.end;
    }
    parts
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// Changes when a weight does.
fn fingerprint(policy: &Policy) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (_, values) in policy.tensors() {
        // Adding 0 makes -0 and 0 alike.
        values.to_vec().iter().for_each(|value| hasher.write_u32((value + 0.0).to_bits()));
    }
    hasher.finish()
}

fn unreached(gradients: &Gradients) -> Vec<String> {
    let silent = gradients.tensors().filter(|(_, values)| values.iter().all(|value| *value == 0.0));
    silent.map(|(spec, _)| spec.name.clone()).collect()
}
