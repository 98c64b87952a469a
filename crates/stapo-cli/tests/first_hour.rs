//! One name for a model in every command, and shipped configs by name.

use crate::common::{complaint, copy_folder, ok, stapo};
use std::path::Path;
use std::process::{Command, Output};

/// A tiny run of three steps with a checkpoint of each.
const SMALL: [&str; 18] = [
    "--set",
    "steps=3",
    "--set",
    "rollout.problems_per_step=2",
    "--set",
    "rollout.group_size=2",
    "--set",
    "update.problems_per_minibatch=2",
    "--set",
    "evaluation.problems=2",
    "--set",
    "evaluation.every_steps=0",
    "--set",
    "record.checkpoint_every_steps=1",
    "--set",
    "record.keep_checkpoints=9",
    "--set",
    "update.learning_rate=0.01",
];

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn train(at: &Path, args: &[&str]) {
    let output = stapo(at, &[&["train", "--quiet"], &SMALL[..], args].concat());
    let said = ok(&output);
    assert!(said.starts_with("done: ") && said.lines().count() == 1, "a quiet run says how it ended: {said}");
    assert_eq!(output.stderr, b"", "and nothing else");
}

/// The scores of one response under a model, as JSON.
fn scores(at: &Path, model: &str) -> String {
    ok(&hub(at, &["score", "--model", model, "--input", "responses.jsonl"]))
}

/// A call with a cache of the hub of its own, and a hub that nobody answers for.
fn hub(at: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(at).args(args).env("HF_HUB_CACHE", at.join("cache")).env("HF_HOME", at);
    command.env("HF_ENDPOINT", "http://127.0.0.1:9").env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.output().unwrap()
}

fn refused(at: &Path, args: &[&str]) -> String {
    let output = hub(at, args);
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The line of `plan.toml` that names the model.
fn planned_model(run: &Path) -> String {
    let plan: toml::Table = std::fs::read_to_string(run.join("plan.toml")).unwrap().parse().unwrap();
    plan["model"]["path"].as_str().unwrap().to_string()
}

#[test]
fn one_name_for_a_model_in_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::write(at.join("responses.jsonl"), r#"{"prompt": "1+1=", "response": "2"}"#).unwrap();
    train(at, &["--out", "a"]);
    // A run is its newest checkpoint, RUN@STEP that of a step, and the folder of a checkpoint names itself.
    let newest = scores(at, "a");
    assert_eq!(newest, scores(at, "a@3"));
    let first = scores(at, "a@1");
    assert_ne!(newest, first);
    assert_eq!(first, scores(at, "a/checkpoints/step-000001"));
    assert_eq!(scores(at, "a@0"), scores(at, "builtin"));
    // What is exported is the same model, as a folder and as a model that was fetched.
    for (args, out) in [(["a@1"].as_slice(), "by-name"), (&["a", "--step", "1"], "by-flag")] {
        let said = ok(&stapo(at, &[&["export"], args, &["--out", out, "--f32"]].concat()));
        assert!(said.starts_with(&format!("{out}: step 1, ")), "{said}");
        assert_eq!(first, scores(at, out));
    }
    let said = complaint(at, &["model", "convert", "a", "converted"]);
    assert!(said.contains("model a: is a run's checkpoint\nhint: stapo export a --out converted"), "{said}");
    // A model that was exported into the run's folder does not stand in for the run.
    ok(&stapo(at, &["export", "a@1", "--out", "a/model"]));
    assert_eq!(newest, scores(at, "a"));
    ok(&stapo(at, &["export", "builtin", "--to", "builtin-folder", "--f32"]));
    assert_eq!(scores(at, "builtin"), scores(at, "builtin-folder"));
    let cached = at.join("cache/models--me--tiny");
    copy_folder(&at.join("by-name"), &cached.join("snapshots").join(COMMIT));
    std::fs::create_dir_all(cached.join("refs")).unwrap();
    std::fs::write(cached.join("refs/main"), COMMIT).unwrap();
    assert_eq!(first, scores(at, "me/tiny"));
    assert_eq!(first, scores(at, &format!("me/tiny@{COMMIT}")));
    // A folder that exists comes before a name on the hub.
    copy_folder(&at.join("builtin-folder"), &at.join("me/tiny"));
    assert_eq!(scores(at, "builtin"), scores(at, "me/tiny"));
    std::fs::remove_dir_all(at.join("me")).unwrap();
    for model in ["a", "a@1", "builtin", "by-name", "me/tiny"] {
        let info = ok(&hub(at, &["model", "info", model, "--json"]));
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        let step = match model {
            "a" => Some(3),
            "a@1" => Some(1),
            _ => None,
        };
        assert_eq!((info["family"].as_str(), info["step"].as_u64()), (Some("qwen3"), step), "{model}");
        let prompt = ["generate", "--model", model, "--prompt", "1+1=", "--max-tokens", "2"];
        ok(&hub(at, &prompt));
        ok(&hub(at, &["plan", "--no-measure", "--set", &format!("model={model}")]));
    }
    ok(&hub(
        at,
        &["eval", "--model", "a", "--samples", "1", "--limit", "1", "--max-tokens", "4", "--out", "e"],
    ));
    let eval: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(at.join("e/eval.json")).unwrap()).unwrap();
    assert_eq!(eval["model"], "a@3");

    // A run that starts from another says which checkpoint it was, and goes on from there.
    train(at, &["--out", "b", "--model", "a"]);
    assert_eq!(planned_model(&at.join("b")), "a@3");
    ok(&stapo(at, &["train", "--resume", "b", "--set", "steps=4"]));
    let out = ["--out", "c", "--set", "steps=1"];
    ok(&hub(at, &[&["train"], &SMALL[..], &out, &["--set", "model.path=me/tiny"]].concat()));
    assert_eq!(planned_model(&at.join("c")), format!("me/tiny@{COMMIT}"));
    assert_eq!(scores(at, "c@0"), first);
    std::fs::remove_dir_all(at.join("a/checkpoints/step-000003")).unwrap();
    let said = complaint(at, &["train", "--resume", "b", "--set", "steps=5"]);
    assert!(said.contains("run folder a: no checkpoint of step 3, only of 0, 1, 2"), "{said}");
    // The checkpoints of `b` need the tokenizer of the model it started from, not that model's weights.
    scores(at, "b@4");
}

#[test]
fn a_name_that_leads_nowhere_says_what_would() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::write(at.join("responses.jsonl"), "{}").unwrap();
    std::fs::create_dir_all(at.join("run/checkpoints")).unwrap();
    std::fs::write(at.join("run/plan.toml"), "[model]\npath = \"run\"").unwrap();
    let cases = [
        ("me/tiny", "hint: stapo fetch model me/tiny gets it"),
        ("me/tiny@v2", "hint: stapo fetch model me/tiny --revision v2 gets it"),
        ("nothing", "model nothing: no such file or folder\nhint: a model is a Hugging Face folder"),
        ("run", "run folder run: no checkpoint"),
        ("run@x", "model run@x: \"x\" is no step"),
        ("run@7", "run folder run: no checkpoint of step 7"),
        ("../a/b", "model ../a/b: no such file or folder"),
    ];
    for (model, expected) in cases {
        for args in [
            &["score", "--model", model, "--input", "responses.jsonl"] as &[&str],
            &["generate", "--model", model, "--prompt", "1"],
            &["eval", "--model", model, "--out", "e"],
            &["model", "info", model],
            &["export", model, "--out", "x"],
            &["train", "--model", model, "--out", "r"],
        ] {
            let said = refused(at, args);
            assert!(said.contains(expected), "{args:?}: {said}");
        }
    }
    assert!(!at.join("e").exists() && !at.join("x").exists() && !at.join("r").exists());
    assert!(refused(at, &["model", "info", "me/tiny", "--fetch"]).contains("cannot be reached"));
}

#[test]
fn a_run_that_leads_back_to_itself_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    train(at, &["--out", "a", "--set", "steps=1"]);
    let plan = std::fs::read_to_string(at.join("a/plan.toml")).unwrap();
    let plan = plan.replace("kind = \"builtin\"", "kind = \"path\"\npath = \"a\"");
    std::fs::write(at.join("a/plan.toml"), plan).unwrap();
    let said = complaint(at, &["model", "info", "a"]);
    assert!(said.contains("more than 64 runs, each trained from the one before"), "{said}");
}

#[test]
fn shipped_configs_are_found_by_name_from_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let problems = |config: &str| ok(&stapo(at, &["problems", config, "-n", "1"]));
    assert_eq!(problems("grpo"), problems("stapo"));
    let plan = ok(&stapo(at, &["plan", "grpo", "--no-measure", "--set", "steps=7"]));
    assert!(plan.contains("grpo: grpo on arithmetic") && plan.contains("7 of 32 problems"), "{plan}");
    let listed = ok(&stapo(at, &["train", "--list"]));
    for name in ["stapo", "grpo", "justrl", "entropy20", "dapo", "qwen3-1.7b", "qwen3-8b", "qwen3-14b"] {
        assert!(listed.lines().any(|line| line.starts_with(&format!("{name} "))), "{name}: {listed}");
    }
    assert!(listed.lines().all(|line| line.chars().count() <= 80), "{listed}");
    let said = complaint(at, &["train", "grpp"]);
    assert!(said.contains("config grpp: no such file") && said.contains("did you mean `grpo`?"), "{said}");
    assert!(complaint(at, &["train", "my.toml"]).contains("hint: known: stapo, grpo, "));
    let said = complaint(at, &["experiment", "main-quik"]);
    assert!(said.contains("did you mean `main-quick`?"), "{said}");
    // A file of that name comes first, and only where the name is given.
    std::fs::write(at.join("stapo"), "no config").unwrap();
    assert!(ok(&stapo(at, &["plan", "--no-measure"])).contains("stapo: stapo on arithmetic"));
    std::fs::write(at.join("grpo"), "name = \"mine\"").unwrap();
    let plan = ok(&stapo(at, &["plan", "grpo", "--no-measure"]));
    assert!(plan.contains("mine: stapo on arithmetic"), "{plan}");
}

/// The source files of the crates, tests left out.
fn sources() -> String {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let names = ["stapo-core", "stapo-ops", "stapo-model", "stapo-rl", "stapo-cli"];
    let mut folders: Vec<std::path::PathBuf> = names.map(|name| crates.join(name).join("src")).into();
    let mut text = String::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.to_string_lossy().contains("test")
            {
                text.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    text
}

/// Messages of the operating system, which stand in no source file.
const OF_THE_SYSTEM: [&str; 2] = ["No space left on device", "File too large"];

#[test]
fn the_messages_that_troubleshooting_quotes_are_the_programs() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/troubleshooting.md");
    let page = std::fs::read_to_string(page).unwrap();
    let sources = sources();
    let cells = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let quoted: Vec<&str> = cells.map(|(quoted, _)| quoted).collect();
    assert!(quoted.len() > 30, "{quoted:?}");
    for message in quoted.iter().filter(|message| !OF_THE_SYSTEM.contains(message)) {
        assert!(
            sources.contains(*message),
            "docs/troubleshooting.md quotes {message:?}, which no command says"
        );
    }
}

#[test]
fn an_error_in_a_config_names_its_place_in_plain_words() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let cases: [(&str, &[&str], &str); 9] = [
        (
            "steps = 3\n[rollout]\n  group_size = \"x\"",
            &[],
            "error: my.toml:3:3: config.rollout.group_size: must be a whole number without a sign, not \"x\"\n",
        ),
        (
            "\nlearning_rate = 1",
            &[],
            "error: my.toml:2:1: config.learning_rate: unknown key `learning_rate`\nhint: did you mean `update.learning_rate`?\n",
        ),
        (
            "[rollout]\ngroup_size = 1",
            &[],
            "error: my.toml:2:1: config.rollout.group_size: 1, expected at least 2",
        ),
        ("model = 3", &[], "error: my.toml:1:1: config.model: must be a table, not 3\n"),
        ("[objective]\npreset = \"stpo\"", &[], "error: my.toml:2:1: objective: unknown preset `stpo`\n"),
        (
            "[task]\nkind = \"arithmetic\"\npath = \"x\"",
            &[],
            "error: my.toml:3:1: task.path: unknown key `path`\nhint: known: ",
        ),
        ("x = = 1", &[], "error: my.toml: line 1, column 5: not TOML: "),
        (
            "",
            &["steps=many"],
            "error: --set steps=many: config.steps: must be a whole number without a sign, not \"many\"\n",
        ),
        (
            "",
            &["rolout.group_size=3"],
            "error: --set rolout.group_size=3: config.rolout: unknown key `rolout`\nhint: did you mean `rollout`?\n",
        ),
    ];
    for (text, set, expected) in cases {
        std::fs::write(at.join("my.toml"), text).unwrap();
        let set = set.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = ["plan", "my.toml", "--no-measure"].into_iter().chain(set).collect();
        let said = complaint(at, &args);
        assert!(said.starts_with(expected), "{text}: {said}");
        let rust = ["usize", "u64", "f64", "struct ", "enum", "invalid type", "expected one of"];
        assert!(!rust.iter().any(|word| said.contains(word)), "{said}");
    }
    // Supervised training places its errors too.
    std::fs::write(at.join("my.toml"), "steps = 3\n[update]\nlearning_rte = 1").unwrap();
    let said = complaint(at, &["pretrain", "my.toml"]);
    assert!(said.starts_with("error: my.toml:3:1: ") && said.contains("`learning_rate`"), "{said}");
    let both = "[update]\nschedule = { kind = \"constant\", warmup_steps = 1, warmup_share = 0.5 }";
    std::fs::write(at.join("my.toml"), both).unwrap();
    let said = complaint(at, &["pretrain", "my.toml"]);
    assert!(said.contains("warmup_share: 0.5 is given together with warmup_steps"), "{said}");
}

#[test]
fn what_a_newcomer_tries_is_answered() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    train(at, &["--out", "run", "--set", "steps=1"]);
    std::fs::create_dir(at.join("other")).unwrap();
    let said = complaint(at, &["compare", "run", "other"]);
    assert!(
        said.contains("run: holds no evaluation") && said.contains("stapo eval --model run --out"),
        "{said}"
    );
    std::fs::remove_dir(at.join("other")).unwrap();
    let said = complaint(at, &["generate", "--model", "builtin", "--prompt", "2 é\n= é"]);
    assert!(said.contains("has no token for 'é', '\\n'\nhint: "), "{said}");
    let runs: serde_json::Value = serde_json::from_str(&ok(&stapo(at, &["runs", ".", "--json"]))).unwrap();
    assert_eq!(
        (&runs[0]["run"], &runs[0]["step"], &runs[0]["status"]),
        (&"run".into(), &1.into(), &"done".into())
    );
    assert!(complaint(at, &["runs"]).contains("hint: stapo train makes runs"));
    let version: serde_json::Value = serde_json::from_str(&ok(&stapo(at, &["version", "--json"]))).unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    assert!(version["target"].as_str().unwrap().contains('-') && version["profile"].is_string());
    let shown = ok(&stapo(at, &["version"]));
    let build = format!("\nbuild    {}, ", version["profile"].as_str().unwrap());
    assert!(
        shown.starts_with("stapo    ") && shown.contains(&build) && shown.contains("\ngpu      "),
        "{shown}"
    );
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = ok(&stapo(at, &["completions", shell]));
        assert!(script.contains("without-checkpoints") && script.contains("resume"), "{shell}");
    }
    assert!(ok(&stapo(at, &["man"])).contains(".TH stapo 1"));
    ok(&stapo(at, &["man", "--out", "man"]));
    let page = std::fs::read_to_string(at.join("man/stapo-model-info.1")).unwrap();
    assert!(page.contains("hub such as Qwen"), "{page}");
    assert!(at.join("man/stapo-train.1").is_file() && at.join("man/stapo.1").is_file());
    let eval = |names: &[&str], out: &str| {
        let more = ["--samples", "1", "--limit", "1", "--max-tokens", "2", "--out", out];
        ok(&stapo(at, &[&["eval", "--quiet", "--benchmarks"], names, &more].concat()))
    };
    for (names, out) in [
        (["arithmetic,countdown"].as_slice(), "commas"),
        (&["arithmetic", "countdown"], "blanks"),
        (&["arithmetic, countdown"], "both"),
        (&["arithmetic", "--benchmarks", "countdown"], "twice"),
    ] {
        let table = eval(names, out);
        assert!(table.contains("arithmetic") && table.contains("countdown"), "{names:?}: {table}");
    }
}

#[test]
fn colors_follow_the_environment_and_quiet_leaves_errors() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let said = |variables: &[(&str, &str)], args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
        command.current_dir(at).args(args).env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
        let output = command.envs(variables.iter().copied()).output().unwrap();
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let wrong = ["model", "info", "nothing"];
    assert!(said(&[], &wrong).starts_with("error: model nothing"));
    assert!(said(&[("CLICOLOR_FORCE", "1")], &wrong).starts_with("\x1b[1;31merror:\x1b[0m model nothing"));
    assert!(said(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")], &wrong).starts_with("error: "));
    assert!(said(&[], &["-q", "model", "info", "nothing"]).starts_with("error: model nothing"));
}
