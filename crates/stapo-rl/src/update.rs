//! Steps 5 to 7 of a training step: calibration, forward, effects, backward, one optimizer step per
//! mini-batch.

mod member;

pub use member::Member;

use crate::carried::Carried;
use crate::config::Plan;
use crate::constants::ResponseConstants;
use crate::error::{Error, Result};
use crate::learner::Learner;
use crate::meter::{Meter, Phase};
use crate::scoring::{Sequence, head_options, packed, score, split};
use member::members;
use stapo_core::batch::pack_in_order;
use stapo_core::diagnostics::{Census, Thresholds};
use stapo_core::objective::{Calibration, ResponseSignals, SequenceTally, Tally, UpdateKey};
use stapo_core::record::ReusedUpdate;
use stapo_core::{Group, Microbatch, TokenEffect};
use stapo_model::decoder::{Gradients, Pass, Policy};
use stapo_model::optimizer::Update;
use std::hash::{DefaultHasher, Hasher};

/// What one optimizer step did.
pub struct Learned<'a> {
    /// The effects are scaled by 1/N.
    pub members: Vec<Member<'a>>,
    pub tally: Tally,
    pub tau_h: Option<f64>,
    pub census: Census,
    pub gradient_norm: f64,
    pub learning_rate: f64,
    /// max |logp - behavior_logp|; 0 where the policy is the one that sampled.
    pub exactness_max_abs: f64,
    /// Tensors whose gradient is 0 everywhere; collected in the first training step only.
    pub unreached: Vec<String>,
    /// Whether the optimizer step changed any weight; true without a check after the first training step.
    pub has_moved: bool,
    /// What the gate of reuse saw; absent where rollout batches are used once.
    pub reuse: Option<ReusedUpdate>,
}

impl Learned<'_> {
    /// True where the gate discarded the gradients, so that no optimizer step was made.
    pub fn is_gated(&self) -> bool {
        self.reuse.is_some_and(|reuse| reuse.gated)
    }
}

/// Where a mini-batch stands in its training step.
#[derive(Debug, Clone, Copy)]
pub struct MinibatchContext<'a> {
    pub step: u64,
    /// Which use of the rollout batch, from 0.
    pub use_idx: usize,
    /// True where the policy has not changed since it sampled the mini-batch.
    pub is_on_policy: bool,
    /// The pass of an objective with two passes; 0 otherwise.
    pub pass: usize,
    pub meter: &'a Meter,
}

/// One optimizer step over whole groups, with the constants of each of their responses. Where the gate of reuse closes,
/// the gradients are discarded and no step is made.
pub fn learn<'a>(
    learner: &mut Learner,
    carried: &mut Carried,
    plan: &Plan,
    (groups, constants): (&'a [Group], &'a [ResponseConstants]),
    context: MinibatchContext,
) -> Result<Learned<'a>> {
    context.meter.enter(Phase::Calibrate);
    let members = members(plan, groups, constants);
    let mut minibatch = Minibatch::prepare(learner, carried, plan, members, context)?;
    context.meter.enter(Phase::Update);
    let mut pass = Pass::training(&learner.model.policy, plan.config.update.recompute)?;
    let tally = minibatch.accumulate(learner, &mut pass)?;
    let reuse = plan.config.update.reuse.map(|reuse| {
        let energy = learner.gradients.head_sum_squares() * tally.scale * tally.scale;
        carried.energies.judge(&reuse, context.use_idx, energy)
    });
    let stepped = if reuse.is_some_and(|reuse| reuse.gated) {
        learner.gradients.clear();
        OptimizerStep::none()
    } else {
        let stepped = minibatch.step(learner, &mut pass, &tally)?;
        carried.controls = plan.objective.next_controls(carried.controls, &tally);
        stepped
    };
    Ok(Learned { reuse, ..minibatch.tally(tally, stepped) })
}

/// The responses of one optimizer step, packed and calibrated.
struct Minibatch<'p, 'a> {
    plan: &'p Plan,
    context: MinibatchContext<'p>,
    members: Vec<Member<'a>>,
    microbatches: Vec<Microbatch>,
    calibration: Calibration,
}

/// What the optimizer did with the gradients of a mini-batch.
struct OptimizerStep {
    gradient_norm: f64,
    learning_rate: f64,
    unreached: Vec<String>,
    has_moved: bool,
}

impl OptimizerStep {
    /// Of gradients that were discarded.
    fn none() -> Self {
        OptimizerStep { gradient_norm: 0.0, learning_rate: 0.0, unreached: Vec::new(), has_moved: true }
    }
}

impl<'p, 'a> Minibatch<'p, 'a> {
    /// Packing, the scoring passes that the objective needs, and calibration.
    fn prepare(
        learner: &Learner,
        carried: &Carried,
        plan: &'p Plan,
        mut members: Vec<Member<'a>>,
        context: MinibatchContext<'p>,
    ) -> Result<Self> {
        let wrap = |source| Error::Objective { step: context.step, microbatch: None, source };
        let lengths: Vec<usize> = members.iter().map(|m| m.scored.rollout.sequence_len()).collect();
        let microbatches = pack_in_order(&lengths, plan.config.update.microbatch_tokens)?;
        let is_stale = !context.is_on_policy && plan.objective.calibrates_on_current_policy();
        if is_stale || plan.objective.reads_collision() {
            let sequences: Vec<Sequence> = members.iter().map(Member::sequence).collect();
            let scores = score(&learner.model.policy, plan, &sequences)?;
            for (member, scores) in members.iter_mut().zip(scores) {
                member.logp = scores.logp;
                member.entropy = scores.entropy;
                member.collision = Some(scores.collision);
            }
        }
        let step = learner.counters.n_updates;
        let update = UpdateKey { step, pass: context.pass, controls: carried.controls };
        let responses: Vec<ResponseSignals> = members.iter().map(Member::signals).collect();
        let calibration = plan.objective.calibrate(&responses, update).map_err(wrap)?;
        Ok(Self { plan, context, members, microbatches, calibration })
    }

    /// Forward, effects and backward of every micro-batch: gradients add up un-normalised.
    fn accumulate(&mut self, learner: &mut Learner, pass: &mut Pass) -> Result<Tally> {
        let Self { plan, context, members, microbatches, calibration } = self;
        let policy = &learner.model.policy;
        let mut tallies = vec![SequenceTally::default(); members.len()];
        for (place, microbatch) in microbatches.iter().enumerate() {
            let sequences = sequences(microbatch, members);
            let scores = pass.forward(policy, &packed(&sequences), head_options(plan))?;
            for (&idx, own) in microbatch.sequences.iter().zip(split(&scores, &sequences)) {
                let member = &mut members[idx];
                member.set_scores(own);
                let mut effects = vec![TokenEffect::default(); member.logp.len()];
                tallies[idx] =
                    plan.objective.evaluate(calibration, idx, &member.signals(), &mut effects).map_err(
                        |source| Error::Objective { step: context.step, microbatch: Some(place), source },
                    )?;
                member.effects = effects;
            }
            let (d_logp, d_entropy) = token_gradients(microbatch, members);
            pass.backward(policy, &d_logp, &d_entropy, &mut learner.gradients)?;
            context.meter.add(microbatch.sequences.len(), d_logp.len());
        }
        Ok(plan.objective.total(&tallies))
    }

    /// The optimizer step. A gradient that is not finite is an error that names the micro-batch at fault.
    fn step(&self, learner: &mut Learner, pass: &mut Pass, tally: &Tally) -> Result<OptimizerStep> {
        let config = &self.plan.config.update;
        let is_first = self.context.step == 1;
        let unreached = if is_first { unreached(&learner.gradients) } else { Vec::new() };
        let before = is_first.then(|| fingerprint(&learner.model.policy));
        let learning_rate = self.plan.learning_rate(learner.counters.n_updates);
        let update = Update { lr: learning_rate, scale: tally.scale, max_norm: config.max_gradient_norm };
        let gradient_norm = match learner.step(update) {
            Ok(norm) => norm,
            Err(source) => {
                let microbatch = self.find_bad_microbatch(learner, pass)?;
                return Err(Error::Gradient { step: self.context.step, microbatch, source });
            }
        };
        let has_moved = before.is_none_or(|before| before != fingerprint(&learner.model.policy));
        Ok(OptimizerStep { gradient_norm, learning_rate, unreached, has_moved })
    }

    /// The first micro-batch whose own gradient is not finite, found by computing the gradient of each micro-batch
    /// anew; `None` where every gradient is finite and only their sum is not. Clears the gradients.
    fn find_bad_microbatch(&self, learner: &mut Learner, pass: &mut Pass) -> Result<Option<usize>> {
        let is_finite = |values: Vec<f32>| values.iter().all(|value| value.is_finite());
        let mut found = None;
        for (place, microbatch) in self.microbatches.iter().enumerate() {
            learner.gradients.clear();
            let policy = &learner.model.policy;
            pass.forward(policy, &packed(&sequences(microbatch, &self.members)), head_options(self.plan))?;
            let (d_logp, d_entropy) = token_gradients(microbatch, &self.members);
            pass.backward(policy, &d_logp, &d_entropy, &mut learner.gradients)?;
            if !learner.gradients.tensors().all(|(_, values)| is_finite(values)) {
                found = Some(place);
                break;
            }
        }
        learner.gradients.clear();
        Ok(found)
    }

    /// Counts the tokens by quadrant and scales the effects.
    fn tally(mut self, tally: Tally, stepped: OptimizerStep) -> Learned<'a> {
        let tau_h = self.calibration.tau_h();
        let tau_p = self.calibration.tau_p();
        let mut census = Census::new(Thresholds { tau_p, tau_h: tau_h.unwrap_or(f64::INFINITY) });
        for member in &mut self.members {
            member.observed().iter().for_each(|token| census.add(token));
            tally.scale_effects(&mut member.effects);
        }
        let exactness_max_abs = self.members.iter().map(Member::distance).fold(0.0, f64::max);
        let OptimizerStep { gradient_norm, learning_rate, unreached, has_moved } = stepped;
        Learned {
            members: self.members,
            tally,
            tau_h,
            census,
            gradient_norm,
            learning_rate,
            exactness_max_abs,
            unreached,
            has_moved,
            reuse: None,
        }
    }
}

/// The sequences of a micro-batch.
fn sequences<'a>(microbatch: &Microbatch, members: &[Member<'a>]) -> Vec<Sequence<'a>> {
    microbatch.sequences.iter().map(|&idx| Sequence::of(&members[idx].scored.rollout)).collect()
}

/// The derivatives by log-prob and entropy of each token of a micro-batch, with which backward starts.
fn token_gradients(microbatch: &Microbatch, members: &[Member]) -> (Vec<f32>, Vec<f32>) {
    let effects = || microbatch.sequences.iter().flat_map(|&idx| &members[idx].effects);
    (effects().map(|e| e.d_logp as f32).collect(), effects().map(|e| e.d_entropy as f32).collect())
}

/// A hash of all weights.
fn fingerprint(policy: &Policy) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (_, values) in policy.tensors() {
        // Adding 0 turns -0 into 0: a change of the sign of 0 is no change of a weight.
        values.to_vec().iter().for_each(|value| hasher.write_u32((value + 0.0).to_bits()));
    }
    hasher.finish()
}

/// Tensors whose gradient is 0 everywhere.
fn unreached(gradients: &Gradients) -> Vec<String> {
    let zero = gradients.tensors().filter(|(_, values)| values.iter().all(|value| *value == 0.0));
    zero.map(|(spec, _)| spec.name.clone()).collect()
}
