//! Reuse of rollout batches, several rewards, teachers, rollouts from elsewhere, and adapters.

mod episodes;
mod golden_steps;
mod lora;
mod positions;
mod quantised;
mod shared_prompts;
mod watching;

use super::{Quiet, device, resume, start, timeless, whole_run};
use serde_json::{Value, json};
use stapo_core::record::{Metrics, ResponseRecord, parse_lines};
use stapo_core::{Group, Scored};
use stapo_rl::reward::Programs;
use stapo_rl::run::Run;
use stapo_rl::train::{Outcome, Trainer, train};
use stapo_rl::{Config, Plan};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Type and shape of every tensor of a safetensors file, whose header is JSON after its length in 8 bytes.
fn shapes(path: &Path) -> BTreeMap<String, [Value; 2]> {
    let bytes = fs::read(path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    header.remove("__metadata__");
    header.into_iter().map(|(name, t)| (name, [t["dtype"].clone(), t["shape"].clone()])).collect()
}

/// Expects every weight of the built-in model and both moments of each in the files of a checkpoint, in f32.
pub fn check_state_files(checkpoint: &Path) {
    let model = shapes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/base/model.safetensors"));
    assert!(!model.is_empty());
    for (file, parts) in [("weights", &["weight"][..]), ("moments", &["moment1", "moment2"])] {
        let name = |part: &&str, name: &String| format!("{part}.{name}");
        let of_part = |part| {
            model.iter().map(move |(tensor, [_, shape])| (name(part, tensor), [json!("F32"), shape.clone()]))
        };
        let expected: BTreeMap<_, _> = parts.iter().flat_map(of_part).collect();
        assert_eq!(shapes(&checkpoint.join(file).with_extension("safetensors")), expected);
    }
}

/// The tiny plan with a seed whose first groups all have right and wrong responses.
fn plan(overrides: &[&str]) -> Plan {
    super::plan(&[&["seed=3"], overrides].concat())
}

/// What a step did to the weights: equal values mean equal bits.
fn learned(metrics: &Metrics) -> [f64; 5] {
    [metrics.loss, metrics.gradient_norm, metrics.entropy_mean, metrics.ratio_min, metrics.ratio_max]
}

/// Stops a run after each of its steps, resumes it, and expects the state and the metrics of the whole run.
fn check_resumed(plan: &Plan) -> Vec<Metrics> {
    let (hash, metrics) = whole_run(plan);
    for stop_after in 1..plan.config.steps {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let (mut run, mut trainer) = start(&path, plan);
        let mut quiet = Quiet { stop_after: Some(stop_after), step: 0 };
        assert_eq!(train(plan, &mut run, &mut trainer, &mut quiet).unwrap(), Outcome::Stopped);
        drop((run, trainer));
        let (mut run, mut trainer, _) = resume(&path, 1);
        train(plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
        assert_eq!(trainer.learner.state_hash().unwrap(), hash, "stopped after {stop_after}");
        assert_eq!(timeless(Run::read_metrics(&path).unwrap()), timeless(metrics.clone()));
    }
    metrics
}

#[test]
fn a_batch_used_once_is_as_without_reuse_and_used_more_often_it_is_off_policy() {
    let (_, without) = whole_run(&plan(&["steps=2"]));
    let (_, once) = whole_run(&plan(&["steps=2", "update.reuse={max=1}"]));
    assert_eq!(once.iter().map(learned).collect::<Vec<_>>(), without.iter().map(learned).collect::<Vec<_>>());
    assert!(without.iter().all(|m| m.reuse.is_none()) && once.iter().all(|m| m.reuse.is_some()));
    let (_, twice) = whole_run(&plan(&["steps=2", "update.reuse={max=2, gate=\"none\"}"]));
    for (twice, once) in twice.iter().zip(&once) {
        let (used, single) = (twice.reuse.as_ref().unwrap(), once.reuse.as_ref().unwrap());
        assert_eq!((used.n_uses, used.gated, used.updates.len()), (2, false, 4));
        assert_eq!(used.updates.iter().map(|update| update.use_idx).collect::<Vec<_>>(), [0, 0, 1, 1]);
        assert!(used.updates.iter().all(|update| update.energy > 0.0));
        assert_eq!((single.n_uses, single.updates.len()), (1, 2));
        assert_eq!((twice.n_responses, once.n_responses), (Some(16), Some(16)));
        assert_eq!(twice.exactness_max_abs, 0.0, "the first update is on policy");
    }
    assert!(twice[0].ratio_max > once[0].ratio_max, "later uses are further from the policy that sampled");
    assert_eq!(twice[0].reuse.as_ref().unwrap().updates[..2], once[0].reuse.as_ref().unwrap().updates[..]);
}

/// With one mini-batch per use and a window of two increments, the gate can close from the fourth update on.
#[test]
fn gradients_that_the_gate_discards_leave_no_trace() {
    let one_minibatch = ["steps=2", "update.problems_per_minibatch=4"];
    let with = |reuse: &str| whole_run(&plan(&[&one_minibatch[..], &[reuse]].concat())).1;
    let gated = with("update.reuse={max=8, tau=-1e9, window=2}");
    let fixed = with("update.reuse={max=3, gate=\"none\", window=2}");
    let first = gated[0].reuse.as_ref().unwrap();
    assert_eq!((first.n_uses, first.gated, first.updates.len()), (4, true, 4));
    assert!(
        first.updates[3].gated
            && first.updates[3].z.is_some()
            && first.updates[..3].iter().all(|u| u.z.is_none())
    );
    assert_eq!(learned(&gated[0])[..2], learned(&fixed[0])[..2], "means are over the steps that were made");
    let second = gated[1].reuse.as_ref().unwrap();
    assert_eq!(
        (second.n_uses, second.gated, second.updates.len()),
        (2, true, 2),
        "the first use is always made"
    );
    let energy = fixed[1].reuse.as_ref().unwrap().updates[0].energy;
    assert_eq!(
        second.updates[0].energy.to_bits(),
        energy.to_bits(),
        "weights and gradients are those without it"
    );
}

#[test]
fn a_run_with_reuse_and_an_entropy_target_is_resumed_to_the_bit() {
    let settings = [
        "steps=3",
        "update.reuse={max=2, tau=0.0, window=6}",
        "objective.entropy_bonus={kind=\"target\", target=9.0, step=0.01}",
    ];
    let metrics = check_resumed(&plan(&settings));
    let window_is_full = |m: &Metrics| m.reuse.as_ref().unwrap().updates.iter().any(|u| u.z.is_some());
    assert!(
        !window_is_full(&metrics[0]) && window_is_full(&metrics[2]),
        "stopped with a window partly filled"
    );
    let coefficients: Vec<f64> = metrics.iter().map(|m| m.entropy_coefficient.unwrap()).collect();
    assert!(coefficients[0] > 0.0 && coefficients[1] > coefficients[0], "{coefficients:?}");
}

#[test]
fn rewards_are_judged_weighed_and_recorded_one_by_one() {
    let strict =
        "{name=\"strict\", weight=0.5, right=2.0, wrong=0.0, verifier={kind=\"rule\", mode=\"exact\"}}";
    let two = format!("rewards=[{{name=\"answer\"}}, {strict}]");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let two_rewards = plan(&["steps=1", &two, "objective.multiple_rewards=\"normalize_each\""]);
    let (mut run, mut trainer) = start(&path, &two_rewards);
    train(&two_rewards, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let metrics: Vec<Metrics> = Run::read_metrics(&path).unwrap();
    let [answer, strict] = ["answer", "strict"].map(|name| metrics[0].rewards[name]);
    assert!((metrics[0].reward_mean - (answer + 0.5 * strict)).abs() < 1e-12);
    assert!((metrics[0].accuracy - f64::midpoint(answer, 1.0)).abs() < 1e-12, "accuracy is the first one's");
    let text = fs::read_to_string(path.join("rollouts/step-000001.jsonl")).unwrap();
    let responses: Vec<ResponseRecord> = parse_lines(&text).unwrap().records;
    assert!(responses.iter().all(|r| r.reward == r.rewards["answer"] + 0.5 * r.rewards["strict"]));
    assert!(responses.iter().any(|r| r.rewards["answer"] == 1.0) && responses.iter().any(|r| r.reward < 0.0));
    let (_, plain) = whole_run(&plan(&["steps=1"]));
    let (_, one) = whole_run(&plan(&["steps=1", "rewards=[{name=\"answer\"}]"]));
    assert_eq!(learned(&one[0]), learned(&plain[0]), "one reward is the task's own");
    let again = Plan::resolve(Config::from_toml(&two_rewards.to_toml(), []).unwrap()).unwrap();
    assert_eq!(again.rewards, two_rewards.rewards);
}

/// At the first step the policy is its own reference and its own frozen teacher, and both differences are 0.
#[test]
fn a_teacher_and_a_reference_that_are_the_policy_add_nothing() {
    let (_, plain) = whole_run(&plan(&["steps=2"]));
    let builtin = "teacher={kind=\"builtin\"}";
    let distilled = "objective.distillation={kind=\"reverse_kl\", beta=1.0, reward_weight=1.0}";
    let (_, taught) = whole_run(&plan(&["steps=2", builtin, distilled]));
    assert_eq!(learned(&taught[0]), learned(&plain[0]));
    assert_ne!(learned(&taught[1]), learned(&plain[1]), "the student has left its teacher");
    let (_, alone) = whole_run(&plan(&["steps=1", builtin, "objective.distillation={kind=\"reverse_kl\"}"]));
    assert_eq!((alone[0].gradient_norm, alone[0].loss), (0.0, 0.0), "rewards have no weight by default");
    let (_, penalised) = whole_run(&plan(&["steps=2", "objective.kl_in_reward={kind=\"k1\", beta=5.0}"]));
    assert_eq!(learned(&penalised[0]), learned(&plain[0]));
    assert_ne!(learned(&penalised[1]), learned(&plain[1]));
}

#[test]
fn a_teacher_with_the_solution_gives_every_token_an_advantage_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let dasd = plan(&["steps=2", "teacher={kind=\"solution\"}", "objective.distillation={kind=\"dasd\"}"]);
    let (mut run, mut trainer) = start(&path, &dasd);
    train(&dasd, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let text = fs::read_to_string(path.join("rollouts/step-000001.jsonl")).unwrap();
    let responses: Vec<ResponseRecord> = parse_lines(&text).unwrap().records;
    assert!(responses.iter().all(|r| r.tokens.advantage.len() == r.tokens.id.len()));
    assert!(responses.iter().any(|r| r.tokens.advantage.windows(2).any(|pair| pair[0] != pair[1])));
    let (_, other) = whole_run(&plan(&[
        "steps=2",
        "teacher={kind=\"solution\", template=\"{{ reference }} {{ prompt }}\"}",
        "objective.distillation={kind=\"dasd\"}",
    ]));
    let own: Vec<Metrics> = Run::read_metrics(&path).unwrap();
    assert_ne!(learned(&other[0])[1], learned(&own[0])[1], "the template decides what the teacher reads");
    let unknown = plan(&[
        "teacher={kind=\"solution\", template=\"{{ answer }}\"}",
        "objective.distillation={kind=\"dasd\"}",
    ]);
    let mut trainer = Trainer::new(&unknown, &device(1), Programs::Recorded).unwrap();
    let said = trainer.roll_out(&unknown).unwrap_err().to_string();
    assert!(said.contains("template") && said.contains("prompt, reference, solution"), "{said}");
}

#[test]
fn a_teacher_of_other_tokens_is_refused_by_the_token() {
    let other = stapo_rl::unpack_builtin().unwrap();
    let file = other.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let (one, two) = (vocabulary["1"].clone(), vocabulary["2"].clone());
    vocabulary.insert("1".into(), two);
    vocabulary.insert("2".into(), one);
    fs::write(&file, tokenizer.to_string()).unwrap();
    let teacher = format!("teacher={{kind=\"path\", path={:?}}}", other.path());
    let plan = plan(&[&teacher, "objective.distillation={kind=\"reverse_kl\"}"]);
    let said = Trainer::new(&plan, &device(1), Programs::Recorded).err().unwrap().to_string();
    assert!(said.contains("config.teacher: token") && said.contains("the model's is"), "{said}");
}

/// The lines of the rollouts that the policy itself samples in the first step.
fn own_rollouts(plan: &Plan) -> Vec<Value> {
    let mut trainer = Trainer::new(plan, &device(2), Programs::Recorded).unwrap();
    let rolled = trainer.roll_out(plan).unwrap();
    let groups = rolled.batch.groups.iter();
    let lines =
        groups.flat_map(|group| group.members.iter().map(move |member| (&group.problem.id, &member.rollout)));
    lines
        .map(|(id, rollout)| {
            let logp: Vec<f64> = rollout.logp.iter().map(|&logp| f64::from(logp)).collect();
            json!({"id": id, "prompt_tokens": rollout.prompt(), "tokens": rollout.response(), "logp": logp})
        })
        .collect()
}

fn text_of(lines: &[Value]) -> String {
    lines.iter().flat_map(|line| [line.to_string(), "\n".to_string()]).collect()
}

fn write_lines(path: &Path, lines: &[Value]) {
    fs::write(path, text_of(lines)).unwrap();
}

#[test]
fn rollouts_from_a_file_train_as_if_the_policy_had_sampled_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rollouts.jsonl");
    let one_update = ["steps=1", "update.problems_per_minibatch=4"];
    let lines = own_rollouts(&plan(&one_update));
    write_lines(&path, &lines);
    let (_, plain) = whole_run(&plan(&one_update));
    let source =
        |behavior: &str| format!("rollout.source={{kind=\"jsonl\", path={path:?}, behavior=\"{behavior}\"}}");
    let tis = "objective.off_policy={kind=\"tis\"}";
    let trained = |settings: &[&str]| whole_run(&plan(&[&one_update[..], settings].concat())).1.remove(0);
    assert_eq!(learned(&trained(&[&source("policy")])), learned(&plain[0]));
    assert_eq!(learned(&trained(&[&source("sampler")])), learned(&plain[0]));
    assert_eq!(learned(&trained(&[&source("policy"), tis])), learned(&plain[0]), "every weight is 1");
    assert_eq!(trained(&[&source("policy")]).accuracy, plain[0].accuracy, "the task's verifier judges");

    // A sampler that found every token half as likely.
    let half = |line: &Value| {
        let mut line = line.clone();
        let logp = line["logp"].as_array().unwrap().iter().map(|logp| logp.as_f64().unwrap() - 2_f64.ln());
        line["logp"] = logp.collect();
        line
    };
    write_lines(&path, &lines.iter().map(half).collect::<Vec<_>>());
    let corrected = trained(&[&source("policy"), tis]);
    let doubled = corrected.loss / plain[0].loss;
    assert!((doubled - 2.0).abs() < 1e-9 && corrected.ratio_max == plain[0].ratio_max, "{doubled}");
    let against_sampler = trained(&[&source("sampler")]);
    assert!((against_sampler.ratio_min - 2.0).abs() < 0.5 && against_sampler.clip_fraction > 0.0);

    let rewarded = |line: &Value| {
        let mut line = line.clone();
        line["reward"] =
            json!(if line["tokens"].as_array().unwrap().len().is_multiple_of(2) { 0.5 } else { -3.0 });
        line
    };
    let with_rewards: Vec<Value> = lines.iter().map(rewarded).collect();
    write_lines(&path, &with_rewards);
    let given = trained(&[&source("policy")]);
    let mean = with_rewards.iter().map(|line| line["reward"].as_f64().unwrap()).sum::<f64>() / 16.0;
    assert!((given.reward_mean - mean).abs() < 1e-12);
    let n_right = with_rewards.iter().filter(|line| line["reward"] == 0.5).count();
    assert_eq!(given.accuracy, n_right as f64 / 16.0, "right above 0");
}

/// The metrics of a step whose responses are all right, three of them with a sum that is not worked out, and the reference of
/// the first problem.
fn with_sums_left_undone(settings: &[&str]) -> (Metrics, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rollouts.jsonl");
    let own = plan(&[&["steps=1"], settings].concat());
    let mut trainer = Trainer::new(&own, &device(1), Programs::Recorded).unwrap();
    let rolled = trainer.roll_out(&own).unwrap();
    let tokenizer = trainer.learner.model.tokenizer().unwrap();
    let members = rolled.batch.groups.iter().flat_map(|group| group.members.iter().map(move |m| (group, m)));
    let line = |(idx, (group, member)): (usize, (&Group, &Scored))| {
        let sum = if idx < 3 { "+0" } else { "" };
        let tokens = tokenizer.encode(&format!("\\boxed{{{}{sum}}}", group.problem.reference)).unwrap();
        let logp = vec![-0.5; tokens.len()];
        json!({"id": group.problem.id, "prompt_tokens": member.rollout.prompt(), "tokens": tokens, "logp": logp})
    };
    write_lines(&path, &members.enumerate().map(line).collect::<Vec<_>>());
    let source = format!("rollout.source={{kind=\"jsonl\", path=\"{}\"}}", path.display());
    let (_, mut metrics) = whole_run(&plan(&[&["steps=1", source.as_str()], settings].concat()));
    (metrics.remove(0), rolled.batch.groups[0].problem.reference.clone())
}

#[test]
fn right_answers_that_leave_the_calculation_to_the_grader_are_told() {
    let any = "task.verifier={kind=\"rule\"}";
    let (metrics, first) = with_sums_left_undone(&[any]);
    assert_eq!(metrics.accuracy, 1.0);
    let said = metrics.warnings.join("; ");
    let expected = format!(
        "step 1: 3 of 16 right answers leave a calculation to the grader, such as \"{first}+0\" for \"{first}\"; \
         the verifier's form = \"worked-out\" takes no such answer"
    );
    assert!(said.contains(&expected), "{said}");
    let (metrics, _) = with_sums_left_undone(&[any, "canaries.enabled=false"]);
    assert!(metrics.warnings.is_empty(), "{:?}", metrics.warnings);
    let (metrics, _) = with_sums_left_undone(&["task.verifier={kind=\"rule\", form=\"worked-out\"}"]);
    assert_eq!(metrics.accuracy, 13.0 / 16.0);
    assert!(!metrics.warnings.join("; ").contains("grader"));
}

#[test]
fn rollouts_that_do_not_fit_are_refused_by_line_and_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rollouts.jsonl");
    let source = format!("rollout.source={{kind=\"jsonl\", path={path:?}}}");
    let good = own_rollouts(&plan(&["steps=1"]));
    let complaint = |text: String, settings: &[&str]| {
        fs::write(&path, text).unwrap();
        let plan = plan(&[&["steps=1", source.as_str()], settings].concat());
        match Trainer::new(&plan, &device(1), Programs::Recorded) {
            Ok(_) => panic!("must be refused"),
            Err(error) => error.to_string(),
        }
    };
    let text = text_of;
    let changed = |key: &str, value: Value| {
        let mut lines = good.clone();
        lines[2][key] = value;
        text(&lines)
    };
    let first = good[0]["id"].as_str().unwrap();
    let cases = [
        (changed("tokens", json!([0, 99999])), "line 3: tokens[1] is 99999, the model has tokens 0 to"),
        (changed("prompt_tokens", json!([99999])), "line 3: prompt_tokens[0] is 99999"),
        (changed("prompt_tokens", json!([1])), "line 3: id"),
        (changed("prompt_tokens", json!([])), "line 3: prompt_tokens has 0 entries, expected 1 to 64"),
        (changed("tokens", json!(vec![1; 97])), "line 3: tokens has 97 entries, expected 1 to 96"),
        (changed("tokens", json!([-1])), "line 3: tokens: invalid value"),
        (changed("logp", json!([-0.5])), "line 3: logp has 1 entries, tokens has"),
        (changed("logp", json!("none")), "line 3: logp: invalid type"),
        (changed("id", json!(null)), "line 3: id is null"),
        (changed("reward", json!("good")), "line 3: reward: invalid type"),
        (format!("{}not json", text(&good[..2])), "line 3: expected ident"),
        (text(&good[1..]), "has 3 responses, the last group from line 1 on has 3, expected 4"),
        (text(&good[4..]), "1 of the 4 groups that the run draws are missing"),
        (String::new(), "4 of the 4 groups that the run draws are missing"),
    ];
    for (text, expected) in cases {
        let said = complaint(text, &[]);
        assert!(said.contains("rollouts.jsonl") && said.contains(expected), "{expected}: {said}");
    }
    assert!(complaint(text(&good[4..]), &[]).contains(&format!("{first:?}")), "missing groups are named");
    let positive: Vec<f64> = good[2]["logp"].as_array().unwrap().iter().map(|_| 0.5).collect();
    assert!(complaint(changed("logp", json!(positive)), &[]).contains("line 3: logp[0] is 0.5"));
    let said = complaint(changed("reward", json!(1.0)), &["rewards=[{name=\"answer\"}]"]);
    assert!(said.contains("line 3: has a reward, and the config has [[rewards]]"), "{said}");
}
