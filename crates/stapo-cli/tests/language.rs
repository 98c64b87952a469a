//! `stapo generate` and `stapo score` from the outside, on folders that `transformers` saved.

use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs::DirEntry;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A model with a chat template and a tokenizer of letters, digits and a few signs.
const TALKING: &str = "qwen3-tied-gqa2";

fn folder(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../stapo-model/tests/goldens").join(case)
}

/// The tiny models of all families that `transformers` scored, and no reward models.
fn cases() -> Vec<String> {
    let entries = folder("").read_dir().unwrap().map(|entry| entry.unwrap());
    let is_scored = |entry: &DirEntry| {
        entry.path().join("golden.safetensors").exists() && entry.path().join("model.safetensors").exists()
    };
    let names = entries.filter(is_scored).map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| !name.starts_with("reward-")).collect()
}

fn stapo(command: &str, case: &str, arguments: &[&str]) -> Output {
    let mut stapo = Command::new(env!("CARGO_BIN_EXE_stapo"));
    stapo.arg(command).arg("--model").arg(folder(case)).args(arguments);
    stapo.output().unwrap()
}

fn input(lines: &[String]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(lines.join("\n").as_bytes()).unwrap();
    file
}

/// Runs the program with the lines as `--input`.
fn with_lines(command: &str, case: &str, lines: &[String], arguments: &[&str]) -> Output {
    let file = input(lines);
    let mut all = vec!["--input", file.path().to_str().unwrap()];
    all.extend(arguments);
    stapo(command, case, &all)
}

fn records(output: &Output) -> Vec<Value> {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn succeeded(output: Output) -> Output {
    assert!(output.status.success(), "{}", errors(&output));
    output
}

fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[track_caller]
fn assert_close(what: &str, ours: &[f64], theirs: &[f64]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let scale = theirs.iter().fold(0.0_f64, |top, x| top.max(x.abs()));
    let worst = ours.iter().zip(theirs).fold(0.0_f64, |top, (a, b)| top.max((a - b).abs()));
    assert!(worst <= 1e-4 * scale, "{what}: off by {worst} of {scale}");
}

#[test]
fn score_agrees_with_transformers() {
    let cases = cases();
    assert!(cases.len() > 20, "{cases:?}");
    for case in &cases {
        let bytes = std::fs::read(folder(case).join("golden.safetensors")).unwrap();
        let golden = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| golden.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        let ints = |name: &str| words(name).into_iter().map(u32::from_le_bytes).collect::<Vec<_>>();
        let floats = |name: &str| {
            words(name).into_iter().map(|word| f64::from(f32::from_le_bytes(word))).collect::<Vec<_>>()
        };
        let tokens = ints("tokens");
        let mut start = 0;
        let mut lines = Vec::new();
        for (length, n_prompt) in ints("lengths").into_iter().zip(ints("prompt_lengths")) {
            let end = start + length as usize;
            lines.push(json!({"tokens": tokens[start..end], "prompt_tokens": n_prompt}).to_string());
            start = end;
        }
        let temperature = floats("temperature")[0].to_string();
        let mut arguments = vec!["--temperature", &temperature, "--alternatives", "5"];
        if case.ends_with("-long") {
            let refused = errors(&with_lines("score", case, &lines, &arguments));
            assert!(refused.contains("61 tokens, the model takes 16 with LongRoPE's factors"), "{refused}");
            assert!(refused.contains("hint: add --max-tokens 61"), "{refused}");
            arguments.extend(["--max-tokens", "61"]);
        }
        let records = records(&succeeded(with_lines("score", case, &lines, &arguments)));
        let joined = |key: &str| records.iter().flat_map(|record| numbers(&record[key])).collect::<Vec<_>>();
        for key in ["logp", "entropy", "collision"] {
            assert_close(&format!("{case} {key}"), &joined(key), &floats(key));
        }
        let alternatives = records.iter().flat_map(|record| record["alternatives"].as_array().unwrap());
        let best: Vec<f64> = alternatives
            .flat_map(|row| row.as_array().unwrap())
            .map(|c| c["logp"].as_f64().unwrap())
            .collect();
        assert_close(&format!("{case} alternatives"), &best, &floats("top_logp"));
    }
}

#[test]
fn score_reads_text_as_it_reads_tokens() {
    let text = json!({"id": "a", "prompt": "two and ", "response": "three"}).to_string();
    let [by_text] = records(&succeeded(with_lines("score", TALKING, &[text], &[]))).try_into().unwrap();
    assert_eq!(by_text["id"], "a");
    assert_eq!(by_text["text"], json!(["t", "h", "r", "e", "e"]));
    let letters = "etaoinshrdlucmfwypvbgkjqxz .\n=+0123456789";
    let ids: Vec<usize> = "two and three".chars().map(|c| letters.find(c).unwrap() + 1).collect();
    let tokens = json!({"tokens": ids, "prompt_tokens": 8}).to_string();
    let [by_tokens] = records(&succeeded(with_lines("score", TALKING, &[tokens], &[]))).try_into().unwrap();
    assert_eq!(by_tokens["logp"], by_text["logp"]);
    assert_eq!(by_tokens["tokens"], by_text["tokens"]);
}

#[test]
fn bad_lines_are_named_and_the_others_scored() {
    let lines = [
        json!({"tokens": [1, 2, 3], "prompt_tokens": 1}).to_string(),
        "{\"tokens\": [1, 2".into(),
        json!({"tokens": [1, 2, 900], "prompt_tokens": 1}).to_string(),
        String::new(),
        json!({"tokens": [1, 2, 3], "prompt_tokens": 0}).to_string(),
        json!({"tokens": [1, 2, 3], "prompt_tokens": 4}).to_string(),
        json!({"tokens": vec![1; 65], "prompt_tokens": 4}).to_string(),
        json!({"prompt": "abc"}).to_string(),
        json!({"response": "abc"}).to_string(),
        json!({"tokens": [3, 2, 1], "prompt_tokens": 3}).to_string(),
    ];
    let output = with_lines("score", TALKING, &lines, &[]);
    assert_eq!(output.status.code(), Some(1));
    let lines: Vec<Value> = records(&output).iter().map(|record| record["line"].clone()).collect();
    assert_eq!(lines, [json!(1), json!(10)]);
    let errors = errors(&output);
    for (line, reason) in [
        (2, "not a record in JSON"),
        (3, "token 900 is outside the vocabulary of 41"),
        (5, "0 prompt tokens of 3"),
        (6, "4 prompt tokens of 3"),
        (7, "65 tokens, the model takes 64"),
        (8, "no response"),
        (9, "no prompt"),
    ] {
        let found = errors.lines().any(|text| text.contains(&format!(":{line}: ")) && text.contains(reason));
        assert!(found, "line {line}: {reason}\n{errors}");
    }
    let nothing = with_lines("score", TALKING, &["{}".into()], &[]);
    assert_eq!(nothing.status.code(), Some(2));
}

#[test]
fn a_generated_logp_is_what_score_gives_for_it() {
    let lines: Vec<String> = ["one ", "two plus ", "x"].map(|p| json!({"prompt": p}).to_string()).to_vec();
    let arguments = ["-n", "3", "--max-tokens", "20", "--seed", "5", "--json"];
    let made = records(&succeeded(with_lines("generate", TALKING, &lines, &arguments)));
    assert_eq!(made.len(), 9);
    let prompts = ["one ", "two plus ", "x"];
    let letters = "etaoinshrdlucmfwypvbgkjqxz .\n=+0123456789";
    let lines: Vec<String> = made
        .iter()
        .map(|record| {
            let prompt = prompts[record["line"].as_u64().unwrap() as usize - 1];
            let mut ids: Vec<u64> = prompt.chars().map(|c| letters.find(c).unwrap() as u64 + 1).collect();
            let n_prompt = ids.len();
            assert_eq!(record["prompt_tokens"], json!(n_prompt));
            ids.extend(record["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()));
            json!({"tokens": ids, "prompt_tokens": n_prompt}).to_string()
        })
        .collect();
    let scored = records(&succeeded(with_lines("score", TALKING, &lines, &[])));
    for (made, scored) in made.iter().zip(&scored) {
        assert_eq!(made["logp"], scored["logp"]);
        assert_eq!(made["entropy"], scored["entropy"]);
    }
}

#[test]
fn the_same_seed_gives_the_same_text_alone_and_in_company() {
    let alone = ["--prompt", "so it ", "--max-tokens", "30", "--seed", "9"];
    let streamed = succeeded(stapo("generate", TALKING, &alone)).stdout;
    let line = json!({"prompt": "so it "}).to_string();
    let more =
        ["-n", "4", "--max-tokens", "30", "--seed", "9", "--json", "--kv-memory", "64K", "--threads", "1"];
    let together = records(&succeeded(with_lines("generate", TALKING, &[line.clone(), line], &more)));
    assert_eq!(together.len(), 8);
    assert_eq!(format!("{}\n", together[0]["text"].as_str().unwrap()), String::from_utf8(streamed).unwrap());
    let texts: std::collections::BTreeSet<&str> =
        together.iter().map(|r| r["text"].as_str().unwrap()).collect();
    assert_eq!(texts.len(), 8, "samples and problems differ");
}

#[test]
fn responses_end_at_a_stop_token_or_a_limit() {
    let arguments = ["--chat", "hi", "-n", "40", "--max-tokens", "60", "--json", "--temperature", "1.5"];
    let made = records(&succeeded(stapo("generate", TALKING, &arguments)));
    let (mut n_stops, mut n_limits) = (0, 0);
    for record in &made {
        let tokens = record["tokens"].as_array().unwrap();
        let n_prompt = record["prompt_tokens"].as_u64().unwrap() as usize;
        assert_eq!(n_prompt, "uhi".len() + "<|end|>a".len() - "<|end|>".len() + 1);
        if record["finish"] == "stop" {
            n_stops += 1;
            assert_eq!(tokens.last().unwrap(), &json!(0));
        } else {
            n_limits += 1;
            // The model takes 64 tokens, the prompt included.
            assert_eq!(tokens.len(), 64 - n_prompt);
        }
        assert!(!tokens[..tokens.len() - 1].contains(&json!(0)), "nothing follows a stop token");
    }
    assert!(n_stops > 0 && n_limits > 0, "{n_stops} stops, {n_limits} limits");
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let long = "a".repeat(64);
    for (arguments, reason) in [
        (vec!["--prompt", long.as_str()], "64 tokens, the model takes 64"),
        (vec!["--prompt", ""], "prompt: empty"),
        (vec!["--prompt", "a", "--kv-memory", "4K"], "kv memory"),
        (vec!["--prompt", "a", "--temperature", "0"], "--greedy"),
        (vec!["--prompt", "a", "--top-p", "1.5"], "--top-p"),
        (vec!["--prompt", "a", "--greedy", "--top-k", "3"], "cannot be used with"),
        (vec!["--prompt", "a", "--chat", "b"], "cannot be used with"),
        (vec!["--input", "no/such/file"], "no/such/file"),
        (vec![], "required"),
    ] {
        let output = stapo("generate", TALKING, &arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(errors(&output).contains(reason), "{arguments:?}: {}", errors(&output));
    }
    let output = stapo("generate", "qwen2-tied-gqa7", &["--prompt", "a"]);
    assert!(errors(&output).contains("no tokenizer.json"), "{}", errors(&output));
}
