//! Steps 5 to 7 of a training step: calibration, forward, effects, backward, one optimizer step per
//! mini-batch.

mod member;
mod parts;
mod work;

pub use member::Member;
pub use parts::{GradientParts, gradient_parts, likelihood_gradient};

use crate::error::{Error, Result};
use crate::learn::carried::Carried;
use crate::learn::constants::ResponseConstants;
use crate::learn::learner::Learner;
use crate::learn::scoring::{Sequence, all_scores, head_options, score};
use crate::plan::config::Plan;
use crate::ranks::wire::words;
use crate::run::meter::{Meter, Part, Phase};
use member::members;
use rayon::prelude::*;
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
    /// max |logp - behavior_logp|; 0 if the policy is the one that sampled.
    pub exactness_max_abs: f64,
    /// Tensors whose gradient is 0 everywhere; collected in the first training step only.
    pub unreached: Vec<String>,
    /// Whether the optimizer step changed any weight; true without a check after the first training step.
    pub has_moved: bool,
    /// What the gate of reuse saw; absent if rollout batches are used once.
    pub reuse: Option<ReusedUpdate>,
}

impl Learned<'_> {
    /// True if the gate discarded the gradients, so that no optimizer step was made.
    pub fn is_gated(&self) -> bool {
        self.reuse.is_some_and(|reuse| reuse.gated)
    }
}

/// The position of a mini-batch in its training step.
#[derive(Debug, Clone, Copy)]
pub struct MinibatchContext<'a> {
    pub step: u64,
    /// Which use of the rollout batch, from 0.
    pub use_idx: usize,
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
    let policy_version = learner.counters.n_updates;
    let members = context.meter.part(Part::Prepare, || members(plan, groups, constants, policy_version));
    let mut minibatch = Minibatch::prepare(learner, pass, carried, plan, members, context)?;
    context.meter.enter(Phase::Update);
    let tally = minibatch.accumulate(learner, pass)?;
    // A GPU still runs the last backward.
    let census = context.meter.part(Part::Beside, || minibatch.census());
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
    Ok(Learned { reuse, ..context.meter.part(Part::Close, || minibatch.close(tally, census, stepped)) })
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
        let is_on_policy = members.iter().all(|member| member.is_on_policy);
        let is_stale = !is_on_policy && plan.objective.calibrates_on_current_policy();
        let reads_collision = plan.objective.reads_collision();
        let deferral = plan.objective.deferral().filter(|_| is_stale && !reads_collision);
        let deferral = match deferral {
            Some(deferral) => context
                .meter
                .part(Part::Prepare, || is_deferral_cheaper(plan, &members, key, deferral))
                .map_err(|source| Error::Objective { step: context.step, microbatch: None, source })?
                .then_some(deferral),
            None => None,
        };
        let tokens = deferral.map_or(Tokens::All, Tokens::Ready);
        let all: Vec<usize> = (0..members.len()).collect();
        let packing = plan.packing(learner.model.policy.config());
        let work = work(packing, &members, &all, tokens)?;
        if deferral.is_none() && (is_stale || reads_collision) {
            let sequences: Vec<Sequence> = members.iter().map(Member::sequence).collect();
            let policy = &learner.model.policy;
            let scores = context.meter.part_on(Part::Score, policy.device(), || {
                score(pass, policy, plan, &*learner.ranks, &sequences)
            })?;
            for (member, scores) in members.iter_mut().zip(scores) {
                member.logp = scores.logp;
                member.entropy = scores.entropy;
                member.collision = Some(scores.collision);
            }
        }
        let calibration = match deferral {
            Some(_) => plan.objective.provisional(key),
            None => context.meter.part(Part::Prepare, || calibrate(plan, &members, key)),
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
        let mut computed: Vec<usize> = Vec::new();
        for round in rounds(self.work.len(), &*learner.ranks) {
            match round.microbatch_idx {
                Some(work_idx) => {
                    self.accumulate_microbatch(
                        learner,
                        pass,
                        (work_idx, round.n_microbatches),
                        &mut tallies,
                    )?;
                    computed.extend(&self.work[work_idx].microbatch.sequences);
                }
                None => learner.backward(pass, None, round.n_microbatches)?,
            }
        }
        if learner.ranks.world() > 1 {
            self.share(learner, &computed, &mut tallies)?;
        }
        if let Some(deferral) = self.deferral {
            self.accumulate_deferred(learner, pass, deferral, &mut tallies)?;
        }
        Ok(self.plan.objective.total(&tallies))
    }

    /// Forward, effects and backward of the micro-batch `work_idx`, in a round of `n_microbatches`. Backward waits for
    /// nothing but the effects; what else forward gave is read while a GPU runs backward.
    fn accumulate_microbatch(
        &mut self,
        learner: &mut Learner,
        pass: &mut Pass,
        (work_idx, n_microbatches): (usize, usize),
        tallies: &mut [SequenceTally],
    ) -> Result<()> {
        let meter = self.context.meter;
        let policy = &learner.model.policy;
        let device = policy.device().clone();
        let options = head_options(self.plan);
        let batch = meter.part(Part::Pack, || self.work[work_idx].batch(&self.members));
        let pending = meter.part_on(Part::Forward, &device, || pass.start(policy, &batch, options))?;
        let (scores, alternatives) = meter.part(Part::Wait, || pending.wait_for_numbers());
        let sequences = self.work[work_idx].microbatch.sequences.clone();
        let (d_logp, d_entropy) = meter.part(Part::Objective, || {
            let mut start = 0;
            for &idx in &sequences {
                start += self.members[idx].set_numbers(&scores, start);
            }
            self.evaluate(&sequences, Some(work_idx), tallies)?;
            Ok::<_, Error>(self.work[work_idx].gradients(&self.members))
        })?;
        meter.part_on(Part::Backward, &device, || {
            learner.backward(pass, Some((&d_logp, &d_entropy)), n_microbatches)
        })?;
        meter.part(Part::Beside, || {
            let mut alternatives = alternatives.wait().into_iter();
            for &idx in &sequences {
                let member = &mut self.members[idx];
                member.alternatives = alternatives.by_ref().take(member.logp.len()).collect();
            }
        });
        meter.add(sequences.len(), d_logp.len());
        Ok(())
    }

    /// Takes over what other ranks have computed of their micro-batches; this rank has `computed` these members.
    /// All ranks then know every member's scores and effects.
    fn share(&mut self, learner: &Learner, computed: &[usize], tallies: &mut [SequenceTally]) -> Result<()> {
        let scored: Vec<_> = computed.iter().map(|&idx| (idx, self.members[idx].scores())).collect();
        let mut foreign = Vec::new();
        for (idx, scores) in all_scores(&*learner.ranks, &scored)? {
            if !computed.contains(&idx) {
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
        let packing = self.plan.packing(learner.model.policy.config());
        self.work.extend(work(packing, &self.members, &waiting, Tokens::Deferred(deferral))?);
        let options = HeadOptions { n_alternatives: 0, ..head_options(self.plan) };
        let deferred = &self.work[n_done..];
        let meter = self.context.meter;
        for round in rounds(deferred.len(), &*learner.ranks) {
            if let Some(work) = round.microbatch_idx.map(|idx| &deferred[idx]) {
                let batch = meter.part(Part::Pack, || work.batch(&self.members));
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

    /// The effects of scored members under the calibration, by all threads. `microbatch` is named in errors.
    fn evaluate(
        &mut self,
        members: &[usize],
        microbatch: Option<usize>,
        tallies: &mut [SequenceTally],
    ) -> Result<()> {
        let Self { plan, calibration, .. } = self;
        let mut is_scored = vec![false; self.members.len()];
        for &idx in members {
            is_scored[idx] = true;
        }
        let scored = self.members.par_iter_mut().zip(tallies).enumerate().filter(|(idx, _)| is_scored[*idx]);
        let evaluated: Vec<std::result::Result<(), ObjectiveError>> = scored
            .map(|(idx, (member, tally))| {
                let mut effects = vec![TokenEffect::default(); member.logp.len()];
                *tally = plan.objective.evaluate(calibration, idx, &member.signals(), &mut effects)?;
                member.effects = effects;
                Ok(())
            })
            .collect();
        let wrap = |source| Error::Objective { step: self.context.step, microbatch, source };
        evaluated.into_iter().collect::<std::result::Result<(), _>>().map_err(wrap)
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
    /// anew, its own on each rank; `None` if every gradient is finite and only their sum is not. The run ends with it.
    fn find_bad_microbatch(&self, learner: &mut Learner, pass: &mut Pass) -> Result<Option<usize>> {
        let mut found = None;
        let (rank, world) = (learner.ranks.rank(), learner.ranks.world());
        for (work_idx, work) in self.work.iter().enumerate().skip(rank).step_by(world) {
            let policy = &learner.model.policy;
            pass.forward(policy, &work.batch(&self.members), head_options(self.plan))?;
            let (d_logp, d_entropy) = work.gradients(&self.members);
            if !learner.is_finite_backward(pass, (&d_logp, &d_entropy))? {
                found = Some(work_idx);
                break;
            }
        }
        let found = found.map_or(u64::MAX, |idx| idx as u64);
        let all = learner.ranks.all_gather(&found.to_le_bytes())?;
        let indices = all.iter().flat_map(|bytes| words(bytes)).map(u64::from_le_bytes);
        Ok(indices.filter(|idx| *idx != u64::MAX).min().map(|idx| idx as usize))
    }

    /// Counts the tokens by quadrant, after every member's effects are known and before they are scaled.
    fn census(&self) -> Census {
        let tau_h = self.calibration.tau_h().unwrap_or(f64::INFINITY);
        let mut census = Census::new(Thresholds { tau_p: self.calibration.tau_p(), tau_h });
        for member in &self.members {
            member.observed().for_each(|token| census.add(&token));
        }
        census
    }

    /// Scales the effects.
    fn close(mut self, tally: Tally, census: Census, stepped: OptimizerStep) -> Learned<'a> {
        self.members.par_iter_mut().for_each(|member| tally.scale_effects(&mut member.effects));
        let exactness_max_abs = self.members.par_iter().map(Member::distance).reduce(|| 0.0, f64::max);
        let OptimizerStep { gradient_norm, learning_rate, unreached, has_moved } = stepped;
        Learned {
            tau_h: self.calibration.tau_h(),
            members: self.members,
            tally,
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
    let waits = |(idx, member): (usize, &Member)| {
        let mut effects = vec![TokenEffect::default(); member.logp.len()];
        plan.objective.evaluate(&calibration, idx, &member.signals(), &mut effects)?;
        Ok(deferral.has_waited(&effects))
    };
    let waiting: Vec<_> = members.par_iter().enumerate().map(waits).collect();
    let mut n_waiting = 0;
    let mut n_all = 0;
    for (member, waits) in members.iter().zip(waiting) {
        let n_tokens = member.scored.rollout.tokens.len();
        n_all += n_tokens;
        n_waiting += if waits? { n_tokens } else { 0 };
    }
    Ok((n_waiting as f64) < DEFERRED_SHARE * n_all as f64)
}
