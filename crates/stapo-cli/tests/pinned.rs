//! Numbers that commands print, pinned: a line that computes another one is noticed, whichever it is. Prose is not pinned.
//!
//! The committed numbers were looked at once. After an intended change STAPO_WRITE_GOLDENS=1 writes them again; the
//! difference in version control then shows what changed.

use crate::browser::runs::read;
use crate::common::{ok, parsed_lines, root, stapo};
use crate::pages::experiment;
use crate::serve::Server;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::io::Read;
use std::path::Path;
use std::process::Output;

/// Compares sections, each a name and its lines, with the file of that name in `tests/goldens`.
pub fn compare(file: &str, sections: &[(String, String)]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(file);
    let found = sections.iter().fold(String::new(), |mut text, (name, lines)| {
        writeln!(text, "== {name}\n{}", lines.trim_end()).unwrap();
        text
    });
    if std::env::var_os("STAPO_WRITE_GOLDENS").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let golden = read(&path);
    let mut section = "";
    for (found, expected) in found.lines().zip(golden.lines()) {
        section = if expected.starts_with("== ") { expected } else { section };
        assert_eq!(found, expected, "{file}, {section}");
    }
    assert_eq!(found.lines().count(), golden.lines().count(), "{file}");
}

/// The first digits of the hash of a text that is too long to be kept.
fn digest(text: &str) -> String {
    format!("{:x}", Sha256::digest(text))[..16].to_string()
}

/// The lines of a text with digits, but for hashes.
pub fn numbered(text: &str) -> String {
    let has_digit = |line: &&str| line.contains(|c: char| c.is_ascii_digit()) && !line.contains("receipt");
    text.lines().filter(has_digit).collect::<Vec<_>>().join("\n")
}

/// Five digits of a number, so that the last bits of a system's logarithm do not count.
fn rounded(value: &Value) -> String {
    value.as_f64().map_or_else(|| value.to_string(), |number| format!("{number:.4e}"))
}

/// The leaves of a value as lines `key.key number`, without keys that depend on the machine or are prose.
fn leaves(value: &Value, name: &str, skipped: &[&str], lines: &mut String) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                if !skipped.iter().any(|word| key.contains(word)) {
                    leaves(value, &format!("{name}.{key}"), skipped, lines);
                }
            }
        }
        Value::Array(values) => {
            for (idx, value) in values.iter().enumerate() {
                leaves(value, &format!("{name}.{idx}"), skipped, lines);
            }
        }
        leaf => writeln!(lines, "{} {}", name.trim_start_matches('.'), rounded(leaf)).unwrap(),
    }
}

/// The words with digits of every assumption of a plan, and the options that would replace it.
fn assumptions(plan: &Value) -> String {
    let counts = |word: &&str| word.starts_with("--") || word.contains(|c: char| c.is_ascii_digit());
    plan["assumed"].as_array().unwrap().iter().fold(String::new(), |mut lines, text| {
        let words: Vec<&str> = text.as_str().unwrap().split_whitespace().filter(counts).collect();
        writeln!(lines, "{}", format!("assumed {}", words.join(" ")).trim_end()).unwrap();
        lines
    })
}

/// What a command said of its steps on standard error and at its end on standard output, without times.
fn shown(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    let steps = said.lines().filter(|line| line.starts_with("step ") && line.contains(" left"));
    let untimed = |line: &str| {
        let kept = line.split("  ").filter(|part| !part.ends_with(" left") && !part.ends_with(" tokens/s"));
        kept.collect::<Vec<_>>().join("  ")
    };
    let other = ["before training: ", "data: ", "held-out ", "reference: "];
    let told = said.lines().filter(|line| other.iter().any(|word| line.starts_with(word)));
    let planned =
        said.lines().filter_map(|line| Some(line.split_once(" for ")?.1.split_once(", by the rates")?.0));
    let ended = ok(output);
    let ended = ended
        .lines()
        .filter(|line| line.contains(" -> ") || line.contains(['▁', '█']) || line.contains(" of "));
    let lines: Vec<String> = steps
        .map(untimed)
        .chain(told.chain(planned).map(String::from))
        .chain(ended.map(String::from))
        .collect();
    lines.join("\n") + "\n"
}

/// Fewer responses than the paper has, which take less time to simulate.
const FEW: [&str; 10] = [
    "--set",
    "rollout.problems_per_step=16",
    "--set",
    "update.problems_per_minibatch=8",
    "--set",
    "evaluation.problems=8",
    "--mean-prompt",
    "200",
    "--mean-response",
    "1000",
];

/// Plans on machines whose rates are published, not measured here.
#[test]
fn plans_have_their_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let [small, large] = ["1.7b", "8b"].map(|size| root().join(format!("configs/qwen3-{size}.toml")));
    let [small, large] = [small.to_str().unwrap(), large.to_str().unwrap()];
    let row = r#"{"prompt": "1+1=", "chosen": "2 and that is right", "rejected": "3 and that is wrong"}"#;
    std::fs::write(at.join("pairs.jsonl"), format!("{row}\n").repeat(40)).unwrap();
    for (name, table) in [("prefer", "[preference]\nloss = { kind = \"dpo\" }"), ("rm", "[reward_model]")] {
        let text = format!(
            "model = {{ kind = \"path\", path = \"Qwen/Qwen3-1.7B-Base\" }}\ndevice = \"cuda\"\n{table}\n[update]\nbatch_rows = 8\n\
             [data]\nkind = \"file\"\npath = \"pairs.jsonl\"\nheld_out_share = 0.1\n"
        );
        std::fs::write(at.join(format!("{name}.toml")), text).unwrap();
    }
    let judge = r#"task.verifier={kind="judge", model="qwen3-4b"}"#;
    let tools = r#"environment={ kind = "tools", tools = [{ kind = "command", name = "a", description = "b", program = "c", workers = 8 }] }"#;
    let few = |args: &[&'static str]| [args, &FEW].concat();
    let cases: [(&str, Vec<&str>); 15] = [
        ("the paper's", few(&[])),
        ("shared prompts", few(&["--set", "update.share_prompts=true"])),
        ("dapo with redraws", few(&["--set", "objective.preset=dapo", "--set", "rollout.max_redraws=3"])),
        ("a reference", few(&["--set", "objective.preset=grpo"])),
        ("a judge", [&FEW[..], &["--set", judge]].concat()),
        ("tools", [&FEW[..], &["--set", tools, "--mean-turns", "3"]].concat()),
        ("adapters", few(&["--set", "model.lora.rank=16", "--model", "qwen2.5-7b"])),
        (
            "a quantised base",
            few(&["--model", "qwen3-14b", "--set", "model.lora={rank=8,base=\"quantised\"}"]),
        ),
        ("windows", few(&["--model", "gemma-3-4b"])),
        ("a hybrid", few(&["--model", "qwen3.5-9b", "--set", "update.states=8bit"])),
        ("eight GPUs in two machines", few(&["--gpus", "8", "--nodes", "2"])),
        ("does not fit", vec![large]),
        ("pairs", vec!["prefer.toml"]),
        ("a reward model", vec!["rm.toml", "--mean-row", "300"]),
        ("on a CPU", vec!["--machine", "cpu"]),
    ];
    let skipped =
        ["assumed", "machine", "here", "source", "origin", "notes", "name", "per_second", "is_measured"];
    let mut sections = Vec::new();
    for (name, args) in &cases {
        let has_config = args.first().is_some_and(|first| !first.starts_with("--"));
        let config: &[&str] = if has_config || args.contains(&"cpu") { &[] } else { &[small] };
        let machine: &[&str] = if args.contains(&"cpu") { &[] } else { &["--machine", "h100"] };
        let all = [&["plan"], config, args, machine].concat();
        let output = stapo(at, &[&all[..], &["--json"]].concat());
        let plan: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{name}: {}", String::from_utf8_lossy(&output.stderr)));
        let mut lines = format!("exit status {:?}\n", output.status.code());
        leaves(&plan, "", &skipped, &mut lines);
        if !args.contains(&"cpu") {
            lines += &assumptions(&plan);
        }
        if ["a judge", "shared prompts", "tools", "eight GPUs in two machines", "does not fit", "pairs"]
            .contains(name)
        {
            let text = String::from_utf8_lossy(&stapo(at, &all).stdout).into_owned();
            lines += text.split("\nassumed ").next().unwrap();
        }
        sections.push(((*name).to_string(), lines));
    }
    let described = ok(&stapo(at, &["model", "info", "builtin"]));
    sections.push(("the built-in model".to_string(), numbered(&described)));
    let described: Value =
        serde_json::from_str(&ok(&stapo(at, &["model", "info", "builtin", "--json"]))).unwrap();
    let mut lines = String::new();
    leaves(&described, "", &["sha256"], &mut lines);
    sections.push(("the built-in model as JSON".to_string(), lines));
    compare("plans.txt", &sections);
}

/// The drawings of a page, each by its name and digest; titles and notes are prose.
fn drawings(page: &str) -> String {
    page.split("<figure id=\"").skip(1).fold(String::new(), |mut lines, figure| {
        let name = figure.split('"').next().unwrap();
        let svg = figure.split("<svg").nth(1).unwrap().split("</svg>").next().unwrap();
        let (before, after) = svg.split_once("aria-label=\"").unwrap();
        let svg = before.to_string() + after.split_once('"').unwrap().1;
        writeln!(lines, "{name} {} bytes, {}", svg.len(), digest(&svg)).unwrap();
        lines
    })
}

/// How many parts of each kind a page has, and the lines that name the last step.
fn parts(page: &str) -> String {
    let count = |part: &str| page.matches(part).count();
    let counts = ["<section", "<figure", "<table", "<tr", "<details", "class=\"note\"", "class=\"missing\""];
    let mut lines = counts.map(|part| format!("{part} {}", count(part))).join("\n");
    for part in ["state after step ", " report · "] {
        let text = page.split(part).nth(1).and_then(|rest| rest.split('<').next());
        write!(lines, "\n{part}{}", text.unwrap_or("-")).unwrap();
    }
    for card in page.split("<div class=\"card\"><b>").skip(1) {
        let text =
            card.split("</div>").next().unwrap().replace("</b><span>", " | ").replace("</span><span>", " | ");
        write!(lines, "\n{}", text.trim_end_matches("</span>")).unwrap();
    }
    lines
}

#[test]
fn reports_comparisons_and_answers_of_the_server_have_their_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    experiment(at);
    let mut sections = Vec::new();
    ok(&stapo(at, &["report", "exp", "--csv", "csv", "-o", "exp.html"]));
    sections.push(("figures of an experiment".to_string(), drawings(&read(at.join("exp.html")))));
    sections.push(("parts of its page".to_string(), parts(&read(at.join("exp.html")))));
    for table in [
        "arms",
        "benchmarks",
        "claims",
        "most-silenced",
        "paired",
        "parameters",
        "silenced-categories",
        "standings",
        "survival",
        "survival-pairs",
        "spurious",
    ] {
        sections.push((format!("{table}.csv"), read(at.join(format!("csv/{table}.csv")))));
    }
    ok(&stapo(at, &["report", "exp/stapo-0", "-o", "run.html"]));
    sections.push(("figures of a run".to_string(), drawings(&read(at.join("run.html")))));
    sections.push(("parts of its page".to_string(), parts(&read(at.join("run.html")))));
    let shown = ok(&stapo(at, &["inspect", "exp/stapo-0", "--step", "2", "--terminal"]));
    sections.push(("a step in the terminal".to_string(), digest(&shown)));
    let compared = ok(&stapo(at, &["compare", "exp/stapo-0", "exp/justrl-0"]));
    let numbers = compared.lines().filter(|line| line.contains('.') && !line.contains("receipt"));
    sections.push(("compared runs".to_string(), numbers.collect::<Vec<_>>().join("\n")));
    for (out, more) in [("a", &["--model", "exp/stapo-0"]), ("b", &["--model", "exp/justrl-1"])] {
        let eval = "eval --benchmarks arithmetic countdown --limit 8 --samples 4 --max-tokens 60 --out";
        let args: Vec<&str> = eval.split(' ').chain([out]).chain(more.iter().copied()).collect();
        let shown = ok(&stapo(at, &args));
        let numbers = shown.lines().filter(|line| line.contains('.') && !line.contains("receipt"));
        sections.push((format!("evaluation {out}"), numbers.collect::<Vec<_>>().join("\n")));
    }
    let compared = ok(&stapo(at, &["compare", "a", "b"]));
    sections.push(("compared evaluations".to_string(), numbered(&compared)));
    let server = Server::start(at, &[]);
    // The reference pages have the names of metrics and the keys of plans.
    let skipped = "seconds bytes free sha256 receipt time changed version host note title stamp written writer plan keys evaluations";
    let skipped: Vec<&str> = skipped.split(' ').collect();
    for question in [
        "runs",
        "run?run=exp/stapo-0",
        "series?run=exp/stapo-0&run=exp/justrl-1&key=accuracy&key=entropy_mean&from=1&to=2",
        "series?run=exp/stapo-0&key=eval_accuracy&points=2",
        "differences?run=exp/stapo-0&run=exp/justrl-0",
        "responses?run=exp/stapo-0&step=2",
        "tokens?run=exp/stapo-0&step=2",
        "compare?run=exp/stapo-0&run=exp/justrl-0",
        "compare?experiment=exp",
        "compare/curves?experiment=exp&key=accuracy&key=entropy_mean&points=2",
        "evaluations?run=exp/stapo-1",
        "samples?run=exp/stapo-0&verdict=right&most=3",
    ] {
        let mut lines = String::new();
        leaves(&server.json(&format!("/api/{question}")), "", &skipped, &mut lines);
        let lines = if lines.len() > 6000 { digest(&lines) } else { lines };
        sections.push((question.to_string(), lines));
    }
    compare("pages.txt", &sections);
    // As many connections as the server serves at a time; the next one is refused in words.
    let _held: Vec<_> = (0..256).map(|_| server.connect()).collect();
    let mut said = String::new();
    server.connect().read_to_string(&mut said).unwrap();
    assert!(said.starts_with("HTTP/1.1 503 ") && said.contains("too many connections at a time"), "{said}");
}

/// What every step of a run wrote down, without times.
fn recorded(run: &Path) -> String {
    // Which sequences of episodes share a step of the engine depends on when the environment answers.
    let counts = if run.join("episodes").is_dir() { "decoding" } else { "schema" };
    let skipped = ["seconds", "per_second", "memory_bytes", "schema", counts];
    let mut lines = String::new();
    for (idx, step) in parsed_lines(&read(run.join("metrics.jsonl"))).iter().enumerate() {
        leaves(step, &format!("{}", idx + 1), &skipped, &mut lines);
    }
    for part in ["rollouts", "tokens", "explored", "episodes"] {
        let Ok(files) = std::fs::read_dir(run.join(part)) else { continue };
        let mut files: Vec<_> = files.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        for file in files {
            let name = file.file_name().unwrap().display();
            writeln!(lines, "{part}/{name} {}", digest(&read(&file))).unwrap();
        }
    }
    lines
}

#[test]
fn runs_have_their_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let row =
        |n: usize| format!("{{\"prompt\": \"{n}+{n}=\", \"response\": \"get \\\\boxed{{{}}}\"}}\n", 2 * n);
    std::fs::write(at.join("rows.jsonl"), (1..25).map(row).collect::<String>()).unwrap();
    let pair = |n: usize| {
        let (right, wrong) = (2 * n, 2 * n + 10);
        format!(
            "{{\"prompt\": \"{n}+{n}=\", \"chosen\": \"{right}\", \"rejected\": \"{wrong}\", \"margin\": 0.25}}\n"
        )
    };
    std::fs::write(at.join("pairs.jsonl"), (0..24).map(pair).collect::<String>()).unwrap();
    let base = root().join("configs/base.toml").display().to_string();
    let small = "--set steps=3 --set update.batch_rows=8 --set update.schedule.warmup_steps=1 --set data.held_out_share=0.2 \
                 --set evaluation.every_steps=2";
    let few = "--set steps=2 --set rollout.problems_per_step=3 --set rollout.group_size=4 --set evaluation.problems=4 \
               --set update.problems_per_minibatch=3 --set record.responses_every_steps=1";
    let game = "--set task={kind=\"guess\",low=1,high=9,template=\"({{low}}+{{high}})\",held_out_share=0.3,n_held_out=4} \
                --set environment={kind=\"guess\",higher=\"+1=\",lower=\"-1=\",unread=\"=\"} \
                --set episode={max_turns=4,max_turn_tokens=24} --set rollout.max_response_tokens=90";
    let countdown = "--set task={kind=\"countdown\",min_numbers=3,max_numbers=3,max_number=9}";
    let mut sections = Vec::new();
    for (name, line) in [
        (
            "solutions",
            format!(
                "pretrain {base} --set model={{kind=\"builtin\"}} --set steps=2 --set update.batch_tokens=2048 --set evaluation.every_steps=2 --set evaluation.problems=4"
            ),
        ),
        ("sft", format!("sft --data rows.jsonl {small}")),
        (
            "dpo",
            format!(
                "prefer --data pairs.jsonl {small} --set preference.masks=[{{kind=\"spurious\",tau_p=0.1}}]"
            ),
        ),
        ("kto", format!("prefer --data pairs.jsonl {small} --set preference.loss.kind=kto")),
        ("rm", format!("rm --data pairs.jsonl {small} --set reward_model.center_coefficient=0.01")),
        (
            "redraws",
            format!(
                "train {few} --set objective.preset=dapo --set rollout.max_redraws=2 --set rollout.max_response_tokens=40"
            ),
        ),
        ("reference", format!("train {few} {countdown} --set objective.preset=grpo")),
        ("game", format!("train {few} {game} --set update.sum=microbatches --set update.share_prompts=true")),
    ] {
        let args: Vec<&str> = line.split_whitespace().chain(["--out", name]).collect();
        let shown = shown(&stapo(at, &args));
        sections.push((name.to_string(), shown + &recorded(&at.join(name))));
    }
    for task in ["{kind=\"arithmetic\",negative_results=true}", "{kind=\"countdown\"}"] {
        let set = format!("task={task}");
        let problems = ok(&stapo(at, &["problems", "-n", "40", "--json", "--no-model", "--set", &set]));
        sections.push((format!("problems of {task}"), digest(&problems)));
    }
    compare("runs.txt", &sections);
}

/// Configs of an own model with chat template, of the built-in one for letters and for programs, and of other programs.
#[test]
fn configs_that_init_writes_have_their_lines() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    crate::data::set_up(at);
    let line = |n: usize, more: &str| format!("{{\"id\": {n}, \"problem\": \"{n}+1=\", {more}}}\n");
    let letters = |n: usize| line(n % 37, "\"answer\": \"B\"");
    std::fs::write(at.join("my letters.jsonl"), (0..40).map(letters).collect::<String>()).unwrap();
    let tests = |n: usize| {
        let split = if n < 30 { "train" } else { "test" };
        line(n, &format!("\"test_list\": [\"assert {n}\"], \"split\": \"{split}\""))
    };
    std::fs::write(at.join("tests.jsonl"), (0..40).map(tests).collect::<String>()).unwrap();
    let other_names = std::fs::read_to_string(at.join("tests.jsonl")).unwrap().replace("train", "first");
    std::fs::write(at.join("splits.jsonl"), other_names.replace("\"test\"}", "\"second\"}")).unwrap();
    std::fs::write(at.join("trl.yaml"), crate::init_from::TRL).unwrap();
    std::fs::write(at.join("verl.yaml"), crate::init_from::VERL).unwrap();
    std::fs::write(at.join("few.yaml"), "num_generations: 4\nbf16: true\n").unwrap();
    let mut sections = Vec::new();
    for (name, args) in [
        ("own", &["--model", "model", "--data", "rows.jsonl", "--answer-field", "final"][..]),
        ("letters", &["--model", "builtin", "--data", "my letters.jsonl"]),
        ("tests", &["--model", "builtin", "--data", "tests.jsonl"]),
        ("splits", &["--model", "builtin", "--data", "splits.jsonl"]),
        ("trl", &["--from", "trl.yaml"]),
        ("verl", &["--from", "verl.yaml", "--device", "cpu", "--data", "rows.jsonl"]),
        ("few", &["--from", "few.yaml", "--model", "o/m"]),
    ] {
        let out = format!("{name}.toml");
        let said = ok(&stapo(at, &[&["init"], args, &["--out", &out]].concat()));
        // The memory that is available is this machine's.
        let here = |line: &str| {
            line.split_once(" of ").filter(|_| line.starts_with("memory ")).map(|(own, _)| own.to_string())
        };
        let said: Vec<String> = said.lines().map(|line| here(line).unwrap_or(line.to_string())).collect();
        sections.push((format!("{name}, said"), said.join("\n")));
        sections.push((format!("{name}, written"), read(at.join(&out))));
    }
    compare("init.txt", &sections);
}
