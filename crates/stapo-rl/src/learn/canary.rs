//! Checks of every step: conditions that stop a run, and conditions that warn.

use crate::error::{Error, Result};
use crate::learn::update::Learned;
use crate::plan::config::{CanaryConfig, Plan, RolloutSourceSpec};
use crate::policy::loaded::LoadedModel;
use crate::reward::{VerifierSpec, left_to_grader};
use rayon::prelude::*;
use stapo_core::record::Metrics;
use stapo_core::{Batch, Finish, Group, Scored, Verdict};
use stapo_verify::Rules;

/// Stops a run whose update is broken: log-probs of sampling and training differ, a tensor has no gradient, or no
/// weight has changed.
pub fn check_learned(plan: &Plan, step: u64, learned: &Learned) -> Result<()> {
    if !plan.config.canaries.enabled {
        return Ok(());
    }
    let stop = |canary, problem, remedy| Err(Error::Canary { step, canary, problem, remedy });
    let is_watched = plan.config.rollout.source.is_none() && learned.exactness_max_abs != 0.0;
    let on_policy = learned.members.iter().filter(|member| is_watched && member.is_on_policy);
    let mut different = on_policy.flat_map(|m| {
        let differs = |&t: &usize| m.logp[t] != m.behavior_logp[t];
        (0..m.logp.len()).filter(differs).map(move |t| (m, t))
    });
    if let Some((member, token)) = different.next() {
        return stop(
            "exactness",
            format!(
                "problem {} sample {} token {token}: logp {} in training, {} when sampled",
                member.group.problem.id,
                member.scored.rollout.sample_idx,
                member.logp[token],
                member.behavior_logp[token]
            ),
            "rollout and training must agree to the bit; this is a defect of the engine, please report it",
        );
    }
    if let Some(name) = learned.unreached.first() {
        // Where ratios are clipped, what is left may be equal tokens of a right and of a wrong response, which cancel.
        let may_cancel = learned.gradient_norm == 0.0 && learned.members.iter().all(|m| !m.is_on_policy);
        let has_contrast = learned.members.iter().any(|m| m.effects.iter().any(|e| e.d_logp != 0.0));
        if has_contrast && !may_cancel {
            return stop(
                "gradient",
                format!("{name} and {} more tensors got no gradient", learned.unreached.len() - 1),
                "every tensor takes part in the forward pass; check the model's config",
            );
        }
    }
    if !learned.has_moved && learned.gradient_norm > 0.0 {
        return stop(
            "weights",
            format!("an update at learning rate {:e} changed no weight", learned.learning_rate),
            "raise update.learning_rate: steps below the weights' precision are lost",
        );
    }
    Ok(())
}

/// Says which canaries cannot watch over a run.
pub fn switched_off(plan: &Plan) -> Vec<String> {
    let off = plan.config.rollout.source.iter();
    off.map(|RolloutSourceSpec::Jsonl { path, .. }| {
        format!(
            "the canary exactness is off: the rollouts come from {}, sampled by another engine",
            path.display()
        )
    })
    .collect()
}

/// Stops a run in which the verifier cannot judge too many responses.
pub fn check_verdicts(plan: &Plan, step: u64, batch: &Batch) -> Result<()> {
    let limit = plan.config.canaries.max_unjudged_share;
    let n = batch.responses().count().max(1) as f64;
    // A program that goes over a limit of time has been judged.
    let judges_programs = matches!(plan.rewards[0].verifier, VerifierSpec::Code(_));
    let unjudged = |verdict| match verdict {
        Verdict::OverBudget => !judges_programs,
        verdict => verdict == Verdict::Unparsable,
    };
    let share = batch.responses().filter(|scored| unjudged(scored.verdict)).count() as f64 / n;
    if plan.config.canaries.enabled && share > limit {
        return Err(Error::Canary {
            step,
            canary: "verifier",
            problem: format!(
                "{:.1} % of the responses could not be judged, the limit is {:.1} %",
                100.0 * share,
                100.0 * limit
            ),
            remedy: "look at rollouts/ for what the model writes; the task's verifier or prompt does not fit it",
        });
    }
    Ok(())
}

/// Warnings about a step: a policy that has drifted far from that of the `first` step. A drift that the step `before` had too
/// was warned of when it began.
pub fn warnings(
    plan: &Plan,
    first: Option<&Metrics>,
    before: Option<&Metrics>,
    metrics: &Metrics,
) -> Vec<String> {
    let canaries = &plan.config.canaries;
    let Some(first) = first.filter(|_| canaries.enabled) else { return Vec::new() };
    let known = before.map_or_else(Vec::new, |before| drifts(canaries, first, before));
    let is_new = |drift: &Drift| known.iter().all(|(kind, _)| *kind != drift.0);
    drifts(canaries, first, metrics).into_iter().filter(is_new).map(|(_, text)| text).collect()
}

/// Warns of a step without contrast between rewards, and says what is the likely reason.
pub fn no_contrast(plan: &Plan, metrics: &Metrics, batch: &Batch) -> Option<String> {
    if !plan.config.canaries.enabled || !batch.groups.iter().all(Group::is_unanimous) {
        return None;
    }
    let limit = plan.config.rollout.max_response_tokens;
    let is_cut = |scored: &Scored| scored.rollout.finish == Finish::LengthLimit;
    let reason = if batch.responses().all(is_cut) {
        format!(
            "every response was cut at rollout.max_response_tokens = {limit} before it could answer; raise that setting"
        )
    } else if batch.responses().all(|scored| scored.verdict == Verdict::Right) {
        "every response is right, so the task is too easy".to_string()
    } else if batch.responses().all(|scored| scored.verdict == Verdict::NoAnswer) {
        "no response has an answer that the verifier finds; stapo problems shows the prompts".to_string()
    } else {
        "the task is too easy or too hard".to_string()
    };
    let step = metrics.step;
    Some(format!(
        "step {step}: every group has equal rewards, so nothing was learned: {reason} (warned once; `equal_rewards_share` counts such groups)"
    ))
}

/// Warns of a step whose right answers leave calculations to the grader: a policy that is rewarded for them learns to copy
/// the question into the box. `None` if the verifier is no rule that takes such answers.
pub fn answers_left_to_grader(
    plan: &Plan,
    step: u64,
    batch: &Batch,
    model: &LoadedModel,
) -> Result<Option<String>> {
    let VerifierSpec::Rule(rule) = &plan.rewards[0].verifier else { return Ok(None) };
    if !plan.config.canaries.enabled {
        return Ok(None);
    }
    let rules = Rules::from(*rule);
    let members =
        batch.groups.iter().flat_map(|group| group.members.iter().map(move |scored| (group, scored)));
    let right: Vec<_> = members.filter(|(_, scored)| scored.verdict == Verdict::Right).collect();
    let short = |text: &str| text.chars().take(60).collect::<String>();
    let example = |&(group, scored): &(&Group, &Scored)| -> Result<Option<String>> {
        let reference = &group.problem.reference;
        let text = model.text(scored.rollout.last_turn())?.unwrap_or_default();
        let answer = left_to_grader(&text, reference, rules);
        Ok(answer.map(|answer| format!("{:?} for {:?}", short(&answer), short(reference))))
    };
    let examples: Vec<_> = right.par_iter().map(example).collect::<Result<_>>()?;
    let left: Vec<String> = examples.into_iter().flatten().collect();
    Ok(is_worth_a_warning(left.len(), right.len()).then(|| {
        format!(
            "step {step}: {} of {} right answers leave a calculation to the grader, such as {}; the verifier's form = \
             \"worked-out\" takes no such answer",
            left.len(),
            right.len(),
            left[0]
        )
    }))
}

/// Whether so many of the right answers leave a calculation to the grader: a tenth or more, and not one or two by chance.
fn is_worth_a_warning(n_left: usize, n_right: usize) -> bool {
    n_left >= 3 && 10 * n_left >= n_right
}

/// What drifted, and a warning of it.
type Drift = (&'static str, String);

/// How far a step is from the first: entropies that fell or rose, responses that no longer end, and a judge that is exploited.
fn drifts(canaries: &CanaryConfig, first: &Metrics, now: &Metrics) -> Vec<Drift> {
    let mut found = Vec::new();
    if canaries.is_collapse(first.entropy_mean, now.entropy_mean) {
        found.push(("entropy fell", format!(
            "step {}: entropy fell from {:.3} to {:.3} nats; likely a learning rate too high or masks that remove exploration",
            now.step, first.entropy_mean, now.entropy_mean
        )));
    }
    if now.entropy_mean > canaries.entropy_explosion_factor * first.entropy_mean {
        found.push(("entropy rose", format!(
            "step {}: entropy rose from {:.3} to {:.3} nats; likely spurious tokens (see tokens/) or a learning rate too high",
            now.step, first.entropy_mean, now.entropy_mean
        )));
    }
    if no_longer_ends(first.truncated_share, now.truncated_share) {
        found.push(("truncated", format!(
            "step {}: {:.0} % of the responses were cut at their limit, {:.0} % in the first step; likely a policy that no longer ends them (see rollouts/); a lower learning rate or a KL term helps",
            now.step,
            100.0 * now.truncated_share,
            100.0 * first.truncated_share
        )));
    }
    if let (Some(before), Some(judge)) = (first.judge, now.judge) {
        let (before, excess) = (first.accuracy - before.rule_accuracy, now.accuracy - judge.rule_accuracy);
        if excess > before + JUDGE_EXCESS {
            found.push(("judge", format!(
                "step {}: {:.0} % of the responses are right by the judge's verdicts and {:.0} % by the rule, {:.0} points further apart than in the first step; likely a policy that exploits its judge (see rollouts/); stapo judge-test shows what fools the judge",
                now.step,
                100.0 * now.accuracy,
                100.0 * judge.rule_accuracy,
                100.0 * (excess - before)
            )));
        }
    }
    found
}

/// By how much the accuracy of a judge's verdicts may grow beyond the rule's before the canary warns.
const JUDGE_EXCESS: f64 = 0.1;

/// Whether a policy no longer ends its responses, given the share of responses cut at their limit and that of the run's first
/// step: at least half are cut, and more than twice as many as then.
pub fn no_longer_ends(first_share: f64, share: f64) -> bool {
    share >= 0.5 && share > 2.0 * first_share
}

#[cfg(test)]
mod tests;
