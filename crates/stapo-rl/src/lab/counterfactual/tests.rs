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
