//! What a plan assumes about the episodes of an environment.

use super::Args;
use anyhow::{Result, bail};
use stapo_rl::Plan;
use stapo_rl::plan::estimate::{EpisodeMeans, Measurement};

/// The means that the command line gives, or shares of the config's limits; `None` for a plan without an environment.
pub fn means(args: &Args, plan: &Plan) -> Result<Option<EpisodeMeans>> {
    let given = [
        ("--mean-turns", args.mean_turns, "episode.max_turns", plan.episode().max_turns),
        (
            "--mean-observation",
            args.mean_observation,
            "episode.max_observation_tokens",
            plan.episode().max_observation_tokens,
        ),
        ("--mean-answer", args.mean_answer, "", usize::MAX),
    ];
    let Some(assumed) = EpisodeMeans::assumed(plan) else {
        if let Some((option, ..)) = given.iter().find(|(_, mean, ..)| mean.is_some()) {
            bail!("{option}: given, and the config has no environment\nhint: leave it out");
        }
        return Ok(None);
    };
    for (option, mean, key, limit) in given {
        if let Some(mean) = mean.filter(|mean| *mean > limit) {
            bail!(
                "{option} {mean}: above {key}, {limit}\nhint: lower the one, or raise the other with --set"
            );
        }
    }
    Ok(Some(EpisodeMeans {
        turns: args.mean_turns.map_or(assumed.turns, |turns| turns as f64),
        observation: args.mean_observation.map_or(assumed.observation, |tokens| tokens as f64),
        answer_seconds: args.mean_answer.map_or(assumed.answer_seconds, |ms| ms as f64 / 1e3),
        ..assumed
    }))
}

/// The means with measured values instead of those that were not given.
pub fn known(args: &Args, means: EpisodeMeans, measured: Option<&Measurement>) -> EpisodeMeans {
    let Some(measured) = measured else { return means };
    let turns = if args.mean_turns.is_some() { means.turns } else { measured.turns_mean.max(1.0) };
    let is_given = args.mean_observation.is_some() || measured.turns_mean <= 1.0;
    let observation =
        if is_given { means.observation } else { measured.given_mean / (measured.turns_mean - 1.0) };
    EpisodeMeans { turns, observation, ..means }
}

/// Says what was assumed about episodes: what was neither given nor measured.
pub fn assume(assumed: &mut Vec<String>, args: &Args, means: &EpisodeMeans, measured: Option<&Measurement>) {
    let EpisodeMeans { turns, observation, answer_seconds, .. } = means;
    if measured.is_none() && args.mean_turns.is_none() {
        assumed.push(format!(
            "episodes of {turns} turns, half of episode.max_turns; --mean-turns N says better"
        ));
    }
    if measured.is_none() && args.mean_observation.is_none() {
        assumed.push(format!(
            "{observation:.0} tokens given after a turn, half of episode.max_observation_tokens, and at most half of an episode; --mean-observation N says better"
        ));
    }
    if measured.is_none() && args.mean_answer.is_none() && *answer_seconds > 0.0 {
        assumed.push(format!(
            "answers of the environment after {answer_seconds:.2} s, a tenth of their limit of time; --mean-answer MS says better"
        ));
    }
    assumed.push("the longest episode waits for each of its answers, while others are sampled".to_string());
}
