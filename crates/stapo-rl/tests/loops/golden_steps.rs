//! Two steps on recorded rollouts, and two steps that redraw groups of equal rewards, each with a mask, a reference, reuse
//! and a resume in between, against the numbers of `goldens/make_steps.py`: a forward pass in NumPy, its derivative by
//! `autograd`, the rule of the redraws, the objective and AdamW as the papers write them, all in f64.

use super::{Quiet, device, plan, resume, start, text_of};
use serde_json::{Value, json};
use stapo_core::Group;
use stapo_core::record::{Metrics, ResponseRecord, parse_lines};
use stapo_rl::Plan;
use stapo_rl::reward::Programs;
use stapo_rl::run::Run;
use stapo_rl::train::{Outcome, Trainer, train};
use std::fs;

const SETTINGS: [&str; 15] = [
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
    "record.responses_every_steps=1",
];

/// The responses of groups.
fn lines(groups: &[Group]) -> impl Iterator<Item = Value> {
    let members =
        groups.iter().flat_map(|group| group.members.iter().map(move |member| (&group.problem.id, member)));
    members.map(|(id, member)| {
        let rollout = &member.rollout;
        let logp: Vec<f64> = rollout.logp.iter().map(|&logp| f64::from(logp)).collect();
        json!({"id": id, "prompt_tokens": rollout.prompt(), "tokens": rollout.response(), "logp": logp, "reward": member.reward})
    })
}

/// The rollouts of both steps as the policy samples them before the first.
fn recorded_rollouts() -> Vec<Value> {
    let both = plan(&["rollout.problems_per_step=8", "update.problems_per_minibatch=8"]);
    let mut trainer = Trainer::new(&both, &device(2), Programs::Recorded).unwrap();
    let groups = trainer.roll_out(&both).unwrap().batch.groups;
    lines(&groups).collect()
}

const MAX_REDRAWS: u64 = 2;

/// The settings with groups of two responses, which agree often.
fn redrawing(max_redraws: u64) -> Plan {
    let redraws = format!("rollout.max_redraws={max_redraws}");
    plan(&[&SETTINGS[..], &["rollout.group_size=2", &redraws]].concat())
}

/// What both steps draw, with the groups that they replace: a batch ends with all groups of its last allowed draw.
fn recorded_draws() -> Vec<Value> {
    let whole = redrawing(MAX_REDRAWS);
    let mut trainer = Trainer::new(&whole, &device(2), Programs::Recorded).unwrap();
    let mut recorded = Vec::new();
    for step in 1..=2 {
        let mut n_kept = 0;
        for draw in 0..=MAX_REDRAWS {
            let groups = trainer.roll_out(&redrawing(draw)).unwrap().batch.groups;
            recorded.extend(lines(&groups[n_kept..]).map(|mut line| {
                (line["step"], line["draw"]) = (json!(step), json!(draw));
                line
            }));
            n_kept += groups[n_kept..].iter().filter(|group| !group.is_unanimous()).count();
            if n_kept == groups.len() {
                break;
            }
        }
        let rolled = trainer.roll_out(&whole).unwrap();
        trainer.learn(&whole, &rolled).unwrap();
    }
    recorded
}

/// Runs both steps, with a resume in between, and compares metrics and recorded problems with the golden ones.
fn check_steps(plan: &Plan, golden: &[Value]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, plan);
    let stopped = train(plan, &mut run, &mut trainer, &mut Quiet { stop_after: Some(1), step: 0 });
    assert_eq!(stopped.unwrap(), Outcome::Stopped);
    drop((run, trainer));
    let (mut run, mut trainer, _) = resume(&path, 1);
    train(plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let metrics: Vec<Metrics> = Run::read_metrics(&path).unwrap();
    assert_eq!((metrics.len(), golden.len()), (2, 2));
    for (found, golden) in metrics.iter().zip(golden) {
        let step = found.step;
        let found = serde_json::to_value(found).unwrap();
        for (key, expected) in golden["metrics"].as_object().unwrap() {
            let numbers = (found[key].as_f64().unwrap(), expected.as_f64().unwrap());
            let is_count = key.starts_with("n_") || key == "step";
            let allowed = if is_count { 0.0 } else { 1e-4 * numbers.1.abs() };
            assert!((numbers.0 - numbers.1).abs() <= allowed, "step {step}: {key} {numbers:?}");
        }
        let text = fs::read_to_string(path.join(format!("rollouts/step-{step:06}.jsonl"))).unwrap();
        let responses: Vec<ResponseRecord> = parse_lines(&text).unwrap().records;
        let ids: Vec<&str> = responses.iter().map(|response| response.problem_id.as_str()).collect();
        // A batch that is used twice is recorded twice.
        let expected = golden["problems"].as_array().unwrap();
        assert_eq!(json!(ids), json!([&expected[..], expected].concat()), "step {step}");
    }
}

/// `STAPO_WRITE_ROLLOUTS=1` records the rollouts anew; the script must follow.
#[test]
fn steps_on_recorded_and_on_redrawn_rollouts_have_the_numbers_of_numpy() {
    let goldens = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens");
    let rollouts = format!("{goldens}/rollouts.jsonl");
    if std::env::var_os("STAPO_WRITE_ROLLOUTS").is_some() {
        fs::write(&rollouts, text_of(&recorded_rollouts())).unwrap();
        fs::write(format!("{goldens}/draws.jsonl"), text_of(&recorded_draws())).unwrap();
    }
    let golden: Value =
        serde_json::from_str(&fs::read_to_string(format!("{goldens}/steps.json")).unwrap()).unwrap();
    let source = format!("rollout.source={{kind=\"jsonl\", path={rollouts:?}, behavior=\"policy\"}}");
    let recorded = plan(&[&SETTINGS[..], &[&source]].concat());
    check_steps(&recorded, golden["recorded"].as_array().unwrap());
    check_steps(&redrawing(MAX_REDRAWS), golden["redrawn"].as_array().unwrap());
}
