//! The records of a training step: metrics, sampled responses, silenced and explored tokens.

use crate::error::Result;
use crate::learn::constants::RolledOut;
use crate::learn::update::{Learned, Member};
use crate::plan::config::Plan;
use crate::policy::loaded::LoadedModel;
use crate::reward::VerifierSpec;
use crate::rollout::accuracy;
use rayon::prelude::*;
use stapo_core::diagnostics::QuadrantCensus;
use stapo_core::diagnostics::theory::entropy_change_of_sample;
use stapo_core::objective::{Advantages, MaskKind};
use stapo_core::program::category_in_response;
use stapo_core::record::{
    Alternative, EntropyChange, EntropyQuantiles, EpisodeMetrics, Extra, GivenTokens, JudgeMetrics,
    LengthQuantiles, Metrics, PhaseSeconds, ResponseRecord, ReuseRecord, ReusedUpdate, SCHEMA, TokenColumns,
    TokenRecord, TokensPerSecond,
};
use stapo_core::stats::quantile_sorted;
use stapo_core::{
    EpisodeTurn, Finish, Group, JudgeOpinion, Rollout, Scored, TokenCategory, TokenEffect, Verdict,
};
use stapo_model::Tokenizer;
use std::collections::BTreeMap;

/// The metrics of a step, without evaluations, counts over the run, and times, which are set when the step is done. Means
/// over updates leave out an update that the gate of reuse discarded.
pub fn metrics(plan: &Plan, step: u64, rolled: &RolledOut, learned: &[Learned]) -> Metrics {
    let responses: Vec<_> = rolled.batch.responses().collect();
    let n_responses = responses.len().max(1) as f64;
    let mean = |value: &dyn Fn(&Scored) -> f64| responses.iter().map(|s| value(s)).sum::<f64>() / n_responses;
    let mut entropies: Vec<f64> =
        responses.iter().flat_map(|s| &s.rollout.entropy).map(|&entropy| f64::from(entropy)).collect();
    entropies.par_sort_unstable_by(f64::total_cmp);
    let stepped: Vec<&Learned> = learned.iter().filter(|update| !update.is_gated()).collect();
    let n_updates = stepped.len().max(1) as f64;
    let average = |value: &dyn Fn(&Learned) -> f64| stepped.iter().map(|u| value(u)).sum::<f64>() / n_updates;
    let count = |value: &dyn Fn(&Learned) -> usize| learned.iter().map(value).sum::<usize>();
    Metrics {
        schema: SCHEMA,
        step,
        reward_mean: mean(&|s| s.reward),
        reward_std: deviation(&responses.iter().map(|s| s.reward).collect::<Vec<_>>()),
        equal_rewards_share: Some(share(&rolled.batch.groups, Group::is_unanimous)),
        rewards: by_reward(plan, |idx| mean(&|s| s.rewards[idx])),
        accuracy: accuracy(&rolled.batch),
        eval_accuracy: None,
        eval_accuracy_before: None,
        benchmarks: BTreeMap::new(),
        benchmarks_before: BTreeMap::new(),
        response_tokens_mean: mean(&|s| s.rollout.n_sampled() as f64),
        response_tokens: lengths(responses.iter().map(|s| s.rollout.n_sampled()).collect()),
        truncated_share: mean(&|s| f64::from(u8::from(s.rollout.finish == Finish::LengthLimit))),
        episodes: episodes(&responses),
        judge: plan.judge().and_then(|_| judge(&responses)),
        score_mean: score_mean(&responses),
        entropy_mean: entropies.iter().sum::<f64>() / entropies.len().max(1) as f64,
        entropy_quantiles: quantiles(&entropies),
        n_tokens: count(&|u| u.tally.n_tokens),
        n_kept: count(&|u| u.tally.n_kept),
        n_candidates: count(&|u| u.tally.n_candidates),
        n_silenced: count(&|u| u.tally.n_silenced),
        silenced_share: Some(
            count(&|u| u.tally.n_silenced) as f64 / count(&|u| u.tally.n_tokens).max(1) as f64,
        ),
        tau_h: learned.first().and_then(|update| update.tau_h),
        clip_fraction: average(&|u| u.tally.clip_fraction),
        ratio_min: learned.iter().map(|u| u.tally.ratio_min).fold(f64::INFINITY, f64::min),
        ratio_max: learned.iter().map(|u| u.tally.ratio_max).fold(0.0, f64::max),
        kl_behavior: k3(&stepped, |m, t| m.logp[t] - m.behavior_logp[t]),
        kl_reference: kl_reference(plan, &stepped),
        loss: average(&|u| u.tally.loss),
        learning_rate: stepped.last().map_or(0.0, |update| update.learning_rate),
        gradient_norm: average(&|u| u.gradient_norm),
        silenced_gradient_share: average(&|u| u.census.silenced_gradient_share()),
        quadrants: learned
            .first()
            .map_or(Vec::new(), |update| Vec::<QuadrantCensus>::from(update.census.rows())),
        entropy_change: entropy_change(learned),
        exactness_max_abs: learned.first().map_or(0.0, |update| update.exactness_max_abs),
        entropy_coefficient: None,
        n_responses: Some(rolled.n_responses),
        n_sampled: Some(rolled.n_sampled),
        decoding: None,
        reuse: reuse(learned),
        tokens_per_second: TokensPerSecond { rollout: 0.0, update: 0.0 },
        n_updates: None,
        tokens_total: None,
        seconds: None,
        wall_seconds: None,
        memory_bytes: None,
        warnings: Vec::new(),
        state_sha256: None,
        extra: Extra::new(),
    }
}

/// What happened between turns; `None` for responses that no environment answered.
fn episodes(responses: &[&Scored]) -> Option<EpisodeMetrics> {
    let turns: Vec<&EpisodeTurn> =
        responses.iter().filter_map(|s| s.episode.as_ref()).flat_map(|e| &e.turns).collect();
    let n_episodes = responses.iter().filter(|s| s.episode.is_some()).count();
    let calls = || turns.iter().flat_map(|turn| &turn.calls);
    let n_given = |s: &&Scored| s.rollout.response().len() - s.rollout.n_sampled();
    (n_episodes > 0).then(|| EpisodeMetrics {
        turns_mean: turns.len() as f64 / n_episodes as f64,
        n_calls: calls().count(),
        n_failed_calls: calls().filter(|call| call.failed).count(),
        n_timed_out_calls: calls().filter(|call| call.timed_out).count(),
        n_cut_observations: turns.iter().map(|turn| turn.n_cut).sum(),
        n_given: responses.iter().map(n_given).sum(),
        turn_limit_share: share(responses, |s| s.rollout.finish == Finish::TurnLimit),
    })
}

/// How judge and rule judged the same responses; `None` for responses that no judge was to judge.
fn judge(responses: &[&Scored]) -> Option<JudgeMetrics> {
    let opinions: Vec<&JudgeOpinion> = responses.iter().filter_map(|s| s.judge.as_deref()).collect();
    let agree: Vec<bool> = opinions.iter().filter_map(|opinion| opinion.agrees()).collect();
    (!opinions.is_empty()).then(|| JudgeMetrics {
        asked_share: agree.len() as f64 / opinions.len() as f64,
        agreement: (!agree.is_empty()).then(|| share(&agree, |agrees| *agrees)),
        rule_accuracy: share(&opinions, |opinion| opinion.rule == Verdict::Right),
    })
}

/// The mean score of a reward model; `None` for responses that none scored.
fn score_mean(responses: &[&Scored]) -> Option<f64> {
    let opinions = responses.iter().filter_map(|scored| scored.judge.as_deref());
    let scores: Vec<f64> = opinions.filter_map(|opinion| opinion.score).collect();
    (!scores.is_empty()).then(|| scores.iter().sum::<f64>() / scores.len() as f64)
}

/// A value for each of several rewards by its name; empty for a run with one.
fn by_reward(plan: &Plan, value: impl Fn(usize) -> f64) -> BTreeMap<String, f64> {
    if plan.config.rewards.is_empty() {
        return BTreeMap::new();
    }
    plan.rewards.iter().enumerate().map(|(idx, reward)| (reward.name.clone(), value(idx))).collect()
}

fn reuse(learned: &[Learned]) -> Option<ReuseRecord> {
    let updates: Vec<ReusedUpdate> = learned.iter().filter_map(|update| update.reuse).collect();
    let last = updates.last()?;
    Some(ReuseRecord { n_uses: last.use_idx + 1, gated: last.gated, updates })
}

fn quantiles(sorted: &[f64]) -> EntropyQuantiles {
    let at = |q| if sorted.is_empty() { 0.0 } else { quantile_sorted(sorted, q) };
    EntropyQuantiles {
        q05: at(0.05),
        q10: Some(at(0.1)),
        q25: at(0.25),
        q50: at(0.5),
        q75: at(0.75),
        q90: Some(at(0.9)),
        q95: at(0.95),
    }
}

fn lengths(mut lengths: Vec<usize>) -> Option<LengthQuantiles> {
    lengths.sort_unstable();
    let (min, max) = (*lengths.first()?, *lengths.last()?);
    let sorted: Vec<f64> = lengths.iter().map(|&length| length as f64).collect();
    let at = |q| quantile_sorted(&sorted, q);
    Some(LengthQuantiles { min, q10: at(0.1), q50: at(0.5), q90: at(0.9), max })
}

/// Sample standard deviation; `None` for fewer than two values.
fn deviation(values: &[f64]) -> Option<f64> {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    (values.len() > 1).then(|| (squares / (n - 1.0)).sqrt())
}

fn share<T>(values: &[T], is: impl Fn(&T) -> bool) -> f64 {
    values.iter().filter(|value| is(value)).count() as f64 / values.len().max(1) as f64
}

/// The k3 estimate of a KL divergence (Schulman 2020): the mean of `r - 1 - ln r` over the kept tokens, where `log_ratio`
/// gives ln r; 0 if no token is kept, and `None` for a mean that is not finite.
fn k3(stepped: &[&Learned], log_ratio: impl Fn(&Member, usize) -> f64) -> Option<f64> {
    let mut sum = 0.0;
    let mut n_kept = 0_usize;
    for member in stepped.iter().flat_map(|update| &update.members) {
        for token_idx in (0..member.effects.len()).filter(|&t| member.effects[t].kept) {
            let log_ratio = log_ratio(member, token_idx);
            sum += libm::expm1(log_ratio) - log_ratio;
            n_kept += 1;
        }
    }
    Some(sum / n_kept.max(1) as f64).filter(|mean| mean.is_finite())
}

/// `None` for an objective without a reference.
fn kl_reference(plan: &Plan, stepped: &[&Learned]) -> Option<f64> {
    let reference_logp = |member: &Member, token_idx: usize| {
        let scored = member.constants.reference_logp.as_ref();
        scored.expect("an objective that needs a reference has every response scored by it")[token_idx]
    };
    let log_ratio = |member: &Member, t: usize| reference_logp(member, t) - member.logp[t];
    plan.objective.needs_reference().then(|| k3(stepped, log_ratio)).flatten()
}

/// Sets the times of a step that is done, and the rates that follow.
pub fn set_times(metrics: &mut Metrics, seconds: PhaseSeconds, wall_seconds: f64) {
    let rate = |n_tokens: usize, seconds: f64| n_tokens as f64 / seconds.max(1e-9);
    metrics.tokens_per_second = TokensPerSecond {
        rollout: rate(metrics.n_sampled.unwrap_or(0), seconds.rollout),
        update: rate(metrics.n_tokens, seconds.update),
    };
    metrics.seconds = Some(seconds);
    metrics.wall_seconds = Some(wall_seconds);
}

/// Predicted and measured entropy change by all optimizer steps of a training step but the last; `None` for a step with
/// a single optimizer step.
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
    let measured =
        pairs.map(|(current, behavior)| current - behavior).sum::<f64>() / last.tally.n_tokens.max(1) as f64;
    Some(EntropyChange { predicted: predicted.sum(), measured })
}

/// Whether tests judge the run's programs and one of them went over a limit of time. Such a verdict depends on the machine,
/// and a run that is made again takes it from the record.
pub fn has_time_outs(plan: &Plan, rolled: &RolledOut) -> bool {
    let judges_programs = matches!(plan.rewards[0].verifier, VerifierSpec::Code(_));
    let mut members = rolled.batch.groups.iter().flat_map(|group| &group.members);
    judges_programs && members.any(|member| member.verdict == Verdict::OverBudget)
}

/// Whole groups spread evenly over the updates of the step, as many as `record.responses` allows but at least one, and
/// all responses with a silenced token or a program that went over a limit of time; none if `record.responses` is 0.
pub fn response_records(
    plan: &Plan,
    step: u64,
    model: &LoadedModel,
    rolled: &RolledOut,
    learned: &[Learned],
) -> Result<Vec<ResponseRecord>> {
    let n_responses = plan.config.record.responses;
    if n_responses == 0 {
        return Ok(Vec::new());
    }
    let tokenizer = model.tokenizer()?;
    let numbered = learned.iter().enumerate();
    let groups: Vec<_> = numbered
        .flat_map(|(idx, update)| {
            let of_one_group = |a: &Member, b: &Member| std::ptr::eq(a.group, b.group);
            update.members.chunk_by(of_one_group).map(move |members| (idx, update, members))
        })
        .collect();
    let n = (n_responses / plan.config.rollout.group_size).clamp(1, groups.len().max(1));
    let is_chosen = |group_idx: usize| group_idx * n / groups.len() != (group_idx + 1) * n / groups.len();
    let keeps_time_outs = has_time_outs(plan, rolled);
    let is_late = |member: &Member| keeps_time_outs && member.scored.verdict == Verdict::OverBudget;
    let has_silenced =
        |member: &Member| member.effects.iter().any(|e| e.silenced_by.is_some_and(singles_out));
    let members = groups.iter().enumerate().flat_map(|(group_idx, &(update_idx, update, members))| {
        members.iter().map(move |member| (group_idx, update_idx, update, member))
    });
    let recorded: Vec<_> = members
        .filter(|(group_idx, _, _, member)| is_chosen(*group_idx) || has_silenced(member) || is_late(member))
        .collect();
    recorded
        .into_par_iter()
        .map(|(_, update_idx, update, member)| {
            let rollout = &member.scored.rollout;
            let given = given_tokens(tokenizer, rollout)?;
            let schema = if given.is_empty() { SCHEMA } else { ResponseRecord::SCHEMA_WITH_GIVEN };
            Ok(ResponseRecord {
                schema,
                step,
                problem_id: member.group.problem.id.clone(),
                group_idx: rolled.batch.groups.iter().position(|group| std::ptr::eq(group, member.group)),
                sample_idx: rollout.sample_idx,
                prompt: member.group.problem.prompt.clone(),
                reference: member.group.problem.reference.clone(),
                text: tokenizer.decode(rollout.response())?,
                verdict: member.scored.verdict,
                reward: member.scored.reward,
                rewards: by_reward(plan, |idx| member.scored.rewards[idx]),
                advantage: member.constants.advantages.mean(),
                finish: rollout.finish,
                update_idx,
                tau_h: update.tau_h,
                tokens: columns(tokenizer, member)?,
                given,
                program: member.scored.program.clone(),
                judge: member.scored.judge.clone(),
                episode: member.scored.episode.clone(),
                extra: Extra::new(),
            })
        })
        .collect()
}

/// The runs of given tokens after the first sampled token.
fn given_tokens(tokenizer: &Tokenizer, rollout: &Rollout) -> Result<Vec<GivenTokens>> {
    let mut found = Vec::new();
    let (mut position, mut n_sampled) = (rollout.prompt().len(), 0);
    for run in rollout.is_sampled[position..].chunk_by(|a, b| a == b) {
        let tokens = &rollout.tokens[position..position + run.len()];
        position += run.len();
        if run[0] {
            n_sampled += run.len();
        } else {
            let text = tokenizer.decode_all(tokens)?;
            found.push(GivenTokens { after: n_sampled, id: tokens.to_vec(), text });
        }
    }
    Ok(found)
}

fn columns(tokenizer: &Tokenizer, member: &Member) -> Result<TokenColumns> {
    let tokens: Vec<u32> = member.scored.rollout.sampled_tokens().collect();
    Ok(TokenColumns {
        text: tokens.iter().map(|&id| Ok(tokenizer.decode_all(&[id])?)).collect::<Result<_>>()?,
        logp: member.logp.clone(),
        behavior_logp: member.behavior_logp.clone(),
        entropy: member.entropy.clone(),
        collision: member.collision.clone().unwrap_or_default(),
        ratio: member.effects.iter().map(|effect| effect.ratio).collect(),
        kept: member.effects.iter().map(|effect| effect.kept).collect(),
        silenced_by: member.effects.iter().map(|effect| effect.silenced_by).collect(),
        clipped: member.effects.iter().map(|effect| effect.clipped).collect(),
        is_candidate: member.effects.iter().map(|effect| effect.is_candidate).collect(),
        weight: member.effects.iter().map(|effect| effect.weight).collect(),
        advantage: match &member.constants.advantages {
            Advantages::Response(_) => Vec::new(),
            Advantages::Tokens(advantages) => advantages.clone(),
        },
        d_logp: member.effects.iter().map(|effect| effect.d_logp).collect(),
        alternatives: (0..tokens.len()).map(|t| alternatives(tokenizer, member, t)).collect::<Result<_>>()?,
        id: tokens,
    })
}

fn alternatives(tokenizer: &Tokenizer, member: &Member, token_idx: usize) -> Result<Vec<Alternative>> {
    let listed = member.alternatives.get(token_idx).into_iter().flatten();
    listed
        .map(|&(id, logp)| Ok(Alternative { id, text: tokenizer.decode_all(&[id])?, logp: f64::from(logp) }))
        .collect()
}

/// Tokens of context on each side of a recorded token.
const CONTEXT_TOKENS: usize = 12;

/// Every silenced token with its context. Tokens silenced by masks that keep a chosen share of all tokens (top entropy,
/// RSI-S, Lopti's passes) or drop whole responses are only counted.
pub fn silenced_records(step: u64, model: &LoadedModel, learned: &[Learned]) -> Result<Vec<TokenRecord>> {
    token_records(step, model, learned, |effect| effect.silenced_by.is_some_and(singles_out))
}

/// True for a mask that picks out single tokens; false for a mask that keeps a chosen share of all tokens, or drops whole
/// responses.
fn singles_out(kind: MaskKind) -> bool {
    !matches!(
        kind,
        MaskKind::TopEntropy | MaskKind::LowProbabilityFirst | MaskKind::Rsi | MaskKind::OffPolicySequence
    )
}

/// Every candidate that was kept.
pub fn explored_records(step: u64, model: &LoadedModel, learned: &[Learned]) -> Result<Vec<TokenRecord>> {
    token_records(step, model, learned, |effect| effect.kept && effect.is_candidate)
}

fn token_records(
    step: u64,
    model: &LoadedModel,
    learned: &[Learned],
    is_recorded: impl Fn(&TokenEffect) -> bool + Sync,
) -> Result<Vec<TokenRecord>> {
    let tokenizer = model.tokenizer()?;
    let members: Vec<&Member> = learned.iter().flat_map(|update| &update.members).collect();
    let of_member = |member: &Member| {
        let chosen = (0..member.effects.len()).filter(|&t| is_recorded(&member.effects[t]));
        chosen.map(|token_idx| token_record(step, tokenizer, member, token_idx)).collect::<Result<Vec<_>>>()
    };
    let records: Vec<Vec<TokenRecord>> = members.into_par_iter().map(of_member).collect::<Result<_>>()?;
    Ok(records.into_iter().flatten().collect())
}

/// One sampled token with its context, which may be given.
fn token_record(step: u64, tokenizer: &Tokenizer, member: &Member, token_idx: usize) -> Result<TokenRecord> {
    let rollout = &member.scored.rollout;
    let tokens = rollout.response();
    let position = rollout.sampled_positions().nth(token_idx).expect("every effect is a sampled token's");
    let at = position - rollout.prompt().len();
    let before = at.saturating_sub(CONTEXT_TOKENS)..at;
    let after = at + 1..tokens.len().min(at + 1 + CONTEXT_TOKENS);
    Ok(TokenRecord {
        schema: SCHEMA,
        step,
        problem_id: member.group.problem.id.clone(),
        sample_idx: rollout.sample_idx,
        token_idx,
        id: tokens[at],
        text: tokenizer.decode_all(&tokens[at..=at])?,
        silenced_by: member.effects[token_idx].silenced_by,
        category: category(tokenizer, member, at)?,
        logp: member.logp[token_idx],
        entropy: member.entropy[token_idx],
        advantage: member.constants.advantages.view().at(token_idx),
        gradient_norm: member.observed_at(token_idx).gradient_norm_squared().sqrt(),
        context_before: tokenizer.decode_all(&tokens[before])?,
        context_after: tokenizer.decode_all(&tokens[after])?,
        alternatives: alternatives(tokenizer, member, token_idx)?,
        extra: Extra::new(),
    })
}

/// What the token at `at` of a response is within the response's program; `None` for a task whose answers are not programs.
fn category(tokenizer: &Tokenizer, member: &Member, at: usize) -> Result<Option<TokenCategory>> {
    let Some(program) = &member.scored.program else { return Ok(None) };
    let tokens = member.scored.rollout.response();
    let response = tokenizer.decode(tokens)?;
    let [from, to] = [at, at + 1].map(|n| tokenizer.decode(&tokens[..n]).map(|text| text.len()));
    Ok(Some(category_in_response(&response, &program.source, from?, to?)))
}

#[cfg(test)]
mod tests;
