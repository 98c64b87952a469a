mod preference;
mod ranking;

use super::rows::TextRow;
use super::sequence::TextEncoder;
use super::*;
use crate::testing::{TEMPLATE, chat_model};
use serde_json::{Map, Value, json};
use stapo_core::Turn;
use stapo_model::CpuOptions;
use stapo_model::config::{LongFactors, RopeScaling};
use std::path::PathBuf;

fn device() -> Device {
    Device::cpu(CpuOptions { threads: 2, ..CpuOptions::from_env().unwrap() })
}

fn conversation(turns: &[(&str, &str)]) -> TextRow {
    let turn = |&(role, content): &(&str, &str)| Turn { role: role.into(), content: content.into() };
    TextRow::Conversation(turns.iter().map(turn).collect())
}

/// For each sequence of a row the text of all tokens, and the texts of the runs of learned ones.
fn learned(model: &LoadedModel, row: &TextRow) -> Vec<(String, Vec<String>)> {
    let tokenizer = model.tokenizer().unwrap();
    let template = model.template.as_ref();
    let encoder = TextEncoder { tokenizer, template, stops: &model.stops, chat_arguments: Map::new() };
    let shown = |sequence: &TextSequence| {
        assert_eq!(sequence.tokens.len(), sequence.is_learned.len());
        let pairs: Vec<(u32, bool)> =
            sequence.tokens.iter().copied().zip(sequence.is_learned.iter().copied()).collect();
        let runs = pairs.chunk_by(|a, b| a.1 == b.1).filter(|run| run[0].1);
        let text = |tokens: Vec<u32>| tokenizer.decode_all(&tokens).unwrap();
        (
            text(sequence.tokens.clone()),
            runs.map(|run| text(run.iter().map(|(token, _)| *token).collect())).collect(),
        )
    };
    encoder.sequences(&[row]).unwrap().concat().iter().map(shown).collect()
}

#[test]
fn every_answer_of_a_conversation_is_learned_up_to_its_stop_token() {
    let folder = tempfile::tempdir().unwrap();
    let model = LoadedModel::open_path(&chat_model(folder.path(), TEMPLATE), &device()).unwrap();
    let turns = [("system", "add"), ("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4")];
    // The start of an answer ("so ") is in no transcript of this template.
    let plain = TEMPLATE.replace("so ", "");
    let other = tempfile::tempdir().unwrap();
    let whole = LoadedModel::open_path(&chat_model(other.path(), &plain), &device()).unwrap();
    assert_eq!(
        learned(&whole, &conversation(&turns)),
        [(
            "(add)1+1=2<|end|>:2+2=4<|end|>".to_string(),
            vec!["2<|end|>".to_string(), "4<|end|>".to_string()]
        )],
        "one sequence without the sign that the template writes after its stop token"
    );
    let encoder = TextEncoder {
        tokenizer: model.tokenizer().unwrap(),
        template: model.template.as_ref(),
        stops: &model.stops,
        chat_arguments: Map::new(),
    };
    let said = encoder.sequences(&[&conversation(&turns)]).unwrap_err().to_string();
    assert!(said.contains("asks for the answer with") && said.contains("so "), "{said}");
    let pair = TextRow::Pair { prompt: "1+1=".into(), response: "2".into() };
    assert_eq!(learned(&model, &pair), [("1+1=2<|end|>".to_string(), vec!["2<|end|>".to_string()])]);
    let text = learned(&model, &TextRow::Text("1+1=2".into()));
    assert_eq!(text, [("1+1=2<|end|>".to_string(), vec!["1+1=2<|end|>".to_string()])]);
}

#[test]
fn a_template_that_changes_earlier_turns_gives_each_answer_a_sequence() {
    // Thinking is kept in the last answer only, as Qwen3's template does.
    let template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}={% else %}\
         {{ '(hence)' if loop.last else '' }}{{ m.content }}<|end|>{% endif %}{% endfor %}";
    let folder = tempfile::tempdir().unwrap();
    let model = LoadedModel::open_path(&chat_model(folder.path(), template), &device()).unwrap();
    let turns = [("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4")];
    let end = |text: &str| vec![format!("(hene){text}<|end|>")];
    assert_eq!(
        learned(&model, &conversation(&turns)),
        [
            ("1+1=(hene)2<|end|>".to_string(), end("2")),
            ("1+1=2<|end|>2+2=(hene)4<|end|>".to_string(), end("4"))
        ],
        "c is no character of the built-in model"
    );
}

fn write(folder: &Path, rows: &[Value]) -> PathBuf {
    let path = folder.join("rows.jsonl");
    std::fs::write(&path, rows.iter().map(|row| format!("{row}\n")).collect::<Vec<_>>().concat()).unwrap();
    path
}

/// A pretrainer of the built-in model on rows, or the error.
fn open(folder: &Path, rows: &[Value], settings: &[&str]) -> Result<(PretrainConfig, Pretrainer)> {
    open_with(&PretrainConfig::fine_tuning(), folder, rows, settings)
}

fn open_with(
    defaults: &PretrainConfig,
    folder: &Path,
    rows: &[Value],
    settings: &[&str],
) -> Result<(PretrainConfig, Pretrainer)> {
    let data = format!("data={{kind=\"jsonl\",path={:?}}}", write(folder, rows));
    let set: Vec<&str> = [&[data.as_str(), "update.batch_tokens=64"], settings].concat();
    let raw = stapo_core::settings::RawConfig::new("", set).unwrap();
    let config = PretrainConfig::with_defaults(defaults, &raw).map_err(PlanError::from)?;
    let pretrainer = Pretrainer::new(&config, Path::new("unused"), &device(), Programs::Never)?;
    Ok((config, pretrainer))
}

fn sums(n: usize) -> Vec<Value> {
    (0..n).map(|i| json!({"prompt": format!("{i}+{i}="), "response": format!("{}", 2 * i)})).collect()
}

#[test]
fn epochs_become_the_steps_in_which_every_row_was_learned() {
    let folder = tempfile::tempdir().unwrap();
    for epochs in [1, 3] {
        let (config, mut pretrainer) =
            open(folder.path(), &sums(40), &[&format!("epochs={epochs}")]).unwrap();
        let steps = pretrainer.steps(&config).unwrap();
        let mut position = 0;
        for step in 1..=steps {
            assert!(position < 40 * epochs, "step {step} of {steps} begins after the last row");
            pretrainer.step(&config).unwrap();
            position = pretrainer.learner.counters.position;
        }
        assert!(position >= 40 * epochs, "{steps} steps end at row {position}");
    }
    let (config, pretrainer) = open(folder.path(), &sums(4), &["steps=7"]).unwrap();
    assert_eq!((config.epochs, pretrainer.steps(&config).unwrap()), (None, 7));
    let said = open(folder.path(), &sums(4), &["steps=7", "epochs=2"]).err().unwrap().to_string();
    assert!(said.contains("config.epochs: given together with steps"), "{said}");
}

#[test]
fn held_out_rows_are_not_learned_and_have_a_loss() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["data.held_out_share=0.3", "epochs=1"];
    let (config, mut pretrainer) = open(folder.path(), &sums(40), &settings).unwrap();
    let file = pretrainer.file().unwrap();
    let n_held_out = file.held_out().len();
    assert!(n_held_out > 4 && file.size().0 == 40 - n_held_out, "{n_held_out} held out");
    let is_held_out = |row: &TextRow| file.held_out().contains(row);
    assert!((0..100).all(|position| !is_held_out(file.row(0, position))));
    let rows: Vec<Value> = sums(40)
        .into_iter()
        .filter(|row| {
            let text = |key: &str| row[key].as_str().unwrap().to_string();
            is_held_out(&TextRow::Pair { prompt: text("prompt"), response: text("response") })
        })
        .collect();
    let held_out_loss = pretrainer.held_out_loss(&config).unwrap().unwrap();
    // The same rows as the rows of one step give the same loss.
    let (config, mut trained) =
        open(folder.path(), &rows, &["epochs=1", "update.batch_tokens=20000"]).unwrap();
    trained.steps(&config).unwrap();
    let one = trained.step(&PretrainConfig { steps: 1, ..config.clone() }).unwrap();
    let n_passes = trained.learner.counters.position / rows.len() as u64;
    assert!(n_passes > 50 && (one.loss - held_out_loss).abs() < 0.02, "{} beside {held_out_loss}", one.loss);
    assert_eq!(trained.held_out_loss(&config).unwrap(), None);
    let said = open(folder.path(), &sums(3), &["data.held_out_share=1.0"]).err().unwrap().to_string();
    assert!(said.contains("leaves 0 rows to learn from and 3 held out"), "{said}");
}

#[test]
fn long_rows_are_found_at_the_start_and_refused_or_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let mut rows = sums(100);
    rows[70] = json!({"prompt": "1".repeat(60), "response": "1"});
    rows[90] = json!({"prompt": "1".repeat(50), "response": "1"});
    let small = "update.microbatch_tokens=40";
    let said = open(folder.path(), &rows, &[small]).err().unwrap().to_string();
    for part in ["2 of 100 rows have more than 40 tokens", "row 71, has 62", "data.long_rows=drop"] {
        assert!(said.contains(part), "{part:?} in {said}");
    }
    let (_, pretrainer) = open(folder.path(), &rows, &[small, "data.long_rows=drop"]).unwrap();
    assert!(pretrainer.warnings[0].contains("2 of 100 rows are left out"), "{:?}", pretrainer.warnings);
    let seen: std::collections::BTreeSet<Vec<u32>> = (0..98)
        .flat_map(|at| pretrainer.texts.sequences(&pretrainer.learner.model, 0, at).unwrap())
        .map(|sequence| sequence.tokens)
        .collect();
    assert_eq!(seen.len(), 98, "an epoch has every other row once");
    // A sequence as long as a micro-batch fits.
    let (mut config, pretrainer) = open(folder.path(), &sums(4), &["steps=1"]).unwrap();
    let of_row = |row| pretrainer.texts.sequences(&pretrainer.learner.model, config.seed, row).unwrap();
    let longest = (0..4).flat_map(of_row).map(|sequence| sequence.tokens.len()).max().unwrap();
    config.update.microbatch_tokens = longest;
    assert!(pretrainer.next_sequences(&config).is_ok());
    config.update.microbatch_tokens = longest - 1;
    assert!(pretrainer.next_sequences(&config).is_err());
}

/// Micro-batches hold many rows, and nothing of a model may depend on their size.
#[test]
fn the_longest_row_chooses_the_factors_of_long_rope() {
    let folder = tempfile::tempdir().unwrap();
    let model = chat_model(folder.path(), "");
    let config_path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&config_path).unwrap()).unwrap();
    config["rope_parameters"] = json!({
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64,
        "short_factor": vec![1.0; 16], "long_factor": vec![2.0; 16],
    });
    std::fs::write(&config_path, config.to_string()).unwrap();
    let model = format!("model={{kind=\"path\",path={model:?}}}");
    let used = |defaults: &PretrainConfig, row: Value, settings: &[&str]| {
        let settings = [&[model.as_str(), "steps=1"], settings].concat();
        let (_, pretrainer) = open_with(defaults, folder.path(), &[row], &settings).unwrap();
        match pretrainer.learner.model.policy.config().attentions().next().unwrap().rope.scaling {
            RopeScaling::Long { used, .. } => used,
            ref other => panic!("{other:?}"),
        }
    };
    let row = |n_tokens: usize| json!({"prompt": "1".repeat(n_tokens - 2), "response": "1"});
    let tuned = |n_tokens, settings: &[&str]| used(&PretrainConfig::fine_tuning(), row(n_tokens), settings);
    assert_eq!(tuned(64, &[]), LongFactors::Short);
    assert_eq!(tuned(65, &[]), LongFactors::Long);
    let pair = json!({"prompt": "1".repeat(40), "chosen": "1", "rejected": "2"});
    let of_pair = used(&PretrainConfig::preferring(), pair, &[]);
    assert_eq!(of_pair, LongFactors::Short, "both answers together are longer, neither is");
}

#[test]
fn bad_rows_are_refused_by_their_number() {
    let folder = tempfile::tempdir().unwrap();
    let with = |row: Value| [sums(3), vec![row]].concat();
    for (rows, expected) in [
        (vec![json!({"q": "a"})], "line 1: no field is recognised"),
        (with(json!({"prompt": "1="})), "line 4: no field \"response\""),
        (with(json!({"prompt": 1, "response": "2"})), "line 4: no text `prompt`"),
        (with(json!({"prompt": "??", "response": ""})), ""),
        (vec![json!({"messages": []})], "line 1: a conversation without messages"),
        (vec![json!({"messages": [{"role": "user", "content": "1"}]})], "without a message of the assistant"),
        (vec![json!({"messages": [{"role": "assistant", "content": "1"}]})], "begins with the assistant"),
        (
            vec![
                json!({"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]}),
            ],
            "the model has no chat template",
        ),
    ] {
        let said = open(folder.path(), &rows, &[]).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(said.contains(expected), "{expected:?} in {said:?}");
    }
    for (set, expected) in [
        ("data.system=x", "data.system"),
        ("data.prompt_field=prompt", "prompt_field is given without response_field"),
        ("update.learning_rate=0", "update.learning_rate: 0, expected a positive number"),
        ("epochs=0", "epochs: 0, expected at least 1"),
        ("device=tpu", "device: tpu"),
    ] {
        let said = open(folder.path(), &sums(3), &[set]).err().unwrap().to_string();
        assert!(said.contains(expected), "{expected:?} in {said:?}");
    }
}

#[test]
fn names_of_earlier_programs_mean_the_same() {
    let earlier = "steps = 5\nlearning_rate = 1e-3\nbatch_tokens = 64\nmicrobatch_tokens = 128\nschedule = { kind = \"constant\", warmup_steps = 1 }\n\
        weight_decay = 0.2\nbeta1 = 0.8\nbeta2 = 0.9\nmax_gradient_norm = 2.0\nevaluation_every_steps = 3\nevaluation_problems = 4\n\
        checkpoint_every_steps = 2\nstart = { kind = \"path\", path = \"m\" }\ntexts = { kind = \"jsonl\", path = \"d\", response_field = \"r\" }\n";
    let today = "steps = 5\nmodel = { path = \"m\" }\ndata = { path = \"d\", response_field = \"r\" }\n\
        [update]\nlearning_rate = 1e-3\nbatch_tokens = 64\nmicrobatch_tokens = 128\nschedule = { kind = \"constant\", warmup_steps = 1 }\n\
        weight_decay = 0.2\nbeta1 = 0.8\nbeta2 = 0.9\nmax_gradient_norm = 2.0\n\
        [evaluation]\nevery_steps = 3\nproblems = 4\n[record]\ncheckpoint_every_steps = 2\n";
    let read = |text: &str, set: &[&str]| PretrainConfig::from_toml(text, set.iter().copied());
    let config = read(today, &[]).unwrap();
    assert_eq!(read(earlier, &[]).unwrap(), config);
    assert_eq!(read(&config.to_toml(), &[]).unwrap(), config, "a written plan reads as itself");
    let set = ["learning_rate=0.5", "start.path=x", "texts.path=y", "checkpoint_every_steps=9"];
    let set_today =
        ["update.learning_rate=0.5", "model.path=x", "data.path=y", "record.checkpoint_every_steps=9"];
    assert_eq!(read(earlier, &set).unwrap(), read(today, &set_today).unwrap());
    let said = read("learning_rate = 1.0\n[update]\nlearning_rate = 2.0", &[]).unwrap_err().to_string();
    assert!(said.contains("config.learning_rate: an earlier name of update.learning_rate"), "{said}");
    let said = read("[update]\nlearn_rate = 2.0", &[]).unwrap_err().to_string();
    assert!(said.contains("learning_rate"), "{said}");
}

#[test]
fn the_config_of_the_built_in_model_keeps_its_values() {
    let config = PretrainConfig::from_toml(include_str!("../../../../../configs/base.toml"), []).unwrap();
    assert_eq!(
        (config.steps, config.update.learning_rate, config.record.checkpoint_every_steps),
        (1500, 2e-3, 300)
    );
    assert_eq!(config.model, Start::Fresh(fresh::Shape::default()));
}

#[test]
fn hybrids_differ_from_base_models_in_their_layers_alone() {
    let read = |text: &str| PretrainConfig::from_toml(text, []).unwrap();
    let pairs = [
        (
            include_str!("../../../../../configs/base.toml"),
            include_str!("../../../../../configs/base-hybrid.toml"),
        ),
        (
            include_str!("../../../../../configs/base-14m.toml"),
            include_str!("../../../../../configs/base-hybrid-14m.toml"),
        ),
    ];
    for (dense, hybrid) in pairs.map(|(dense, hybrid)| (read(dense), read(hybrid))) {
        hybrid.check().unwrap();
        let Start::Fresh(shape) = dense.model.clone() else { panic!("not fresh") };
        let model = Start::Fresh(fresh::Shape { is_hybrid: true, ..shape });
        assert_eq!(hybrid, PretrainConfig { name: hybrid.name.clone(), model, ..dense });
    }
}

#[test]
fn larger_base_models_differ_from_the_small_one_in_shape_and_rate_alone() {
    let read = |text: &str| PretrainConfig::from_toml(text, []).unwrap();
    let base = read(include_str!("../../../../../configs/base.toml"));
    let larger = [
        (include_str!("../../../../../configs/base-5m.toml"), "base-5m", 4_747_264),
        (include_str!("../../../../../configs/base-14m.toml"), "base-14m", 14_198_784),
        (include_str!("../../../../../configs/base-40m.toml"), "base-40m", 39_393_280),
    ];
    for (text, name, n_matrix_weights) in larger {
        let config = read(text);
        config.check().unwrap();
        let Start::Fresh(shape) = config.model.clone() else { panic!("{name}: not fresh") };
        let heads = (2 * shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim;
        let layer = shape.width * (heads + 3 * shape.ffn_width);
        assert_eq!(shape.n_layers * layer + 112 * shape.width, n_matrix_weights, "{name}");
        let mut as_base = PretrainConfig { name: base.name.clone(), model: base.model.clone(), ..config };
        as_base.update.learning_rate = base.update.learning_rate;
        assert_eq!(as_base, base, "{name}");
    }
}

#[test]
fn the_best_loss_is_the_lowest_and_the_first_of_equals() {
    let evaluated = |step, eval_loss| PretrainMetrics {
        schema: SCHEMA,
        step,
        loss: 1.0,
        entropy_mean: 0.0,
        n_tokens: 1,
        n_scored: 1,
        learning_rate: 0.0,
        gradient_norm: 0.0,
        eval_accuracy: None,
        eval_loss,
        tokens_per_second: 0.0,
        preference: None,
        reward_model: None,
        state_sha256: None,
        extra: Extra::new(),
    };
    let losses = [Some(0.5), None, Some(0.25), Some(0.75), Some(0.25)];
    let mut best = None;
    let steps = (1..).zip(losses).map(|(step, loss)| {
        best = better(best.take(), &evaluated(step, loss));
        best.as_ref().unwrap().step
    });
    assert_eq!(steps.collect::<Vec<_>>(), [1, 1, 3, 3, 3]);
    assert!(better(None, &evaluated(1, None)).is_none());
}

#[test]
fn what_excludes_learning_from_pairs_is_refused() {
    let checked = |defaults: PretrainConfig, set: &[&str]| {
        let raw = stapo_core::settings::RawConfig::new("", set.to_vec()).unwrap();
        let config = PretrainConfig::with_defaults(&defaults, &raw).unwrap();
        config.check().map_err(|error| error.to_string())
    };
    assert_eq!(checked(PretrainConfig::ranking(), &[]), Ok(()));
    assert_eq!(checked(PretrainConfig::fine_tuning(), &["loss_on=everything"]), Ok(()));
    for (set, expected) in [
        ("loss_on=everything", "config.loss_on: everything, but responses are compared"),
        ("reward_model.center_coefficient=-0.1", "config.reward_model.center_coefficient: -0.1, expected"),
        ("preference={}", "config.preference: given together with reward_model"),
        ("model={kind=\"fresh\"}", "config.model: a fresh model knows no text to rank"),
    ] {
        let said = checked(PretrainConfig::ranking(), &[set]).unwrap_err();
        assert!(said.starts_with(expected), "{set}: {said}");
    }
}

/// Of sources with the shares 1 and 3, a quarter of the examples are of the first.
#[test]
fn a_mixture_takes_each_source_by_its_share() {
    let folder = tempfile::tempdir().unwrap();
    let part = |name: &str, share: f64| {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("{{\"text\": \"{}\"}}\n", if share > 1.0 { "2" } else { "1" }))
            .unwrap();
        format!("{{share={share:?},texts={{kind=\"jsonl\",path={path:?}}}}}")
    };
    let parts = format!("data={{kind=\"mixture\",parts=[{},{}]}}", part("a", 1.0), part("b", 3.0));
    let raw = stapo_core::settings::RawConfig::new("", ["steps=1", parts.as_str()]).unwrap();
    let config = PretrainConfig::with_defaults(&PretrainConfig::fine_tuning(), &raw).unwrap();
    let pretrainer = Pretrainer::new(&config, Path::new("unused"), &device(), Programs::Never).unwrap();
    let model = &pretrainer.learner.model;
    let first = model.tokenizer().unwrap().encode("1").unwrap()[0];
    let is_of_a =
        |seed: u64, at: u64| pretrainer.texts.sequences(model, seed, at).unwrap()[0].tokens[0] == first;
    let chosen = |seed: u64| (0..400).map(|at| is_of_a(seed, at)).collect::<Vec<_>>();
    let n = chosen(7).iter().filter(|is| **is).count();
    // The standard deviation is 8.7.
    assert!((74..=126).contains(&n), "{n} of 400");
    assert_ne!(chosen(7), chosen(8));
}
