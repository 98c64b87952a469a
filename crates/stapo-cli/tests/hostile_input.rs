//! Input and output that no program should trip over: endless lines, pipes in place of files, huge numbers, a full
//! disk, control characters.

use crate::common::{complaint, ok, stapo};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn golden() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../stapo-model/tests/goldens/qwen3-tied-gqa2")
        .to_str()
        .unwrap()
        .to_owned()
}

/// Calls the program with `head`, then 70 MiB without a line break, then `tail` on standard input.
fn with_long_line(args: &[&str], head: &str, tail: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let (head, tail) = (head.to_owned(), tail.to_owned());
    let writer = std::thread::spawn(move || {
        let long = vec![b'x'; 1 << 20];
        // A command that refuses the line may leave before the rest is written.
        let _ = input.write_all(head.as_bytes());
        for _ in 0..70 {
            if input.write_all(&long).is_err() {
                return;
            }
        }
        let _ = input.write_all(tail.as_bytes());
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

#[test]
fn one_endless_line_is_refused_with_its_number_and_the_limit() {
    let model = golden();
    let record = "{\"prompt\": \"a\", \"response\": \"b\"}\n";
    let output = with_long_line(&["score", "--model", &model, "--input", "-"], record, "\n");
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("<stdin>:2: the line is longer than 64 MiB"), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 1, "the other record is scored");
    let args = ["generate", "--model", &model, "--input", "-", "--max-tokens", "2", "--json"];
    let output = with_long_line(&args, "", "\n{\"prompt\": \"a\"}");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("<stdin>:1: the line is longer than 64 MiB"));
    assert!(String::from_utf8_lossy(&output.stdout).contains("\"line\":2"));
    let output = with_long_line(&["objective", "-"], "", "");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("<stdin>:1: the line is longer than 64 MiB"));
    let output = with_long_line(&["grade", "-"], "", "\n{\"answer\": \"1\", \"reference\": \"1\"}");
    assert_eq!(output.status.code(), Some(1));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(printed.contains("longer than 8 MiB") && printed.contains("\"right\""), "{printed}");
}

#[cfg(unix)]
#[test]
fn pipes_devices_and_folders_in_place_of_files_are_refused_and_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let pipe = |path: &Path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    for file in [
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "tokenizer_config.json",
        "model.safetensors",
    ] {
        let model = at.join(file.replace('.', "-"));
        std::fs::create_dir(&model).unwrap();
        for entry in std::fs::read_dir(golden()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() && path.file_name().unwrap() != file {
                std::fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
            }
        }
        pipe(&model.join(file));
        let said = complaint(at, &["generate", "--model", model.to_str().unwrap(), "--prompt", "a"]);
        assert!(said.contains(file) && said.contains("a pipe or a device, expected a file"), "{said}");
    }
    pipe(&at.join("pipe"));
    std::fs::create_dir(at.join("folder.toml")).unwrap();
    let said = complaint(at, &["train", "pipe"]);
    assert!(said.contains("config pipe") && said.contains("a pipe or a device"), "{said}");
    let said = complaint(at, &["objective", "--spec", "folder.toml", "-"]);
    assert!(said.contains("spec folder.toml") && said.contains("a folder"), "{said}");
    for (path, word) in
        [("pipe", "a pipe or a device"), ("/dev/zero", "a pipe or a device"), (".", "a folder")]
    {
        let data = format!("task.path=\"{path}\"");
        let said = complaint(at, &["problems", "--set", "task.kind=\"jsonl\"", "--set", &data]);
        assert!(said.contains(word), "{path}: {said}");
    }
    assert!(complaint(at, &["experiment", "."]).contains("a folder"));
}

#[test]
fn huge_numbers_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let model = golden();
    for command in
        [&["train"][..], &["plan"], &["generate", "--prompt", "a"], &["eval"], &["pretrain"], &["score"]]
    {
        let args = [command, &["--threads", "100000"]].concat();
        assert!(complaint(at, &args).contains("from 1 to 1024"), "{args:?}");
    }
    assert!(complaint(at, &["grade", "-", "--threads", "100000"]).contains("--threads"));
    for (setting, word) in [
        ("rollout.group_size=4294967298", "rollout.group_size: 4294967298, expected at most 65536"),
        ("rollout.problems_per_step=9223372036854775807", "rollout.problems_per_step"),
        ("rollout.max_prompt_tokens=9223372036854775807", "rollout.max_prompt_tokens"),
        ("rollout.max_response_tokens=9223372036854775807", "rollout.max_response_tokens"),
        ("rollout.kv_mib=9223372036854775807", "rollout.kv_mib"),
        ("evaluation.samples=4294967296", "evaluation.samples"),
        ("evaluation.problems=9223372036854775807", "evaluation.problems"),
        ("update.microbatch_tokens=9223372036854775807", "update.microbatch_tokens"),
    ] {
        assert!(complaint(at, &["plan", "--no-measure", "--set", setting]).contains(word), "{setting}");
    }
    for value in ["4294967296", "9223372036854775808", "18446744073709551616", "-1", "1e308", "nan"] {
        for option in ["--n", "--max-tokens", "--top-k", "--temperature", "--top-p", "--seed", "--kv"] {
            let given = format!("{option}={value}");
            let short = if option == "--max-tokens" { &[][..] } else { &["--max-tokens=1"] };
            let args = [&["generate", "--model", &model, "--prompt", "a", &given], short].concat();
            let output = stapo(at, &args);
            let status = output.status.code();
            assert!(matches!(status, Some(0 | 2)), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

/// Every command that prints something without training.
fn printing() -> Vec<Vec<String>> {
    let model = golden();
    [
        "--help".to_owned(),
        "--version".into(),
        "train --help".into(),
        "runs .".into(),
        "plan --no-measure".into(),
        "plan --no-measure --json".into(),
        "problems".into(),
        "problems --json".into(),
        "doctor".into(),
        "doctor --json".into(),
        "objective --list".into(),
        "objective --spec grpo --show".into(),
        "experiment".into(),
        format!("model info {model}"),
        format!("model info {model} --json"),
        format!("generate --model {model} --prompt a --max-tokens 2"),
        format!("generate --model {model} --prompt a --max-tokens 2 --json"),
    ]
    .iter()
    .map(|line| line.split(' ').map(str::to_owned).collect())
    .collect()
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_standard_output_is_an_error_and_a_reader_that_left_is_none() {
    let folder = tempfile::tempdir().unwrap();
    for args in printing() {
        let run = |output: Stdio| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
            command.current_dir(folder.path()).args(&args).stdout(output).output().unwrap()
        };
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = run(full.into());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains("error: ") && said.contains("No space left"), "{args:?}: {said}");
        assert!(!said.contains("panicked"), "{args:?}: {said}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = run(writer.into());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {said}");
        assert!(!said.contains("error") && !said.contains("panicked"), "{args:?}: {said}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn metrics_that_a_full_disk_swallowed_are_told_at_the_end_of_a_run_that_lost_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let small = "--json --set steps=1";
    let train = "train --set rollout.problems_per_step=1 --set update.problems_per_minibatch=1 --set evaluation.problems=1";
    let pretrain = "pretrain --set batch_tokens=64 --set evaluation_problems=1 --set start.n_layers=1";
    for (out, line) in [("trained", train), ("pretrained", pretrain)] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
        command.current_dir(folder.path()).args(line.split(' ')).args(small.split(' '));
        let output = command.args(["--out", out]).stdout(Stdio::from(full)).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{line}: {said}");
        assert!(
            said.contains("No space left") && said.contains("nothing of the run is lost"),
            "{line}: {said}"
        );
        let metrics = std::fs::read_to_string(folder.path().join(out).join("metrics.jsonl")).unwrap();
        assert_eq!(metrics.lines().count(), 1, "{line}");
    }
}

#[test]
fn control_characters_of_names_and_files_are_spelled_out() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let name = "a\u{1b}]0;title\u{7}\u{9b}2J";
    for args in [
        vec!["export", name, "--to", "x"],
        vec!["train", name],
        vec!["plan", "--set", name],
        vec!["objective", "--spec", name, "-"],
        vec!["report", name],
        vec!["fetch", "model", name],
        vec!["generate", "--model", name, "--prompt", "x"],
    ] {
        let said = complaint(at, &args);
        assert!(!said.contains(['\u{1b}', '\u{7}', '\u{9b}']), "{said:?}");
        assert!(said.contains("\\u001b") || said.contains("\\u{1b}"), "{said}");
    }
    let data = at.join("rows.jsonl");
    std::fs::write(&data, "{\"problem\": \"x\\u001b[2J\", \"answer\": 1, \"id\": \"\\u001b[31m\"}\n")
        .unwrap();
    let setting = format!("task.path={:?}", data.to_str().unwrap());
    let args = [
        "problems",
        "--set",
        "task.kind=\"jsonl\"",
        "--set",
        &setting,
        "--set",
        "task.template=\"{{ nothing }}\"",
        "--set",
        "task.held_out_share=0.0",
    ];
    let said = complaint(at, &args);
    assert!(!said.contains('\u{1b}') && said.contains("nothing"), "{said:?}");
}

#[test]
fn the_exit_statuses_are_in_the_help() {
    let folder = tempfile::tempdir().unwrap();
    let help = ok(&stapo(folder.path(), &["--help"]));
    assert!(help.contains("Exit status: 0 success; 1 finished, but") && help.contains("128 + N"), "{help}");
    assert_eq!(stapo(folder.path(), &["--nothing"]).status.code(), Some(2));
}
