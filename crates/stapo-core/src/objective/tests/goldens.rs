use super::*;
use serde::Deserialize;

#[derive(Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

/// The numbers of another implementation, and the settings with which ours are the same.
#[derive(Deserialize)]
struct Case {
    name: String,
    preset: String,
    set: Vec<String>,
    /// By group and response, then by reward where there are several.
    rewards: Vec<Vec<Rewards>>,
    #[serde(default = "single")]
    weights: Vec<f64>,
    logp: Vec<Vec<f64>>,
    behavior_logp: Vec<Vec<f64>>,
    reference_logp: Vec<Vec<f64>>,
    entropy: Vec<Vec<f64>>,
    sampler_logp: Option<Vec<Vec<f64>>>,
    /// One per token, where the implementation's advantages are golden too.
    advantage: Option<Vec<Vec<f64>>>,
    loss: f64,
    /// False if the gradients are the same and the values are not: `stopgrad(weight) * logp`.
    #[serde(default = "yes")]
    same_loss: bool,
    d_logp: Vec<Vec<f64>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Rewards {
    One(f64),
    Several(Vec<f64>),
}

fn single() -> Vec<f64> {
    vec![1.0]
}
fn yes() -> bool {
    true
}

impl Case {
    fn spec(&self) -> ObjectiveSpec {
        let preset = ObjectiveSpec::from_preset(&self.preset).unwrap();
        preset.with_overrides(self.set.iter().map(String::as_str)).unwrap()
    }

    fn advantages(&self, spec: &ObjectiveSpec) -> Vec<Advantages> {
        let rewards: Vec<(usize, Vec<f64>)> = self
            .rewards
            .iter()
            .enumerate()
            .flat_map(|(group, members)| members.iter().map(move |member| (group, member)))
            .map(|(group, member)| match member {
                Rewards::One(reward) => (group, vec![*reward]),
                Rewards::Several(rewards) => (group, rewards.clone()),
            })
            .collect();
        let scored: Vec<ScoredResponse> = rewards
            .iter()
            .enumerate()
            .map(|(i, (group, rewards))| ScoredResponse {
                behavior_logp: Some(&self.behavior_logp[i]),
                reference_logp: Some(&self.reference_logp[i]),
                ..ScoredResponse::new(*group, rewards, self.logp[i].len())
            })
            .collect();
        spec.advantages(&scored, &self.weights).unwrap()
    }

    fn sample(&self, i: usize, advantage: Advantages) -> Sample {
        let mut sample = Sample {
            advantage,
            behavior_logp: self.behavior_logp[i].clone(),
            reference_logp: self.reference_logp[i].clone(),
            ..Sample::on_policy(0.0, &self.logp[i], &self.entropy[i])
        };
        if let Some(sampler_logp) = &self.sampler_logp {
            sample.sampler_logp.clone_from(&sampler_logp[i]);
        }
        sample
    }
}

/// Compares a file of goldens with ours, and returns the names of the cases.
fn check(goldens: &str) -> Vec<String> {
    let goldens: Goldens = serde_json::from_str(goldens).unwrap();
    for case in &goldens.cases {
        let name = &case.name;
        let spec = case.spec();
        let advantages = case.advantages(&spec);
        let close = |ours: f64, theirs: f64| (ours - theirs).abs() <= 1e-6 * theirs.abs().max(1e-6);
        for (i, theirs) in case.advantage.iter().flatten().enumerate() {
            for (t, &theirs) in theirs.iter().enumerate() {
                let ours = advantages[i].view().at(t);
                assert!(close(ours, theirs), "{name}: advantage of response {i} token {t}: {ours} {theirs}");
            }
        }
        let samples: Vec<Sample> =
            advantages.into_iter().enumerate().map(|(i, advantage)| case.sample(i, advantage)).collect();
        let (tally, effects) = run(&spec, &samples, UpdateKey::default()).unwrap();
        // A loss is a sum of both signs, so rounding can be much of a small one.
        let is_near = (tally.loss - case.loss).abs() <= 1e-6 * case.loss.abs().max(1e-3);
        assert!(!case.same_loss || is_near, "{name}: loss {} {}", tally.loss, case.loss);
        let mut n_pushed = 0;
        for (i, theirs) in case.d_logp.iter().enumerate() {
            for (t, &theirs) in theirs.iter().enumerate() {
                let ours = effects[i][t].d_logp;
                assert!(close(ours, theirs), "{name}: response {i} token {t}: {ours} {theirs}");
                n_pushed += usize::from(theirs != 0.0);
            }
        }
        assert!(n_pushed >= 4, "{name}: the golden pushes only {n_pushed} tokens");
    }
    goldens.cases.into_iter().map(|case| case.name).collect()
}

#[test]
fn losses_and_gradients_agree_with_trl() {
    let names = check(include_str!("../../../tests/goldens/trl.json"));
    assert_eq!(names[..7], ["grpo", "dapo", "dr-grpo", "cispo", "gspo", "sapo", "entropy20"]);
    assert_eq!(names.len(), 18);
}

#[test]
fn losses_gradients_and_advantages_agree_with_verl() {
    let names = check(include_str!("../../../tests/goldens/verl.json"));
    assert_eq!(names.len(), 20);
    for name in ["clip-cov", "kl-cov", "gmpo", "rloo", "dppo-tv", "justrl", "reinforce++", "cispo", "sapo"] {
        assert!(names.iter().any(|own| own == name), "{name} is missing");
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
