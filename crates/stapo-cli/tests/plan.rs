//! `stapo plan` from the outside: without a GPU, weights and data, and measured on the CPU.

use crate::common::{complaint, ok, stapo};
use crate::terminal::on_terminal;
use serde_json::Value;
use std::path::Path;

const PAPER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/qwen3-1.7b.toml");
const PAPER_8B: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/qwen3-8b.toml");
const PAPER_14B: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/qwen3-14b.toml");
const BASE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/base");

fn plan(at: &Path, args: &[&str]) -> Value {
    let plan: Value = serde_json::from_str(&ok(&stapo(at, &[&["plan", "--json"], args].concat()))).unwrap();
    assert_ne!(plan["fits"], false, "a plan that does not fit has status 1");
    plan
}

/// A plan that does not fit, for which the exit status is 1.
fn too_large(at: &Path, args: &[&str]) -> Value {
    let output = stapo(at, &[&["plan", "--json"], args].concat());
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn assumed(plan: &Value, word: &str) -> bool {
    plan["assumed"].as_array().unwrap().iter().any(|text| text.as_str().unwrap().contains(word))
}

#[test]
fn a_run_is_planned_without_gpu_weights_and_data() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let named = plan(at, &[PAPER, "--machine", "h200", "--mean-prompt", "200", "--mean-response", "4000"]);
    assert_eq!(named["parameters"], 1_720_574_976);
    assert_eq!((&named["machine"]["name"], &named["fits"]), (&"h200".into(), &true.into()));
    assert!(assumed(&named, "Qwen3-1.7B-Base, whose files are not here"), "{named:#}");
    assert!(!assumed(&named, "--mean-"), "{named:#}");
    let reused = plan(at, &[PAPER, "--machine", "h200", "--set", "update.reuse={max=2}"]);
    assert!(
        assumed(&reused, "is used 2 times (update.reuse)") && !assumed(&named, "update.reuse"),
        "{reused:#}"
    );
    let used = &named["memory_bytes_used_by"];
    let part = |name: &str| number(&named["memory_bytes"][name]);
    let always = part("weights") + part("optimizer") + part("libraries");
    assert_eq!(number(&used["checkpoint"]), always);
    assert_eq!(number(&used["sampling"]), always + part("keys, values") + part("logits"));
    assert_eq!(number(&used["update"]), always + part("gradients") + part("activations") + part("logits"));
    let time = &named["time"];
    assert_eq!(time["is_measured"], false);
    let phases = time["phases"].as_object().unwrap();
    let sum: f64 = phases.values().map(number).sum();
    assert!((sum / number(&time["seconds_per_step"]) - 1.0).abs() < 1e-9);
    let first = number(&time["first_step_seconds"]);
    assert!((number(&time["seconds"]) - 750.0 * sum - first).abs() < 1e-6 * sum);
    // 2,048 responses of 4,000 tokens and their prompts, by a program that trains at most 50,000 tokens/s.
    assert!(number(&phases["update"]) > 2048.0 * 4200.0 / 50_000.0);
    assert_eq!(std::fs::read_dir(at).unwrap().count(), 0, "nothing is written");

    let other = too_large(at, &[PAPER, "--machine", "h200", "--model", "Qwen/Qwen3-8B-Base"]);
    assert_eq!(other["parameters"], 8_190_735_360_u64);
    assert!(assumed(&other, "a quarter") && assumed(&other, "a third"), "{other:#}");
    let slower = plan(at, &[PAPER, "--machine", "a100", "--mean-prompt", "200", "--mean-response", "4000"]);
    assert!(number(&slower["time"]["seconds"]) > 2.0 * number(&time["seconds"]));
    assert_eq!(slower["machine"]["products_operations"]["origin"], "published");
    assert_eq!(named["machine"]["products_operations"]["origin"], "measured");
}

#[test]
fn a_run_that_does_not_fit_says_what_to_change() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let base = [&[PAPER_8B, "--machine", "h100"][..], &FEW].concat();
    let refused = too_large(at, &base);
    assert_eq!(refused["fits"], false);
    let settings = refused["remedy"]["set"].as_array().unwrap();
    assert!(!settings.is_empty());
    let sets: Vec<&str> = settings.iter().flat_map(|text| ["--set", text.as_str().unwrap()]).collect();
    let fitting = plan(at, &[&base[..], &sets].concat());
    assert_eq!((&fitting["fits"], &fitting["remedy"]), (&true.into(), &Value::Null));
    assert_eq!(fitting["memory_bytes_total"], refused["remedy"]["memory_bytes_total"]);
    let larger = [&[PAPER_8B, "--machine", "rtx4090", "--model", "qwen3-32b"][..], &FEW].concat();
    let hopeless = too_large(at, &larger);
    assert_eq!((&hopeless["fits"], &hopeless["remedy"]), (&false.into(), &Value::Null));
    let output = stapo(at, &[&["plan"], &base[..]].concat());
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("does not fit; with --set "), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

/// The paper's lengths: log-normal with a mean of 4,000 before the cut at 15,360, 0.8 in the logarithm.
const LENGTHS: [&str; 4] =
    ["--set", "rollout.lengths={ mean = 4000.0, sigma = 0.8 }", "--mean-prompt", "200"];

/// Fewer responses than the paper has: all of them are simulated.
const FEW: [&str; 6] = [
    "--set",
    "rollout.problems_per_step=32",
    "--set",
    "update.problems_per_minibatch=32",
    "--set",
    "evaluation.problems=8",
];

#[test]
fn the_papers_recipes_are_planned_over_several_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for config in [PAPER, PAPER_8B, PAPER_14B] {
        let base = [&[config, "--machine", "h200"], &LENGTHS[..], &FEW].concat();
        let on = |args: &[&str]| plan(at, &[&base, args].concat());
        let [one, eight] = [on(&[]), on(&["--gpus", "8"])];
        assert_eq!((&one["ranks"], &one["time"]["phases"]["exchange"]), (&Value::Null, &0.0.into()));
        // The mean of min(X, 15,360).
        assert!((number(&eight["lengths"]["response_tokens_mean"]) - 3887.1).abs() < 0.1);
        let part = |plan: &Value, name: &str| number(&plan["memory_bytes"][name]);
        // Every rank has the bf16 weights, and the f32 masters (1.7B has f32 states) that it owns.
        let masters = if config == PAPER { 7.0 / 8.0 * 4.0 / 6.0 } else { 0.0 };
        assert!((part(&eight, "weights") / part(&one, "weights") - (1.0 - masters)).abs() < 1e-6);
        // A gradient exists as two layers, the vocabulary and the sums that a rank owns.
        assert!(part(&eight, "gradients") < 0.45 * part(&one, "gradients"));
        assert_eq!(part(&eight, "optimizer"), (part(&one, "optimizer") / 8.0).ceil());
        let ranks = &eight["ranks"];
        assert_eq!((&ranks["ranks"], &ranks["machines"]), (&8.into(), &1.into()));
        assert_eq!(ranks["one_gpu"]["seconds_per_step"], one["time"]["seconds_per_step"]);
        let per_step = number(&eight["time"]["seconds_per_step"]);
        let efficiency = number(&one["time"]["seconds_per_step"]) / per_step / 8.0;
        assert!((number(&ranks["efficiency"]) / efficiency - 1.0).abs() < 1e-9);
        assert!((0.3..1.6).contains(&efficiency), "{config}: {efficiency}");
        let exchange = &ranks["exchange_seconds"];
        let parts = ["exposed", "weights", "responses"].map(|name| number(&exchange[name]));
        assert!(
            (parts.iter().sum::<f64>() / number(&eight["time"]["phases"]["exchange"]) - 1.0).abs() < 1e-9
        );
        assert!(parts[0] < number(&exchange["gradients"]) + number(&exchange["fold"]));
    }
    // What a link and a second machine change, with one of the models.
    let on = |args: &[&str]| {
        plan(at, &[&[PAPER, "--machine", "h200", "--gpus", "8"], &LENGTHS[..], &FEW, args].concat())
    };
    let [slow, fast] = ["50", "400"].map(|link| on(&["--link", link]));
    let gradients = |plan: &Value| number(&plan["ranks"]["exchange_seconds"]["gradients"]);
    assert!(gradients(&slow) > 6.0 * gradients(&fast));
    assert_eq!(slow["time"]["phases"]["rollout"], fast["time"]["phases"]["rollout"]);
    // Two machines exchange through the network.
    let two = on(&["--nodes", "2"]);
    assert!(gradients(&two) > 3.0 * gradients(&fast));
    assert_eq!(two["ranks"]["machines"], 2);
    let args = ["plan", PAPER, "--machine", "h200", "--gpus", "16", "--nodes", "2"];
    let text = ok(&stapo(at, &[&args[..], &FEW].concat()));
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["ranks 16 in 2 machines", "exchange ", "an efficiency of", "published"] {
        assert!(words.contains(part), "{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn a_path_wins_over_a_known_name_and_a_config_alone_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::create_dir(at.join("qwen3-8b")).unwrap();
    std::fs::copy(Path::new(BASE).join("config.json"), at.join("qwen3-8b/config.json")).unwrap();
    let small = plan(at, &["--model", "qwen3-8b", "--machine", "cpu"]);
    let file = plan(at, &["--model", "qwen3-8b/config.json", "--machine", "cpu"]);
    let builtin = plan(at, &["--model", "builtin", "--machine", "cpu"]);
    assert_eq!(small["parameters"], builtin["parameters"]);
    assert_eq!(small["memory_bytes"], file["memory_bytes"]);
    // Without --model the plan's own model counts; a folder without weights cannot be measured.
    let unweighed = plan(at, &["--set", "model.kind=path", "--set", "model.path=qwen3-8b"]);
    assert!(assumed(&unweighed, "the weights of qwen3-8b are not here"), "{unweighed:#}");
}

/// Without a GPU and without --machine the rates of a machine are assumed, and its memory with them.
#[test]
fn the_machine_that_is_assumed_has_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let [assumed_here, named] = [&["--no-measure"][..], &["--machine", "h200"]]
        .map(|args| plan(at, &[&[PAPER, "--set", "device=cuda:63"], args].concat()));
    assert_eq!(assumed_here["memory_bytes"], named["memory_bytes"]);
    assert!(assumed(&assumed_here, "rates and memory of h200"), "{assumed_here:#}");
}

#[test]
fn mistakes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for (args, words) in [
        (&["--model", "qwen9-1b"][..], &["qwen9-1b", "qwen3-1.7b", "qwen2.5-7b"][..]),
        (&["--machine", "h300"], &["h300", "h200", "rtx4090", "cpu"]),
        (&["--mean-response", "97"], &["--mean-response 97", "rollout.max_response_tokens, 96"]),
        (&["--machine", "h200", "--gpus", "2", "--nodes", "3"], &["--nodes 3", "--gpus"]),
        (
            &["--model", "gemma-3-4b", "--machine", "a100"],
            &["machine a100", "heads of at most 128, not 256", "--device cpu"],
        ),
        (&["--gpus", "8"], &["--gpus 8", "a CPU", "--machine h200"]),
        (&["--gpus", "0"], &["--gpus", "at least 1"]),
        (&["--mean-prompt", "0"], &["--mean-prompt", "at least 1"]),
        (&["--machine", "cpu", "--set", "update.states=8bit"], &["update.states"]),
    ] {
        let said = complaint(at, &[&["plan"], args].concat());
        for word in words {
            assert!(said.contains(word), "{args:?}: {said:?} does not say {word:?}");
        }
    }
}

/// A run that needs more main memory than there is, is refused before anything is loaded or written.
#[test]
fn a_run_that_does_not_fit_main_memory_is_refused_before_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let set = ["--set", "model={kind=\"random\", shape=\"qwen3-32b\"}"];
    let planned = too_large(at, &set);
    assert!(assumed(&planned, "not measured: the run does not fit"), "{planned:#}");
    assert!(number(&planned["memory_bytes_total"]) > number(&planned["memory_bytes_here"]));
    let said = complaint(at, &[&["train", "--out", "run"], &set[..]].concat());
    assert!(said.contains("cpu") && said.contains("MiB are free"), "{said}");
    assert!(!at.join("run").exists(), "a refused run leaves nothing behind");
    // The most that one micro-batch can have counts, not the limit that the config allows.
    let roomy = plan(at, &["--no-measure", "--set", "update.microbatch_tokens=67108864"]);
    assert_eq!(roomy["fits"], true);
}

/// The simulated plan is there at once, and a signal while steps are measured keeps it.
#[cfg(unix)]
#[test]
fn a_signal_while_measuring_keeps_the_simulated_plan() {
    let folder = tempfile::tempdir().unwrap();
    for json in [false, true] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_stapo"));
        command.current_dir(folder.path()).args(["plan", "--set", "rollout.group_size=64"]);
        command.args(json.then_some("--json"));
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stderr = std::io::BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        std::io::BufRead::read_line(&mut stderr, &mut line).unwrap();
        assert!(line.starts_with("measuring: "), "{line}");
        let pid = child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(143), "{said}");
        if json {
            let plan: Value = serde_json::from_str(&said).unwrap();
            assert!(plan["time"]["is_measured"] == false && assumed(&plan, "measured next"), "{plan:#}");
        } else {
            assert!(said.contains("memory") && said.contains("measured next"), "{said}");
            assert!(said.contains(" are free here") && !said.contains("does not fit"), "{said}");
        }
    }
}

/// The measured step corrects the simulation, and its lengths take the place of assumed ones.
#[cfg(unix)]
#[test]
fn the_built_in_run_is_measured_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let small = [
        "--set",
        "rollout.problems_per_step=2",
        "--set",
        "update.problems_per_minibatch=2",
        "--set",
        "steps=3",
    ];
    let measured = plan(at, &small);
    let step = &measured["measured"];
    assert_eq!((&measured["time"]["is_measured"], &step["problems"]), (&true.into(), &2.into()));
    let mean = &measured["lengths"]["response_tokens_mean"];
    assert_eq!(mean, &step["response_tokens_mean"]);
    assert!(number(mean) > 10.0 && number(mean) < 96.0);
    assert!(!assumed(&measured, "a third"));
    // The measured step has the size of the run's steps, so the run's phases are the measured ones.
    let phases = &measured["time"]["phases"];
    let rolled = number(&phases["rollout"]) + number(&phases["grade"]);
    assert!((rolled / number(&step["rollout_seconds"]) - 1.0).abs() < 1e-6, "{measured:#}");
    let learned = number(&phases["update"]) + number(&phases["calibrate"]);
    assert!((learned / number(&step["update_seconds"]) - 1.0).abs() < 1e-6, "{measured:#}");
    // On a terminal the plan is shown first, then a clock, then the measured times.
    let (status, text) = on_terminal(at, &[&["plan", "--mean-response", "60"], &small[..]].concat(), "");
    assert!(status.success(), "{text}");
    let place = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
    let order = [
        "measured next\n",
        "measuring: loading the model; ",
        "measuring: a step of 2 problems with ",
        "\nmeasured ",
    ];
    assert!(order.map(place).is_sorted(), "{text}");
    assert_eq!(text.matches("responses of 60 tokens on average").count(), 2, "{text}");
    assert!(text.contains("a warm step of 2 problems with responses to 96 tokens: rollout "), "{text}");
}

#[test]
fn a_quantised_base_is_counted_by_its_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let planned = |set: &[&str]| {
        let args = ["--machine", "h200", "--model", "Qwen/Qwen3-32B", "--set", "model.lora.rank=32"];
        let set = set.iter().flat_map(|set| ["--set", set]);
        plan(folder.path(), &[PAPER].into_iter().chain(args).chain(set).collect::<Vec<_>>())
    };
    let (plain, quantised) = (planned(&[]), planned(&["model.lora.base=quantised"]));
    let bytes = |plan: &Value, part: &str| number(&plan["memory_bytes"][part]);
    // Layers of 31.2e9 weights in Q4_K, 4.5 bits each; embedding and head in bf16.
    let weights = 31_205_621_760.0 * 4.5 / 8.0 + 2.0 * (32_762_123_264.0 - 31_205_621_760.0);
    assert!((bytes(&quantised, "weights") / weights - 1.0).abs() < 0.01, "{quantised:#}");
    assert!((bytes(&plain, "weights") / 65.5e9 - 1.0).abs() < 0.01, "{plain:#}");
    // Gate and up of one layer, with what adapters add.
    let layer = 2.0 * f64::from((2 * 25600 + 64) * (5120 + 64));
    assert_eq!(bytes(&quantised, "unpacked"), layer);
    assert!(assumed(&quantised, "Q4_K") && !assumed(&plain, "Q4_K"), "{quantised:#}");
    let rollout = |plan: &Value| number(&plan["time"]["phases"]["rollout"]);
    assert!(rollout(&quantised) > rollout(&plain));
    let on_cpu = ["plan", PAPER, "--set", "model.lora.base=quantised", "--set", "device=cpu"];
    assert!(complaint(folder.path(), &on_cpu).contains("model.lora.base"));
}

#[test]
fn a_base_stays_quantised_on_a_gpu_only() {
    let folder = tempfile::tempdir().unwrap();
    for command in [&["generate", "--prompt", "1"][..], &["eval", "--limit", "1"]] {
        let args = [command, &["--model", "builtin", "--base", "quantised"]].concat();
        let message = complaint(folder.path(), &args);
        assert!(message.contains("--base quantised") && message.contains("--device cuda"), "{message}");
        let args = [command, &["--model", "builtin", "--base", "int4"]].concat();
        let message = complaint(folder.path(), &args);
        assert!(message.contains("expected bf16 or quantised"), "{message}");
    }
}

#[test]
fn episodes_are_planned_with_given_tokens_and_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let tools = r#"environment={ kind = "tools", tools = [{ kind = "command", name = "a", description = "b", program = "c", workers = 8 }] }"#;
    let base = [PAPER, "--machine", "h200", "--mean-prompt", "200", "--mean-response", "4000"];
    let alone = plan(at, &base);
    assert_eq!((&alone["episodes"], &alone["time"]["phases"]["environment"]), (&Value::Null, &0.0.into()));
    let with = |more: &[&str]| plan(at, &[&base[..], &["--set", tools], more].concat());
    let assumed_all = with(&[]);
    let episodes = &assumed_all["episodes"];
    // Half of 4 turns, 1.5 observations of half of 256 tokens, and a tenth of 30 seconds.
    assert_eq!((number(&episodes["turns_mean"]), number(&episodes["given_tokens_mean"])), (2.5, 192.0));
    assert_eq!((number(&episodes["answer_seconds_mean"]), number(&episodes["answers_at_once"])), (3.0, 8.0));
    assert!(
        ["--mean-turns", "--mean-observation", "--mean-answer"]
            .iter()
            .all(|option| assumed(&assumed_all, option))
    );
    let given = with(&["--mean-turns", "3", "--mean-observation", "200", "--mean-answer", "10"]);
    assert_eq!(number(&given["episodes"]["given_tokens_mean"]), 400.0);
    assert!(!assumed(&given, "--mean-"), "{given:#}");
    let phases = |plan: &Value, name: &str| number(&plan["time"]["phases"][name]);
    assert!(phases(&given, "environment") < phases(&assumed_all, "environment"));
    assert!(phases(&given, "environment") >= 0.03 && phases(&given, "rollout") < phases(&alone, "rollout"));
    let text = ok(&stapo(at, &[&["plan"], &base[..], &["--set", tools, "--mean-answer", "10"]].concat()));
    assert!(text.contains("of which 192 tokens are given between 2.5 turns; answers take 10.0 ms"), "{text}");
    let said = complaint(at, &["plan", PAPER, "--machine", "h200", "--mean-turns", "2"]);
    assert!(said.contains("--mean-turns") && said.contains("no environment"), "{said}");
}

#[test]
fn supervised_runs_are_planned_and_say_their_plan() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let row = r#"{"prompt": "1+1=", "chosen": "2 and that is right", "rejected": "3 and that is wrong"}"#;
    std::fs::write(at.join("pairs.jsonl"), format!("{row}\n").repeat(40)).unwrap();
    let config = |table: &str| {
        let text = format!(
            "model = {{ kind = \"path\", path = \"Qwen/Qwen3-1.7B-Base\" }}\ndevice = \"cuda\"\n{table}\n[data]\nkind = \"file\"\npath = \"pairs.jsonl\"\nheld_out_share = 0.1\n"
        );
        std::fs::write(at.join("config.toml"), text).unwrap();
    };
    config("[preference]\nloss = { kind = \"dpo\" }\n[update]\nbatch_rows = 8");
    let args = ["config.toml", "--machine", "h200"];
    let prefer = plan(at, &args);
    assert_eq!((&prefer["command"], &prefer["steps"]), (&"prefer".into(), &5.into()));
    assert_eq!((&prefer["rows"], &prefer["rows_held_out"]), (&36.into(), &4.into()));
    assert!(number(&prefer["time"]["seconds_before"]) > 0.0 && assumed(&prefer, "--mean-row"));
    let parts: f64 = prefer["memory_bytes"].as_object().unwrap().values().map(number).sum();
    assert_eq!(number(&prefer["memory_bytes_total"]), parts);
    assert!(assumed(&prefer, "by its name"), "{prefer:#}");
    let longer = plan(at, &[&args[..], &["--mean-row", "2000", "--model", "qwen3-1.7b"]].concat());
    assert_eq!(number(&longer["step_tokens_mean"]), 16_000.0);
    assert!(!assumed(&longer, "by its name") && !assumed(&longer, "--mean-row"), "{longer:#}");
    assert!(number(&longer["time"]["seconds"]) > number(&prefer["time"]["seconds"]));
    config("[reward_model]\n[update]\nbatch_rows = 8");
    let ranked = plan(at, &args);
    assert_eq!(ranked["command"], "rm");
    assert!(ranked["memory_bytes"].get("logits").is_none());
    let text = ok(&stapo(at, &["plan", "config.toml", "--machine", "h200"]));
    assert!(text.contains("stapo rm") && text.contains("36 rows of "), "{text}");
    std::fs::remove_file(at.join("pairs.jsonl")).unwrap();
    let said = complaint(at, &["plan", "config.toml", "--machine", "h200"]);
    assert!(said.contains("pairs.jsonl") && said.contains("--set steps=N"), "{said}");
    assert_eq!(plan(at, &[&args[..], &["--set", "steps=7"]].concat())["steps"], 7);
    let text = ok(&stapo(at, &["plan", "config.toml", "--machine", "h200", "--set", "steps=7"]));
    assert!(!text.contains("\ndata ") && text.contains("rows of 512 tokens"), "{text}");
}
