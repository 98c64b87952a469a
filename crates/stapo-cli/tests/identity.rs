//! A run goes on only as the run it was: what changed is refused by name, and a refusal changes nothing.

use crate::common::{complaint, copy_folder, folder_below_tmp, json, ok, stapo, without_receipt};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const SMALL: [&str; 16] = [
    "--set",
    "rollout.problems_per_step=2",
    "--set",
    "rollout.group_size=4",
    "--set",
    "update.problems_per_minibatch=2",
    "--set",
    "evaluation.problems=4",
    "--set",
    "evaluation.every_steps=0",
    "--set",
    "record.checkpoint_every_steps=1",
    "--set",
    "record.keep_checkpoints=9",
    "--set",
    "canaries.max_unjudged_share=1.0",
];

fn train(at: &Path, out: &str, set: &[&str]) {
    let set: Vec<&str> = set.iter().flat_map(|setting| ["--set", setting]).collect();
    ok(&stapo(at, &[&["train", "--out", out], &SMALL[..], &set].concat()));
}

/// A model in `model`, problems in `data.jsonl`, a verifier in `judge.sh`; the settings that name them.
fn inputs(at: &Path) -> [String; 3] {
    copy_folder(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/base")), &at.join("model"));
    let rows = (1..9).map(|n| format!("{{\"problem\": \"{n}+{n}=\", \"answer\": \"{}\"}}\n", 2 * n));
    fs::write(at.join("data.jsonl"), rows.collect::<String>()).unwrap();
    fs::write(at.join("judge.sh"), "while read -r line; do echo '{\"reward\": 0.5}'; done\n").unwrap();
    let verifier = "{kind=\"command\",program=\"sh\",args=[\"judge.sh\"]}";
    [
        "model={kind=\"path\",path=\"model\"}".to_string(),
        format!(
            "task={{kind=\"jsonl\",path=\"data.jsonl\",template=\"{{{{ problem }}}}\",held_out_share=0.3,verifier={verifier}}}"
        ),
        "steps=2".to_string(),
    ]
}

/// Every file below a folder with its content.
fn tree(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.insert(path.clone(), Vec::new());
            found.extend(tree(&path));
        } else {
            found.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    found
}

fn change(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} in {}", path.display());
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

fn events(run: &Path, kind: &str) -> Vec<Value> {
    let text = fs::read_to_string(run.join("events.jsonl")).unwrap();
    let all = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    all.filter(|event| event["event"] == kind).collect()
}

fn last_hash(run: &Path) -> String {
    json(&run.join("manifest.json"))["steps"].as_array().unwrap().last().unwrap()["sha256"].to_string()
}

/// Changes one input of a finished run.
type Tampering = fn(&Path);

/// Each way to change what a run depends on, and the words that name it.
const TAMPERINGS: [(Tampering, &str); 11] = [
    (|at| fs::write(at.join("run/plan.toml"), "").unwrap(), "is absent"),
    (
        |at| {
            let text = fs::read_to_string(at.join("run/plan.toml")).unwrap();
            fs::write(at.join("run/plan.toml"), &text[..text.len() / 2]).unwrap();
        },
        "checkpoints/step-000002/plan.toml",
    ),
    (
        |at| fs::remove_file(at.join("run/plan.toml")).unwrap(),
        "checkpoints/step-000002/plan.toml: copy it back",
    ),
    (
        |at| change(&at.join("run/plan.toml"), "learning_rate = 0.0001", "learning_rate = 0.0002"),
        "update.learning_rate: was 0.0001, is 0.0002",
    ),
    (|at| change(&at.join("run/plan.toml"), "steps = 2", "steps = 9"), "steps: was 2, is 9"),
    (|at| change(&at.join("data.jsonl"), "\"answer\": \"6\"", "\"answer\": \"7\""), "data: was "),
    (
        |at| {
            let path = at.join("model/tokenizer.json");
            let mut tokenizer = json(&path);
            let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
            let (three, four) = (vocabulary["3"].clone(), vocabulary["4"].clone());
            vocabulary.insert("3".into(), four);
            vocabulary.insert("4".into(), three);
            fs::write(&path, tokenizer.to_string()).unwrap();
        },
        "tokenizer: was ",
    ),
    (|at| change(&at.join("model/config.json"), "{", "{ "), "model config: was "),
    (
        |at| fs::write(at.join("model/chat_template.jinja"), "{{ messages }}").unwrap(),
        "chat template: was absent",
    ),
    (
        |at| {
            let path = at.join("model/model.safetensors");
            let mut bytes = fs::read(&path).unwrap();
            let last = bytes.len() - 2;
            bytes[last] ^= 1;
            fs::write(&path, bytes).unwrap();
        },
        "weights: was ",
    ),
    (|at| change(&at.join("judge.sh"), "0.5", "0.6"), "verifier: was "),
];

#[test]
fn whatever_a_run_depends_on_is_compared_and_refused_by_name() {
    let folder = folder_below_tmp();
    let at = folder.path();
    let set = inputs(at);
    train(at, "run", &set.each_ref().map(String::as_str));
    copy_folder(at, &at.with_extension("kept"));
    let kept = at.with_extension("kept");
    for (tamper, named) in TAMPERINGS {
        tamper(at);
        let before = tree(at);
        let said = complaint(at, &["train", "--resume", "run"]);
        assert!(said.contains(named), "{named} in {said}");
        assert_eq!(tree(at), before, "{named}: a refusal changes nothing");
        let verified = stapo(at, &["verify", "run", "--replay", "--steps", "1"]);
        assert_ne!(verified.status.code(), Some(0), "{named}");
        fs::remove_dir_all(at).unwrap();
        copy_folder(&kept, at);
    }
    // The same bytes in another place are the same run.
    fs::rename(at.join("model"), at.join("elsewhere")).unwrap();
    ok(&stapo(at, &["train", "--resume", "run", "--set", "model.path=elsewhere"]));
    // What is accepted is recorded.
    change(&at.join("data.jsonl"), "\"answer\": \"6\"", "\"answer\": \"7\"");
    ok(&stapo(at, &["train", "--resume", "run", "--accept-changes"]));
    assert_eq!(events(&at.join("run"), "accepted")[0]["change"]["name"], "data");
    assert_eq!(json(&at.join("run/manifest.json"))["accepted"][0]["name"], "data");
    fs::remove_dir_all(kept).unwrap();
}

#[test]
fn what_may_change_by_a_setting_does_and_is_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    train(at, "run", &["steps=2"]);
    train(at, "longer", &["steps=4"]);
    copy_folder(&at.join("run"), &at.join("moved/copy"));
    let run = at.join("run");
    let before = tree(&run);
    for (setting, named) in [
        ("seed=7", "seed: was 0, is 7"),
        ("update.learning_rate=1e-3", "update.learning_rate: was 0.0001, is 0.001"),
        ("steps=1", "1 is below the 2 steps"),
        ("device=cuda", "device: was \"cpu\", is \"cuda\""),
        ("stepz=3", "did you mean `steps`?"),
    ] {
        let said = complaint(at, &["train", "--resume", "run", "--set", setting]);
        assert!(said.contains(named), "{named} in {said}");
        assert_eq!(tree(&run), before, "{setting}");
    }
    // A free key changed by hand is no other run; a setting is recorded in the plan and the events.
    change(&run.join("plan.toml"), "kv_mib = \"auto\"", "kv_mib = 128");
    let resume = ["train", "--resume", "run", "--set", "steps=4", "--set", "evaluation.target_accuracy=1.0"];
    ok(&stapo(at, &resume));
    let plan: toml::Table = fs::read_to_string(run.join("plan.toml")).unwrap().parse().unwrap();
    assert_eq!(plan["steps"], toml::Value::Integer(4));
    let names: Vec<String> =
        events(&run, "setting").iter().map(|event| event["change"]["name"].to_string()).collect();
    for name in ["steps", "evaluation.target_accuracy", "rollout.kv_mib"] {
        assert!(names.contains(&format!("{name:?}")), "{name} in {names:?}");
    }
    assert_eq!(last_hash(&run), last_hash(&at.join("longer")));
    // The plan that a setting wrote is the run's, also before a checkpoint holds it.
    let copied = at.join("moved/copy");
    ok(&stapo(
        at,
        &["train", "--resume", "moved/copy", "--set", "steps=4", "--set", "record.keep_checkpoints=8"],
    ));
    without_receipt(&copied);
    for step in [3, 4] {
        fs::remove_dir_all(copied.join(format!("checkpoints/step-00000{step}"))).unwrap();
    }
    ok(&stapo(at, &["train", "--resume", "moved/copy"]));
    assert_eq!(last_hash(&copied), last_hash(&at.join("longer")), "a copied run goes on");
}

/// Changes a run folder for the worse.
type Damage<'a> = &'a dyn Fn(&Path);

/// What a replay prints of a run whose receipt is refused.
fn replayed_without_receipt(at: &Path, run: &str) -> String {
    let verified = stapo(at, &["verify", run, "--replay", "--steps", "1"]);
    assert_eq!(verified.status.code(), Some(2));
    String::from_utf8_lossy(&verified.stdout).into_owned()
}

/// Keeps the first lines of a run's metrics.
fn cut(run: &Path, n_lines: usize) {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let kept: String = text.split_inclusive('\n').take(n_lines).collect();
    fs::write(run.join("metrics.jsonl"), kept).unwrap();
}

#[test]
fn damage_is_repaired_from_the_checkpoint_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    train(at, "whole", &["steps=3"]);
    let whole = at.join("whole");
    let hash = last_hash(&whole);
    let mut n_copies = 0;
    let mut damaged = |damage: Damage| {
        n_copies += 1;
        let run = format!("run-{n_copies}");
        copy_folder(&whole, &at.join(&run));
        without_receipt(&at.join(&run));
        damage(&at.join(&run));
        run
    };
    let metrics = fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
    let repairs: [Damage; 4] = [
        &|run| cut(run, 2),
        &|run| fs::write(run.join("metrics.jsonl"), &metrics[..metrics.len() - 20]).unwrap(),
        &|run| {
            let (before, last) = metrics.rsplit_once("\"n_tokens\":").unwrap();
            fs::write(run.join("metrics.jsonl"), format!("{before}\"n_tokens\":1{last}")).unwrap();
        },
        &|run| fs::write(run.join("events.jsonl"), "{\"schema\": 1, torn").unwrap(),
    ];
    for damage in repairs {
        let run = damaged(damage);
        ok(&stapo(at, &["train", "--resume", &run]));
        assert_eq!(fs::read_to_string(at.join(&run).join("metrics.jsonl")).unwrap(), metrics);
    }
    // The files of a run that was resumed differ in what happened to them, and so does the list of them.
    let manifest = |run: &Path| {
        let mut manifest = json(&run.join("manifest.json"));
        manifest.as_object_mut().unwrap().remove("files").unwrap();
        manifest
    };
    for damage in ["", "{", "{\"schema\": 1}"] {
        let run = damaged(&|run| fs::write(run.join("manifest.json"), damage).unwrap());
        assert!(replayed_without_receipt(at, &run).contains("step 3: the same"), "{damage:?}");
        ok(&stapo(at, &["train", "--resume", &run]));
        assert_eq!(manifest(&at.join(run)), manifest(&whole), "{damage:?}");
    }
    let refusals: [(Damage, &str); 4] = [
        (&|run| cut(run, 1), "metrics.jsonl has 1 steps in order, the checkpoint is of step 3"),
        (
            &|run| fs::remove_dir_all(run.join("checkpoints")).unwrap(),
            "metrics of 3 steps, but no checkpoint",
        ),
        (
            &|run| {
                for step in 0..4 {
                    let file = if step == 0 { "checkpoint.json" } else { "weights.safetensors" };
                    fs::write(run.join(format!("checkpoints/step-00000{step}/{file}")), "x").unwrap();
                }
            },
            "no good checkpoint among 4",
        ),
        (&|run| fs::remove_dir_all(run).unwrap(), "no run folder"),
    ];
    for (damage, named) in refusals {
        let run = damaged(damage);
        let before = at.join(&run).exists().then(|| tree(&at.join(&run)));
        let said = complaint(at, &["train", "--resume", &run]);
        assert!(said.contains(named) && said.contains("hint: "), "{named} in {said}");
        assert_eq!(at.join(&run).exists().then(|| tree(&at.join(&run))), before);
    }
    // A start that was killed before its first checkpoint goes on from its plan.
    let run = damaged(&|run| {
        fs::remove_dir_all(run.join("checkpoints")).unwrap();
        fs::write(run.join("metrics.jsonl"), "").unwrap();
    });
    let said = complaint(at, &["train", "--out", &run]);
    assert!(said.contains(&format!("--resume {run}")), "{said}");
    ok(&stapo(at, &["train", "--resume", &run]));
    assert_eq!(last_hash(&at.join(&run)), hash);
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// Puts the weights and the moments of a checkpoint into one file, as programs did before there were two.
fn join_files(checkpoint: &Path) {
    let (mut keys, mut data) = (serde_json::Map::new(), Vec::new());
    for name in ["weights.safetensors", "moments.safetensors"] {
        let bytes = fs::read(checkpoint.join(name)).unwrap();
        let (n, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (head, tensors) = rest.split_at(u64::from_le_bytes(*n) as usize);
        let head: serde_json::Map<String, Value> = serde_json::from_slice(head).unwrap();
        for (name, mut tensor) in head {
            for end in tensor["data_offsets"].as_array_mut().unwrap() {
                *end = (end.as_u64().unwrap() + data.len() as u64).into();
            }
            keys.insert(name, tensor);
        }
        data.extend(tensors);
        fs::remove_file(checkpoint.join(name)).unwrap();
    }
    fs::remove_file(checkpoint.join("moments.digests")).unwrap();
    let mut head = Value::Object(keys).to_string();
    head.push_str(&" ".repeat(head.len().next_multiple_of(8) - head.len()));
    let file = [&(head.len() as u64).to_le_bytes(), head.as_bytes(), &data].concat();
    fs::write(checkpoint.join("state.safetensors"), file).unwrap();
}

/// Writes `checkpoint.json` as programs did that recorded no identity.
fn seal_as_before(checkpoint: &Path) {
    let sealed = json(&checkpoint.join("checkpoint.json"));
    let counters = sealed["counters"].clone();
    let state = sha256(&fs::read(checkpoint.join("state.safetensors")).unwrap());
    let text = format!("{} {} {} {state}", counters["step"], counters["position"], counters["n_updates"]);
    let old = serde_json::json!({
        "schema": 1, "counters": counters, "state_sha256": state, "seal": sha256(text.as_bytes())
    });
    fs::write(checkpoint.join("checkpoint.json"), old.to_string()).unwrap();
}

#[test]
fn copies_old_and_not_finite_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    train(at, "whole", &["steps=3"]);
    let hash = last_hash(&at.join("whole"));
    let checkpoints = at.join("whole/checkpoints");
    // Copies under other names are no checkpoints, and one under another step's name is found out.
    copy_folder(&checkpoints.join("step-000001"), &checkpoints.join("step-best"));
    copy_folder(&checkpoints.join("step-000001"), &checkpoints.join("step-000009"));
    without_receipt(&at.join("whole"));
    let resumed = stapo(at, &["train", "--resume", "whole"]);
    ok(&resumed);
    let said = String::from_utf8_lossy(&resumed.stderr);
    assert!(
        said.contains("step-000009: is a copy of the checkpoint of step 1") && !said.contains("best"),
        "{said}"
    );
    assert_eq!(events(&at.join("whole"), "checkpoint_refused").len(), 1);
    assert_eq!(last_hash(&at.join("whole")), hash);
    fs::remove_dir_all(checkpoints.join("step-000009")).unwrap();
    // A checkpoint with a NaN gives way to the one before, and one without an identity is told of.
    for step in [2, 3] {
        join_files(&checkpoints.join(format!("step-{step:06}")));
    }
    let state = checkpoints.join("step-000003/state.safetensors");
    let mut bytes = fs::read(&state).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&state, bytes).unwrap();
    seal_as_before(&checkpoints.join("step-000003"));
    seal_as_before(&checkpoints.join("step-000002"));
    without_receipt(&at.join("whole"));
    ok(&stapo(at, &["export", "whole", "--to", "exported"]));
    let resumed = stapo(at, &["train", "--resume", "whole"]);
    ok(&resumed);
    let said = String::from_utf8_lossy(&resumed.stderr);
    for told in ["is not a finite number", "recorded no identity"] {
        assert!(said.contains(told), "{told} in {said}");
    }
    assert_eq!(last_hash(&at.join("whole")), hash, "step 3 is made again, to the same bits");
}

/// Learning rates and rewards beyond what numbers can hold stop the run with a word, and the checkpoint before is good.
#[test]
fn numbers_that_are_not_finite_are_never_saved() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let verifier = "task.verifier={kind=\"command\",program=\"sh\",args=[\"-c\",\"while read -r a && read -r b; do echo '{\\\"reward\\\":1e200}'; echo '{\\\"reward\\\":-1e200}'; done\"]}";
    let cases: [(&str, &[&str]); 3] = [
        ("lr", &["update.learning_rate=1e38", "update.schedule={kind=\"constant\",warmup_steps=0}"]),
        ("rewards", &["reward.right=1e308", "reward.wrong=-1e308"]),
        ("verifier", &[verifier]),
    ];
    for (name, set) in cases {
        let set: Vec<&str> = set.iter().flat_map(|setting| ["--set", setting]).collect();
        let output = stapo(at, &[&["train", "--out", name, "--set", "steps=20"], &SMALL[..], &set].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {said}");
        let is_named = said.contains("finite") || said.contains("not a number that f64 can hold");
        assert!(is_named && said.contains("hint: "), "{name}: {said}");
        assert_eq!(events(&at.join(name), "stop")[0]["reason"], "error");
        ok(&stapo(at, &["export", name, "--to", &format!("{name}-model")]));
        assert!(ok(&stapo(at, &["runs", "."])).contains("died: "), "{name}");
    }
}
