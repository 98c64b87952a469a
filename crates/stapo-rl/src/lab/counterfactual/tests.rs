use super::*;

fn found(kind: Kind, problem: &str, sampled: usize, preferred: usize) -> Counterfactual {
    Counterfactual {
        step: 3,
        kind,
        problem_id: problem.to_string(),
        sample_idx: 0,
        token_idx: 1,
        id: 5,
        text: "a".into(),
        preferred_id: 6,
        preferred_text: "b".into(),
        logp: -7.0,
        entropy: 0.1,
        advantage: 1.0,
        n_samples: 8,
        n_right_sampled: sampled,
        n_right_preferred: preferred,
    }
}

#[test]
fn tokens_of_one_problem_count_as_one() {
    let all = [
        found(Kind::Silenced, "a", 8, 4),
        found(Kind::Silenced, "a", 4, 4),
        found(Kind::Silenced, "b", 0, 2),
        found(Kind::Punished, "a", 1, 7),
    ];
    let [silenced, punished] = summaries(&all, &Resampling::default()).unwrap()[..] else {
        panic!("two kinds")
    };
    assert_eq!((silenced.kind, silenced.n_tokens, silenced.n_problems), (Kind::Silenced, 3, 2));
    // Problem a: 12 and 8 of 16, problem b: 0 and 2 of 8.
    assert_eq!((silenced.right_sampled, silenced.right_preferred), (0.375, 0.375));
    let paired = silenced.paired.unwrap();
    assert_eq!((paired.difference, paired.n_better, paired.n_worse), (0.0, 1, 1));
    assert_eq!((punished.right_sampled, punished.right_preferred), (0.125, 0.875));
    assert_eq!(punished.paired, None, "one problem has no interval");
}

#[test]
fn sites_are_spread_evenly_and_never_more_than_asked() {
    let sites: Vec<Site> = (0..10).map(|token| Site { response: 0, token }).collect();
    let tokens = |most| spread(&sites, most).iter().map(|site| site.token).collect::<Vec<_>>();
    assert_eq!(tokens(5), [0, 2, 4, 6, 8]);
    assert_eq!(tokens(20).len(), 10);
    assert_eq!(spread(&[], 3), []);
}

#[test]
fn a_difference_is_what_was_sampled_minus_what_was_preferred() {
    let all = [found(Kind::Silenced, "a", 8, 2), found(Kind::Silenced, "b", 4, 2)];
    let summary = summaries(&all, &Resampling::default()).unwrap()[0];
    assert_eq!((summary.right_sampled, summary.right_preferred), (0.75, 0.25));
    let paired = summary.paired.unwrap();
    assert_eq!((paired.difference, paired.n_better, paired.n_worse), (0.5, 2, 0));
}

/// A response of four sampled tokens after a prompt of one.
fn response(sample_idx: usize, tokens: [u32; 4], logp: [f32; 4]) -> Scored {
    let (tokens, is_sampled) = stapo_core::Rollout::one_turn(&[9], &tokens);
    let rollout = stapo_core::Rollout {
        problem_idx: 0,
        sample_idx,
        tokens,
        is_sampled,
        logp: logp.to_vec(),
        entropy: vec![0.5; 4],
        kept: Vec::new(),
        finish: stapo_core::Finish::LengthLimit,
        policy_version: None,
    };
    let (verdict, reward, rewards) = (Verdict::Wrong, 0.0, vec![0.0]);
    Scored { rollout, verdict, reward, rewards, program: None, judge: None, episode: None }
}

fn recorded(sample_idx: usize, token_idx: usize, id: u32) -> TokenRecord {
    serde_json::from_value(serde_json::json!({
        "schema": 1, "step": 3, "problem_id": "p", "sample_idx": sample_idx, "token_idx": token_idx, "id": id,
        "text": "a", "silenced_by": "spurious", "logp": -7.0, "entropy": 0.5, "advantage": 1.0,
        "gradient_norm": 1.0, "context_before": "", "context_after": "", "alternatives": []
    }))
    .unwrap()
}

#[test]
fn a_silenced_token_is_compared_with_unused_tokens_that_the_policy_would_not_have_chosen() {
    let [id, prompt, reference] = ["p", "1+1=", "2"].map(String::from);
    let problem = Problem { id, earlier_turns: Vec::new(), prompt, reference };
    let rewarded = response(0, [1, 2, 3, 4], [-1.0, -7.0, -2.0, -3.0]);
    // The third token is as near as the first, and it is the one that the policy preferred.
    let punished = response(1, [1, 2, 3, 4], [-6.4, -1.0, -7.6, -9.0]);
    // As probable as the silenced token, and rewarded.
    let near = response(2, [1, 2, 3, 4], [-7.0, -7.0, -7.0, -7.0]);
    let constants = [1.0, -1.0, 1.0].map(|advantage| crate::learn::constants::ResponseConstants {
        advantages: stapo_core::objective::Advantages::Response(advantage),
        reference_logp: None,
        sampler_logp: None,
    });
    let rolled = RolledOut {
        batch: stapo_core::Batch { groups: Vec::new() },
        constants: constants.to_vec(),
        n_drawn: 1,
        n_responses: 3,
        n_sampled: 12,
        episodes: Vec::new(),
    };
    let batch = ReplayedBatch {
        step: 3,
        responses: vec![(&problem, &rewarded), (&problem, &punished), (&problem, &near)],
        rolled: &rolled,
        preferred: vec![vec![1, 8, 3, 8], vec![8, 8, 3, 8], vec![8; 4]],
    };
    let settings = Settings { n_samples: 1, max_tokens: 5, seed: 0 };
    let (silenced, kept) = ([recorded(0, 1, 2)], [recorded(0, 0, 1), recorded(0, 1, 2)]);
    let site = |response, token| Site { response, token };
    let expected = [
        (Kind::Silenced, site(0, 1)),
        (Kind::KeptCandidate, site(0, 0)),
        (Kind::Random, site(0, 3)),
        (Kind::Punished, site(1, 0)),
    ];
    assert_eq!(batch.sites(&silenced, &kept, settings).unwrap(), expected);
    assert_eq!(batch.fork(site(0, 1)), (&[1][..], [2, 8]));
    let other = batch.sites(&[recorded(0, 1, 5)], &[], settings).unwrap_err().to_string();
    assert!(other.contains('p'), "the replay has another token there: {other}");
}
