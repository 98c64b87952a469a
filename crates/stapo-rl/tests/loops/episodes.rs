//! Runs whose environment answers the policy between its turns.

use super::{check_resumed, plan, start, whole_run};
use crate::{Quiet, device};
use stapo_core::record::{EpisodeRecord, Metrics, ResponseRecord, parse_lines};
use stapo_core::{Finish, Verdict};
use stapo_rl::Plan;
use stapo_rl::reward::Programs;
use stapo_rl::rollout::{AnswerUse, RecordedAnswers};
use stapo_rl::run::Run;
use stapo_rl::train::{Trainer, train};
use std::fs;

/// Games of guess with the built-in model, whose alphabet has no words.
fn games(overrides: &[&str]) -> Plan {
    let settings = [
        "steps=3",
        "task={kind=\"guess\", low=1, high=9, template=\"({{ low }}+{{ high }})\", held_out_share=0.3, n_held_out=4}",
        "environment={kind=\"guess\", higher=\"+1=\", lower=\"-1=\", unread=\"=\"}",
        "episode={max_turns=4, max_turn_tokens=24}",
        "rollout.max_response_tokens=100",
        "record.responses=100",
        "record.responses_every_steps=1",
    ];
    plan(&[&settings, overrides].concat())
}

#[test]
fn episodes_are_learned_from_by_their_sampled_tokens_alone_and_are_exact() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let plan = games(&[]);
    let (mut run, mut trainer) = start(&path, &plan);
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let metrics: Vec<Metrics> = Run::read_metrics(&path).unwrap();
    let read = |part: &str| fs::read_to_string(path.join(format!("{part}/step-000001.jsonl"))).unwrap();
    let responses = parse_lines::<ResponseRecord>(&read("rollouts")).unwrap().records;
    let episodes = parse_lines::<EpisodeRecord>(&read("episodes")).unwrap().records;
    let (first, n) = (&metrics[0], responses.len());
    assert!(metrics.iter().all(|m| m.exactness_max_abs == 0.0), "sampling and training differ");
    assert_eq!((n, episodes.len()), (16, 16));
    let turns = |response: &ResponseRecord| response.episode.as_ref().unwrap().turns.len();
    let seen = first.episodes.unwrap();
    let n_turns: usize = responses.iter().map(turns).sum();
    assert_eq!(seen.turns_mean, n_turns as f64 / n as f64);
    assert!(
        responses.iter().any(|r| turns(r) == 4) && responses.iter().any(|r| r.given.len() > 1),
        "{seen:?}"
    );
    let n_given: usize = responses.iter().flat_map(|r| &r.given).map(|given| given.id.len()).sum();
    assert_eq!((seen.n_given, seen.n_calls), (n_given, 0));
    let out_of_turns = responses.iter().filter(|r| r.finish == Finish::TurnLimit).count();
    assert!(out_of_turns > 0 && seen.turn_limit_share == out_of_turns as f64 / n as f64);
    assert_eq!(
        first.n_tokens,
        responses.iter().map(|r| r.tokens.id.len()).sum::<usize>(),
        "given tokens have a loss"
    );
    for response in &responses {
        let episode = response.episode.as_ref().unwrap();
        assert_eq!(response.given.len(), episode.turns.len() - 1, "one observation between two turns");
        let is_right = response.verdict == Verdict::Right;
        assert_eq!(is_right, episode.turns.last().unwrap().observations.is_empty());
        assert!(is_right || response.finish != Finish::Stop { token: 0 });
        for (given, turn) in response.given.iter().zip(&episode.turns) {
            assert!(given.text.contains(&turn.observations[0].content), "{given:?} {turn:?}");
        }
    }
}

#[test]
fn a_run_with_episodes_has_the_same_bits_after_an_interruption_and_with_other_workers() {
    let plan = games(&["rollout.max_redraws=1"]);
    let metrics = check_resumed(&plan);
    assert!(metrics.iter().all(|m| m.exactness_max_abs == 0.0 && m.episodes.is_some()));
    let hash = whole_run(&plan).0;
    let settings = ["rollout.max_redraws=1", "episode.workers=1", "rollout.kv_mib=1"];
    assert_eq!(whole_run(&games(&settings)).0, hash);
}

#[test]
fn recorded_answers_replay_a_step_and_a_changed_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let plan = games(&["steps=1"]);
    let (mut run, mut trainer) = start(&path, &plan);
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let hash = trainer.learner.state_hash().unwrap();
    let text = fs::read_to_string(path.join("episodes/step-000001.jsonl")).unwrap();
    let mut records = parse_lines::<EpisodeRecord>(&text).unwrap().records;
    let again = |records: Vec<EpisodeRecord>, usage| {
        let mut trainer = Trainer::new(&plan, &device(1), Programs::Recorded).unwrap();
        trainer.recorded = RecordedAnswers::new(records, usage);
        let rolled = trainer.roll_out(&plan).unwrap();
        drop(trainer.learn(&plan, &rolled).unwrap());
        (trainer.learner.state_hash().unwrap(), trainer.recorded.comparison())
    };
    assert_eq!(again(records.clone(), AnswerUse::Replay), (hash.clone(), (0, None)));
    let n_answers = records.iter().filter(|r| !r.evaluation).map(|r| r.episode.turns.len()).sum();
    assert_eq!(again(records.clone(), AnswerUse::Compare), (hash.clone(), (n_answers, None)));
    // The environment has another opinion than the record, which counts.
    let first = records.iter_mut().find(|r| r.episode.turns[0].judged.is_empty()).unwrap();
    first.episode.turns[0].observations[0].content = "0".into();
    let (sample, problem) = (first.sample_idx + 1, first.problem_idx + 1);
    let (changed, (_, difference)) = again(records, AnswerUse::Compare);
    let difference = difference.unwrap();
    assert!(
        difference.contains(&format!("step 1, problem {problem}, sample {sample}, turn 1: recorded [\"0\"]")),
        "{difference}"
    );
    assert_ne!(changed, hash, "the recorded answer was not used");
}

#[test]
fn turns_are_credited_by_the_rewards_that_follow_them() {
    let settings = ["episode.credit=turn", "episode.discount=0.5", "reward.wrong=0.0"];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let plan = games(&settings);
    let (mut run, mut trainer) = start(&path, &plan);
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let mut n_right = 0;
    for step in 1..=3 {
        let text = fs::read_to_string(path.join(format!("rollouts/step-00000{step}.jsonl"))).unwrap();
        for response in parse_lines::<ResponseRecord>(&text).unwrap().records {
            let turns = &response.episode.as_ref().unwrap().turns;
            let last = f64::from(u8::from(response.verdict == Verdict::Right));
            let returns: Vec<f64> = turns.iter().map(|turn| turn.returns[0]).collect();
            let expected: Vec<f64> = (0..turns.len()).rev().map(|n| last * 0.5_f64.powi(n as i32)).collect();
            assert_eq!(returns, expected);
            assert_eq!(response.reward, expected[0]);
            // All tokens of a turn have one advantage, where the response has several turns.
            if turns.len() > 1 {
                let advantages = &response.tokens.advantage;
                assert_eq!(advantages.len(), response.tokens.id.len());
                let mut start = 0;
                for end in response.given.iter().map(|given| given.after).chain([advantages.len()]) {
                    assert!(advantages[start..end].iter().all(|a| a == &advantages[start]), "{advantages:?}");
                    start = end;
                }
            }
            n_right += usize::from(last > 0.0);
        }
    }
    assert!(n_right > 0, "no game was won, so nothing was credited");
}

#[test]
fn limits_and_settings_that_cannot_be_are_refused_by_name() {
    let refused = |settings: &[&str]| {
        let config = stapo_rl::Config::from_toml("", settings.iter().copied()).unwrap();
        Plan::resolve(config).unwrap_err().to_string()
    };
    let guess = ["task={kind=\"guess\"}", "environment={kind=\"guess\"}"];
    let with = |setting| refused(&[guess[0], guess[1], setting]);
    for (error, expected) in [
        (refused(&guess[..1]), "config.task.kind: guess hides the answer"),
        (refused(&guess[1..]), "config.environment.kind: guess plays the task of kind guess alone"),
        (refused(&["episode.max_turns=3"]), "config.episode: given: has no effect"),
        (with("episode.max_turns=0"), "config.episode.max_turns: 0, expected at least 1"),
        (with("episode.max_turn_tokens=97"), "config.episode.max_turn_tokens: 97, expected at most 96"),
        (with("episode.discount=1.5"), "config.episode.discount: 1.5"),
        (with("rollout.lengths={mean=9.0, sigma=0.0}"), "config.rollout.lengths: given: has no meaning"),
        (with("rewards=[{name=\"a\"}]"), "config.environment.kind: guess judges episodes itself"),
    ] {
        assert!(error.starts_with(expected), "{error}");
    }
}
