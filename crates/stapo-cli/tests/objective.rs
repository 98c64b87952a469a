//! `stapo objective` from the outside.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Output, Stdio};

fn stapo(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
        .arg("objective")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A failed write is ignored: the program may refuse its arguments without reading its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn lines(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The standard error of a refused call, which must have written nothing to standard output.
fn complaint(args: &[&str], input: &str) -> String {
    let output = stapo(args, input);
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    assert!(output.stdout.is_empty(), "nothing is written halfway");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn response(group: &str, reward: f64, logp: &[f64], entropy: &[f64]) -> Value {
    json!({"group": group, "reward": reward, "logp": logp, "behavior_logp": logp, "entropy": entropy})
}

/// Two groups with interleaved lines.
fn minibatch() -> Vec<Value> {
    vec![
        response("a", 1.0, &[-7.0, -7.5, -0.1], &[0.1, 0.5, 0.3]),
        response("b", -1.0, &[-1.0], &[0.1]),
        response("a", -1.0, &[-0.5, -9.0], &[0.2, 0.0]),
        response("b", 1.0, &[-8.0], &[0.2]),
    ]
}

fn text(lines: &[Value]) -> String {
    lines.iter().fold(String::new(), |text, line| text + &line.to_string() + "\n")
}

#[test]
fn prints_one_line_per_response_in_order_then_the_totals() {
    let out = lines(&stapo(&["--spec", "stapo", "-"], &text(&minibatch())));
    assert_eq!(out.len(), 5);
    let groups: Vec<_> = out[..4].iter().map(|line| line["group"].as_str().unwrap()).collect();
    assert_eq!(groups, ["a", "b", "a", "b"]);
    // The candidates -7, -7.5 and -8 have entropies 0.1, 0.5 and 0.2, whose 0.75-quantile is 0.35.
    assert_eq!(out[0]["kept"], json!([false, true, true]));
    assert_eq!(out[0]["silenced_by"], json!(["spurious", null, null]));
    assert_eq!(out[2]["kept"], json!([true, true]), "an unrewarded response is never silenced");
    let total = &out[4];
    assert_eq!(total["tau_h"], json!(0.35));
    for (key, value) in [("n_tokens", 7), ("n_kept", 5), ("n_candidates", 3), ("n_silenced", 2)] {
        assert_eq!(total[key], json!(value), "{key}");
    }
    let a = 0.5f64.sqrt();
    assert_eq!(out[0]["ratio"], json!([1.0, 1.0, 1.0]));
    let pushed = out[0]["d_logp"][1].as_f64().unwrap();
    assert!((pushed + a / 5.0).abs() < 1e-15);
    let loss = total["loss"].as_f64().unwrap();
    assert!((loss - (-2.0 * a + 3.0 * a) / 5.0).abs() < 1e-15, "{loss}");
}

#[test]
fn d_logp_is_the_derivative_of_the_printed_loss() {
    let mut batch = minibatch();
    batch[0]["behavior_logp"] = json!([-6.9, -7.45, -0.2]);
    let loss = |batch: &[Value]| lines(&stapo(&["-"], &text(batch)))[4]["loss"].as_f64().unwrap();
    let d_logp = lines(&stapo(&["-"], &text(&batch)))[0]["d_logp"][2].as_f64().unwrap();
    let moved = |delta: f64| {
        let mut batch = batch.clone();
        batch[0]["logp"][2] = json!(-0.1 + delta);
        loss(&batch)
    };
    let numeric = (moved(1e-5) - moved(-1e-5)) / 2e-5;
    assert!((numeric - d_logp).abs() < 1e-8, "{numeric} {d_logp}");
}

#[test]
fn specs_come_from_files_and_overrides() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    std::fs::write(&file, "preset = \"stapo\"\n[[masks]]\nkind = \"spurious\"\ntau_p = 1e-9\n").unwrap();
    let total = |args: &[&str]| lines(&stapo(args, &text(&minibatch())))[4].clone();
    assert_eq!(total(&["--spec", file.to_str().unwrap(), "-"])["n_candidates"], json!(0));
    assert_eq!(total(&["--set", "masks.0.tau_p=0.0005", "-"])["n_candidates"], json!(1));
    let shown = stapo(&["--spec", "gspo+spurious", "--show"], "");
    std::fs::write(&file, &shown.stdout).unwrap();
    assert_eq!(total(&["--spec", file.to_str().unwrap(), "-"]), total(&["--spec", "gspo+spurious", "-"]));
    let missing = complaint(&["--spec", "nowhere.toml", "-"], "");
    assert!(missing.contains("spec nowhere.toml"), "{missing}");
}

#[test]
fn collisions_bring_gradient_norms_and_the_census() {
    let batch: Vec<Value> = minibatch()
        .into_iter()
        .map(|mut line| {
            line["collision"] = json!(vec![0.9; line["logp"].as_array().unwrap().len()]);
            line
        })
        .collect();
    let out = lines(&stapo(&["-"], &text(&batch)));
    let expected = (0.5 * (1.0 - 2.0 * (-7.0f64).exp() + 0.9)).sqrt();
    assert!((out[0]["gradient_norm"][0].as_f64().unwrap() - expected).abs() < 1e-12);
    let quadrants = out[4]["quadrants"].as_array().unwrap();
    let counts: Vec<_> = quadrants.iter().map(|q| q["n_tokens"].as_u64().unwrap()).collect();
    assert_eq!(counts, [0, 3, 1, 3]);
}

#[test]
fn a_two_pass_objective_shows_either_pass() {
    let kept = |pass| {
        let out = lines(&stapo(&["--spec", "lopti", "--pass", pass, "-"], &text(&minibatch())));
        out[..4].iter().flat_map(|line| line["kept"].as_array().unwrap().clone()).collect::<Vec<_>>()
    };
    let both: Vec<bool> = kept("1").iter().zip(kept("2")).map(|(a, b)| *a == b).collect();
    assert_eq!(both, [false; 7], "every token is in exactly one pass");
    assert!(complaint(&["--pass", "2", "-"], &text(&minibatch())).contains("this objective has 1 pass"));
}

#[test]
fn malformed_lines_are_named_by_file_line_and_field() {
    let good = text(&minibatch());
    let cases = [
        (
            r#"{"group":"a","reward":1,"logp":[-1,"x"],"behavior_logp":[-1,-1],"entropy":[0,0]}"#,
            "logp[1]: invalid type",
        ),
        (r#"{"group":"a","reward":1,"logp":[-1],"entropy":[0]}"#, "missing key `behavior_logp`"),
        (r#"{"group":"a","reward":1,"logp":[NaN],"behavior_logp":[-1],"entropy":[0]}"#, "logp holds NaN"),
        (
            r#"{"group":"a","reward":1,"logp":[-1],"behavior_logp":[-1],"entropy":[Infinity]}"#,
            "entropy holds Infinity",
        ),
        (
            r#"{"group":"a","reward":1e999,"logp":[-1],"behavior_logp":[-1],"entropy":[0]}"#,
            "reward: number out of range",
        ),
        (
            r#"{"group":"a","reward":1,"logp":[-1],"behavior_logp":[-1],"entropy":[0,1]}"#,
            "group a: entropy has 2 entries",
        ),
        (
            r#"{"group":"a","reward":1,"logp":[-1],"behavior_logp":[-9000],"entropy":[0]}"#,
            "ratio of token 0 is not finite",
        ),
        (
            r#"{"group":"a","reward":1,"logp":[2],"behavior_logp":[-1],"entropy":[0]}"#,
            "logp[0] is 2, expected",
        ),
        (
            r#"{"group":"a","reward":1,"logp":[-1],"behavior_logp":[-1],"entropy":[0],"colision":[0.5]}"#,
            "did you mean `collision`",
        ),
        (r#"{"group":"a","reward":1,"logp":[-1],"behavior_l"#, "not JSON"),
        (r#"["a"]"#, "expected a JSON object"),
    ];
    for (line, expected) in cases {
        let said = complaint(&["-"], &format!("{good}\n{line}\n"));
        assert!(said.contains("<stdin>:6:") && said.contains(expected), "{line}\n{said}");
    }
    assert!(complaint(&["-"], "\n\n").contains("no responses"));
    assert!(complaint(&["no-such-file.jsonl"], "").contains("no-such-file.jsonl"));
    let own_keys = good.replace("\"reward\"", "\"note\":\"mine\",\"reward\"");
    assert_eq!(lines(&stapo(&["-"], &own_keys)).len(), 5, "keys of the user's own are no error");
}

#[test]
fn wrong_specs_suggest_the_nearest_name() {
    let good = text(&minibatch());
    assert!(complaint(&["--spec", "justrll", "-"], &good).contains("did you mean `justrl`?"));
    assert!(complaint(&["--set", "masks.0.tau=1", "-"], &good).contains("did you mean `tau_p`?"));
    let needs = complaint(&["--spec", "grpo", "-"], &good);
    assert!(needs.contains("reference_logp is missing") && needs.contains("hint: "), "{needs}");
}
