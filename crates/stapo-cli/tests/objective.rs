//! `stapo objective` from the outside.

use crate::common::{ok, parsed_lines, stapo_with_input};
use serde_json::{Value, json};
use std::process::Output;

fn stapo(args: &[&str], input: &str) -> Output {
    stapo_with_input(&[&["objective"], args].concat(), input.as_bytes())
}

fn lines(output: &Output) -> Vec<Value> {
    parsed_lines(&ok(output))
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

#[test]
fn given_advantages_take_the_place_of_rewards() {
    let from_rewards = lines(&stapo(&["-"], &text(&minibatch())));
    let mut given = minibatch();
    for (line, out) in given.iter_mut().zip(&from_rewards) {
        line.as_object_mut().unwrap().remove("reward");
        line["advantage"] = out["advantage"].clone();
    }
    assert_eq!(lines(&stapo(&["-"], &text(&given))), from_rewards, "a number, without a reward");
    for line in &mut given {
        let n = line["logp"].as_array().unwrap().len();
        line["advantage"] = json!(vec![line["advantage"].as_f64().unwrap(); n]);
    }
    let by_token = lines(&stapo(&["-"], &text(&given)));
    assert_eq!(by_token[4], from_rewards[4]);
    assert_eq!(by_token[0]["d_logp"], from_rewards[0]["d_logp"]);
    assert_eq!(by_token[0]["advantage"], given[0]["advantage"]);
    given[0]["advantage"] = json!([1.0, -1.0, 0.5]);
    let mixed = lines(&stapo(&["--spec", "reinforce", "-"], &text(&given)));
    assert_eq!(mixed[0]["d_logp"], json!([-1.0 / 7.0, 1.0 / 7.0, -0.5 / 7.0]));
    given[2].as_object_mut().unwrap().remove("advantage");
    given[2]["reward"] = json!(1.0);
    let said = complaint(&["-"], &text(&given));
    assert!(said.contains("<stdin>:3: line 1 has an advantage, line 3 has none"), "{said}");
    given[2]["advantage"] = json!([1.0]);
    let said = complaint(&["-"], &text(&given));
    assert!(said.contains("<stdin>:3: group a: advantage has 1 entries, logp has 2"), "{said}");
    given[2].as_object_mut().unwrap().remove("advantage");
    given[2].as_object_mut().unwrap().remove("reward");
    let said = complaint(&["-"], &text(&given[2..]));
    assert!(
        said.contains("missing key `reward`\nhint: a line without a reward needs an advantage"),
        "{said}"
    );
}

#[test]
fn a_masked_token_is_in_no_count_quantile_or_loss() {
    let without = lines(&stapo(&["--spec", "gspo+spurious", "-"], &text(&minibatch())));
    let mut masked = minibatch();
    for line in &mut masked {
        // A token between the others that would be a candidate, with values that no check accepts.
        for (column, value) in [("logp", 5.0), ("behavior_logp", -50.0), ("entropy", -7.0)] {
            line[column].as_array_mut().unwrap().insert(1, json!(value));
        }
        let mut mask = vec![json!(1); line["logp"].as_array().unwrap().len()];
        mask[1] = json!(false);
        line["loss_mask"] = json!(mask);
    }
    let with = lines(&stapo(&["--spec", "gspo+spurious", "-"], &text(&masked)));
    assert_eq!(with[4], without[4], "the totals are those without the token");
    for (with, without) in with[..4].iter().zip(&without) {
        for (column, of_masked) in [
            ("kept", json!(false)),
            ("ratio", json!(null)),
            ("d_logp", json!(0.0)),
            ("silenced_by", json!(null)),
        ] {
            let mut expected = without[column].as_array().unwrap().clone();
            expected.insert(1, of_masked);
            assert_eq!(with[column], json!(expected), "{column}");
        }
    }
    masked[0]["logp"][2] = json!(3.0);
    let said = complaint(&["-"], &text(&masked));
    assert!(
        said.contains("<stdin>:1: group a: logp[2] is 3"),
        "the token is named as the line counts: {said}"
    );
    let said = complaint(&["-"], &text(&masked).replacen('\n', " {}\n", 1));
    assert!(said.contains("<stdin>:1: ") && said.contains("more than one JSON object"), "{said}");
    masked[0]["logp"][2] = json!(-1.0);
    let entropy = masked[0]["entropy"].take();
    masked[0]["entropy"] = json!([0.1]);
    let said = complaint(&["-"], &text(&masked));
    assert!(said.contains("<stdin>:1: ") && said.contains("entropy has 1 entries, logp has 4"), "{said}");
    masked[0]["entropy"] = entropy;
    masked[0]["loss_mask"] = json!([1, 0, 1]);
    assert!(complaint(&["-"], &text(&masked)).contains("<stdin>:1: loss_mask has 3 entries, logp has 4"));
    masked[0]["loss_mask"] = json!([1, 0, 2, 1]);
    assert!(complaint(&["-"], &text(&masked)).contains("loss_mask[2] is neither true or 1 nor false or 0"));
    masked[0].as_object_mut().unwrap().remove("loss_mask");
    masked[0]["loss_mak"] = json!([1, 0, 1, 1]);
    assert!(complaint(&["-"], &text(&masked)).contains("did you mean `loss_mask`?"));
}

#[test]
fn several_rewards_have_weights() {
    let mut batch = minibatch();
    for (line, second) in batch.iter_mut().zip([0.0, 1.0, 4.0, 5.0]) {
        line["reward"] = json!([line["reward"], second]);
    }
    let advantages = |args: &[&str]| {
        let out =
            lines(&stapo(&[args, &["--set", "advantage.kind=group_mean", "-"]].concat(), &text(&batch)));
        out[..4].iter().map(|line| line["advantage"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(advantages(&[]), [-1.0, -3.0, 1.0, 3.0], "weights of 1");
    assert_eq!(advantages(&["--reward-weights", "1,0"]), [1.0, -1.0, -1.0, 1.0]);
    assert_eq!(advantages(&["--reward-weights", "0,-1"]), [2.0, 2.0, -2.0, -2.0]);
    let gdpo = ["--set", "multiple_rewards=normalize_each", "--set", "advantage.kind=group_z_score", "-"];
    let out = lines(&stapo(&gdpo, &text(&batch)));
    let expected = [0.0, -2.0 * 0.5f64.sqrt(), 0.0, 2.0 * 0.5f64.sqrt()];
    for (line, expected) in out.iter().zip(expected) {
        assert!((line["advantage"].as_f64().unwrap() - expected).abs() < 1e-15, "{line}");
    }
    let said = complaint(&["--reward-weights", "1,2,3", "-"], &text(&batch));
    assert!(said.contains("<stdin>:1: group a: 2 rewards, expected 3"), "{said}");
}

#[test]
fn a_byte_order_mark_reversed_clips_and_any_order_of_overrides_are_accepted() {
    let good = text(&minibatch());
    assert_eq!(lines(&stapo(&["-"], &format!("\u{feff}{good}"))), lines(&stapo(&["-"], &good)));
    let reversed = stapo(&["--set", "surrogate.low=0.4", "-"], &good);
    assert_eq!(lines(&reversed).len(), 5);
    let said = String::from_utf8_lossy(&reversed.stderr).into_owned();
    assert!(said.contains("warning: objective.surrogate.high 0.28 is below low 0.4"), "{said}");
    assert!(stapo(&["-"], &good).stderr.is_empty(), "nothing unusual, no warning");
    let sets = ["--set", "surrogate.high=.2", "--set", "surrogate.kind=cispo"];
    let shown = |sets: &[&str]| stapo(&[sets, &["--show"]].concat(), "");
    let (forth, back) = (shown(&sets), shown(&[sets[2], sets[3], sets[0], sets[1]]));
    assert!(forth.status.success() && forth.stdout == back.stdout);
    let said = complaint(&["--spec", "stapo+spurious", "-"], &good);
    assert!(said.contains("stapo+spurious would silence twice: stapo has S2T already"), "{said}");
    let huge =
        good.replace("\"reward\":1.0", "\"reward\":1e200").replace("\"reward\":-1.0", "\"reward\":-1e200");
    let said = complaint(&["-"], &huge);
    assert!(said.contains("<stdin>:1: group a: rewards from -1e200 to 1e200"), "{said}");
}
