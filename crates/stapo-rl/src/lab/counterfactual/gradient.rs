//! What silenced tokens would do to the weights: their part of the real gradient, and where that part points.

use crate::error::Result;
use crate::learn::carried::Carried;
use crate::learn::constants::RolledOut;
use crate::learn::scoring::{MarkedTokens, Sequence};
use crate::learn::update::{GradientParts, MinibatchContext, gradient_parts, likelihood_gradient};
use crate::plan::config::Plan;
use crate::rollout::{Beginning, continuations};
use crate::train::Trainer;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use stapo_core::random::Key;
use stapo_core::stats::{Estimate, StatsError, mean_estimate};
use stapo_core::{Problem, Rollout, Verdict};

/// The gradient of the first mini-batch of a step, split by what the masks took out of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GradientEffect {
    pub step: u64,
    pub n_tokens: usize,
    pub n_silenced: usize,
    /// The squared norm of the silenced tokens' part over that of the whole gradient, in which they are kept.
    pub silenced_share: f64,
    /// The cosine of the angle between the silenced tokens' part and the rest; absent if one of them is 0.
    pub cosine_with_kept: Option<f64>,
    /// Right responses to held-out problems, sampled by the same policy.
    pub n_answers: usize,
    /// First-order change of their mean log-prob by a plain step of the learning rate along each part, nats per response:
    /// positive where the part makes right answers likelier. Absent if no held-out response was right.
    pub answers_by_silenced: Option<f64>,
    pub answers_by_kept: Option<f64>,
    /// The cosine of the angle between the step along each part and the steepest rise of that log-prob.
    pub answers_cosine_silenced: Option<f64>,
    pub answers_cosine_kept: Option<f64>,
}

/// Splits the gradient of the trainer's next step, whose batch is `rolled`. `n_problems` held-out problems are answered once
/// each.
pub fn gradient_effect(
    trainer: &mut Trainer,
    plan: &Plan,
    rolled: &RolledOut,
    n_problems: usize,
    seed: u64,
) -> Result<GradientEffect> {
    let step = trainer.learner.counters.step + 1;
    let answers = right_answers(trainer, plan, n_problems, Key::new(seed).with(step))?;
    let meter = trainer.meter();
    let mut carried = Carried::read(&trainer.learner.loop_state)?;
    let context = MinibatchContext { step, use_idx: 0, pass: 0, meter: &meter };
    let minibatches = rolled.minibatches(plan);
    let pass = trainer.memory.update(&mut trainer.learner.gradients);
    let parts = gradient_parts(&mut trainer.learner, pass, &mut carried, plan, minibatches[0], context)?;
    let sequences: Vec<Sequence> = answers.iter().map(Sequence::from).collect();
    let rise = if sequences.is_empty() {
        None
    } else {
        Some(likelihood_gradient(&trainer.learner, pass, plan, &sequences)?)
    };
    let learning_rate = plan.learning_rate(trainer.learner.counters.n_updates);
    Ok(effect(step, &parts, rise.as_deref(), answers.len(), learning_rate))
}

fn effect(
    step: u64,
    parts: &GradientParts,
    rise: Option<&[f32]>,
    n_answers: usize,
    learning_rate: f64,
) -> GradientEffect {
    let GradientParts { kept, silenced, n_tokens, n_silenced, scale } = parts;
    let (of_kept, of_silenced, both) = (dot(kept, kept), dot(silenced, silenced), dot(kept, silenced));
    let whole = of_kept + of_silenced + 2.0 * both;
    // With the steepest rise of right answers. Both gradients are of losses, so a positive product is a rise of the log-prob by a
    // step down the loss.
    let towards = rise.map(|rise| (dot(kept, rise), dot(silenced, rise), dot(rise, rise)));
    let change = |product: f64| learning_rate * scale * product;
    GradientEffect {
        step,
        n_tokens: *n_tokens,
        n_silenced: *n_silenced,
        silenced_share: if whole > 0.0 { of_silenced / whole } else { 0.0 },
        cosine_with_kept: cosine(both, of_kept, of_silenced),
        n_answers,
        answers_by_silenced: towards.map(|(_, silenced, _)| change(silenced)),
        answers_by_kept: towards.map(|(kept, _, _)| change(kept)),
        answers_cosine_silenced: towards
            .and_then(|(_, silenced, of_rise)| cosine(silenced, of_silenced, of_rise)),
        answers_cosine_kept: towards.and_then(|(kept, _, of_rise)| cosine(kept, of_kept, of_rise)),
    }
}

/// The sum of the products of two gradients, by chunks whose sums are added in order: the same bits with any number of threads.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    const CHUNK: usize = 1 << 16;
    let of_chunk =
        |(a, b): (&[f32], &[f32])| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    let sums: Vec<f64> = a.par_chunks(CHUNK).zip(b.par_chunks(CHUNK)).map(of_chunk).collect();
    sums.iter().sum()
}

fn cosine(product: f64, a: f64, b: f64) -> Option<f64> {
    let size = (a * b).sqrt();
    (size > 0.0).then(|| product / size)
}

/// Held-out problems answered by the policy once each; the right answers, each as a sequence that begins with its prompt.
fn right_answers(
    trainer: &mut Trainer,
    plan: &Plan,
    n_problems: usize,
    key: Key,
) -> Result<Vec<MarkedTokens>> {
    let problems = trainer.task.held_out(n_problems);
    let model = &trainer.learner.model;
    let prompting = model.prompting(&plan.style)?;
    let prompts: Vec<Vec<u32>> =
        problems.iter().map(|problem| prompting.tokens(problem)).collect::<Result<_>>()?;
    let numbered = problems.iter().zip(&prompts).enumerate();
    let beginnings: Vec<Beginning> = numbered
        .map(|(number, (problem, prompt))| Beginning {
            number: number as u64,
            problem_id: &problem.id,
            prompt,
            tokens: Vec::new(),
        })
        .collect();
    let meter = trainer.meter();
    let memory = trainer.memory.sample();
    let sampled = continuations(model, memory, plan, &beginnings, (key, 1), &meter)?;
    let tokenizer = model.tokenizer()?;
    let texts: Vec<String> =
        sampled.iter().map(|responses| Ok(tokenizer.decode(&responses[0])?)).collect::<Result<_>>()?;
    let pairs: Vec<(&Problem, &str)> = problems.iter().zip(texts.iter().map(String::as_str)).collect();
    let judged = trainer.task.judge(&pairs)?;
    let answered = prompts.into_iter().zip(sampled).zip(judged);
    let right = answered.filter(|(_, judged)| judged.verdict == Verdict::Right);
    Ok(right.map(|((prompt, sampled), _)| Rollout::one_turn(&prompt, &sampled[0])).collect())
}

/// The means over steps, with the step as the unit of chance.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GradientSummary {
    pub n_steps: usize,
    pub n_tokens: usize,
    pub n_silenced: usize,
    pub silenced_share: Estimate,
    pub cosine_with_kept: Option<Estimate>,
    pub answers_by_silenced: Option<Estimate>,
    pub answers_by_kept: Option<Estimate>,
    pub answers_cosine_silenced: Option<Estimate>,
    pub answers_cosine_kept: Option<Estimate>,
}

/// The means of at least one step.
pub fn gradient_summary(steps: &[GradientEffect]) -> std::result::Result<GradientSummary, StatsError> {
    let mean = |value: fn(&GradientEffect) -> Option<f64>| {
        let values: Vec<f64> = steps.iter().filter_map(value).collect();
        if values.is_empty() { Ok(None) } else { mean_estimate(&values).map(Some) }
    };
    let shares: Vec<f64> = steps.iter().map(|step| step.silenced_share).collect();
    Ok(GradientSummary {
        n_steps: steps.len(),
        n_tokens: steps.iter().map(|step| step.n_tokens).sum(),
        n_silenced: steps.iter().map(|step| step.n_silenced).sum(),
        silenced_share: mean_estimate(&shares)?,
        cosine_with_kept: mean(|step| step.cosine_with_kept)?,
        answers_by_silenced: mean(|step| step.answers_by_silenced)?,
        answers_by_kept: mean(|step| step.answers_by_kept)?,
        answers_cosine_silenced: mean(|step| step.answers_cosine_silenced)?,
        answers_cosine_kept: mean(|step| step.answers_cosine_kept)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: |kept|^2 = 5, |silenced|^2 = 25, their product 3.
    #[test]
    fn parts_are_compared_with_the_whole_and_with_the_rise_of_right_answers() {
        let parts = GradientParts {
            kept: vec![1.0, 2.0, 0.0],
            silenced: vec![3.0, 0.0, 4.0],
            n_tokens: 7,
            n_silenced: 2,
            scale: 0.5,
        };
        let found = effect(4, &parts, Some(&[1.0, 1.0, 1.0]), 6, 0.1);
        let expected = GradientEffect {
            step: 4,
            n_tokens: 7,
            n_silenced: 2,
            silenced_share: 25.0 / 36.0,
            cosine_with_kept: Some(3.0 / 125f64.sqrt()),
            n_answers: 6,
            answers_by_silenced: Some(0.1 * 0.5 * 7.0),
            answers_by_kept: Some(0.1 * 0.5 * 3.0),
            answers_cosine_silenced: Some(7.0 / 75f64.sqrt()),
            answers_cosine_kept: Some(3.0 / 15f64.sqrt()),
        };
        assert_eq!(found, expected);
        let none = GradientParts { kept: vec![0.0; 3], silenced: vec![0.0; 3], ..parts };
        let nothing = effect(4, &none, None, 0, 0.1);
        assert_eq!(
            (nothing.silenced_share, nothing.cosine_with_kept, nothing.answers_by_kept),
            (0.0, None, None)
        );
        // Chunks and what is left of the last one.
        let long: Vec<f32> = (0..200_000u32).map(|i| (i % 7) as f32).collect();
        assert_eq!(dot(&long, &long), (0..200_000u32).map(|i| f64::from((i % 7) * (i % 7))).sum::<f64>());
        let summary = gradient_summary(&[found, nothing]).unwrap();
        assert_eq!((summary.n_steps, summary.n_silenced), (2, 4));
        assert_eq!(summary.answers_by_kept.unwrap().n_questions, 1);
    }
}
