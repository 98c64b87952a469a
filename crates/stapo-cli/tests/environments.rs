//! Environments of the user's and tools in whole runs: the same bits as the built-in game under delays, other workers, kills
//! and several ranks, replays from records, and programs that fail. The tests need `python3` and say so where there is
//! none.

use crate::common::{folder_below_tmp, ok, parsed_lines, stapo};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

fn has_python() -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: there is no python3");
    }
    found
}

/// The built-in game as a class, whose answers take a random time.
const CLASS: &str = r#"
import random, re, time

class Environment:
    def reset(self, row):
        self.number = int(row["reference"])

    def step(self, message):
        time.sleep(random.random() * DELAY)
        found = list(re.finditer("[0-9]+", message))
        if not found or len(found[-1].group()) > 18:
            return "="
        guess, before = int(found[-1].group()), message[: found[-1].start()]
        if before.endswith("-") and not re.search("[0-9A-Za-z)]$", before[:-1]):
            guess = -guess
        if guess == self.number:
            return {"done": True, "verdict": True}
        return "+1=" if guess < self.number else "-1="
"#;

/// A small run of games, with `environment` in place of the built-in one.
fn config(at: &Path, environment: &str) {
    let text = format!(
        "{SMALL}\nenvironment = {environment}\n[task]\nkind = \"guess\"\nlow = 1\nhigh = 9\ntemplate = \"({{{{ low }}}}+{{{{ high }}}})\"\n\
         held_out_share = 0.3\nn_held_out = 4\n"
    );
    fs::write(at.join("config.toml"), text).unwrap();
}

const SMALL: &str = r#"
steps = 3
episode = { max_turns = 4, max_turn_tokens = 24 }
rollout = { problems_per_step = 2, group_size = 4, max_response_tokens = 100 }
update = { problems_per_minibatch = 2, sum = "microbatches" }
evaluation = { problems = 4, every_steps = 2 }
record = { checkpoint_every_steps = 1, keep_checkpoints = 99, responses_every_steps = 1 }
"#;

const GAME: &str = r#"{ kind = "guess", higher = "+1=", lower = "-1=", unread = "=" }"#;

fn class(at: &Path, delay: f64) {
    fs::write(at.join("game.py"), CLASS.replace("DELAY", &delay.to_string())).unwrap();
}

fn train(at: &Path, out: &str, more: &[&str]) {
    ok(&stapo(at, &[&["train", "config.toml", "--out", out, "--threads", "1"], more].concat()));
}

/// The state hash after each step.
fn hashes(at: &Path, run: &str) -> Vec<Value> {
    let text = fs::read_to_string(at.join(run).join("metrics.jsonl")).unwrap();
    parsed_lines(&text).iter().map(|line| line["state_sha256"].clone()).collect()
}

#[test]
fn a_class_that_plays_the_game_gives_its_bits_under_delays_kills_and_ranks() {
    if !has_python() {
        return;
    }
    let folder = folder_below_tmp();
    let at = folder.path();
    config(at, GAME);
    train(at, "game", &[]);
    let expected = hashes(at, "game");
    assert_eq!(expected.len(), 3);
    let of_class =
        |workers: usize| format!("{{ kind = \"python\", file = \"game.py\", workers = {workers} }}");
    class(at, 0.02);
    config(at, &of_class(3));
    train(at, "delayed", &["--set", "episode.workers=5"]);
    assert_eq!(hashes(at, "delayed"), expected, "delays changed a bit");
    // Two ranks, each with processes of its own.
    ok(&stapo(at, &["launch", "--ranks", "2", "train", "config.toml", "--out", "ranks"]));
    assert_eq!(hashes(at, "ranks"), expected, "two ranks changed a bit");
    // Killed in the middle of a rollout: every answer takes a while, so a kill after the first step finds turns under way.
    class(at, 0.1);
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(at).args(["train", "config.toml", "--out", "killed"]);
    let mut child = command
        .env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let metrics = at.join("killed/metrics.jsonl");
    while fs::read_to_string(&metrics).unwrap_or_default().lines().count() < 1 {
        assert!(child.try_wait().unwrap().is_none(), "the run ended early");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(75));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(hashes(at, "killed").len() < 3, "the run was killed too late to test anything");
    ok(&stapo(at, &["train", "--resume", "killed"]));
    assert_eq!(hashes(at, "killed"), expected, "a kill changed a bit");
}

/// A program that answers every turn after a while and writes down which turns it was asked about.
const COUNTING: &str = r#"
import json, sys, time
for line in sys.stdin:
    request = json.loads(line)
    with open(LOG, "a") as log:
        log.write(f"{request['episode']} {len(request['turns'])}\n")
    time.sleep(0.03)
    done = len(request["turns"]) == 3
    print(json.dumps({"observation": "=", "reward": len(request["turns"][-1]) % 5 / 4, "done": done}), flush=True)
"#;

#[test]
fn a_run_killed_in_a_rollout_asks_nothing_twice_unless_its_config_says_so() {
    if !has_python() {
        return;
    }
    let folder = folder_below_tmp();
    let at = folder.path();
    let log = at.join("asked.txt");
    fs::write(at.join("program.py"), COUNTING.replace("LOG", &format!("{:?}", log.display().to_string())))
        .unwrap();
    config(at, "{ kind = \"command\", program = \"python3\", args = [\"program.py\"], workers = 2 }");
    let options = ["--set", "canaries.enabled=false", "--set", "steps=2"];
    train(at, "whole", &options);
    let asked =
        || fs::read_to_string(&log).unwrap_or_default().lines().map(str::to_string).collect::<Vec<_>>();
    let n_whole = asked().len();
    for resume in ["records", "environment"] {
        fs::remove_file(&log).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
        command
            .current_dir(at)
            .args(["train", "config.toml", "--out", resume, "--threads", "1"])
            .args(options);
        let mut child = command
            .args(["--set", &format!("episode.resume={resume}")])
            .env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // In the middle of the second step.
        while asked().len() < n_whole * 3 / 4 {
            assert!(child.try_wait().unwrap().is_none(), "the run ended early");
            std::thread::sleep(Duration::from_millis(5));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let journal = at.join(resume).join("answers.journal");
        let n_written = fs::read_to_string(&journal).unwrap_or_default().lines().count();
        assert!(hashes(at, resume).len() < 2, "the run was killed too late to test anything");
        ok(&stapo(at, &["train", "--resume", resume]));
        assert_eq!(hashes(at, resume), hashes(at, "whole"), "{resume}");
        assert!(!journal.exists(), "the journal outlived its steps");
        let mut turns = asked();
        turns.sort();
        let n_twice = turns.windows(2).filter(|pair| pair[0] == pair[1]).count();
        if resume == "records" {
            // Each process of the program may have been asked about a turn whose answer was not written down.
            assert!(
                n_written > 2 && n_twice <= 2,
                "{n_twice} turns asked twice, {n_written} answers written"
            );
        } else {
            assert!(
                n_written == 0 && n_twice > 2,
                "{n_twice} turns asked twice, {n_written} answers written"
            );
        }
    }
}

/// Problems that are drawn again in a step are other episodes to their program.
#[test]
fn every_draw_of_a_step_has_episodes_of_its_own() {
    if !has_python() {
        return;
    }
    let folder = folder_below_tmp();
    let at = folder.path();
    let log = at.join("asked.txt");
    let equal = COUNTING.replace("len(request[\"turns\"][-1]) % 5 / 4", "0").replace("0.03", "0");
    fs::write(at.join("program.py"), equal.replace("LOG", &format!("{:?}", log.display().to_string())))
        .unwrap();
    config(at, "{ kind = \"command\", program = \"python3\", args = [\"program.py\"] }");
    train(
        at,
        "run",
        &["--set", "canaries.enabled=false", "--set", "steps=1", "--set", "rollout.max_redraws=2"],
    );
    let asked = fs::read_to_string(&log).unwrap();
    let mut first: Vec<&str> = asked.lines().filter_map(|line| line.strip_suffix(" 1")).collect();
    let n_first = first.len();
    first.sort_unstable();
    first.dedup();
    assert!(n_first > 3 * 8, "three draws of two groups of four, and evaluations: {n_first}");
    assert_eq!(first.len(), n_first, "no episode was numbered twice");
}

#[test]
fn a_replay_takes_answers_from_the_record_and_a_live_one_names_the_first_that_differs() {
    if !has_python() {
        return;
    }
    let folder = folder_below_tmp();
    let at = folder.path();
    class(at, 0.0);
    config(at, "{ kind = \"python\", file = \"game.py\" }");
    train(at, "run", &[]);
    let replay = ["verify", "run", "--replay", "--steps", "3", "--allow-command"];
    let live = [replay.as_slice(), &["--live"]].concat();
    let said = ok(&stapo(at, &live));
    assert!(said.contains("environment: asked again for ") && !said.contains("DIFFERENT"), "{said}");
    // The same file now answers otherwise. A replay from records does not ask it.
    let changed = CLASS.replace("DELAY", "0").replace("return \"+1=\"", "return \"+2=\"");
    fs::write(at.join("game.py"), changed).unwrap();
    let of = |args: &[&str]| String::from_utf8_lossy(&stapo(at, args).stdout).into_owned();
    let said = of(&replay);
    for step in 1..=3 {
        assert!(said.contains(&format!("step {step}: the same, ")), "{said}");
    }
    assert!(said.contains("environment: DIFFERENT, recorded"), "the changed file is an input: {said}");
    let output = stapo(at, &live);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("recorded [\"+1=\"], found [\"+2=\"]"), "{said}");
    assert_eq!(output.status.code(), Some(1), "other answers are a difference");
    assert!(said.contains("step 3: the same, "), "the recorded answers count: {said}");
}

#[test]
fn tools_are_called_recorded_and_shown() {
    let folder = folder_below_tmp();
    let at = folder.path();
    let text = format!(
        "{SMALL}\nenvironment = {CALCULATOR}\nmodel = {{ kind = \"path\", path = {:?} }}\n[task]\nkind = \"arithmetic\"\n\
         min_operators = 1\nmax_operators = 1\nmin_operand = 1000\nmax_operand = 9999\noperators = [\"*\"]\n\
         max_result = 99980001\n",
        calling_model()
    );
    fs::write(at.join("config.toml"), text).unwrap();
    let limits = "episode={max_turns=3, max_turn_tokens=60}";
    train(at, "run", &["--set", "steps=1", "--set", limits, "--set", "rollout.max_response_tokens=160"]);
    let metrics = parsed_lines(&fs::read_to_string(at.join("run/metrics.jsonl")).unwrap());
    let episodes = &metrics[0]["episodes"];
    assert_eq!(metrics[0]["exactness_max_abs"], 0.0);
    let records = parsed_lines(&fs::read_to_string(at.join("run/episodes/step-000001.jsonl")).unwrap());
    let calls: Vec<&Value> = records
        .iter()
        .filter(|record| record.get("evaluation").is_none())
        .flat_map(|record| record["turns"].as_array().unwrap())
        .flat_map(|turn| turn["calls"].as_array().into_iter().flatten())
        .collect();
    assert!(!calls.is_empty(), "no episode of eight has a call");
    assert_eq!(episodes["n_calls"], calls.len());
    assert!(calls.iter().all(|call| call["sha256"].as_str().unwrap().len() == 64));
    let shown = ok(&stapo(at, &["inspect", "run", "--terminal"]));
    assert!(shown.contains("  call calculator(") && shown.contains("turn 1: reward 0"), "{shown}");
    ok(&stapo(at, &["inspect", "run", "--out", "page.html"]));
    let page = fs::read_to_string(at.join("page.html")).unwrap();
    assert!(page.contains("\"turns\":[{\"calls\":["), "the page has no turns");
    ok(&stapo(at, &["verify", "run", "--replay", "--steps", "1", "--live"]));
}

#[test]
fn a_class_that_fails_ends_the_run_with_its_traceback_and_a_late_one_is_an_observation() {
    if !has_python() {
        return;
    }
    let folder = folder_below_tmp();
    let at = folder.path();
    config(at, "{ kind = \"python\", file = \"game.py\", sample_seconds = 0.5 }");
    let fails = |class: &str| {
        fs::write(at.join("game.py"), class).unwrap();
        let output = stapo(at, &["train", "config.toml", "--out", "failed"]);
        assert_eq!(output.status.code(), Some(2));
        let _ = fs::remove_dir_all(at.join("failed"));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = fails("class Environment:\n    def reset(self, row): pass\n");
    assert!(said.contains("Environment has no method 'step'"), "{said}");
    let said =
        fails("class Environment:\n    def reset(self, row): pass\n    def step(self, m): return 1 / 0\n");
    assert!(said.contains("ZeroDivisionError") && said.contains("turn 1 of problem"), "{said}");
    let said = fails(
        "class Environment:\n    def reset(self, row): pass\n    def step(self, m): return {\"done\": True}\n",
    );
    assert!(said.contains("neither reward nor verdict"), "{said}");
    let late = "import time\nclass Environment:\n    def reset(self, row): pass\n    def step(self, m): time.sleep(30)\n";
    fs::write(at.join("game.py"), late).unwrap();
    train(
        at,
        "late",
        &["--set", "steps=1", "--set", "episode.max_turns=1", "--set", "evaluation.problems=1"],
    );
    let metrics = parsed_lines(&fs::read_to_string(at.join("late/metrics.jsonl")).unwrap());
    assert_eq!(metrics[0]["episodes"]["n_timed_out_calls"], 8);
    assert_eq!(metrics[0]["episodes"]["turn_limit_share"], 1.0);
}

#[test]
fn a_program_answers_turns_by_lines_of_json() {
    if !has_python() {
        return;
    }
    let folder = folder_below_tmp();
    let at = folder.path();
    // Rewards of turns count: every turn but the last has 0.25.
    let program = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    n = len(request["turns"])
    done = n == 3
    print(json.dumps({"observation": "=" * n, "reward": 1.0 if done else 0.25, "done": done}), flush=True)
"#;
    fs::write(at.join("program.py"), program).unwrap();
    config(at, "{ kind = \"command\", program = \"python3\", args = [\"program.py\"], workers = 2 }");
    train(at, "run", &["--set", "steps=1", "--set", "canaries.enabled=false"]);
    let text = fs::read_to_string(at.join("run/rollouts/step-000001.jsonl")).unwrap();
    for response in parsed_lines(&text) {
        let n_turns = response["episode"]["turns"].as_array().unwrap().len();
        let is_done = n_turns == 3;
        assert_eq!(response["verdict"], if is_done { "right" } else { "no_answer" });
        let expected = 0.25 * (n_turns - 1) as f64 + if is_done { 1.0 } else { -0.75 };
        assert_eq!(response["reward"], expected, "{response}");
    }
}

/// The model that was taught to call the calculator, as a command line names it.
fn calling_model() -> String {
    crate::common::root().join("models/tools").display().to_string()
}

const CALCULATOR: &str = r#"{ kind = "tools", format = "plain", tools = [{ kind = "calculator" }] }"#;

#[test]
fn generate_and_eval_play_episodes_with_tools() {
    let folder = folder_below_tmp();
    let at = folder.path();
    let model = calling_model();
    let generate =
        ["generate", "--model", &model, "--prompt", "4321*8765=", "--samples", "8", "--tools", CALCULATOR];
    let lines = parsed_lines(&ok(&stapo(at, &[&generate[..], &["--json"]].concat())));
    assert_eq!(lines.len(), 8);
    let calls = |line: &Value| line["turns"][0]["calls"].as_array().map_or(0, Vec::len);
    let called =
        lines.iter().find(|line| calls(line) > 0).expect("one of eight samples calls the calculator");
    let sampled = called["is_sampled"].as_array().unwrap();
    let n_sampled = sampled.iter().filter(|is_sampled| **is_sampled == true).count();
    assert!(n_sampled < sampled.len(), "nothing was given: {called}");
    assert_eq!(called["logp"].as_array().unwrap().len(), n_sampled);
    let text = ok(&stapo(at, &generate));
    assert!(text.starts_with("--- prompt 1, sample 1: ") && text.contains("[="), "{text}");
    assert_eq!(text, ok(&stapo(at, &generate)), "the same seed gives the same conversations");
    fs::write(at.join("prompts.jsonl"), "{\"prompt\": \"1+1=\", \"id\": \"a\"}\n{\"prompt\": \"2+2=\"}\n")
        .unwrap();
    let of_file =
        ["generate", "--model", &model, "--input", "prompts.jsonl", "--tools", CALCULATOR, "--json"];
    let answered = parsed_lines(&ok(&stapo(at, &of_file)));
    assert_eq!(answered.iter().map(|line| line["id"].as_str()).collect::<Vec<_>>(), [Some("a"), None]);
    // Products that the model cannot compute alone.
    let rows: Vec<String> = (0..6)
        .map(|n| (4321 + 17 * n, 8765 - 31 * n))
        .map(|(a, b)| format!(r#"{{"id": "{a}", "problem": "{a}*{b}", "answer": "{}"}}"#, a * b))
        .collect();
    fs::write(at.join("products.jsonl"), rows.join("\n")).unwrap();
    let eval = |tools: &str, out: &str| {
        let args =
            ["eval", "--model", &model, "--benchmarks", "products.jsonl", "--template", "{{ problem }}="];
        let more = ["--samples", "4", "--max-tokens", "128", "--tools", tools, "--out", out, "--json"];
        let more = [&more[..], if tools == "none" { &[] } else { &["--max-turns", "3"] }].concat();
        let table: Value = serde_json::from_str(&ok(&stapo(at, &[&args[..], &more].concat()))).unwrap();
        table[0]["avg"]["value"].as_f64().unwrap()
    };
    assert_eq!(eval("none", "without"), 0.0);
    assert!(eval(CALCULATOR, "with") > 0.1);
    let samples = parsed_lines(&fs::read_to_string(at.join("with/samples.jsonl")).unwrap());
    let n_turns = samples.iter().map(|sample| sample["episode"]["turns"].as_array().unwrap().len());
    assert!((2..=3).contains(&n_turns.max().unwrap()));
    let plan = crate::common::json(&at.join("with/eval.json"));
    assert_eq!(plan["episode"]["max_turns"], 3, "{plan}");
    ok(&stapo(at, &["verify", "with", "--replay"]));
    let said =
        crate::common::complaint(at, &["generate", "--model", &model, "--prompt", "1", "--tools", "abacus"]);
    assert!(said.contains("abacus") && said.contains("calculator"), "{said}");
}

#[test]
fn problems_show_the_tools_that_prompts_list_and_start_none() {
    let folder = folder_below_tmp();
    let at = folder.path();
    fs::create_dir(at.join("model")).unwrap();
    for file in fs::read_dir(calling_model()).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), at.join("model").join(file.file_name())).unwrap();
    }
    let template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}";
    fs::write(at.join("model/chat_template.jinja"), template).unwrap();
    let config = |environment: &str| {
        let text = format!("model = \"model\"\nenvironment = {environment}\n[rollout]\nchat = true\n");
        fs::write(at.join("config.toml"), text).unwrap();
        stapo(at, &["problems", "config.toml", "-n", "1", "--json"])
    };
    let shown = parsed_lines(&ok(&config(CALCULATOR)));
    assert!(shown[0]["text"].as_str().unwrap().starts_with("calculator "), "{shown:?}");
    let own =
        config(r#"{ kind = "tools", tools = [{ kind = "function", file = "absent.py", function = "f" }] }"#);
    let said = String::from_utf8_lossy(&own.stderr).into_owned();
    assert!(own.status.success() && said.contains("tool 1 is a program"), "{said}");
}
