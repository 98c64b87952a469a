//! What somebody who edits a run folder can and cannot make `stapo` believe. Each test is an attack.

#![cfg(unix)]

use crate::common::{
    SMALL_RUN, complaint, copy_folder, json, ok, resumed_without_end, stapo, without_receipt,
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::TempDir;

/// A run of some steps in the folder `run`.
fn trained(steps: u64) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let steps = format!("steps={steps}");
    let recorded = ["--set", "record.responses_every_steps=1"];
    let args = [&["train", "--out", "run", "--set", &steps], &SMALL_RUN[..], &recorded].concat();
    ok(&stapo(folder.path(), &args));
    let run = folder.path().join("run");
    (folder, run)
}

/// What a call prints that must end with exit status 1.
fn differs(at: &Path, args: &[&str]) -> String {
    let output = stapo(at, args);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

fn append(path: &Path, text: &str) {
    let before = fs::read_to_string(path).unwrap();
    fs::write(path, before + text).unwrap();
}

/// Makes a file a tebibyte long, which nobody should read.
fn stretch(path: &Path) {
    fs::File::options().write(true).open(path).unwrap().set_len(1 << 40).unwrap();
}

fn flip_last_byte(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Sets the accuracy of every step to 1.
fn forge_accuracy(run: &Path) {
    let path = run.join("metrics.jsonl");
    let lines = fs::read_to_string(&path).unwrap();
    let forged = lines.lines().map(|line| {
        let (before, rest) = line.split_once("\"accuracy\":").unwrap();
        let end = rest.find(',').unwrap();
        format!("{before}\"accuracy\":1.0{}\n", &rest[end..])
    });
    let forged: String = forged.collect();
    assert_ne!(forged, lines);
    fs::write(path, forged).unwrap();
}

/// Writes the manifest and the receipt that fit the files, as a forger would.
fn reseal(run: &Path) {
    let mut manifest = json(&run.join("manifest.json"));
    for file in manifest["files"].as_array_mut().unwrap() {
        let bytes = fs::read(run.join(file["name"].as_str().unwrap())).unwrap();
        file["n_bytes"] = bytes.len().into();
        file["sha256"] = sha256(&bytes).into();
    }
    write_manifest(run, &manifest);
}

fn write_manifest(run: &Path, manifest: &Value) {
    let text = format!("{manifest}\n");
    fs::write(run.join("manifest.sha256"), format!("{}  manifest.json\n", sha256(text.as_bytes()))).unwrap();
    fs::write(run.join("manifest.json"), text).unwrap();
}

/// Replaces texts in a checkpoint's `checkpoint.json` and gives the file the seal that fits.
fn reseal_checkpoint(checkpoint: &Path, replaced: &[(String, String)]) {
    let path = checkpoint.join("checkpoint.json");
    let mut text = fs::read_to_string(&path).unwrap();
    for (from, to) in replaced {
        assert!(text.contains(from.as_str()), "{from} in {text}");
        text = text.replace(from.as_str(), to);
    }
    let seal = json(&path)["seal"].as_str().unwrap().to_string();
    let (mut compact, mut in_string, mut is_escaped) = (String::new(), false, false);
    for char in text.replace(&seal, "").chars() {
        in_string ^= char == '"' && !is_escaped;
        is_escaped = char == '\\' && !is_escaped;
        if in_string || !char.is_whitespace() {
            compact.push(char);
        }
    }
    fs::write(path, text.replace(&seal, &sha256(compact.as_bytes()))).unwrap();
}

/// Puts the weights of one checkpoint into another, with hashes and seals that fit.
fn transplant(run: &Path, from: u64, to: u64) {
    let path = |step: u64| run.join(format!("checkpoints/step-{step:06}"));
    let hash = |step: u64| sha256(&fs::read(path(step).join("weights.safetensors")).unwrap());
    let before = hash(to);
    fs::copy(path(from).join("weights.safetensors"), path(to).join("weights.safetensors")).unwrap();
    reseal_checkpoint(&path(to), &[(before, hash(to))]);
    reseal(run);
}

#[test]
fn a_resume_refuses_what_differs_from_the_receipt_and_records_what_is_accepted_for_ever() {
    let (folder, run) = trained(2);
    let at = folder.path();
    let whole = at.join("whole");
    copy_folder(&run, &whole);
    let attacks: [(&str, &dyn Fn()); 9] = [
        ("is 1099511627776 bytes", &|| stretch(&run.join("rollouts/step-000001.jsonl"))),
        ("file rollouts/step-000001.jsonl: was ", &|| {
            append(&run.join("rollouts/step-000001.jsonl"), "{}\n");
        }),
        ("file metrics.jsonl: was ", &|| forge_accuracy(&run)),
        ("file checkpoints/step-000001/weights.safetensors: was ", &|| {
            flip_last_byte(&run.join("checkpoints/step-000001/weights.safetensors"));
        }),
        ("file checkpoints/step-000000/checkpoint.json: was ", &|| {
            fs::remove_dir_all(run.join("checkpoints/step-000000")).unwrap();
        }),
        ("file config.toml: was ", &|| append(&run.join("config.toml"), "# edited\n")),
        ("file events.jsonl: was ", &|| append(&run.join("events.jsonl"), "{}\n")),
        ("file manifest.json: was ", &|| fs::remove_file(run.join("manifest.json")).unwrap()),
        ("file manifest.json: was ", &|| {
            let text = fs::read_to_string(run.join("manifest.json")).unwrap();
            fs::write(run.join("manifest.json"), text.replacen(':', ": ", 1)).unwrap();
        }),
    ];
    for (named, attack) in attacks {
        for more in [&[][..], &["--set", "steps=3"]] {
            attack();
            let said = complaint(at, &[&["train", "--resume", "run"], more].concat());
            assert!(said.contains(named) && said.contains("--accept-changes"), "{named} in {said}");
            let n_named = said.matches("file rollouts/step-000001.jsonl: was ").count();
            assert!(n_named <= 1, "receipt and checkpoint name one change: {said}");
            fs::remove_dir_all(&run).unwrap();
            copy_folder(&whole, &run);
        }
    }
    ok(&stapo(at, &["verify", "run"]));
    // What is accepted stays in every later receipt, and the run does not look untouched.
    forge_accuracy(&run);
    append(&run.join("rollouts/step-000001.jsonl"), "{}\n");
    for more in [&["--accept-changes"][..], &["--set", "steps=3"], &[]] {
        ok(&stapo(at, &[&["train", "--resume", "run"], more].concat()));
        let said = differs(at, &["verify", "run"]);
        for name in ["file metrics.jsonl: was ", "file rollouts/step-000001.jsonl: was "] {
            assert!(
                said.lines().any(|line| line.contains(name) && line.contains("ACCEPTED after step 2")),
                "{said}"
            );
        }
    }
    let accepted = json(&run.join("manifest.json"))["accepted"].clone();
    let n_accepted = accepted.as_array().unwrap().len();
    assert_eq!(
        n_accepted, 3,
        "metrics.jsonl by the receipt and by the checkpoint, and one record: {accepted}"
    );
    assert_eq!(accepted[0]["step"], 2, "{accepted}");
}

/// A killed run has no receipt. Its newest checkpoint has sealed the metrics and the records up to its step.
#[test]
fn a_killed_run_goes_on_only_with_the_records_that_it_wrote() {
    let (folder, run) = trained(3);
    let at = folder.path();
    without_receipt(&run);
    let whole = at.join("whole");
    copy_folder(&run, &whole);
    let record = |name: &str| run.join(name).join("step-000002.jsonl");
    let attacks: [(&str, &dyn Fn()); 5] = [
        ("file rollouts/step-000002.jsonl: was ", &|| append(&record("rollouts"), "{}\n")),
        ("is absent", &|| fs::remove_file(record("rollouts")).unwrap()),
        ("file tokens/step-000001.jsonl: was absent", &|| {
            fs::copy(record("rollouts"), run.join("tokens/step-000001.jsonl")).unwrap();
        }),
        ("file metrics.jsonl: was ", &|| forge_accuracy(&run)),
        ("file records.jsonl: was ", &|| {
            let text = fs::read_to_string(run.join("records.jsonl")).unwrap();
            fs::write(run.join("records.jsonl"), text.replacen("\"step\":1", "\"step\":0", 1)).unwrap();
        }),
    ];
    for (named, attack) in attacks {
        attack();
        let said = complaint(at, &["train", "--resume", "run", "--set", "steps=4"]);
        assert!(said.contains(named), "{named} in {said}");
        ok(&stapo(at, &["train", "--resume", "run", "--set", "steps=4", "--accept-changes"]));
        assert!(differs(at, &["verify", "run"]).contains("ACCEPTED after step 3"));
        ok(&stapo(at, &["train", "--resume", "run"]));
        // Another change is no part of what was accepted.
        without_receipt(&run);
        append(&run.join("rollouts/step-000001.jsonl"), "{}\n");
        let said = complaint(at, &["train", "--resume", "run"]);
        assert!(said.contains("file rollouts/step-000001.jsonl: was ") && !said.contains(named), "{said}");
        fs::remove_dir_all(&run).unwrap();
        copy_folder(&whole, &run);
    }
    stretch(&record("rollouts"));
    assert!(complaint(at, &["train", "--resume", "run"]).contains("is 1099511627776 bytes"));
    fs::remove_dir_all(&run).unwrap();
    copy_folder(&whole, &run);
    ok(&stapo(at, &["train", "--resume", "run", "--set", "steps=4"]));
    ok(&stapo(at, &["verify", "run"]));
}

#[test]
fn metrics_that_are_overwritten_during_a_run_end_in_no_receipt() {
    let (folder, run) = trained(1);
    let at = folder.path();
    let child = resumed_without_end(at, Stdio::piped());
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    fs::write(run.join("metrics.jsonl"), text.replacen("\"accuracy\":", "\"accuracy\":1", 1)).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM)
        .unwrap();
    let said = String::from_utf8_lossy(&child.wait_with_output().unwrap().stderr).into_owned();
    assert!(
        said.contains("no receipt: ") && said.contains("metrics.jsonl is not as this process wrote it"),
        "{said}"
    );
    assert!(!run.join("manifest.sha256").exists());
    assert!(complaint(at, &["verify", "run"]).contains("no receipt"));
    assert!(complaint(at, &["train", "--resume", "run"]).contains("file metrics.jsonl: was "));
}

#[test]
fn other_weights_are_found_wherever_weights_are_used() {
    let (folder, run) = trained(3);
    let at = folder.path();
    transplant(&run, 1, 3);
    let said = differs(at, &["verify", "run"]);
    assert!(said.contains("checkpoints/step-000003/weights.safetensors: DIFFERENT, its weights and optimizer state have the hash"), "{said}");
    assert!(complaint(at, &["train", "--resume", "run", "--set", "steps=4"]).contains("step-000003"));
    for args in [
        &["export", "run@3", "--to", "exported"][..],
        &["eval", "--model", "run@3", "--limit", "1", "--samples", "1", "--out", "e"],
        &["generate", "--model", "run@3", "--prompt", "1+1="],
    ] {
        let said = complaint(at, args);
        assert!(said.contains("its weights and optimizer state have the hash"), "{args:?}: {said}");
    }
    // A kept checkpoint in the middle is looked at as well, and a replay starts from a good one.
    let (folder, run) = trained(3);
    let at = folder.path();
    transplant(&run, 1, 2);
    assert!(
        differs(at, &["verify", "run"]).contains("checkpoints/step-000002/weights.safetensors: DIFFERENT")
    );
    let replay = ["verify", "run", "--replay", "--steps", "1"];
    assert!(differs(at, &replay).contains("replaying from step 1"));
    without_receipt(&run);
    let output = stapo(at, &replay);
    assert_eq!(output.status.code(), Some(2), "there is no receipt");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("DIFFERENT, checkpoint run/checkpoints/step-000002: "), "{said}");
}

/// A forger who also writes the hash of the other weights wherever it stands has a whole folder, and a replay finds it.
#[test]
fn a_replay_finds_weights_that_the_run_did_not_train() {
    let (folder, run) = trained(3);
    let at = folder.path();
    let trained_hash = json(&run.join("manifest.json"))["steps"][2]["sha256"].as_str().unwrap().to_string();
    transplant(&run, 1, 3);
    let said = differs(at, &["verify", "run"]);
    let forged = said.split("have the hash ").nth(1).unwrap().split(',').next().unwrap().to_string();
    reseal_checkpoint(&run.join("checkpoints/step-000003"), &[(trained_hash.clone(), forged.clone())]);
    for name in ["metrics.jsonl", "manifest.json"] {
        let text = fs::read_to_string(run.join(name)).unwrap();
        fs::write(run.join(name), text.replace(&trained_hash, &forged)).unwrap();
    }
    reseal(&run);
    ok(&stapo(at, &["verify", "run"]));
    let said = differs(at, &["verify", "run", "--replay", "--steps", "1"]);
    for source in ["manifest.json", "its checkpoint"] {
        let line = format!("step 3: DIFFERENT, recorded {forged} in {source}, replayed {trained_hash}");
        assert!(said.contains(&line), "{line} in {said}");
    }
}

#[test]
fn a_replay_compares_metrics_records_and_the_best_evaluation() {
    let (folder, run) = trained(4);
    let at = folder.path();
    let whole = at.join("whole");
    copy_folder(&run, &whole);
    // As many steps as asked for, or all that there are.
    let said = ok(&stapo(at, &["verify", "run", "--replay", "--steps", "4"]));
    let n_same =
        said.lines().filter(|line| line.starts_with("step ") && line.contains(": the same, ")).count();
    assert!(n_same == 4 && said.contains("replaying from step 0") && !said.contains(" of 4 steps"), "{said}");
    let said = ok(&stapo(at, &["verify", "run", "--replay", "--steps", "9"]));
    assert!(said.contains("replaying from step 0") && said.contains("step 4: the same, "), "{said}");
    assert!(!said.contains(" of 9 steps") && !said.contains("no checkpoint"), "{said}");
    let attacks: [(&str, &dyn Fn()); 5] = [
        ("step 4: DIFFERENT, accuracy of metrics.jsonl: recorded 1.0, replayed ", &|| forge_accuracy(&run)),
        ("step 4: DIFFERENT, eval_accuracy of metrics.jsonl: recorded nothing", &|| {
            let path = run.join("metrics.jsonl");
            fs::write(
                &path,
                fs::read_to_string(&path).unwrap().replace("\"eval_accuracy\":", "\"renamed\":"),
            )
            .unwrap();
        }),
        ("step 4: DIFFERENT, rollouts/step-000004.jsonl is not what the step records", &|| {
            append(&run.join("rollouts/step-000004.jsonl"), "{}\n");
        }),
        ("step 3: DIFFERENT, explored/step-000003.jsonl is not what the step records", &|| {
            fs::write(run.join("explored/step-000003.jsonl"), "{}\n").unwrap();
        }),
        ("best.json: DIFFERENT", &|| {
            let mut best = json(&run.join("best.json"));
            best["value"] = 0.99.into();
            fs::write(run.join("best.json"), format!("{best}\n")).unwrap();
        }),
    ];
    for (named, attack) in attacks {
        attack();
        reseal(&run);
        let said = differs(at, &["verify", "run", "--replay", "--steps", "2"]);
        assert!(said.contains(named), "{named} in {said}");
        fs::remove_dir_all(&run).unwrap();
        copy_folder(&whole, &run);
    }
    // A run that was extended is replayed across the step that was its last.
    ok(&stapo(at, &["train", "--resume", "run", "--set", "steps=5"]));
    ok(&stapo(at, &["verify", "run", "--replay", "--steps", "3"]));
    // Settings that were changed later are no excuse that goes without a word.
    let other = ["train", "--resume", "run", "--set", "steps=6", "--set", "evaluation.problems=2"];
    ok(&stapo(at, &other));
    let said = ok(&stapo(at, &["verify", "run", "--replay", "--steps", "2"]));
    assert!(
        said.contains("step 5: evaluations NOT compared") && !said.contains("step 6: evaluations"),
        "{said}"
    );
}

/// Makes a signature with the private key of 32 bytes of 7, whose public key goes to `public`.
fn sign(at: &Path, folder: &str) {
    if !at.join("key").exists() {
        fs::write(at.join("key"), [7; 32]).unwrap();
        fs::set_permissions(at.join("key"), fs::Permissions::from_mode(0o400)).unwrap();
        let public = "ea4a6c63e29c520abef5507b132ec5f9954776aebebe7b92421eea691446d22c";
        let digits = (0..64).step_by(2).map(|i| u8::from_str_radix(&public[i..i + 2], 16).unwrap());
        fs::write(at.join("public"), digits.collect::<Vec<u8>>()).unwrap();
    }
    ok(&stapo(at, &["verify", folder, "--sign", "key"]));
}

#[test]
fn a_signature_vouches_for_nothing_that_it_does_not_cover() {
    let (folder, run) = trained(1);
    let at = folder.path();
    sign(at, "run");
    let key = ["verify", "run", "--key", "public"];
    ok(&stapo(at, &key));
    ok(&stapo(at, &["eval", "--model", "run", "--limit", "1", "--samples", "1", "--out", "run/eval"]));
    let unsigned = "NOT covered by the signature";
    assert!(differs(at, &key).contains(&format!("eval: {unsigned}")));
    sign(at, "run/eval");
    ok(&stapo(at, &key));
    for name in
        ["report.html", "table.csv", "figure.png", "tensorboard", ".plan.toml.tmp", "rollouts/.x.starting"]
    {
        fs::write(run.join(name), "anything").unwrap();
        assert!(differs(at, &key).contains(&format!("{name}: {unsigned}")), "{name}");
        let said = ok(&stapo(at, &[&key[..], &["--allow-unsigned"]].concat()));
        assert!(said.contains(&format!("{name}: {unsigned}")), "{said}");
        fs::remove_file(run.join(name)).unwrap();
    }
    ok(&stapo(at, &key));
}

/// An evaluation that was complete and edited does not get another receipt either.
#[test]
fn an_evaluation_goes_on_only_with_the_samples_that_it_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    ok(&stapo(at, &["eval", "--limit", "2", "--samples", "1", "--max-tokens", "8", "--out", "e"]));
    let path = at.join("e/samples.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("\"reason\":\"", "\"reason\":\"x", 1)).unwrap();
    let said = complaint(at, &["eval", "--resume", "e"]);
    assert!(said.contains("file samples.jsonl: was "), "{said}");
    ok(&stapo(at, &["eval", "--resume", "e", "--accept-changes"]));
    assert!(differs(at, &["verify", "e"]).contains("file samples.jsonl: was "));
}
