//! What an environment adds to a run: tokens that the policy is given, and waiting for answers.

use super::lengths::Lengths;
use crate::plan::config::Plan;

/// Episodes on average. Their length after the prompt, sampled and given tokens together, is [`Lengths::response_mean`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EpisodeMeans {
    /// Turns of the policy.
    pub turns: f64,
    /// Tokens that the policy is given after each turn but the last.
    pub observation: f64,
    /// Seconds of an answer.
    pub answer_seconds: f64,
    /// Answers that are given at the same time, on each rank.
    pub at_once: usize,
}

/// The part of an answer's limit of time that replaces its mean if none is given.
pub const ANSWER_SHARE: f64 = 10.0;

impl EpisodeMeans {
    /// Of a plan with an environment, by default: half of the turns, observations half as long as they may be,
    /// and a tenth of the limit of time.
    pub fn assumed(plan: &Plan) -> Option<Self> {
        let environment = plan.config.environment.as_ref()?;
        let episode = plan.episode();
        Some(Self {
            turns: f64::midpoint(1.0, episode.max_turns as f64),
            observation: episode.max_observation_tokens as f64 / 2.0,
            answer_seconds: environment.answer_limit() / ANSWER_SHARE,
            at_once: environment.answers_at_once().map_or(episode.workers, |n| n.min(episode.workers)),
        })
    }

    /// Tokens that an episode is given. At least half of the episode is sampled.
    pub fn given(&self, lengths: Lengths) -> f64 {
        ((self.turns - 1.0) * self.observation).clamp(0.0, lengths.response_mean / 2.0)
    }

    /// Seconds in which nothing is sampled because all sequences wait, besides `sampling` seconds of one rank that plays
    /// `n_episodes`. The longest episode waits for each of its answers; where answers are slower than sampling, all wait.
    pub fn waiting(&self, n_episodes: f64, sampling: f64) -> f64 {
        let answering = n_episodes * self.turns * self.answer_seconds / self.at_once.max(1) as f64;
        (self.turns * self.answer_seconds).max(answering - sampling)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_least_half_of_an_episode_is_sampled() {
        let lengths =
            |response_mean| Lengths { prompt_mean: 10.0, response_mean, response_limit: 1000, spread: 0.5 };
        let episodes = EpisodeMeans { turns: 4.0, observation: 30.0, answer_seconds: 1.0, at_once: 1 };
        assert_eq!(episodes.given(lengths(400.0)), 90.0);
        assert_eq!(episodes.given(lengths(100.0)), 50.0);
    }
}
