//! Two steps on recorded rollouts, with a mask, a reference, reuse and a resume in between, against the numbers of
//! `goldens/make_steps.py`: a forward pass in NumPy, its derivative by `autograd`, the objective and AdamW as the papers
//! write them, all in f64.

use super::{Quiet, device, plan, resume, start, text_of};
use serde_json::{Value, json};
use stapo_core::record::Metrics;
use stapo_rl::reward::Programs;
use stapo_rl::run::Run;
use stapo_rl::train::{Outcome, Trainer, train};
use std::fs;

const SETTINGS: [&str; 14] = [
    "steps=2",
    "objective.preset=stapo",
    "objective.masks.0.tau_p=0.3",
    "objective.masks.0.q=0.5",
    "objective.kl={kind=\"k3\", beta=0.1}",
    "update.reuse={max=2, gate=\"none\"}",
    "update.learning_rate=2e-5",
    "update.schedule={kind=\"constant\", warmup_steps=3}",
    "update.beta1=0.9",
    "update.beta2=0.99",
    "update.epsilon=1e-5",
    "update.weight_decay=0.01",
    "update.max_gradient_norm=0.5",
    "record.checkpoint_every_steps=1",
];

/// The rollouts of both steps as the policy samples them before the first.
fn recorded_rollouts() -> Vec<Value> {
    let both = plan(&["rollout.problems_per_step=8", "update.problems_per_minibatch=8"]);
    let mut trainer = Trainer::new(&both, &device(2), Programs::Recorded).unwrap();
    let rolled = trainer.roll_out(&both).unwrap();
    let groups = rolled.batch.groups.iter();
    let members =
        groups.flat_map(|group| group.members.iter().map(move |member| (&group.problem.id, member)));
    let line = |(id, member): (&String, &stapo_core::Scored)| {
        let rollout = &member.rollout;
        let logp: Vec<f64> = rollout.logp.iter().map(|&logp| f64::from(logp)).collect();
        json!({"id": id, "prompt_tokens": rollout.prompt(), "tokens": rollout.response(), "logp": logp, "reward": member.reward})
    };
    members.map(line).collect()
}

/// `STAPO_WRITE_ROLLOUTS=1` records the rollouts anew; the script must follow.
#[test]
fn steps_on_recorded_rollouts_have_the_numbers_of_numpy() {
    let goldens = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens");
    let rollouts = format!("{goldens}/rollouts.jsonl");
    if std::env::var_os("STAPO_WRITE_ROLLOUTS").is_some() {
        fs::write(&rollouts, text_of(&recorded_rollouts())).unwrap();
    }
    let golden: Value =
        serde_json::from_str(&fs::read_to_string(format!("{goldens}/steps.json")).unwrap()).unwrap();
    let source = format!("rollout.source={{kind=\"jsonl\", path={rollouts:?}, behavior=\"policy\"}}");
    let plan = plan(&[&SETTINGS[..], &[&source]].concat());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, &plan);
    let stopped = train(&plan, &mut run, &mut trainer, &mut Quiet { stop_after: Some(1), step: 0 });
    assert_eq!(stopped.unwrap(), Outcome::Stopped);
    drop((run, trainer));
    let (mut run, mut trainer, _) = resume(&path, 1);
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let metrics: Vec<Metrics> = Run::read_metrics(&path).unwrap();
    for (found, expected) in metrics.iter().zip(golden["steps"].as_array().unwrap()) {
        let found = serde_json::to_value(found).unwrap();
        for (key, expected) in expected.as_object().unwrap() {
            let numbers = (found[key].as_f64().unwrap(), expected.as_f64().unwrap());
            let is_count = key.starts_with("n_") || key == "step";
            let allowed =
                if is_count { 0.0 } else { golden["tolerance"].as_f64().unwrap() * numbers.1.abs() };
            assert!((numbers.0 - numbers.1).abs() <= allowed, "step {}: {key} {numbers:?}", found["step"]);
        }
    }
    assert_eq!((metrics.len(), golden["steps"].as_array().unwrap().len()), (2, 2));
}
