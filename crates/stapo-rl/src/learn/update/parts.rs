//! The gradient of a mini-batch in two parts: what the masks leave of it, and what they take away.

use super::member::members;
use super::{Minibatch, MinibatchContext};
use crate::error::{Error, Result};
use crate::learn::carried::Carried;
use crate::learn::constants::ResponseConstants;
use crate::learn::learner::Learner;
use crate::learn::scoring::{Sequence, head_options, microbatches, packed};
use crate::plan::config::Plan;
use stapo_core::objective::{ObjectiveSpec, SequenceTally};
use stapo_core::{Group, TokenEffect};
use stapo_model::decoder::{Gradients, Pass};

/// The two parts, each a sum over tokens of the derivative of the loss by every weight, before the division by the number of
/// tokens. Their sum is the gradient of the same objective without masks.
pub struct GradientParts {
    pub kept: Vec<f32>,
    pub silenced: Vec<f32>,
    pub n_tokens: usize,
    pub n_silenced: usize,
    /// What the objective without masks multiplies its sum by.
    pub scale: f64,
}

/// Both parts of the gradient of a mini-batch. No optimizer step is made, and the gradients are cleared.
pub fn gradient_parts(
    learner: &mut Learner,
    pass: &mut Pass,
    carried: &mut Carried,
    plan: &Plan,
    (groups, constants): (&[Group], &[ResponseConstants]),
    context: MinibatchContext,
) -> Result<GradientParts> {
    let members = members(plan, groups, constants, learner.counters.n_updates);
    let mut minibatch = Minibatch::prepare(learner, pass, carried, plan, members, context)?;
    if minibatch.deferral.is_some() {
        return Err(Error::Misfit {
            key: "rollout.source",
            problem: "the responses are of another policy, so their masks are not known before the update"
                .into(),
            remedy: "look at a run that sampled its own responses",
        });
    }
    minibatch.accumulate(learner, pass)?;
    learner.gradients.clear();
    let kept = minibatch.gradient(learner, pass)?;
    let effects = || minibatch.members.iter().flat_map(|member| &member.effects);
    let n_tokens = effects().count();
    let n_silenced = effects().filter(|effect| effect.silenced_by.is_some()).count();
    let scale = minibatch.keep_what_masks_took()?;
    let silenced = minibatch.gradient(learner, pass)?;
    Ok(GradientParts { kept, silenced, n_tokens, n_silenced, scale })
}

impl Minibatch<'_, '_> {
    /// The gradient that the members' effects give, all weights in a row.
    fn gradient(&self, learner: &Learner, pass: &mut Pass) -> Result<Vec<f32>> {
        let policy = &learner.model.policy;
        let mut gradients = Gradients::zeros(policy)?;
        for work in &self.work {
            pass.forward(policy, &work.batch(&self.members), head_options(self.plan))?;
            let (d_logp, d_entropy) = work.gradients(&self.members);
            pass.backward(policy, &d_logp, &d_entropy, &mut gradients)?;
        }
        Ok(gradients.in_a_row())
    }

    /// Replaces every effect by the difference between that of the objective without masks and its own. Backward is linear in
    /// these derivatives, so this is the difference of two backward passes without the cancellation of their sums. Returns
    /// the scale of the objective without masks.
    fn keep_what_masks_took(&mut self) -> Result<f64> {
        let wrap = |source| Error::Objective { step: self.context.step, microbatch: None, source };
        let bare = ObjectiveSpec { masks: Vec::new(), ..self.plan.objective.clone() };
        let signals: Vec<_> = self.members.iter().map(super::Member::signals).collect();
        let calibration = bare.calibrate(&signals, self.key).map_err(wrap)?;
        let mut tallies: Vec<SequenceTally> = Vec::new();
        for idx in 0..self.members.len() {
            let mut effects = vec![TokenEffect::default(); self.members[idx].logp.len()];
            let signals = self.members[idx].signals();
            tallies.push(bare.evaluate(&calibration, idx, &signals, &mut effects).map_err(wrap)?);
            for (effect, masked) in effects.iter_mut().zip(&self.members[idx].effects) {
                effect.d_logp -= masked.d_logp;
                effect.d_entropy -= masked.d_entropy;
            }
            self.members[idx].effects = effects;
        }
        Ok(bare.total(&tallies).scale)
    }
}

/// The gradient of minus the mean log-prob of the responses, all weights in a row.
pub fn likelihood_gradient(
    learner: &Learner,
    pass: &mut Pass,
    plan: &Plan,
    responses: &[Sequence],
) -> Result<Vec<f32>> {
    let policy = &learner.model.policy;
    let mut gradients = Gradients::zeros(policy)?;
    let packing = plan.packing(policy.config());
    for microbatch in microbatches(responses, packing)? {
        let chosen: Vec<Sequence> = microbatch.sequences.iter().map(|&idx| responses[idx]).collect();
        let batch = packed(&chosen, packing);
        pass.forward(policy, &batch, head_options(plan))?;
        let d_logp = vec![-1.0 / responses.len() as f32; batch.n_scored()];
        pass.backward(policy, &d_logp, &vec![0.0; batch.n_scored()], &mut gradients)?;
    }
    Ok(gradients.in_a_row())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::Config;
    use crate::reward::Programs;
    use crate::train::Trainer;
    use stapo_model::{CpuOptions, Device};

    /// The parts of the first mini-batch of a small run with these masks.
    fn parts(masks: &str) -> GradientParts {
        let settings = [
            "rollout.problems_per_step=4",
            "update.problems_per_minibatch=4",
            &format!("objective={{preset=\"stapo\", masks={masks}}}"),
        ];
        let plan = Plan::resolve(Config::from_toml("", settings).unwrap()).unwrap();
        let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() });
        let mut trainer = Trainer::new(&plan, &device, Programs::Recorded).unwrap();
        let rolled = trainer.roll_out(&plan).unwrap();
        let meter = trainer.meter();
        let context = MinibatchContext { step: 1, use_idx: 0, pass: 0, meter: &meter };
        let mut carried = Carried::read(&trainer.learner.loop_state).unwrap();
        let pass = trainer.memory.update(&mut trainer.learner.gradients);
        let minibatch = rolled.minibatches(&plan)[0];
        gradient_parts(&mut trainer.learner, pass, &mut carried, &plan, minibatch, context).unwrap()
    }

    #[test]
    fn the_parts_add_up_to_the_gradient_without_masks() {
        let masked = parts("[{kind=\"spurious\", tau_p=0.3}]");
        let whole = parts("[]");
        assert!(masked.n_silenced > 0 && whole.n_silenced == 0);
        assert_eq!((masked.n_tokens, masked.scale), (whole.n_tokens, whole.scale));
        assert!(whole.silenced.iter().all(|value| *value == 0.0));
        let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt();
        // The difference of two backward passes, with the silenced tokens and without them.
        let difference: Vec<f32> =
            whole.kept.iter().zip(&masked.kept).map(|(all, kept)| all - kept).collect();
        let miss: Vec<f32> = difference.iter().zip(&masked.silenced).map(|(a, b)| a - b).collect();
        assert!(norm(&masked.silenced) > 0.0);
        assert!(norm(&miss) < 1e-4 * norm(&whole.kept), "{} of {}", norm(&miss), norm(&whole.kept));
    }
}
