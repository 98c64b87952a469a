//! What a step tells: metrics, sampled responses, silenced tokens.

use crate::error::Result;
use crate::policy::Student;
use crate::rollout::{RolledOut, accuracy};
use crate::update::{Learned, Member};
use stapo_core::Finish;
use stapo_core::diagnostics::theory::entropy_change_of_sample;
use stapo_core::diagnostics::{Quadrant, QuadrantCensus};
use stapo_core::objective::MaskKind;
use stapo_core::record::{
    Alternative, EntropyChange, EntropyQuantiles, Extra, Metrics, ResponseRecord, SCHEMA, TokenColumns,
    TokenRecord, TokensPerSecond,
};
use stapo_core::stats::quantile_sorted;
use std::time::Instant;

/// How long each phase of a step took.
pub struct Phases {
    at: Instant,
    rollout_rate: f64,
    update_rate: f64,
}

impl Phases {
    pub fn start() -> Self {
        Phases { at: Instant::now(), rollout_rate: 0.0, update_rate: 0.0 }
    }

    fn lap(&mut self, n_tokens: usize) -> f64 {
        let rate = n_tokens as f64 / self.at.elapsed().as_secs_f64().max(1e-9);
        self.at = Instant::now();
        rate
    }

    pub fn rolled_out(&mut self, n_tokens: usize) {
        self.rollout_rate = self.lap(n_tokens);
    }

    pub fn updated(&mut self, learned: &[Learned]) {
        self.update_rate = self.lap(learned.iter().map(|update| update.tally.n_tokens).sum());
    }
}

/// The line of a step.
pub fn metrics(step: u64, rolled: &RolledOut, learned: &[Learned], phases: &Phases) -> Metrics {
    let responses: Vec<_> = rolled.batch.responses().collect();
    let n_responses = responses.len().max(1) as f64;
    let mean =
        |of: &dyn Fn(&stapo_core::Scored) -> f64| responses.iter().map(|s| of(s)).sum::<f64>() / n_responses;
    let mut entropies: Vec<f64> =
        responses.iter().flat_map(|s| &s.rollout.entropy).map(|&entropy| f64::from(entropy)).collect();
    entropies.sort_by(f64::total_cmp);
    let n_updates = learned.len().max(1) as f64;
    let average = |of: &dyn Fn(&Learned) -> f64| learned.iter().map(of).sum::<f64>() / n_updates;
    let count = |of: &dyn Fn(&Learned) -> usize| learned.iter().map(of).sum::<usize>();
    Metrics {
        schema: SCHEMA,
        step,
        reward_mean: mean(&|s| s.reward),
        accuracy: accuracy(&rolled.batch),
        eval_accuracy: None,
        eval_accuracy_before: None,
        response_tokens_mean: mean(&|s| s.rollout.tokens.len() as f64),
        truncated_share: mean(&|s| f64::from(u8::from(s.rollout.finish == Finish::LengthLimit))),
        entropy_mean: entropies.iter().sum::<f64>() / entropies.len().max(1) as f64,
        entropy_quantiles: quantiles(&entropies),
        n_tokens: count(&|u| u.tally.n_tokens),
        n_kept: count(&|u| u.tally.n_kept),
        n_candidates: count(&|u| u.tally.n_candidates),
        n_silenced: count(&|u| u.tally.n_silenced),
        tau_h: learned.first().and_then(|update| update.tau_h),
        clip_fraction: average(&|u| u.tally.clip_fraction),
        ratio_min: learned.iter().map(|u| u.tally.ratio_min).fold(f64::INFINITY, f64::min),
        ratio_max: learned.iter().map(|u| u.tally.ratio_max).fold(0.0, f64::max),
        loss: average(&|u| u.tally.loss),
        learning_rate: learned.last().map_or(0.0, |update| update.learning_rate),
        gradient_norm: average(&|u| u.gradient_norm),
        silenced_gradient_share: average(&|u| u.census.silenced_gradient_share()),
        quadrants: learned
            .first()
            .map_or(Vec::new(), |update| Vec::<QuadrantCensus>::from(update.census.rows())),
        entropy_change: entropy_change(learned),
        exactness_max_abs: learned.first().map_or(0.0, |update| update.exactness_max_abs),
        tokens_per_second: TokensPerSecond { rollout: phases.rollout_rate, update: phases.update_rate },
        extra: Extra::new(),
    }
}

fn quantiles(sorted: &[f64]) -> EntropyQuantiles {
    let at = |q| if sorted.is_empty() { 0.0 } else { quantile_sorted(sorted, q) };
    EntropyQuantiles { q05: at(0.05), q25: at(0.25), q50: at(0.5), q75: at(0.75), q95: at(0.95) }
}

/// All updates but the last against the entropy they left for the last mini-batch.
fn entropy_change(learned: &[Learned]) -> Option<EntropyChange> {
    let (last, before) = learned.split_last().filter(|(_, before)| !before.is_empty())?;
    let predicted = before.iter().map(|update| {
        let kept = update.members.iter().flat_map(Member::observed).filter(|token| token.effect.kept);
        let changes = kept.map(|token| {
            entropy_change_of_sample(update.learning_rate, token.logp, token.entropy, token.effect.weight)
        });
        changes.sum::<f64>() / update.tally.n_kept.max(1) as f64
    });
    let pairs = last.members.iter().flat_map(|member| member.entropy.iter().zip(&member.behavior_entropy));
    let measured = pairs.map(|(now, then)| now - then).sum::<f64>() / last.tally.n_tokens.max(1) as f64;
    Some(EntropyChange { predicted: predicted.sum(), measured })
}

/// The first `n` responses of the step, with every token.
pub fn response_records(
    step: u64,
    student: &Student,
    learned: &[Learned],
    n: usize,
) -> Result<Vec<ResponseRecord>> {
    let numbered = learned.iter().enumerate();
    let members = numbered.flat_map(|(idx, update)| update.members.iter().map(move |m| (idx, update, m)));
    members
        .take(n)
        .map(|(update_idx, update, member)| {
            let rollout = &member.scored.rollout;
            Ok(ResponseRecord {
                schema: SCHEMA,
                step,
                problem_id: member.group.problem.id.clone(),
                sample_idx: rollout.sample_idx,
                prompt: member.group.problem.prompt.clone(),
                reference: member.group.problem.reference.clone(),
                text: student.tokenizer.decode(&rollout.tokens)?,
                verdict: member.scored.verdict,
                reward: member.scored.reward,
                advantage: member.advantage,
                finish: rollout.finish,
                update_idx,
                tau_h: update.tau_h,
                tokens: columns(student, member)?,
                extra: Extra::new(),
            })
        })
        .collect()
}

fn columns(student: &Student, member: &Member) -> Result<TokenColumns> {
    let tokens = &member.scored.rollout.tokens;
    Ok(TokenColumns {
        id: tokens.clone(),
        text: tokens.iter().map(|&id| Ok(student.tokenizer.decode_all(&[id])?)).collect::<Result<_>>()?,
        logp: member.logp.clone(),
        behavior_logp: member.behavior_logp.clone(),
        entropy: member.entropy.clone(),
        collision: member.collision.clone(),
        ratio: member.effects.iter().map(|effect| effect.ratio).collect(),
        kept: member.effects.iter().map(|effect| effect.kept).collect(),
        silenced_by: member.effects.iter().map(|effect| effect.silenced_by).collect(),
        clipped: member.effects.iter().map(|effect| effect.clipped).collect(),
        weight: member.effects.iter().map(|effect| effect.weight).collect(),
        d_logp: member.effects.iter().map(|effect| effect.d_logp).collect(),
        alternatives: (0..tokens.len()).map(|t| alternatives(student, member, t)).collect::<Result<_>>()?,
    })
}

fn alternatives(student: &Student, member: &Member, token_idx: usize) -> Result<Vec<Alternative>> {
    let listed = member.alternatives.get(token_idx).into_iter().flatten();
    listed
        .map(|&(id, logp)| {
            Ok(Alternative { id, text: student.tokenizer.decode_all(&[id])?, logp: f64::from(logp) })
        })
        .collect()
}

/// Tokens of context on each side of a silenced one.
const CONTEXT_TOKENS: usize = 12;

/// Every silenced token with its context. Masks that keep a chosen share (top entropy, Lopti's passes) are told by counts alone.
pub fn silenced_records(step: u64, student: &Student, learned: &[Learned]) -> Result<Vec<TokenRecord>> {
    let by_choice = |kind: &MaskKind| !matches!(kind, MaskKind::TopEntropy | MaskKind::LowProbabilityFirst);
    token_records(step, student, learned, |_, member, t| {
        member.effects[t].silenced_by.as_ref().is_some_and(by_choice)
    })
}

/// Every S2T candidate that stayed in the update: rewarded, improbable, kept.
pub fn explored_records(step: u64, student: &Student, learned: &[Learned]) -> Result<Vec<TokenRecord>> {
    token_records(step, student, learned, |update, member, t| {
        let quadrant = Quadrant::of(member.logp[t], member.entropy[t], update.census.thresholds);
        let is_improbable =
            matches!(quadrant, Quadrant::ImprobableHighEntropy | Quadrant::ImprobableLowEntropy);
        member.effects[t].kept && member.advantage > 0.0 && is_improbable
    })
}

fn token_records(
    step: u64,
    student: &Student,
    learned: &[Learned],
    is_told: impl Fn(&Learned, &Member, usize) -> bool,
) -> Result<Vec<TokenRecord>> {
    let mut records = Vec::new();
    for (update, member) in learned.iter().flat_map(|update| update.members.iter().map(move |m| (update, m)))
    {
        let observed = member.observed();
        for token_idx in (0..observed.len()).filter(|&t| is_told(update, member, t)) {
            let rollout = &member.scored.rollout;
            let tokens = &rollout.tokens;
            let before = token_idx.saturating_sub(CONTEXT_TOKENS)..token_idx;
            let after = token_idx + 1..tokens.len().min(token_idx + 1 + CONTEXT_TOKENS);
            records.push(TokenRecord {
                schema: SCHEMA,
                step,
                problem_id: member.group.problem.id.clone(),
                sample_idx: rollout.sample_idx,
                token_idx,
                id: tokens[token_idx],
                text: student.tokenizer.decode_all(&tokens[token_idx..=token_idx])?,
                silenced_by: member.effects[token_idx].silenced_by,
                logp: member.logp[token_idx],
                entropy: member.entropy[token_idx],
                advantage: member.advantage,
                gradient_norm: observed[token_idx].gradient_norm_squared().sqrt(),
                context_before: student.tokenizer.decode_all(&tokens[before])?,
                context_after: student.tokenizer.decode_all(&tokens[after])?,
                alternatives: alternatives(student, member, token_idx)?,
                extra: Extra::new(),
            });
        }
    }
    Ok(records)
}
