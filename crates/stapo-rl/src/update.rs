//! Steps 5 to 7 of a training step: calibration, forward, effects, backward, one optimizer step per
//! mini-batch.

mod member;
mod parts;
mod work;

pub use member::Member;
pub use parts::{GradientParts, gradient_parts, likelihood_gradient};

use crate::carried::Carried;
use crate::config::Plan;
use crate::constants::ResponseConstants;
use crate::error::{Error, Result};
use crate::learner::Learner;
use crate::meter::{Meter, Part, Phase};
use crate::ranks::wire::words;
use crate::scoring::{ResponseScores, Sequence, all_scores, head_options, packed, score, split};
use member::members;
use stapo_core::diagnostics::{Census, Thresholds};
use stapo_core::objective::{
    Calibration, Deferral, ObjectiveError, ResponseSignals, SequenceTally, Tally, UpdateKey,
};
use stapo_core::record::ReusedUpdate;
use stapo_core::{Group, TokenEffect};
use stapo_model::decoder::{HeadOptions, Pass};
use stapo_model::optimizer::{StepError, Update};
use work::{Tokens, Work, rounds, work};

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
    pass: &mut Pass,
    carried: &mut Carried,
    plan: &Plan,
    (groups, constants): (&'a [Group], &'a [ResponseConstants]),
    context: MinibatchContext,
) -> Result<Learned<'a>> {
    context.meter.enter(Phase::Calibrate);
    let mut minibatch = context.meter.part(Part::Prepare, || {
        let members = members(plan, groups, constants);
        Minibatch::prepare(learner, pass, carried, plan, members, context)
    })?;
    context.meter.enter(Phase::Update);
    let tally = minibatch.accumulate(learner, pass)?;
    let reuse = match plan.config.update.reuse {
        Some(reuse) => {
            let energy = learner.head_sum_squares()? * tally.scale * tally.scale;
            Some(carried.energies.judge(&reuse, context.use_idx, energy))
        }
        None => None,
    };
    let stepped = if reuse.is_some_and(|reuse| reuse.gated) {
        learner.gradients.clear();
        OptimizerStep::none()
    } else {
        let device = learner.model.policy.device().clone();
        let stepped =
            context.meter.part_on(Part::Optimizer, &device, || minibatch.step(learner, pass, &tally))?;
        carried.controls = plan.objective.next_controls(carried.controls, &tally);
        stepped
    };
    Ok(Learned { reuse, ..context.meter.part(Part::Close, || minibatch.tally(tally, stepped)) })
}

/// The responses of one optimizer step, packed and calibrated.
struct Minibatch<'p, 'a> {
    plan: &'p Plan,
    context: MinibatchContext<'p>,
    key: UpdateKey,
    members: Vec<Member<'a>>,
    /// What goes through forward and backward, in order.
    work: Vec<Work>,
    /// Provisional until all members are scored, where a deferral is given.
    calibration: Calibration,
    deferral: Option<Deferral>,
}

/// Deferred tokens cost a further forward and backward of their sequences, a scoring pass costs a forward of all: with
/// backward as two forwards, deferring is cheaper below this share of the tokens.
const DEFERRED_SHARE: f64 = 1.0 / 3.0;

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
    /// Packing, the scoring pass where the objective needs one, and calibration. Where the objective needs the current
    /// log-probs for its thresholds and few tokens depend on these, the scoring pass is left out and these tokens wait.
    fn prepare(
        learner: &Learner,
        pass: &mut Pass,
        carried: &Carried,
        plan: &'p Plan,
        mut members: Vec<Member<'a>>,
        context: MinibatchContext<'p>,
    ) -> Result<Self> {
        let step = learner.counters.n_updates;
        let key = UpdateKey { step, pass: context.pass, controls: carried.controls };
        let is_stale = !context.is_on_policy && plan.objective.calibrates_on_current_policy();
        let reads_collision = plan.objective.reads_collision();
        let deferral = plan.objective.deferral().filter(|_| is_stale && !reads_collision);
        let deferral = match deferral {
            Some(deferral) => is_deferral_cheaper(plan, &members, key, deferral)
                .map_err(|source| Error::Objective { step: context.step, microbatch: None, source })?
                .then_some(deferral),
            None => None,
        };
        let tokens = deferral.map_or(Tokens::All, Tokens::Ready);
        let all: Vec<usize> = (0..members.len()).collect();
        let work = work(plan, &members, &all, tokens)?;
        if deferral.is_none() && (is_stale || reads_collision) {
            let sequences: Vec<Sequence> = members.iter().map(Member::sequence).collect();
            let scores = score(pass, &learner.model.policy, plan, &*learner.ranks, &sequences)?;
            for (member, scores) in members.iter_mut().zip(scores) {
                member.logp = scores.logp;
                member.entropy = scores.entropy;
                member.collision = Some(scores.collision);
            }
        }
        let calibration = match deferral {
            Some(_) => plan.objective.provisional(key),
            None => calibrate(plan, &members, key),
        };
        let calibration = calibration.map_err(|source| Error::Objective {
            step: context.step,
            microbatch: None,
            source,
        })?;
        Ok(Self { plan, context, key, members, work, calibration, deferral })
    }

    /// Forward, effects and backward of every micro-batch: gradients add up un-normalised.
    fn accumulate(&mut self, learner: &mut Learner, pass: &mut Pass) -> Result<Tally> {
        let mut tallies = vec![SequenceTally::default(); self.members.len()];
        let mut scored: Vec<(usize, ResponseScores)> = Vec::new();
        let meter = self.context.meter;
        for round in rounds(self.work.len(), &*learner.ranks) {
            if let Some(place) = round.own {
                let Self { plan, members, work, .. } = self;
                let sequences = work[place].sequences(members);
                let batch = meter.part(Part::Pack, || packed(&sequences));
                let policy = &learner.model.policy;
                let device = policy.device().clone();
                let pending = meter
                    .part_on(Part::Forward, &device, || pass.start(policy, &batch, head_options(plan)))?;
                let scores = meter.part(Part::Wait, || pending.wait());
                let own = work[place].microbatch.sequences.clone();
                meter.part(Part::Objective, || {
                    for (&idx, scores) in own.iter().zip(split(&scores, &sequences)) {
                        if learner.ranks.world() > 1 {
                            scored.push((idx, scores.clone()));
                        }
                        members[idx].set_scores(scores);
                    }
                });
                let (d_logp, d_entropy) = meter.part(Part::Objective, || {
                    self.evaluate(&own, Some(place), &mut tallies)?;
                    Ok::<_, Error>(self.work[place].gradients(&self.members))
                })?;
                meter.part_on(Part::Backward, &device, || {
                    learner.backward(pass, Some((&d_logp, &d_entropy)), round.n_microbatches)
                })?;
                meter.add(own.len(), d_logp.len());
            } else {
                learner.backward(pass, None, round.n_microbatches)?;
            }
        }
        if learner.ranks.world() > 1 {
            self.share(learner, &scored, &mut tallies)?;
        }
        if let Some(deferral) = self.deferral {
            self.accumulate_deferred(learner, pass, deferral, &mut tallies)?;
        }
        Ok(self.plan.objective.total(&tallies))
    }

    /// Takes over what other ranks have computed of their micro-batches, so that all ranks know every member's scores and
    /// effects.
    fn share(
        &mut self,
        learner: &Learner,
        own: &[(usize, ResponseScores)],
        tallies: &mut [SequenceTally],
    ) -> Result<()> {
        let is_own = |idx: usize| own.iter().any(|(own, _)| *own == idx);
        let mut foreign = Vec::new();
        for (idx, scores) in all_scores(&*learner.ranks, own)? {
            if !is_own(idx) {
                self.members[idx].set_scores(scores);
                foreign.push(idx);
            }
        }
        self.evaluate(&foreign, None, tallies)
    }

    /// The final calibration, from what forward has seen, and the tokens that waited for it.
    fn accumulate_deferred(
        &mut self,
        learner: &mut Learner,
        pass: &mut Pass,
        deferral: Deferral,
        tallies: &mut [SequenceTally],
    ) -> Result<()> {
        let wrap = |source| Error::Objective { step: self.context.step, microbatch: None, source };
        self.calibration = calibrate(self.plan, &self.members, self.key).map_err(wrap)?;
        let all: Vec<usize> = (0..self.members.len()).collect();
        self.evaluate(&all, None, tallies)?;
        let has_waited = |idx: &usize| deferral.has_waited(&self.members[*idx].effects);
        let waiting: Vec<usize> = all.iter().copied().filter(has_waited).collect();
        let n_done = self.work.len();
        self.work.extend(work(self.plan, &self.members, &waiting, Tokens::Deferred(deferral))?);
        let options = HeadOptions { n_alternatives: 0, ..head_options(self.plan) };
        let deferred = &self.work[n_done..];
        let meter = self.context.meter;
        for round in rounds(deferred.len(), &*learner.ranks) {
            if let Some(work) = round.own.map(|place| &deferred[place]) {
                let batch = meter.part(Part::Pack, || packed(&work.sequences(&self.members)));
                let policy = &learner.model.policy;
                let device = policy.device().clone();
                meter.part_on(Part::Forward, &device, || pass.start(policy, &batch, options))?;
                let (d_logp, d_entropy) = meter.part(Part::Objective, || work.gradients(&self.members));
                meter.part_on(Part::Backward, &device, || {
                    learner.backward(pass, Some((&d_logp, &d_entropy)), round.n_microbatches)
                })?;
            } else {
                learner.backward(pass, None, round.n_microbatches)?;
            }
        }
        Ok(())
    }

    /// The effects of scored members under the calibration. `microbatch` is named in errors.
    fn evaluate(
        &mut self,
        members: &[usize],
        microbatch: Option<usize>,
        tallies: &mut [SequenceTally],
    ) -> Result<()> {
        for &idx in members {
            let member = &mut self.members[idx];
            let mut effects = vec![TokenEffect::default(); member.logp.len()];
            let tally = self.plan.objective.evaluate(&self.calibration, idx, &member.signals(), &mut effects);
            tallies[idx] =
                tally.map_err(|source| Error::Objective { step: self.context.step, microbatch, source })?;
            member.effects = effects;
        }
        Ok(())
    }

    /// The optimizer step. A gradient that is not finite is an error that names the micro-batch at fault.
    fn step(&self, learner: &mut Learner, pass: &mut Pass, tally: &Tally) -> Result<OptimizerStep> {
        let config = &self.plan.config.update;
        let is_first = self.context.step == 1;
        let unreached = if is_first { learner.unreached()? } else { Vec::new() };
        let before = is_first.then(|| learner.model.policy.fingerprint());
        let learning_rate = self.plan.learning_rate(learner.counters.n_updates);
        let update = Update { lr: learning_rate, scale: tally.scale, max_norm: config.max_gradient_norm };
        let gradient_norm = match learner.step(update) {
            Ok(norm) => norm,
            Err(StepError::Rank(lost)) => return Err(lost.into()),
            Err(StepError::Gradient(source)) => {
                let microbatch = self.find_bad_microbatch(learner, pass)?;
                return Err(Error::Gradient { step: self.context.step, microbatch, source });
            }
        };
        let has_moved = before.map_or(Ok(true), |before| learner.has_moved(before))?;
        Ok(OptimizerStep { gradient_norm, learning_rate, unreached, has_moved })
    }

    /// The first micro-batch whose own gradient is not finite, found by computing the gradient of each micro-batch
    /// anew, its own on each rank; `None` where every gradient is finite and only their sum is not. Clears the gradients.
    fn find_bad_microbatch(&self, learner: &mut Learner, pass: &mut Pass) -> Result<Option<usize>> {
        let mut found = None;
        let (rank, world) = (learner.ranks.rank(), learner.ranks.world());
        for (place, work) in self.work.iter().enumerate().skip(rank).step_by(world) {
            let policy = &learner.model.policy;
            pass.forward(policy, &packed(&work.sequences(&self.members)), head_options(self.plan))?;
            let (d_logp, d_entropy) = work.gradients(&self.members);
            if !learner.is_finite_backward(pass, (&d_logp, &d_entropy))? {
                found = Some(place);
                break;
            }
        }
        learner.gradients.clear();
        let own = found.map_or(u64::MAX, |place| place as u64);
        let all = learner.ranks.all_gather(&own.to_le_bytes())?;
        let places = all.iter().flat_map(|bytes| words(bytes)).map(u64::from_le_bytes);
        Ok(places.filter(|place| *place != u64::MAX).min().map(|place| place as usize))
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

fn calibrate(
    plan: &Plan,
    members: &[Member],
    key: UpdateKey,
) -> std::result::Result<Calibration, ObjectiveError> {
    let responses: Vec<ResponseSignals> = members.iter().map(Member::signals).collect();
    plan.objective.calibrate(&responses, key)
}

/// Whether to let tokens wait instead of scoring all, judged by what the behavior policy would have made of the
/// mini-batch: nothing but the rollouts decides, so a resumed run decides the same.
fn is_deferral_cheaper(
    plan: &Plan,
    members: &[Member],
    key: UpdateKey,
    deferral: Deferral,
) -> std::result::Result<bool, ObjectiveError> {
    let calibration = calibrate(plan, members, key)?;
    let mut n_waiting = 0;
    let mut n_all = 0;
    for (idx, member) in members.iter().enumerate() {
        let mut effects = vec![TokenEffect::default(); member.logp.len()];
        plan.objective.evaluate(&calibration, idx, &member.signals(), &mut effects)?;
        let n_tokens = member.scored.rollout.sequence_len();
        n_all += n_tokens;
        n_waiting += if deferral.has_waited(&effects) { n_tokens } else { 0 };
    }
    Ok((n_waiting as f64) < DEFERRED_SHARE * n_all as f64)
}
