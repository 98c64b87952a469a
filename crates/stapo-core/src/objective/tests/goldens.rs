use super::*;
use serde::Deserialize;

#[derive(Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    rewards: Vec<Vec<f64>>,
    logp: Vec<Vec<f64>>,
    behavior_logp: Vec<Vec<f64>>,
    reference_logp: Vec<Vec<f64>>,
    entropy: Vec<Vec<f64>>,
    loss: f64,
    d_logp: Vec<Vec<f64>>,
}

/// Our preset with TRL's settings: TRL adds 1e-4 to the deviation; TRL's Dr. GRPO divides by the configured completion
/// length (16 in the goldens); TRL's top-entropy mask divides by all response tokens instead of the kept tokens.
fn as_trl(name: &str) -> ObjectiveSpec {
    let overrides: &[&str] = match name {
        "dr-grpo" => &["denominator.length=16.0"],
        "entropy20" => &["advantage.epsilon=1e-4", "denominator.kind=all_tokens"],
        _ => &["advantage.epsilon=1e-4"],
    };
    ObjectiveSpec::from_preset(name).unwrap().with_overrides(overrides.iter().copied()).unwrap()
}

#[test]
fn losses_and_gradients_agree_with_trl() {
    let goldens: Goldens = serde_json::from_str(include_str!("../../../tests/goldens/trl.json")).unwrap();
    let names: Vec<&str> = goldens.cases.iter().map(|case| case.name.as_str()).collect();
    assert_eq!(names, ["grpo", "dapo", "dr-grpo", "cispo", "gspo", "sapo", "entropy20"]);
    for case in &goldens.cases {
        let spec = as_trl(&case.name);
        let advantages = case.rewards.iter().flat_map(|group| spec.advantage.of_group(group).unwrap());
        let samples: Vec<Sample> = advantages
            .enumerate()
            .map(|(i, advantage)| Sample {
                behavior_logp: case.behavior_logp[i].clone(),
                reference_logp: case.reference_logp[i].clone(),
                ..Sample::on_policy(advantage, &case.logp[i], &case.entropy[i])
            })
            .collect();
        let (tally, effects) = run(&spec, &samples, UpdateKey::default()).unwrap();
        let close = |ours: f64, theirs: f64| (ours - theirs).abs() <= 1e-6 * theirs.abs().max(1e-6);
        assert!(close(tally.loss, case.loss), "{}: loss {} {}", case.name, tally.loss, case.loss);
        let mut n_pushed = 0;
        for (i, theirs) in case.d_logp.iter().enumerate() {
            for (t, &theirs) in theirs.iter().enumerate() {
                let ours = effects[i][t].d_logp;
                assert!(close(ours, theirs), "{}: response {i} token {t}: {ours} {theirs}", case.name);
                n_pushed += usize::from(theirs != 0.0);
            }
        }
        assert!(n_pushed >= 4, "{}: the golden pushes only {n_pushed} tokens", case.name);
    }
}

#[test]
fn the_seven_printed_advantages_come_out() {
    let printed = ["0.3536", "0.5401", "0.7246", "0.9354", "1.2076", "1.6202", "2.4749"];
    for (n_wrong, printed) in (1..8).zip(printed) {
        let rewards: Vec<f64> = (0..8).map(|i| if i < n_wrong { -1.0 } else { 1.0 }).collect();
        let advantages = Advantage::default().of_group(&rewards).unwrap();
        assert_eq!(format!("{:.4}", advantages[7]), printed, "{n_wrong} wrong of 8");
        assert!(advantages.iter().sum::<f64>().abs() < 1e-12);
    }
}

#[test]
fn the_other_advantages_are_what_their_papers_say() {
    let rewards = [1.0, 0.0, 0.0, 0.5];
    assert_eq!(Advantage::GroupMean.of_group(&rewards).unwrap(), [0.625, -0.375, -0.375, 0.125]);
    let left_out = Advantage::LeaveOneOut.of_group(&rewards).unwrap();
    for (i, a) in left_out.iter().enumerate() {
        let others: f64 = (0..4).filter(|&j| j != i).map(|j| rewards[j]).sum::<f64>() / 3.0;
        assert!((a - (rewards[i] - others)).abs() < 1e-15);
    }
    let population = Advantage::GroupZScore { ddof: 0, epsilon: 0.0 }.of_group(&[1.0, -1.0]).unwrap();
    assert_eq!(population, [1.0, -1.0]);
    assert_eq!(Advantage::default().of_group(&[0.7]).unwrap(), [0.0]);
    assert_eq!(
        Advantage::LeaveOneOut.of_group(&[0.7]),
        Err(ObjectiveError::LoneResponse { response_idx: Some(0) })
    );
    let nan = Advantage::default().of_group(&[0.0, f64::NAN]);
    assert!(matches!(nan, Err(ObjectiveError::Reward { reward_idx: 1, .. })));
}
