//! `stapo train` from the outside: killed, resumed, verified, exported, misused.

use crate::common::{complaint, ok, stapo, without_receipt};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const SMALL: [&str; 12] = [
    "--set",
    "steps=6",
    "--set",
    "rollout.problems_per_step=4",
    "--set",
    "update.problems_per_minibatch=4",
    "--set",
    "evaluation.problems=8",
    "--set",
    "evaluation.every_steps=0",
    "--set",
    "record.checkpoint_every_steps=2",
];

fn last_hash(run: &Path) -> Value {
    let manifest: Value =
        serde_json::from_str(&std::fs::read_to_string(run.join("manifest.json")).unwrap()).unwrap();
    manifest["steps"].as_array().unwrap().last().unwrap().clone()
}

#[test]
fn killed_three_times_and_resumed_is_the_uninterrupted_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    ok(&stapo(at, &new_run("whole")));
    for millis in [700, 300, 900] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
            .current_dir(at)
            .args(start_or_resume(at))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(millis));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    ok(&stapo(at, &start_or_resume(at)));
    assert_eq!(last_hash(&at.join("cut")), last_hash(&at.join("whole")));
    let replay = ok(&stapo(at, &["verify", "cut", "--replay", "--steps", "2"]));
    assert_eq!(replay.matches("step ").count(), 3, "{replay}");
    for line in ["config: the same", "weights: the same", "step 6: the same"] {
        assert!(replay.contains(line), "{line} in {replay}");
    }
    let plan = at.join("cut/config.toml");
    std::fs::write(&plan, format!("{}\n# touched", std::fs::read_to_string(&plan).unwrap())).unwrap();
    let touched = stapo(at, &["verify", "cut", "--replay", "--steps", "1"]);
    assert!(
        touched.status.code() == Some(1)
            && String::from_utf8_lossy(&touched.stdout).contains("config: DIFFERENT")
    );
    assert!(ok(&stapo(at, &["runs", "."])).contains("done"));
    ok(&stapo(at, &["export", "cut", "--to", "model"]));
    assert!(at.join("model/model.safetensors").is_file() && at.join("model/tokenizer.json").is_file());
}

/// Resumes the run if it has a checkpoint, else starts it over, as a user would.
fn start_or_resume(at: &Path) -> Vec<&'static str> {
    let has_checkpoint = std::fs::read_dir(at.join("cut/checkpoints")).is_ok_and(|entries| {
        entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("step-"))
    });
    if has_checkpoint {
        return vec!["train", "--resume", "cut"];
    }
    let _ = std::fs::remove_dir_all(at.join("cut"));
    new_run("cut")
}

fn new_run(out: &'static str) -> Vec<&'static str> {
    [&["train", "--out", out], &SMALL[..]].concat()
}

#[test]
fn bad_input_is_one_paragraph_with_the_remedy_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::create_dir_all(at.join("there/something")).unwrap();
    std::fs::write(at.join("empty.jsonl"), "").unwrap();
    std::fs::write(at.join("unanswered.jsonl"), "{\"problem\": \"1+1=\"}\n").unwrap();
    mismatched_model(&at.join("mismatched"));
    let cases: [(&[&str], &str); 13] = [
        (&["train", "--set", "stepz=3"], "did you mean `steps`?"),
        (&["train", "--set", "steps=many"], "config.steps"),
        (&["train", "nowhere.toml"], "config nowhere.toml"),
        (&["train", "--out", "there"], "exists already"),
        (&["train", "--set", "task={kind=\"jsonl\",path=\"empty.jsonl\"}"], "empty.jsonl"),
        (&["train", "--set", "model={kind=\"path\",path=\"nowhere\"}"], "nowhere"),
        (&["train", "--resume", "nowhere"], "no run folder"),
        (&["train", "--set", "task={kind=\"jsonl\",path=\"unanswered.jsonl\"}"], "answer_field"),
        (
            &[
                "train",
                "--set",
                "objective.preset=grpo",
                "--set",
                "reference={kind=\"path\",path=\"frozen\"}",
            ],
            "frozen",
        ),
        (&["train", "--set", "model={kind=\"path\",path=\"mismatched\"}"], "has ids up to 48"),
        (&["train", "--set", "rollout.chat=true"], "the model has no chat template"),
        (&["train", "--set", "rollout.max_response_tokens=1000"], "the model has 256 positions"),
        (&["plan", "--set", "stepz=3"], "did you mean `steps`?"),
    ];
    for (args, expected) in cases {
        let said = complaint(at, args);
        assert!(said.contains(expected), "{args:?}: {said}");
    }
    assert!(!at.join("runs").exists(), "a refused run makes no folder");
    let long = complaint(at, &["train", "--out", "long", "--set", "rollout.max_prompt_tokens=2"]);
    assert!(long.contains("500 of 500 prompts are longer than 2 tokens"), "{long}");
    assert!(
        long.contains("hint: raise it to 10, or leave such problems out with rollout.long_prompts=drop"),
        "{long}"
    );
}

/// Rows of the built-in model's embedding.
const VOCABULARY: u64 = 48;

/// The built-in model with a tokenizer that has one token more than the model's vocabulary.
fn mismatched_model(folder: &Path) {
    let base = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/base");
    std::fs::create_dir(folder).unwrap();
    for entry in std::fs::read_dir(base).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    let path = folder.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let last = tokenizer["added_tokens"][0].clone();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    for id in last["id"].as_u64().unwrap() + 1..=VOCABULARY {
        let mut token = last.clone();
        token["id"] = id.into();
        token["content"] = format!("<|{id}|>").into();
        added.push(token);
    }
    std::fs::write(&path, tokenizer.to_string()).unwrap();
}

#[test]
fn a_folder_that_cannot_be_written_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    let said = complaint(folder.path(), &["train", "--out", "file/run"]);
    assert!(said.contains("file/run"), "{said}");
    let locked = folder.path().join("locked");
    std::fs::create_dir(&locked).unwrap();
    let mut permissions = std::fs::metadata(&locked).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&locked, permissions).unwrap();
    if std::fs::write(locked.join("probe"), "").is_ok() {
        eprintln!("skipped the read-only folder: this user may write anywhere");
        return;
    }
    let said = complaint(folder.path(), &["train", "--out", "locked/run"]);
    assert!(said.contains("locked/run") && said.contains("choose a folder you may write to"), "{said}");
}

/// A file system mounted read-only refuses even the root user, to whom file permissions do not apply.
#[test]
fn a_read_only_disk_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("disk")).unwrap();
    let script = "mount -t tmpfs -o ro none disk || exit 77; exec \"$0\" train --out disk/run";
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_stapo")])
        .current_dir(folder.path())
        .output();
    let Ok(output) = output else { return eprintln!("skipped: there is no unshare here") };
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(77) || said.contains("unshare:") {
        return eprintln!("skipped: no disk can be mounted here: {said}");
    }
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("disk/run") && said.contains("choose a folder you may write to"), "{said}");
}

/// On a disk of a few MiB the run fills the disk, reports it, and resumes to the same bits once there is space.
#[test]
fn a_full_disk_stops_with_a_valid_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::create_dir(at.join("disk")).unwrap();
    let script = r#"
        mount -t tmpfs -o size=40m none disk || exit 77
        head -c 23000000 /dev/zero > disk/filler
        "$0" train --out disk/run "$@" && exit 3
        rm disk/filler
        "$0" train --resume disk/run || exit 4
        cp disk/run/manifest.json cut.json
    "#;
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_stapo")])
        .args(SMALL)
        .current_dir(at)
        .output();
    let Ok(output) = output else { return eprintln!("skipped: there is no unshare here") };
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(77) || said.contains("unshare:") {
        return eprintln!("skipped: no small disk can be mounted here: {said}");
    }
    assert!(output.status.success(), "{:?} {said}", output.status);
    assert!(said.contains("No space left") && said.contains("hint: free some space"), "{said}");
    ok(&stapo(at, &new_run("whole")));
    std::fs::create_dir(at.join("cut")).unwrap();
    std::fs::rename(at.join("cut.json"), at.join("cut/manifest.json")).unwrap();
    assert_eq!(last_hash(&at.join("cut")), last_hash(&at.join("whole")));
}

#[cfg(unix)]
#[test]
fn a_limit_on_the_size_of_files_is_told_and_the_run_goes_on_without_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    // Blocks of 512 bytes: the built-in model fits, a checkpoint with its optimizer states does not.
    let output = Command::new("sh")
        .args(["-c", r#"ulimit -f 10000; exec "$0" train --out run "$@""#, env!("CARGO_BIN_EXE_stapo")])
        .args(SMALL)
        .current_dir(at)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{:?} {said}", output.status);
    assert!(said.contains("File too large") && said.contains("hint: raise the limit"), "{said}");
    ok(&stapo(at, &["train", "--resume", "run"]));
    ok(&stapo(at, &new_run("whole")));
    assert_eq!(last_hash(&at.join("run")), last_hash(&at.join("whole")));
}

#[test]
fn plan_and_doctor_tell_without_touching_anything() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let plan: Value = serde_json::from_str(&ok(&stapo(at, &["plan", "--no-measure", "--json"]))).unwrap();
    assert_eq!((&plan["steps"], &plan["responses_per_step"]), (&80.into(), &256.into()));
    let parts: u64 = plan["memory_bytes"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
    assert_eq!(plan["memory_bytes_total"], parts);
    let text = ok(&stapo(at, &["plan", "--no-measure", "--set", "objective.preset=dapo"]));
    assert!(text.contains("activations") && text.contains("rollout.max_redraws is 0"), "{text}");
    let doctor: Value = serde_json::from_str(&ok(&stapo(at, &["doctor", "--json"]))).unwrap();
    assert!(doctor["threads"].as_u64().unwrap() >= 1);
    let text = ok(&stapo(at, &["doctor"]));
    assert!(text.contains("cpu") && text.contains("disk") && text.contains("nvrtc"), "{text}");
    assert!(text.ends_with("\n\nThe CPU is enough for the built-in run: stapo train\n"), "{text}");
    assert_eq!(std::fs::read_dir(at).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn ctrl_c_finishes_the_step_saves_and_says_how_to_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let args = [&new_run("cut")[..], &["--set", "steps=500", "--set", "record.checkpoint_every_steps=1000"]]
        .concat();
    let child = Command::new(env!("CARGO_BIN_EXE_stapo"))
        .current_dir(at)
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    for _ in 0..1000 {
        std::thread::sleep(Duration::from_millis(10));
        if std::fs::read_to_string(at.join("cut/metrics.jsonl")).is_ok_and(|text| text.lines().count() >= 2) {
            break;
        }
    }
    // A test that was started in the background has inherited an ignored SIGINT, which the program leaves ignored.
    let (signal, status) = if is_interrupt_ignored() { ("-TERM", 143) } else { ("-INT", 130) };
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.contains("stapo train --resume cut"), "{said}");
    let n_steps = std::fs::read_to_string(at.join("cut/metrics.jsonl")).unwrap().lines().count();
    assert!(at.join(format!("cut/checkpoints/step-{n_steps:06}")).is_dir());
}

/// Whether this process ignores SIGINT; false where the system does not tell.
#[cfg(unix)]
fn is_interrupt_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() & 2 != 0)
}

/// Supervised fine-tuning of the built-in model on a file lowers the loss on the responses and writes a model.
#[test]
fn sft_learns_given_responses_and_pretrain_refuses_them() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let lines: Vec<String> = (1..9)
        .map(|n| format!("{{\"prompt\": \"{n}+{n}=\", \"response\": \"get \\\\boxed{{{}}}\"}}\n", 2 * n))
        .collect();
    std::fs::write(at.join("texts.jsonl"), lines.concat()).unwrap();
    let base = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/base");
    let config = format!(
        "steps = 6\nbatch_tokens = 256\nmicrobatch_tokens = 256\nlearning_rate = 1e-3\nschedule = {{ kind = \"constant\", warmup_steps = 1 }}\n\
         start = {{ kind = \"path\", path = {base:?} }}\n\
         texts = {{ kind = \"jsonl\", path = \"texts.jsonl\", prompt_field = \"prompt\", response_field = \"response\" }}\n"
    );
    std::fs::write(at.join("sft.toml"), config).unwrap();
    let lines = ok(&stapo(at, &["sft", "sft.toml", "--out", "sft", "--json"]));
    let losses: Vec<f64> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter_map(|line| line["loss"].as_f64())
        .collect();
    assert!(losses.len() == 6 && losses[5] < 0.7 * losses[0], "{losses:?}");
    let tuned =
        stapo(at, &["generate", "--model", "sft/model", "--prompt", "3+3=", "--json", "--max-tokens", "16"]);
    assert!(!ok(&tuned).is_empty());
    let said = complaint(at, &["sft", "sft.toml", "--out", "x", "--set", "texts.path=gone.jsonl"]);
    assert!(said.contains("gone.jsonl"), "{said}");
    let said = complaint(at, &["pretrain", "sft.toml", "--out", "x"]);
    assert!(said.contains("file texts.jsonl: has prompts with responses or conversations"), "{said}");
    assert!(said.contains("hint: stapo sft sft.toml") && !at.join("x").exists(), "{said}");
    let texts = "texts={kind=\"jsonl\",path=\"texts.jsonl\",response_field=\"response\"}";
    ok(&stapo(at, &["pretrain", "sft.toml", "--out", "x", "--set", texts, "--set", "steps=1"]));
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
        .args(["plan", "--no-measure"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The steps of an event file, from the framing of TFRecord and the fields of each event.
fn event_steps(file: &Path) -> Vec<u64> {
    let bytes = std::fs::read(file).unwrap();
    let mut rest = bytes.as_slice();
    let mut steps = Vec::new();
    while !rest.is_empty() {
        let n = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        // A wall time of 9 bytes; then the step as field 2, or the version as field 3.
        let event = &rest[12..12 + n];
        if event[9] == 2 << 3 {
            steps.push(u64::from(event[10]));
        }
        rest = &rest[12 + n + 4..];
    }
    steps
}

#[test]
fn tensorboard_has_every_step_once_whatever_interrupted_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let run = at.join("run");
    let file = run.join("tensorboard/events.out.tfevents.stapo");
    let settings = [&new_run("run")[..], &["--set", "steps=2", "--tensorboard"]].concat();
    let said = ok(&stapo(at, &settings));
    assert_eq!(event_steps(&file), [0, 1, 2]);
    for command in
        ["stapo report run", "stapo inspect run", "stapo eval --model run --out run/eval", "stapo export run"]
    {
        assert!(said.contains(command), "{command} in {said}");
    }
    let longer = ["train", "--resume", "run", "--set", "steps=3"];
    ok(&stapo(at, &longer));
    assert_eq!(event_steps(&file), [0, 1, 2], "without the flag the file stays");
    ok(&stapo(at, &["train", "--resume", "run", "--set", "steps=4", "--tensorboard"]));
    assert_eq!(event_steps(&file), [0, 1, 2, 3, 4], "the steps between are there too");
    without_receipt(&run);
    std::fs::remove_dir_all(run.join("checkpoints/step-000004")).unwrap();
    std::fs::remove_dir_all(run.join("checkpoints/step-000003")).ok();
    ok(&stapo(at, &["train", "--resume", "run", "--tensorboard"]));
    assert_eq!(event_steps(&file), [0, 1, 2, 3, 4], "a step that was made again is there once");
    let best: Value = serde_json::from_str(&std::fs::read_to_string(run.join("best.json")).unwrap()).unwrap();
    let step = best["step"].to_string();
    let exported = ok(&stapo(at, &["export", "run", "--step", "best", "--to", "best"]));
    assert!(exported.contains(&format!("step {step},")), "{exported}");
    assert!(
        complaint(at, &["export", "run", "--step", "77", "--to", "none"])
            .contains("no checkpoint of step 77")
    );
    let missing = complaint(at, &["train", "--out", "new", "--set", "evaluation.benchmarks=[\"gsm8k\"]"]);
    assert!(missing.contains("stapo fetch benchmarks gsm8k") && !at.join("new").exists(), "{missing}");
}
