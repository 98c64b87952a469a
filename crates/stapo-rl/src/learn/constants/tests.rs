use super::*;
use stapo_core::{EpisodeTurn, Finish, Problem, Scored, Verdict};

/// An episode whose turns have so many sampled tokens, with one given token between them and these returns.
fn episode(n_tokens: &[usize], returns: &[f64]) -> Scored {
    let mut is_sampled = vec![false];
    for (idx, n) in n_tokens.iter().enumerate() {
        is_sampled.extend(std::iter::repeat_n(false, usize::from(idx > 0)));
        is_sampled.extend(std::iter::repeat_n(true, *n));
    }
    let turn = |reward: &f64| EpisodeTurn {
        text_sha256: String::new(),
        calls: Vec::new(),
        observations: Vec::new(),
        n_cut: 0,
        reward: 0.0,
        judged: Vec::new(),
        returns: vec![*reward],
    };
    let n_sampled = n_tokens.iter().sum();
    let rollout = Rollout {
        problem_idx: 0,
        sample_idx: 0,
        tokens: vec![1; is_sampled.len()],
        is_sampled,
        logp: vec![-0.5; n_sampled],
        entropy: vec![0.5; n_sampled],
        kept: Vec::new(),
        finish: Finish::LengthLimit,
        policy_version: None,
    };
    let episode = Some(Box::new(Episode { turns: returns.iter().map(turn).collect() }));
    let rewards = vec![returns[0]];
    Scored {
        rollout,
        verdict: Verdict::Wrong,
        reward: returns[0],
        rewards,
        program: None,
        judge: None,
        episode,
    }
}

fn group(members: Vec<Scored>) -> Group {
    let [id, prompt, reference] = ["p", "1+1=", "2"].map(String::from);
    Group { problem: Problem { id, earlier_turns: Vec::new(), prompt, reference }, members }
}

/// The number of its group, the rewards and the tokens of every part.
fn parts(batch: &Batch, credit: Credit) -> Vec<Vec<(usize, f64, Range<usize>)>> {
    let of_response = |parts: Vec<CreditedPart>| {
        parts.into_iter().map(|part| (part.group, part.rewards[0], part.tokens)).collect()
    };
    credited_parts(batch, credit).into_iter().map(of_response).collect()
}

/// A third turn, which one episode alone has, is compared with the second turns.
#[test]
fn turns_are_compared_with_turns_of_the_same_number_in_the_same_group() {
    let first = group(vec![
        episode(&[2, 1], &[0.5, 0.25]),
        episode(&[1, 2, 3], &[1.0, 2.0, 3.0]),
        episode(&[4], &[0.0]),
    ]);
    let second = group(vec![episode(&[1], &[4.0]), episode(&[2], &[5.0])]);
    let batch = Batch { groups: vec![first, second] };
    let expected = [
        vec![(0, 0.5, 0..2), (2, 0.25, 2..3)],
        vec![(0, 1.0, 0..1), (2, 2.0, 1..3), (2, 3.0, 3..6)],
        vec![(0, 0.0, 0..4)],
        vec![(1, 4.0, 0..1)],
        vec![(1, 5.0, 0..2)],
    ];
    assert_eq!(parts(&batch, Credit::Turn), expected);
    let whole = [
        vec![(0, 0.5, 0..3)],
        vec![(0, 1.0, 0..6)],
        vec![(0, 0.0, 0..4)],
        vec![(1, 4.0, 0..1)],
        vec![(1, 5.0, 0..2)],
    ];
    assert_eq!(parts(&batch, Credit::Episode), whole);
}

#[test]
fn every_sampled_token_has_the_advantage_of_its_turn() {
    let part = |tokens| CreditedPart { group: 0, rewards: &[], tokens };
    let turns = [part(0..2), part(2..3), part(3..5)];
    let advantages =
        [Advantages::Response(1.5), Advantages::Response(-1.0), Advantages::Tokens(vec![0.25, 0.5])];
    let expected = Advantages::Tokens(vec![1.5, 1.5, -1.0, 0.25, 0.5]);
    assert_eq!(joined(&turns, advantages.into_iter()), expected);
    let alone = joined(&turns[..1], [Advantages::Response(1.5)].into_iter());
    assert_eq!(alone, Advantages::Response(1.5), "one number for a response of one turn");
}

/// Groups of 2, 1 and 3 responses, two groups to a mini-batch.
#[test]
fn each_minibatch_has_the_constants_of_its_responses() {
    let groups = [2, 1, 3].map(|n| group((0..n).map(|_| episode(&[1], &[0.0])).collect()));
    let constants = (0..6).map(|n| ResponseConstants {
        advantages: Advantages::Response(f64::from(n)),
        reference_logp: None,
        sampler_logp: None,
    });
    let rolled = RolledOut {
        batch: Batch { groups: groups.to_vec() },
        constants: constants.collect(),
        n_drawn: 3,
        n_responses: 6,
        n_sampled: 6,
        episodes: Vec::new(),
    };
    let set = ["rollout.problems_per_step=3", "update.problems_per_minibatch=2"];
    let plan = Plan::resolve(crate::Config::from_toml("", set).unwrap()).unwrap();
    let found: Vec<(usize, Vec<f64>)> = rolled
        .minibatches(&plan)
        .into_iter()
        .map(|(groups, constants)| {
            (groups.len(), constants.iter().map(|own| own.advantages.mean()).collect())
        })
        .collect();
    assert_eq!(found, [(2, vec![0.0, 1.0, 2.0]), (1, vec![3.0, 4.0, 5.0])]);
}
