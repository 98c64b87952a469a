use super::*;
use stapo_core::{Episode, ToolCall};

/// A response after a prompt of one token; `is_sampled` says which of its tokens the policy sampled.
fn response(is_sampled: &[bool], finish: Finish) -> Scored {
    let tokens = (0..=is_sampled.len() as u32).collect();
    let is_sampled = [&[false], is_sampled].concat();
    let n_sampled = is_sampled.iter().filter(|is_sampled| **is_sampled).count();
    let rollout = Rollout {
        problem_idx: 0,
        sample_idx: 0,
        tokens,
        is_sampled,
        logp: vec![-0.5; n_sampled],
        entropy: vec![0.5; n_sampled],
        kept: Vec::new(),
        finish,
        policy_version: None,
    };
    let (verdict, reward, rewards) = (Verdict::Wrong, 0.0, vec![0.0]);
    Scored { rollout, verdict, reward, rewards, program: None, judge: None, episode: None }
}

fn call(failed: bool, timed_out: bool) -> ToolCall {
    ToolCall { tool: "t".into(), arguments: String::new(), sha256: String::new(), failed, timed_out }
}

fn turn(calls: Vec<ToolCall>, n_cut: usize) -> EpisodeTurn {
    EpisodeTurn {
        text_sha256: String::new(),
        calls,
        observations: Vec::new(),
        n_cut,
        reward: 0.0,
        judged: Vec::new(),
        returns: Vec::new(),
    }
}

#[test]
fn episodes_are_counted_by_their_turns_calls_and_given_tokens() {
    let with = |scored: Scored, turns| Scored { episode: Some(Box::new(Episode { turns })), ..scored };
    let long = with(
        response(&[true, false, false, true, true, false, true], Finish::TurnLimit),
        vec![
            turn(vec![call(false, false), call(true, false)], 1),
            turn(vec![call(true, true)], 2),
            turn(Vec::new(), 0),
        ],
    );
    let short = with(response(&[true, true], Finish::Stop { token: 2 }), vec![turn(Vec::new(), 0)]);
    let found = episodes(&[&long, &short]).unwrap();
    assert_eq!((found.turns_mean, found.turn_limit_share), (2.0, 0.5));
    assert_eq!((found.n_calls, found.n_failed_calls, found.n_timed_out_calls), (3, 2, 1));
    assert_eq!((found.n_cut_observations, found.n_given), (3, 3));
    assert_eq!(episodes(&[&response(&[true], Finish::TurnLimit)]), None, "no environment answered");
}

#[test]
fn judge_and_rule_agree_by_the_responses_that_both_judged() {
    use Verdict::{NoAnswer, Right, Wrong};
    let judged = |verdict: Option<Verdict>, rule| {
        let opinion = JudgeOpinion { verdict, score: verdict.map(|_| 2.5), ..JudgeOpinion::of_rule(rule) };
        Scored { judge: Some(Box::new(opinion)), ..response(&[true], Finish::LengthLimit) }
    };
    let all = [
        judged(Some(Right), Right),
        judged(Some(Wrong), NoAnswer),
        judged(Some(Right), Wrong),
        judged(None, Right),
        judged(None, Right),
    ];
    let plain = response(&[true], Finish::LengthLimit);
    let refs: Vec<&Scored> = all.iter().chain([&plain]).collect();
    let found = judge(&refs).unwrap();
    assert_eq!((found.asked_share, found.rule_accuracy), (0.6, 0.6));
    assert_eq!(found.agreement, Some(2.0 / 3.0));
    assert_eq!(judge(&refs[3..]).unwrap().agreement, None, "the judge was asked about none");
    assert_eq!((judge(&refs[5..]), score_mean(&refs[5..])), (None, None));
    assert_eq!(score_mean(&refs), Some(2.5), "over those that have a score");
}

#[test]
fn spreads_and_lengths_are_those_of_samples() {
    assert_eq!((deviation(&[]), deviation(&[3.0])), (None, None));
    // The squares of 2, 0 and -2 over two degrees of freedom.
    assert_eq!(deviation(&[1.0, 3.0, 5.0]), Some(2.0));
    assert_eq!(lengths(Vec::new()), None);
    let found = lengths(vec![50, 10, 30, 20, 40]).unwrap();
    assert_eq!((found.min, found.q50, found.max), (10, 30.0, 50));
    assert_eq!((found.q10, found.q90), (14.0, 46.0));
    let entropies = quantiles(&[0.0, 1.0, 2.0, 3.0, 4.0]);
    assert_eq!((entropies.q25, entropies.q50, entropies.q75), (1.0, 2.0, 3.0));
    assert_eq!((entropies.q05, entropies.q95), (0.2, 3.8));
    assert_eq!(quantiles(&[]).q50, 0.0);
}

/// A mask that keeps a chosen share of all tokens silences most of them, and a file of these would be the rollouts again.
#[test]
fn only_tokens_that_a_mask_picks_out_are_recorded_one_by_one() {
    use MaskKind::{LowProbabilityFirst, OffPolicySequence, Rsi, TopEntropy};
    for kind in MaskKind::ALL {
        let is_share = [TopEntropy, LowProbabilityFirst, Rsi, OffPolicySequence].contains(&kind);
        assert_eq!(singles_out(kind), !is_share, "{kind:?}");
    }
    assert!(singles_out(MaskKind::Spurious) && singles_out(MaskKind::ClipCov));
}

#[test]
fn rates_are_of_the_tokens_of_each_phase() {
    let mut metrics = crate::testing::metrics(1, 0.5, 0.3);
    (metrics.n_sampled, metrics.n_tokens) = (Some(600), 900);
    let seconds = PhaseSeconds { rollout: 2.0, calibrate: 7.0, update: 3.0, ..PhaseSeconds::default() };
    set_times(&mut metrics, seconds, 40.0);
    assert_eq!((metrics.tokens_per_second.rollout, metrics.tokens_per_second.update), (300.0, 300.0));
    assert_eq!((metrics.seconds, metrics.wall_seconds), (Some(seconds), Some(40.0)));
}
