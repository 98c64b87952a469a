//! Receipts: what `stapo verify` says of folders that are whole, changed, unfinished, or a stranger's.

#![cfg(unix)]

use crate::common::{complaint, copy_folder, ok, resumed_without_end, stapo};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const SMALL: [&str; 10] = [
    "--set",
    "rollout.problems_per_step=2",
    "--set",
    "rollout.group_size=4",
    "--set",
    "update.problems_per_minibatch=2",
    "--set",
    "evaluation={problems=4,every_steps=0}",
    "--set",
    "record.checkpoint_every_steps=1",
];

fn train(at: &Path, out: &str, steps: &str) {
    ok(&stapo(at, &[&["train", "--out", out, "--set", steps], &SMALL[..]].concat()));
}

/// What `stapo verify` prints of a folder in which something differs.
fn differs(at: &Path, args: &[&str]) -> String {
    let output = stapo(at, args);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// Writes a manifest with the receipt that fits it, as a forger would.
fn forge(folder: &Path, manifest: &Value) {
    let text = format!("{manifest}\n");
    fs::write(folder.join("manifest.sha256"), format!("{}  manifest.json\n", sha256(text.as_bytes())))
        .unwrap();
    fs::write(folder.join("manifest.json"), text).unwrap();
}

fn manifest(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("manifest.json")).unwrap()).unwrap()
}

#[test]
fn a_run_ends_in_a_receipt_that_names_what_differs() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    train(at, "run", "steps=2");
    let run = at.join("run");
    let text = fs::read_to_string(run.join("manifest.json")).unwrap();
    assert_eq!(text, format!("{}\n", serde_json::from_str::<Value>(&text).unwrap()), "keys are in order");
    let receipt = sha256(text.as_bytes());
    let said = ok(&stapo(at, &["verify", "run"]));
    assert!(said.contains(&format!("receipt {receipt}")), "{said}");
    assert_eq!(
        fs::read_to_string(run.join("manifest.sha256")).unwrap(),
        format!("{receipt}  manifest.json\n")
    );
    let listed: Vec<String> = manifest(&run)["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| f["name"].as_str().unwrap().into())
        .collect();
    for name in ["config.toml", "plan.toml", "metrics.jsonl", "events.jsonl"] {
        assert!(listed.iter().any(|listed| listed == name), "{name} in {listed:?}");
    }
    // Pages are made from the records at any time, and an evaluation in the folder has a receipt of its own.
    ok(&stapo(at, &["report", "run", "--tensorboard", "run/tensorboard"]));
    ok(&stapo(at, &["eval", "--model", "run", "--limit", "2", "--samples", "1", "--out", "run/eval"]));
    let said = ok(&stapo(at, &["verify", "run"]));
    assert!(said.contains("eval: made later, with a separate receipt"), "{said}");
    // What was made later is looked at too, and where the run has its own files nothing is made later.
    let table = fs::read(run.join("eval/table.json")).unwrap();
    fs::write(run.join("eval/table.json"), [&table[..], b" "].concat()).unwrap();
    assert!(differs(at, &["verify", "run"]).contains("eval/table.json: DIFFERENT"));
    fs::write(run.join("eval/table.json"), &table).unwrap();
    let planted = run.join("checkpoints/step-000009");
    fs::create_dir(&planted).unwrap();
    for file in fs::read_dir(run.join("eval")).unwrap().map(|entry| entry.unwrap().path()) {
        if file.is_file() {
            fs::copy(&file, planted.join(file.file_name().unwrap())).unwrap();
        }
    }
    let said = differs(at, &["verify", "run"]);
    assert!(said.contains("checkpoints/step-000009: EXTRA"), "{said}");
    fs::remove_dir_all(&planted).unwrap();
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(page.contains(&receipt[..12]), "the report shows the receipt");

    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    fs::write(run.join("metrics.jsonl"), metrics.replacen("\"accuracy\":0", "\"accuracy\":1", 1)).unwrap();
    let said = differs(at, &["verify", "run"]);
    assert!(said.contains("metrics.jsonl: DIFFERENT, recorded "), "{said}");
    fs::write(run.join("metrics.jsonl"), &metrics).unwrap();
    ok(&stapo(at, &["verify", "run"]));

    fs::write(run.join("notes.txt"), "mine").unwrap();
    assert!(differs(at, &["verify", "run"]).contains("notes.txt: EXTRA"));
    fs::remove_file(run.join("notes.txt")).unwrap();
    fs::remove_dir_all(run.join("checkpoints/step-000002")).unwrap();
    let said = differs(at, &["verify", "run"]);
    assert!(said.contains("checkpoints/step-000002/weights.safetensors: MISSING"), "{said}");
    let said = ok(&stapo(at, &["verify", "run", "--without-checkpoints"]));
    assert!(said.contains("checkpoints: 5 files are not here"), "{said}");
}

#[test]
fn a_run_that_goes_on_or_was_killed_has_no_receipt() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    train(at, "run", "steps=1");
    ok(&stapo(at, &["verify", "run"]));
    let mut child = resumed_without_end(at, Stdio::null());
    let said = complaint(at, &["verify", "run"]);
    assert!(said.contains("is writing it"), "{said}");
    child.kill().unwrap();
    child.wait().unwrap();
    let said = complaint(at, &["verify", "run"]);
    assert!(said.contains("no receipt") && said.contains("--resume"), "{said}");
    assert!(!at.join("run/manifest.sha256").exists());
    let n_steps = fs::read_to_string(at.join("run/metrics.jsonl")).unwrap().lines().count();
    let steps = format!("steps={}", n_steps + 1);
    ok(&stapo(at, &["train", "--resume", "run", "--set", &steps]));
    let said = ok(&stapo(at, &["verify", "run", "--replay", "--steps", "1"]));
    assert!(said.contains("files as recorded") && said.contains(": the same, "), "{said}");
}

#[test]
fn a_strangers_folder_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    ok(&stapo(at, &["eval", "--limit", "2", "--samples", "1", "--max-tokens", "8", "--out", "e"]));
    let folder = at.join("e");
    let sealed = manifest(&folder);
    let with_name = |name: &str| {
        let mut forged = sealed.clone();
        forged["files"][0]["name"] = name.into();
        forge(&folder, &forged);
        complaint(at, &["verify", "e"])
    };
    for name in ["../../etc/passwd", "/etc/passwd", "a//b", "a\\b", "."] {
        let said = with_name(name);
        assert!(said.contains("which is no file of this folder"), "{name}: {said}");
    }
    let twice = sealed["files"][1]["name"].as_str().unwrap().to_string();
    assert!(with_name(&twice).contains("twice"));
    forge(&folder, &sealed);
    ok(&stapo(at, &["verify", "e"]));
    // Another spelling of the same JSON is not what the program wrote.
    let text = fs::read_to_string(folder.join("manifest.json")).unwrap();
    fs::write(folder.join("manifest.json"), text.replacen(':', ": ", 1)).unwrap();
    assert!(complaint(at, &["verify", "e"]).contains("not in canonical form"));
    fs::write(folder.join("manifest.json"), &text).unwrap();
    fs::write(folder.join("manifest.sha256"), "0000  manifest.json\n").unwrap();
    assert!(complaint(at, &["verify", "e"]).contains("manifest.sha256 was changed"));
    forge(&folder, &sealed);
    // A file of a tebibyte differs by its length, and is not read.
    let samples = fs::read(folder.join("samples.jsonl")).unwrap();
    fs::File::options().write(true).open(folder.join("samples.jsonl")).unwrap().set_len(1 << 40).unwrap();
    let said = differs(at, &["verify", "e"]);
    assert!(said.contains("samples.jsonl: DIFFERENT") && said.contains("1099511627776 bytes"), "{said}");
    fs::write(folder.join("samples.jsonl"), samples).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", folder.join("table.png")).unwrap();
    assert!(complaint(at, &["verify", "e"]).contains("a symbolic link"));
    assert!(complaint(at, &["verify", "nowhere"]).contains("no such folder"));
}

#[test]
fn an_evaluation_is_replayed_and_signed() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let table = ok(&stapo(at, &["eval", "--limit", "3", "--samples", "2", "--out", "e"]));
    let receipt = sha256(&fs::read(at.join("e/manifest.json")).unwrap());
    assert!(table.contains(&format!("receipt {}: stapo verify e", &receipt[..12])), "{table}");
    assert!(ok(&stapo(at, &["compare", "e", "e"])).contains(&format!("A e, receipt {}", &receipt[..12])));
    let said = ok(&stapo(at, &["verify", "e", "--replay", "--steps", "2"]));
    assert!(said.contains("replay: 4 samples the same, 0 different"), "{said}");

    fs::write(at.join("key"), [7; 32]).unwrap();
    fs::set_permissions(at.join("key"), fs::Permissions::from_mode(0o644)).unwrap();
    let said = complaint(at, &["verify", "e", "--sign", "key"]);
    assert!(said.contains("mode is 644") && said.contains("chmod 400 key"), "{said}");
    fs::set_permissions(at.join("key"), fs::Permissions::from_mode(0o400)).unwrap();
    let said = ok(&stapo(at, &["verify", "e", "--sign", "key"]));
    assert!(said.ends_with("signed: e/manifest.sig\n"), "{said}");
    // The public key of 32 bytes of 7, by `openssl pkey -pubout`.
    let public = "ea4a6c63e29c520abef5507b132ec5f9954776aebebe7b92421eea691446d22c";
    let raw: Vec<u8> =
        (0..64).step_by(2).map(|i| u8::from_str_radix(&public[i..i + 2], 16).unwrap()).collect();
    fs::write(at.join("public"), &raw).unwrap();
    let said = ok(&stapo(at, &["verify", "e", "--key", "public"]));
    assert!(said.contains("signature: made with the key of public"), "{said}");
    assert!(ok(&stapo(at, &["verify", "e"])).contains("not checked; --key"));
    // Going on withdraws the receipt and the signature of it.
    copy_folder(&at.join("e"), &at.join("copy"));
    ok(&stapo(at, &["eval", "--resume", "copy"]));
    assert!(at.join("copy/manifest.sha256").exists() && !at.join("copy/manifest.sig").exists());
    // A manifest forged with a receipt that fits it does not have the signature.
    let mut forged = manifest(&at.join("e"));
    forged["program"] = "another".into();
    forge(&at.join("e"), &forged);
    assert!(differs(at, &["verify", "e", "--key", "public"]).contains("NOT made of this manifest"));
    assert!(complaint(at, &["verify", "e", "--key", "e/eval.json"]).contains("no Ed25519 public key"));
    // What is not as recorded is not signed.
    fs::write(at.join("e/samples.jsonl"), "").unwrap();
    let said = complaint(at, &["verify", "e", "--sign", "key"]);
    assert!(said.contains("folder e: not signed, since it is not as recorded"), "{said}");
}

#[test]
fn an_experiment_has_the_receipts_of_its_runs() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let args = ["experiment", "falsify", "--seeds", "0", "--set", "steps=1", "--set", "rollout.group_size=4"];
    let plan = ok(&stapo(at, &["experiment", "falsify", "--dry-run"]));
    assert!(plan.contains("10 runs, none started") && plan.contains("without-s2t/seed-4"), "{plan}");
    assert_eq!(fs::read_dir(at).unwrap().count(), 0);
    // A link to an empty folder on another disk is followed.
    for folder in ["experiments", "large"] {
        fs::create_dir(at.join(folder)).unwrap();
    }
    let experiment = at.join("experiments/falsify");
    std::os::unix::fs::symlink("../large", &experiment).unwrap();
    let said = ok(&stapo(at, &[&args[..], &SMALL[..]].concat()));
    let receipt = sha256(&fs::read(experiment.join("manifest.json")).unwrap());
    assert!(said.contains(&format!("receipt {}", &receipt[..12])), "{said}");
    let at_end = "\nruns: experiments/falsify\nreport: stapo report experiments/falsify\nreceipt ";
    assert!(said.contains(at_end), "{said}");
    let verify = ["verify", "experiments/falsify"];
    ok(&stapo(at, &verify));
    let replayed = ok(&stapo(at, &[&verify[..], &["--replay", "--steps", "1"]].concat()));
    for run in ["with-s2t/seed-0:\n", "without-s2t/seed-0:\n"] {
        assert!(replayed.contains(run), "{replayed}");
    }
    assert_eq!(replayed.matches("\nstep 1: the same, ").count(), 2, "{replayed}");
    let path = experiment.join("with-s2t/seed-0/metrics.jsonl");
    let metrics = fs::read_to_string(&path).unwrap();
    fs::write(&path, metrics.replacen('1', "2", 1)).unwrap();
    let said = differs(at, &verify);
    assert!(said.contains("with-s2t/seed-0/metrics.jsonl: DIFFERENT"), "{said}");
    fs::write(&path, &metrics).unwrap();
    // Going on withdraws the receipt with its signature, and writes the receipt again.
    fs::write(experiment.join("manifest.sig"), "of the receipt before").unwrap();
    ok(&stapo(at, &[&args[..], &SMALL[..]].concat()));
    assert!(!experiment.join("manifest.sig").exists());
    ok(&stapo(at, &verify));
    fs::remove_dir_all(experiment.join("without-s2t/seed-0")).unwrap();
    assert!(differs(at, &verify).contains("without-s2t/seed-0/manifest.json: MISSING"));
    // Twenty differences are shown.
    for n in 0..25 {
        fs::write(experiment.join(format!("extra-{n}.txt")), "").unwrap();
    }
    let said = differs(at, &verify);
    assert!(said.contains("\nand 6 more\n"), "{said}");
}

#[test]
fn a_stopped_experiment_has_a_receipt_of_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
        .current_dir(at)
        .args(["experiment", "falsify", "--seeds", "0", "--set", "steps=100000"])
        .args(SMALL)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let metrics = at.join("experiments/falsify/with-s2t/seed-0/metrics.jsonl");
    while !fs::metadata(&metrics).is_ok_and(|file| file.len() > 0) {
        assert!(child.try_wait().unwrap().is_none(), "the experiment goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM)
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(143), "{said}");
    let receipt = sha256(&fs::read(at.join("experiments/falsify/manifest.json")).unwrap());
    assert!(said.contains(&format!("receipt {} of what is there", &receipt[..12])), "{said}");
    let verify = ["verify", "experiments/falsify"];
    ok(&stapo(at, &verify));
    fs::write(&metrics, "").unwrap();
    assert!(differs(at, &verify).contains("with-s2t/seed-0/metrics.jsonl: DIFFERENT"));
}
