use super::*;
use crate::learn::constants::ResponseConstants;
use crate::learn::update::Member;
use crate::plan::config::Config;
use crate::testing::metrics;
use stapo_core::diagnostics::{Census, Thresholds};
use stapo_core::objective::Advantages;
use stapo_core::record::JudgeMetrics;
use stapo_core::{Problem, Rollout, TokenEffect};

#[test]
fn a_tenth_of_the_right_answers_is_worth_a_warning() {
    assert!(is_worth_a_warning(3, 30) && is_worth_a_warning(4, 4));
    assert!(!is_worth_a_warning(2, 2) && !is_worth_a_warning(3, 31));
}

#[test]
fn an_accuracy_that_rises_without_the_rules_is_a_warning() {
    let judged = |accuracy, rule_accuracy| {
        let judge = JudgeMetrics { asked_share: 1.0, agreement: Some(0.5), rule_accuracy };
        Metrics { accuracy, judge: Some(judge), ..metrics(1, 0.5, 0.3) }
    };
    let warned = |now: &Metrics| drifts(&CanaryConfig::default(), &judged(0.5, 0.4), now);
    assert!(warned(&judged(0.8, 0.7)).is_empty(), "both rose");
    assert!(warned(&judged(0.61, 0.42)).is_empty(), "a tenth is chance");
    // At its limit the canary says nothing. These numbers have no rounding in their differences.
    let grown = |now: &Metrics| drifts(&CanaryConfig::default(), &judged(0.0, 0.0), now).len();
    assert_eq!((grown(&judged(0.1, 0.0)), grown(&judged(0.11, 0.0))), (0, 1));
    let [(_, warning)] = &warned(&judged(0.9, 0.4))[..] else { panic!("one warning") };
    assert!(warning.contains("90 %") && warning.contains("40 points further apart"), "{warning}");
}

fn scored(verdict: Verdict, finish: Finish) -> Scored {
    let rollout = Rollout {
        problem_idx: 0,
        sample_idx: 0,
        tokens: vec![1, 2],
        is_sampled: vec![false, true],
        logp: vec![-0.5],
        entropy: vec![0.5],
        kept: vec![],
        finish,
        policy_version: None,
    };
    Scored { rollout, verdict, reward: 0.0, rewards: vec![0.0], program: None, judge: None, episode: None }
}

fn one_group(members: Vec<Scored>) -> Batch {
    let [id, prompt, reference] = ["p", "1+1=", "2"].map(String::from);
    let problem = Problem { id, earlier_turns: Vec::new(), prompt, reference };
    Batch { groups: vec![Group { problem, members }] }
}

#[test]
fn equal_rewards_are_explained_by_what_the_responses_have_in_common() {
    let plan = Plan::resolve(Config::default()).unwrap();
    let said = |verdict, finish| {
        let batch = one_group(vec![scored(verdict, finish), scored(verdict, finish)]);
        no_contrast(&plan, &metrics(3, 0.5, 0.5), &batch).unwrap()
    };
    let cut = said(Verdict::NoAnswer, Finish::LengthLimit);
    assert!(cut.starts_with("step 3: ") && cut.contains("rollout.max_response_tokens = 96"), "{cut}");
    assert!(said(Verdict::Right, Finish::Stop { token: 2 }).contains("too easy ("));
    assert!(said(Verdict::NoAnswer, Finish::Stop { token: 2 }).contains("no response has an answer"));
    assert!(said(Verdict::Wrong, Finish::Stop { token: 2 }).contains("too easy or too hard"));
    let mut apart = one_group(vec![scored(Verdict::Wrong, Finish::Stop { token: 2 }); 2]);
    apart.groups[0].members[0].rewards = vec![1.0];
    assert_eq!(no_contrast(&plan, &metrics(3, 0.5, 0.5), &apart), None);
}

/// One of four responses is not judged.
#[test]
fn as_many_responses_as_the_limit_may_be_unjudged() {
    for unjudged in [Verdict::Unparsable, Verdict::OverBudget] {
        let verdicts = [Verdict::Right, Verdict::Wrong, Verdict::NoAnswer, unjudged];
        let batch = one_group(verdicts.map(|verdict| scored(verdict, Finish::LengthLimit)).to_vec());
        let checked = |limit: &str| {
            let limit = format!("canaries.max_unjudged_share={limit}");
            let plan = Plan::resolve(Config::from_toml("", [limit.as_str()]).unwrap()).unwrap();
            check_verdicts(&plan, 3, &batch).map_err(|error| error.to_string())
        };
        assert_eq!(checked("0.25"), Ok(()));
        let said = checked("0.24").unwrap_err();
        assert!(said.contains("step 3") && said.contains("25.0 %") && said.contains("24.0 %"), "{said}");
    }
}

#[test]
fn a_step_far_from_the_first_is_told() {
    let canaries = Config::default().canaries;
    let step = |entropy, truncated_share| Metrics { truncated_share, ..metrics(7, 0.5, entropy) };
    let said = |first: (f64, f64), now: (f64, f64)| {
        let found = drifts(&canaries, &step(first.0, first.1), &step(now.0, now.1));
        found.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("; ")
    };
    // At its limit a canary says nothing.
    assert_eq!(said((0.5, 0.1), (0.05, 0.49)), "");
    assert_eq!(said((0.5, 0.25), (2.5, 0.5)), "");
    assert!(said((0.4, 0.0), (0.039, 0.0)).starts_with("step 7: entropy fell from 0.400 to 0.039 nats"));
    assert!(said((0.4, 0.0), (2.01, 0.0)).starts_with("step 7: entropy rose from 0.400 to 2.010 nats"));
    // Where half of the responses are cut from the start, more are no news.
    assert_eq!(said((0.4, 0.5), (0.4, 1.0)), "");
    let cut = said((0.4, 0.2), (0.4, 0.5));
    assert!(cut.starts_with("step 7: 50 % of the responses were cut at their limit, 20 % in the"), "{cut}");
}

#[test]
fn a_drift_is_warned_of_when_it_begins() {
    let plan = Plan::resolve(Config::default()).unwrap();
    let step = |entropy, truncated_share| Metrics { truncated_share, ..metrics(7, 0.5, entropy) };
    let (first, low) = (step(0.4, 0.0), step(0.01, 0.0));
    let warned = |before: Option<&Metrics>, now: &Metrics| warnings(&plan, Some(&first), before, now).len();
    assert_eq!((warned(None, &low), warned(Some(&first), &low)), (1, 1));
    assert_eq!(warned(Some(&low), &low), 0, "the same warning again");
    assert_eq!(warned(Some(&low), &step(0.01, 0.9)), 1, "another drift begins");
    assert_eq!(warned(Some(&step(0.01, 0.9)), &low), 0);
}

/// What an update of one mini-batch looks like to the canaries.
fn learned<'a>(
    plan: &Plan,
    members: Vec<Member<'a>>,
    unreached: &[&str],
    (has_moved, gradient_norm): (bool, f64),
) -> Learned<'a> {
    let exactness_max_abs = members.iter().map(Member::distance).fold(0.0, f64::max);
    Learned {
        members,
        tally: plan.objective.total(&[]),
        tau_h: None,
        census: Census::new(Thresholds { tau_p: 0.002, tau_h: f64::INFINITY }),
        gradient_norm,
        learning_rate: 1e-4,
        exactness_max_abs,
        unreached: unreached.iter().map(ToString::to_string).collect(),
        has_moved,
        reuse: None,
    }
}

/// A response of one sampled token whose log-prob was -0.5, with the log-prob of training and the derivative by it.
fn member<'a>(
    group: &'a Group,
    constants: &'a ResponseConstants,
    is_on_policy: bool,
    (logp, d_logp): (f64, f64),
) -> Member<'a> {
    Member {
        group,
        scored: &group.members[0],
        constants,
        is_on_policy,
        behavior_logp: vec![-0.5],
        behavior_entropy: vec![0.5],
        logp: vec![logp],
        entropy: vec![0.5],
        collision: Some(vec![0.9]),
        alternatives: Vec::new(),
        effects: vec![TokenEffect { d_logp, ..TokenEffect::default() }],
    }
}

#[test]
fn a_broken_update_stops_the_run_and_an_update_without_contrast_does_not() {
    let batch = one_group(vec![scored(Verdict::Wrong, Finish::LengthLimit)]);
    let advantages = Advantages::Response(0.0);
    let constants = ResponseConstants { advantages, reference_logp: None, sampler_logp: None };
    let resolve = |set: &[&str]| Plan::resolve(Config::from_toml("", set.to_vec()).unwrap()).unwrap();
    let (plan, off) = (resolve(&[]), resolve(&["canaries.enabled=false"]));
    let foreign = resolve(&["rollout.source={kind=\"jsonl\",path=\"x\"}"]);
    let members = |is_on_policy, numbers| vec![member(&batch.groups[0], &constants, is_on_policy, numbers)];
    let moved = (true, 1.0);
    let checked =
        |plan: &Plan, learned: Learned| check_learned(plan, 7, &learned).map_err(|error| error.to_string());
    let same = (-0.5, 0.3);
    assert_eq!(checked(&plan, learned(&plan, members(true, same), &[], moved)), Ok(()));
    // Log-probs that differ in the last bit, of a response of this policy.
    let differs = ((-0.5_f64).next_down(), 0.3);
    let said = checked(&plan, learned(&plan, members(true, differs), &[], moved)).unwrap_err();
    assert!(said.starts_with("step 7: canary exactness") && said.contains("sample 0 token 0"), "{said}");
    assert_eq!(
        checked(&plan, learned(&plan, members(false, differs), &[], moved)),
        Ok(()),
        "an earlier policy"
    );
    assert_eq!(checked(&foreign, learned(&foreign, members(true, differs), &[], moved)), Ok(()));
    assert_eq!(checked(&off, learned(&off, members(true, differs), &[], moved)), Ok(()));

    let said = checked(&plan, learned(&plan, members(true, same), &["a", "b"], moved)).unwrap_err();
    assert!(said.contains("canary gradient: a and 1 more tensors got no gradient"), "{said}");
    for (is_on_policy, gradient_norm, is_broken) in
        [(true, 0.0, true), (false, 1.0, true), (false, 0.0, false)]
    {
        let update = learned(&plan, members(is_on_policy, same), &["a"], (true, gradient_norm));
        assert_eq!(checked(&plan, update).is_err(), is_broken, "{is_on_policy} {gradient_norm}");
    }
    let nothing = (-0.5, 0.0);
    assert_eq!(
        checked(&plan, learned(&plan, members(true, nothing), &["a"], moved)),
        Ok(()),
        "nothing to learn"
    );

    let said = checked(&plan, learned(&plan, members(true, same), &[], (false, 0.1))).unwrap_err();
    assert!(said.contains("canary weights: an update at learning rate 1e-4 changed no weight"), "{said}");
    assert_eq!(checked(&plan, learned(&plan, members(true, same), &[], (false, 0.0))), Ok(()), "no gradient");
}

#[test]
fn without_canaries_no_step_stops_a_run_or_warns() {
    let plan = Plan::resolve(Config::from_toml("", ["canaries.enabled=false"]).unwrap()).unwrap();
    let unjudged = one_group(vec![scored(Verdict::Unparsable, Finish::LengthLimit); 2]);
    assert!(check_verdicts(&plan, 1, &unjudged).is_ok());
    let low = Metrics { truncated_share: 1.0, ..metrics(7, 0.5, 0.001) };
    assert!(warnings(&plan, Some(&metrics(1, 0.5, 0.4)), None, &low).is_empty());
    assert_eq!(no_contrast(&plan, &low, &unjudged), None);
}

/// A program that goes over a limit of time has been judged by its tests.
#[test]
fn programs_that_take_too_long_are_judged() {
    let set =
        ["task={kind=\"jsonl\",path=\"x\",verifier={kind=\"code\"}}", "canaries.max_unjudged_share=0.5"];
    let plan = Plan::resolve(Config::from_toml("", set).unwrap()).unwrap();
    let batch = |verdict| one_group(vec![scored(verdict, Finish::LengthLimit); 2]);
    assert!(check_verdicts(&plan, 1, &batch(Verdict::OverBudget)).is_ok());
    assert!(check_verdicts(&plan, 1, &batch(Verdict::Unparsable)).is_err());
}

#[test]
fn only_rollouts_of_another_engine_switch_exactness_off() {
    let plan = |set: &[&str]| Plan::resolve(Config::from_toml("", set.to_vec()).unwrap()).unwrap();
    assert!(switched_off(&plan(&[])).is_empty());
    let said = switched_off(&plan(&["rollout.source={kind=\"jsonl\",path=\"x.jsonl\"}"]));
    assert!(said.len() == 1 && said[0].contains("x.jsonl"), "{said:?}");
}
