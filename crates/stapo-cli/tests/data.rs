//! A user's own model and data: `init`, `problems`, `sft`, and the examples.

mod examples;

use crate::common::{complaint, ok, stapo};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// `(system)question=answer<|end|>` in the characters of the built-in model.
const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'system' %}({{ m.content }}){% elif m.role == 'user' %}{{ m.content }}{{ '+=' if shout else '=' }}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}";

/// Makes the folder `model`, the built-in model with a chat template, and `rows.jsonl` of 60 rows, of which one has no
/// answer and ten are longer.
pub fn set_up(at: &Path) {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/base");
    fs::create_dir(at.join("model")).unwrap();
    for entry in fs::read_dir(base).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, at.join("model").join(path.file_name().unwrap())).unwrap();
    }
    fs::write(at.join("model/chat_template.jinja"), TEMPLATE).unwrap();
    let zero = |i: usize| if i < 50 { "" } else { "+0" };
    let row =
        |i: usize| json!({"uid": i, "question": format!("{i}+{}{}", i % 7, zero(i)), "final": i + i % 7});
    let mut rows: Vec<Value> = (0..60).map(row).collect();
    rows[5]["final"] = "".into();
    fs::write(at.join("rows.jsonl"), rows.iter().map(|row| format!("{row}\n")).collect::<Vec<_>>().concat())
        .unwrap();
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn init_writes_a_config_that_problems_and_train_take_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    set_up(at);
    let init = "init --model model --data rows.jsonl --out mine.toml";
    let said = complaint(at, &words(init));
    assert!(said.contains("no field for the answer is recognised") && said.contains("final"), "{said}");
    assert!(!at.join("mine.toml").exists(), "nothing is written where something is missing");
    let said = ok(&stapo(at, &words(&format!("{init} --answer-field final"))));
    for part in [
        "794.0k parameters",
        "256 positions",
        "with a chat template",
        "60 rows",
        "\"question\"",
        "1 have no reference",
        "stapo train mine.toml",
    ] {
        assert!(said.contains(part), "{part:?} in {said}");
    }
    let text = fs::read_to_string(at.join("mine.toml")).unwrap();
    for part in [
        "chat = true",
        "missing_answers = \"drop\"",
        "answer_field = \"final\"",
        "verifier = { kind = \"rule\", mode = \"math\", form = \"worked-out\" }",
        "learning_rate = 1e-4",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    let said = complaint(at, &words(&format!("{init} --answer-field final")));
    assert!(said.contains("mine.toml: exists already") && said.contains("--force"), "{said}");
    ok(&stapo(at, &words(&format!("{init} --answer-field final --force"))));

    // The instruction holds characters that the built-in model does not know; a template of its own is enough here.
    let own = ["--set", "task.template={{ problem }}"];
    let lines = ok(&stapo(at, &[&words("problems mine.toml -n 200 --json")[..], &own].concat()));
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let first = &lines[0];
    assert_eq!(first["text"], format!("{}=", first["prompt"].as_str().unwrap()));
    assert_eq!(first["prompt_tokens"].as_array().unwrap().len(), first["text"].as_str().unwrap().len());
    let small = words(
        "train mine.toml --json --set steps=1 --set rollout.group_size=2 --set rollout.max_response_tokens=8 --out run",
    );
    ok(&stapo(at, &[&small[..], &own].concat()));
    assert!(fs::read_to_string(at.join("run/plan.toml")).unwrap().contains("chat_arguments"));

    // Prompts with a zero at the end are too long here: they are left out, and the run and its resumption say so.
    let short =
        ["--set", "rollout.max_prompt_tokens=5", "--set", "rollout.long_prompts=drop", "--out", "short"];
    let n_own = small.len() - 2;
    ok(&stapo(at, &[&small[..n_own], &own, &short].concat()));
    ok(&stapo(at, &words("train --resume short --json --set steps=2")));
    let events = fs::read_to_string(at.join("short/events.jsonl")).unwrap();
    assert_eq!(events.matches("10 of 59 problems are left out").count(), 2, "{events}");
}

#[test]
fn init_names_what_is_missing_and_what_makes_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    set_up(at);
    fs::write(at.join("one.jsonl"), "{\"problem\": \"1+1\", \"answer\": 2}\n").unwrap();
    fs::write(at.join("long.jsonl"), format!("{{\"problem\": \"{}\", \"answer\": 2}}\n", "1".repeat(300)))
        .unwrap();
    let chat = "{\"prompt\": [{\"role\": \"system\", \"content\": \"add\"}, {\"role\": \"user\", \"content\": \"1\"}], \"answer\": 2}\n";
    fs::write(at.join("chat.jsonl"), chat).unwrap();
    for (line, expected) in [
        ("init --model gone --data rows.jsonl", "gone: no such file or folder"),
        ("init --model model --data gone.jsonl", "gone.jsonl: No such file"),
        ("init --model model --data one.jsonl", "too few to hold some out"),
        ("init --model model --data long.jsonl", "of the model's 256 positions"),
        ("init --model builtin --data chat.jsonl", "the model has no chat template"),
    ] {
        let said = complaint(at, &words(line));
        assert!(said.contains(expected) && said.contains("hint"), "{line}: {said}");
        assert!(!at.join("stapo.toml").exists());
    }
}

#[test]
fn problems_show_the_very_text_and_refused_lengths() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    set_up(at);
    let rows: Vec<String> = (0..20)
        .map(|i| {
            let turns =
                json!([{"role": "system", "content": "add"}, {"role": "user", "content": format!("{i}+1")}]);
            format!("{}\n", json!({"id": format!("p{i}"), "prompt": turns, "answer": i + 1}))
        })
        .collect();
    fs::write(at.join("chat.jsonl"), rows.concat()).unwrap();
    let config = "model = { kind = \"path\", path = \"model\" }\n[task]\nkind = \"jsonl\"\npath = \"chat.jsonl\"\ntemplate = \"{{ problem }}\"\nheld_out_share = 0.5\n[rollout]\nchat = true\nchat_arguments = { shout = true }\n";
    fs::write(at.join("c.toml"), config).unwrap();
    let said = ok(&stapo(at, &words("problems c.toml -n 40")));
    assert!(
        said.contains("--- p")
            && said.contains("tokens, reference")
            && said.contains("(add)")
            && said.contains("+1+="),
        "{said}"
    );
    let solved = ok(&stapo(at, &words("problems --no-model -n 1 --solutions")));
    let line = ok(&stapo(at, &words("problems --no-model -n 1 --solutions --json")));
    let line: Value = serde_json::from_str(&line).unwrap();
    let solution = line["solution"].as_str().unwrap();
    assert!(!solution.is_empty() && solved.ends_with(&format!("\n    {solution}\n")), "{solved}");
    let output = stapo(at, &words("problems c.toml -n 1 --set rollout.max_prompt_tokens=10"));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(ok(&output).contains("--- p") && told.contains("10 of 20 prompts are longer than 10"), "{told}");
    let said = ok(&stapo(at, &words("problems c.toml -n 1 --no-model --set model.path=gone")));
    assert!(said.contains("[system] add"), "{said}");
    for (set, expected) in [
        ("rollout.chat=false", "rollout.chat_arguments: given: has no effect"),
        ("model.path=gone", "--no-model"),
        ("rollout.stop=[\"\"]", "rollout.stop: an empty text"),
    ] {
        let said = complaint(at, &["problems", "c.toml", "--set", set]);
        assert!(said.contains(expected), "{set}: {said}");
    }
    let plain = ["problems", "c.toml", "--set", "rollout.chat=false", "--set", "rollout.chat_arguments={}"];
    let said = complaint(at, &plain);
    assert!(said.contains("is a conversation that begins with a message of role \"system\""), "{said}");
}

#[test]
fn sft_learns_conversations_without_a_config_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    set_up(at);
    let row = |i: usize| {
        let turns = json!([{"role": "user", "content": format!("{i}+{i}")}, {"role": "assistant", "content": (2 * i).to_string()}]);
        format!("{}\n", json!({"messages": turns}))
    };
    fs::write(at.join("talk.jsonl"), (0..40).map(row).collect::<String>()).unwrap();
    let small =
        "--set update.batch_tokens=128 --set update.learning_rate=1e-3 --set update.schedule.warmup_steps=1";
    let line = format!("sft --model model --data talk.jsonl --json --out sft {small} --set epochs=3");
    let lines = ok(&stapo(at, &words(&line)));
    let metrics: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let loss = |at: usize| metrics[at]["loss"].as_f64().unwrap();
    assert!(loss(metrics.len() - 1) < 0.8 * loss(0), "{lines}");
    assert!(metrics[0]["n_scored"].as_u64() < metrics[0]["n_tokens"].as_u64(), "prompts have no loss");
    assert!(at.join("sft/model/chat_template.jinja").exists());
    // Other threads and a stop in between give the same bits.
    let steps = metrics.len();
    let half = format!(
        "sft --model model --data talk.jsonl --json --out cut {small} --threads 1 --set steps={}",
        steps / 2
    );
    ok(&stapo(at, &words(&half)));
    ok(&stapo(at, &words(&format!("sft --resume cut --json --set steps={steps}"))));
    let weights = |run: &str| fs::read(at.join(run).join("model/model.safetensors")).unwrap();
    assert!(weights("sft") == weights("cut"), "a run that was extended has the bits of one that was not");
    let said = complaint(at, &words("sft --model model"));
    assert!(said.contains("stapo sft --model MODEL --data FILE"), "{said}");
}

#[test]
fn sft_holds_rows_out_keeps_the_best_checkpoint_and_names_the_next_commands() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    set_up(at);
    let row = |i: usize| {
        let turns = json!([{"from": "human", "value": format!("{i}+{i}")}, {"from": "gpt", "value": (2 * i).to_string()}]);
        json!({"conversations": turns})
    };
    fs::create_dir(at.join("talk")).unwrap();
    for part in 0..2 {
        let rows: Vec<Value> = (20 * part..20 * part + 20).map(row).collect();
        fs::write(at.join(format!("talk/{part}.json")), json!(rows).to_string()).unwrap();
    }
    let small = "--set update.batch_tokens=128 --set update.learning_rate=0.1 --set update.schedule.warmup_steps=1 --set steps=4 --set evaluation.every_steps=2";
    let line =
        format!("sft --model model --data talk/*.json --out run {small} --set data.held_out_share=0.2");
    let output = stapo(at, &words(&line));
    ok(&output);
    let said = String::from_utf8_lossy(&output.stderr);
    for expected in [
        "data: ",
        "packed without padding",
        "held-out loss",
        "next:\n  stapo generate --model run/model",
        "\nmodel run/model: ",
        " bytes of weights, sha256 ",
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    let metrics = fs::read_to_string(at.join("run/metrics.jsonl")).unwrap();
    let metrics: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let lowest = metrics
        .iter()
        .filter_map(|line| Some((line["eval_loss"].as_f64()?, line["step"].as_u64()?)))
        .min_by(|a, b| a.0.total_cmp(&b.0));
    let best: Value = serde_json::from_slice(&fs::read(at.join("run/best.json")).unwrap()).unwrap();
    assert_eq!((best["value"].as_f64(), best["step"].as_u64()), lowest.unzip());
    let is_last = best["step"] == 4;
    assert_eq!(at.join("run/model-best/model.safetensors").exists(), !is_last, "{said}");
    if !is_last {
        let weights = |model: &str| fs::read(at.join("run").join(model).join("model.safetensors")).unwrap();
        assert!(weights("model") != weights("model-best"));
        assert!(said.contains("the model of that step is run/model-best"), "{said}");
    }
}

#[test]
fn problems_init_and_eval_read_the_same_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    set_up(at);
    let rows: Vec<String> = (0..30).map(|i| format!("{i}+{i},{}\n", 2 * i)).collect();
    let table = rows.concat();
    fs::write(at.join("rows.csv"), format!("question,answer\n{table}")).unwrap();
    fs::write(at.join("more.json"), r#"[{"question": "50+50", "answer": 100}]"#).unwrap();
    let files = r#"task.path=["rows.csv","more.json"]"#;
    let asked =
        ["problems", "--set", files, "--set", "task.held_out_share=0", "--no-model", "-n", "40", "--json"];
    let listed = ok(&stapo(at, &asked));
    let ids: Vec<Value> =
        listed.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone()).collect();
    assert!(ids.contains(&json!("rows-30")) && ids.contains(&json!("more-1")), "{listed}");
    ok(&stapo(at, &words("init --model model --data rows.csv --out mine.toml")));
    let config = fs::read_to_string(at.join("mine.toml")).unwrap();
    assert!(config.contains("kind = \"file\"") && config.contains("rows.csv"), "{config}");
    ok(&stapo(at, &words("problems mine.toml -n 2")));
    ok(&stapo(
        at,
        &words(
            "eval --model model --benchmarks rows.csv --limit 2 --samples 1 --max-tokens 8 --template {{problem}}= --out eval",
        ),
    ));
}

#[test]
fn generate_stops_at_a_text_and_passes_arguments_to_the_template() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    set_up(at);
    let text = |more: &[&str]| {
        let line = ["generate", "--model", "model", "--prompt", "3+4*2=", "--greedy", "--json"];
        let out: Value = serde_json::from_str(&ok(&stapo(at, &[&line[..], more].concat()))).unwrap();
        (out["text"].as_str().unwrap().to_string(), out["finish"].as_str().unwrap().to_string())
    };
    let (whole, _) = text(&[]);
    let middle = &whole[3..6];
    let (cut, finish) = text(&["--stop", "xyz", "--stop", middle]);
    assert_eq!((cut, finish.as_str()), (whole[..whole.find(middle).unwrap() + 3].to_string(), "stop"));
    // Several responses have a line each above their texts.
    let both = ["generate", "--model", "model", "--prompt", "3+4*2=", "--greedy", "-n", "2"];
    let said = ok(&stapo(at, &both));
    let n_tokens = whole.chars().count() + 1;
    let of = |sample: usize| format!("--- prompt 1, sample {sample}: {n_tokens} tokens, stop\n{whole}\n");
    assert_eq!(said, of(1) + &of(2));
    let listed = [&both[..6], &["--json", "--alternatives", "2", "--max-tokens", "3"]].concat();
    let line: Value = serde_json::from_str(&ok(&stapo(at, &listed))).unwrap();
    let likeliest = line["alternatives"].as_array().unwrap();
    for (own, logp) in likeliest.iter().zip(line["logp"].as_array().unwrap()) {
        assert_eq!((own.as_array().unwrap().len(), &own[0]["logp"]), (2, logp), "{line}");
    }
    fs::write(at.join("empty.jsonl"), "\n").unwrap();
    let said = complaint(at, &["generate", "--model", "model", "--input", "empty.jsonl"]);
    assert!(said.contains("input empty.jsonl: no prompt to continue"), "{said}");
    let prompt_tokens = |more: &[&str]| {
        let line = ["generate", "--model", "model", "--chat", "3+4", "--json", "--max-tokens", "1"];
        let out: Value = serde_json::from_str(&ok(&stapo(at, &[&line[..], more].concat()))).unwrap();
        out["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(prompt_tokens(&[]) + 1, prompt_tokens(&["--chat-arguments", "{\"shout\": true}"]));
    let eval = "eval --model model --benchmarks arithmetic --limit 2 --samples 1 --max-tokens 48 --decoding greedy --json";
    ok(&stapo(at, &[&words(eval)[..], &["--out", "e", "--stop", ", "]].concat()));
    let samples = fs::read_to_string(at.join("e/samples.jsonl")).unwrap();
    let texts: Vec<Value> =
        samples.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["text"].clone()).collect();
    assert!(texts.iter().all(|text| text.as_str().unwrap().ends_with(", ")), "{texts:?}");
    let said = complaint(at, &[&words(eval)[..], &["--chat-arguments", "{\"shout\": true}"]].concat());
    assert!(said.contains("--chat-arguments: has no effect without --chat"), "{said}");
}

/// The clock would change a prompt from day to day, so the date comes with the arguments of the template.
#[test]
fn a_template_that_asks_for_the_day_gets_it_from_the_arguments() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    set_up(at);
    let template = "{% for m in messages %}{{ m.content }}{{ strftime_now('+%d') }}={% endfor %}";
    fs::write(at.join("model/chat_template.jinja"), template).unwrap();
    fs::write(at.join("chat.jsonl"), "{\"chat\": \"3+4\", \"response\": \"7\"}\n").unwrap();
    let date = ["--chat-arguments", "{\"today\": \"2026-11-18\"}"];
    let score = ["score", "--model", "model", "--input", "chat.jsonl"];
    let generate = ["generate", "--model", "model", "--chat", "3+4", "--json", "--max-tokens", "1"];
    let problems = "problems c.toml -n 1 --json --set rollout.chat_arguments.today=";
    let task = "path = \"rows.jsonl\"\nproblem_field = \"question\"\nanswer_field = \"final\"\nmissing_answers = \"drop\"\ntemplate = \"{{ problem }}\"";
    fs::write(
        at.join("c.toml"),
        format!("model = {{ kind = \"path\", path = \"model\" }}\n[task]\nkind = \"jsonl\"\n{task}\n[rollout]\nchat = true\n"),
    )
    .unwrap();
    for line in
        [&score[..], &generate, &words("problems c.toml -n 1"), &words(&format!("{problems}\"18.11.\""))]
    {
        let run = stapo(at, line);
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(
            !run.status.success() && said.contains("hint: ") && said.contains("today"),
            "{line:?}: {said}"
        );
    }
    let scored: Value = serde_json::from_str(&ok(&stapo(at, &[&score[..], &date].concat()))).unwrap();
    fs::write(at.join("plain.jsonl"), "{\"prompt\": \"3+4+18=\", \"response\": \"7\"}\n").unwrap();
    let plain = ok(&stapo(at, &["score", "--model", "model", "--input", "plain.jsonl"]));
    fs::write(at.join("unknown.jsonl"), "{\"tokens\": [1, 99999], \"prompt_tokens\": 1}\n").unwrap();
    let said = complaint(at, &["score", "--model", "model", "--input", "unknown.jsonl"]);
    assert!(said.contains("unknown.jsonl:1: token 99999 is outside the vocabulary of "), "{said}");
    assert!(said.contains("input unknown.jsonl: no record to score"), "{said}");
    assert_eq!(scored, serde_json::from_str::<Value>(&plain).unwrap());
    let generated: Value = serde_json::from_str(&ok(&stapo(at, &[&generate[..], &date].concat()))).unwrap();
    assert_eq!(generated["prompt_tokens"], "3+4+18=".len());
    for date in ["2026-11-18", "\"2026-11-18\""] {
        let line = ok(&stapo(at, &words(&format!("{problems}{date}"))));
        let problem: Value = serde_json::from_str(&line).unwrap();
        assert!(problem["text"].as_str().unwrap().ends_with("+18="), "{problem}");
    }
}
