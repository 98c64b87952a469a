use super::*;
use std::path::Path;

mod overrides;
mod schema;

fn complaint(text: &str, overrides: &[&str]) -> String {
    let read = Config::from_toml(text, overrides.iter().copied());
    match read.and_then(Plan::resolve) {
        Ok(_) => panic!("{text} {overrides:?} must be refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn an_empty_config_is_the_builtin_run() {
    let plan = Plan::resolve(Config::from_toml("", []).unwrap()).unwrap();
    assert_eq!(plan.config, Config::default());
    assert_eq!(plan.objective, ObjectiveSpec::from_preset("stapo").unwrap());
    assert_eq!(plan.updates_per_step(), 2);
}

#[test]
fn a_plan_resolves_to_itself() {
    for preset in stapo_core::objective::presets() {
        let text = format!("[objective]\npreset = \"{}\"", preset.name);
        let plan = Plan::resolve(Config::from_toml(&text, []).unwrap()).unwrap();
        let again = Plan::resolve(Config::from_toml(&plan.to_toml(), []).unwrap()).unwrap();
        assert_eq!(again.objective, plan.objective, "{}", preset.name);
        assert_eq!(again.task, plan.task);
        assert_eq!(again.to_toml(), plan.to_toml());
    }
}

#[test]
fn wrong_keys_types_and_values_are_named_with_the_remedy() {
    let cases: [(&str, &[&str], &str); 20] = [
        ("stepz = 3", &[], "config.stepz: unknown key `stepz`"),
        ("stepz = 3", &[], "did you mean `steps`?"),
        ("[rollout]\ngroup_sise = 3", &[], "config.rollout.group_sise: unknown key `group_sise`"),
        ("steps = \"many\"", &[], "config.steps: must be a whole number without a sign, not \"many\""),
        (
            "learning_rate = 1",
            &[],
            "config.learning_rate: unknown key `learning_rate`\nhint: did you mean `update.learning_rate`?",
        ),
        ("", &["rollout.group_size=1"], "config.rollout.group_size: 1, expected at least 2"),
        ("", &["rollout.temperature=0"], "rollout.temperature: 0, expected a number from 1e-6 to 1e6"),
        ("", &["rollout.temperature=1e-300"], ", expected a number from 1e-6 to 1e6"),
        ("", &["update.problems_per_minibatch=64"], "is above rollout.problems_per_step"),
        ("", &["update.microbatch_tokens=100"], "is below the longest sequence, 160 tokens"),
        ("", &["update.learning_rate=-1"], "config.update.learning_rate: -1, expected a positive number"),
        ("", &["name=../x"], "config.name: ../x, expected letters"),
        ("", &["reward.right=-2"], "expected a number above reward.wrong"),
        ("[objective]\npreset = \"stpo\"", &[], "did you mean `stapo`?"),
        ("[task]\nkind = \"arithmetics\"", &[], "did you mean `arithmetic`?"),
        ("[model]\nkind = \"path\"", &[], "config.model: the key `path` is missing"),
        ("reference = { kind = \"builtin\" }", &[], "config.reference: given, but the objective has no KL"),
        (
            "",
            &["objective.off_policy={kind=\"tis\"}"],
            "config.objective.off_policy.kind: tis reads the log-probs of",
        ),
        (
            "",
            &["objective.off_policy={kind=\"icepop\"}"],
            "hint: leave it out, or give rollouts with log-probs: rollout.source",
        ),
        ("rollout = 3", &[], "config.rollout: must be a table, not 3"),
    ];
    for (text, overrides, expected) in cases {
        let said = complaint(text, overrides);
        assert!(said.contains(expected), "{text} {overrides:?}: {said}");
    }
}

#[test]
fn inputs_that_the_loop_lacks_or_does_not_read_are_refused() {
    let dasd = "objective.distillation={kind=\"dasd\"}";
    let solution = "teacher={kind=\"solution\"}";
    let file = "task={kind=\"jsonl\", path=\"x.jsonl\"}";
    let rollouts = "rollout.source={kind=\"jsonl\", path=\"x\"}";
    let sampler = "rollout.source={kind=\"jsonl\", path=\"x\", behavior=\"sampler\"}";
    let one = "rewards=[{name=\"a\"}]";
    let cases: [(&[&str], &str); 36] = [
        (&["update.reuse={max=0}"], "config.update.reuse.max: 0, expected at least 1"),
        (&["update.reuse={tau=inf}"], "config.update.reuse.tau: inf, expected a finite number"),
        (&["update.reuse={window=1}"], "config.update.reuse.window: 1, expected at least 2"),
        (&["update.reuse={gate=\"lmhead\"}"], "did you mean `lm_head`?"),
        (&["update.reuse={uses=3}"], "unknown key `uses`"),
        (&[dasd], "config.teacher: absent, and objective.distillation learns from one"),
        (&[solution], "config.teacher: given, but the objective has no distillation"),
        (&[dasd, solution, file], "hint: name the field of the solution with task.solution_field"),
        (&[rollouts, "rollout.max_redraws=2"], "config.rollout.max_redraws: 2 cannot redraw"),
        (&["rollout.top_p=0.9"], "config.rollout.top_p: 0.9 needs rollout.top_k"),
        (&["rollout.top_k=129"], "config.rollout.top_k: 129, expected a number from 1 to 128"),
        (&["rollout.top_k=20", "rollout.min_p=1.5"], "config.rollout.min_p: 1.5, expected a share"),
        (&["rollout.top_k=20", "device=cuda"], "config.rollout.top_k: 20 cannot be trained exactly on a GPU"),
        (
            &["rollout.speculate=off", "rollout.draft=builtin"],
            "config.rollout.draft: builtin has nothing to draft",
        ),
        (&[sampler, "objective.off_policy={kind=\"mis\"}"], "mis weighs the policy against the sampler"),
        (&["rollout.source={kind=\"csv\", path=\"x\"}"], "unknown kind `csv`"),
        (&[one, "reward.right=2"], "config.reward: given together with [[rewards]]"),
        (
            &[one, "task.verifier={kind=\"rule\", mode=\"exact\"}"],
            "config.task.verifier: given together with",
        ),
        (&["rewards=[{name=\"a\"}, {name=\"a\"}]"], "config.rewards.name: a is there twice"),
        (&["rewards=[{name=\"\"}]"], "config.rewards.name: \"\", expected letters"),
        (&["rewards=[{name=\"a\", weight=0}]"], "config.rewards.weight: 0, expected a number other than 0"),
        (&["rewards=[{name=\"a\", weight=inf}]"], "config.rewards.weight: inf, expected"),
        (&["rewards=[{name=\"a\", right=-1}]"], "config.rewards.right: -1, expected a number above wrong"),
        (&["rewards=[{weight=1}]"], "the key `name` is missing"),
        (
            &["update.schedule={kind=\"linear\", warmup_steps=1, warmup_share=0.1}"],
            "config.update.schedule.warmup_share: 0.1 is given together with warmup_steps",
        ),
        (
            &["update.schedule.warmup_share=2"],
            "config.update.schedule.warmup_share: 2, expected a number from 0",
        ),
        (
            &["update.schedule={kind=\"linear\", total_steps=0}"],
            "config.update.schedule.total_steps: 0, expected",
        ),
        (
            &["update.schedule={kind=\"cosine\", final_factor=-1}"],
            "config.update.schedule.final_factor: -1, expected at least 0",
        ),
        (
            &["update.schedule={kind=\"constant\", final_factor=0.1}"],
            "config.update.schedule.final_factor: 0.1 is given together with kind = \"constant\"",
        ),
        (&["evaluation.best=gsm8k"], "config.evaluation.best: gsm8k is neither held_out nor none"),
        (&["evaluation.patience=0"], "config.evaluation.patience: 0, expected at least 1"),
        (&["evaluation.idle_patience=0"], "config.evaluation.idle_patience: 0, expected at least 1"),
        (&["evaluation.patience=2", "evaluation.every_steps=0"], "hint: set evaluation.every_steps"),
        (&["evaluation.patience=2", "evaluation.best=none"], "but evaluation.best is \"none\""),
        (&["evaluation.benchmark_samples=0"], "config.evaluation.benchmark_samples: 0, expected at least 1"),
        (&["rewards=[{name=\"a\", verifyer={}}]"], "did you mean `verifier`?"),
    ];
    for (overrides, expected) in cases {
        let said = complaint("", overrides);
        assert!(said.contains(expected), "{overrides:?}: {said}");
    }
    let resolved = |overrides: &[&str]| {
        Plan::resolve(Config::from_toml("", overrides.iter().copied()).unwrap()).unwrap()
    };
    assert!(resolved(&[rollouts]).notes().iter().any(|note| note.contains("are not used")));
    assert!(resolved(&[sampler]).notes().is_empty());
    assert!(resolved(&[rollouts, "objective.off_policy={kind=\"tis\"}"]).notes().is_empty());
    assert_eq!(resolved(&["update.reuse={}"]).updates_per_step(), 8);
}

#[test]
fn a_model_is_named_by_its_path_alone() {
    let read = |text: &str, overrides: &[&str]| Config::from_toml(text, overrides.iter().copied()).unwrap();
    let named = ModelSource::Path { path: "x".to_string() };
    for (text, overrides) in [
        ("model = \"x\"", &[] as &[&str]),
        ("[model]\npath = \"x\"", &[]),
        ("[model]\nkind = \"path\"\npath = \"x\"", &[]),
        ("", &["model=x"]),
        ("", &["model.path=x"]),
        ("", &["model.path=x", "model.kind=path"]),
        ("model = \"y\"", &["model.path=x"]),
    ] {
        assert_eq!(read(text, overrides).model, named, "{text} {overrides:?}");
    }
    assert_eq!(read("model = \"x\"", &["model=builtin"]).model, ModelSource::Builtin);
    assert_eq!(read("[model]\npath = \"builtin\"", &[]).model, ModelSource::Builtin);
    assert_eq!(read("", &["reference.path=x"]).reference, Some(named));
    assert_eq!(read("", &["teacher.path=x"]).teacher, Some(TeacherSource::Path { path: "x".to_string() }));
    assert_eq!(read("teacher = \"solution\"", &[]).teacher, Some(TeacherSource::Solution { template: None }));
    let said = complaint("[model]\nkind = \"builtin\"\npath = \"x\"", &[]);
    assert!(said.contains("config.model") && said.contains("path"), "{said}");
}

#[test]
fn an_error_knows_the_key_it_is_about() {
    let key = |text: &str| Config::from_toml(text, []).and_then(Plan::resolve).expect_err(text).key();
    for (text, expected) in [
        ("stepz = 3", "stepz"),
        ("[rollout]\ngroup_size = \"x\"", "rollout.group_size"),
        ("[rollout]\ngroup_size = 1", "rollout.group_size"),
        ("[task]\nkind = \"arithmetic\"\noperators = 3", "task.operators"),
        ("objective = { preset = \"stpo\" }", "objective.preset"),
        (
            "objective = { preset = \"stapo\", masks = [{ kind = \"spurious\", tau_q = 1 }] }",
            "objective.masks.0.tau_q",
        ),
    ] {
        assert_eq!(key(text).as_deref(), Some(expected), "{text}");
    }
}

#[test]
fn schedules_warm_up_and_come_down() {
    let constant = Schedule::constant(4);
    assert_eq!([0, 1, 3, 4, 100].map(|s| constant.factor(s, 7)), [0.25, 0.5, 1.0, 1.0, 1.0]);
    let read = |text: &str| -> Plan {
        Plan::resolve(Config::from_toml(&format!("[update]\nschedule = {text}"), []).unwrap()).unwrap()
    };
    let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
    let given = "{ kind = \"cosine\", warmup_steps = 2, total_steps = 10, final_factor = 0.1 }";
    let cosine = read(given).config.update.schedule;
    assert_eq!([cosine.factor(1, 99), cosine.factor(2, 99)], [1.0, 1.0]);
    assert!(near(cosine.factor(6, 99), 0.55));
    assert!(near(cosine.factor(10, 99), 0.1) && near(cosine.factor(1000, 99), 0.1));
    // The default plan has 80 steps of 2 updates.
    let linear = read("{ kind = \"linear\", warmup_share = 0.1 }");
    assert_eq!(linear.n_updates(), 160);
    let factors = [0, 15, 16, 88, 160, 161].map(|update| linear.learning_rate(update) / 1e-4);
    let expected = [1.0 / 16.0, 1.0, 1.0, 0.5, 0.0, 0.0];
    assert!(factors.iter().zip(expected).all(|(a, b)| near(*a, b)), "{factors:?}");
    assert!(read("{ kind = \"cosine\" }").config.update.schedule.follows_the_plan());
    assert!(read("{ kind = \"constant\", warmup_share = 0.1 }").config.update.schedule.follows_the_plan());
    assert!(!cosine.follows_the_plan() && !constant.follows_the_plan());
    let shared = Config::from_toml("", ["update.schedule.warmup_share=0.5"]).unwrap().update.schedule;
    assert_eq!(shared, read("{ kind = \"constant\", warmup_share = 0.5 }").config.update.schedule);
}

/// The plans of all files in configs/ except base.toml and its larger shapes, which are for pretraining.
fn shipped() -> Vec<(String, Plan)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs");
    let paths =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    let runs =
        paths.filter(|path| path.file_stem().is_some_and(|stem| !stem.to_string_lossy().starts_with("base")));
    runs.map(|path| {
        let text = std::fs::read_to_string(&path).unwrap();
        let config = Config::from_toml(&text, []).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let plan = Plan::resolve(config).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        (path.file_stem().unwrap().to_string_lossy().into_owned(), plan)
    })
    .collect()
}

#[test]
fn shipped_configs_are_what_their_names_say() {
    let shipped = shipped();
    for name in ["stapo", "grpo", "justrl", "entropy20", "dapo", "qwen3-1.7b", "qwen3-8b", "qwen3-14b"] {
        let (_, plan) = shipped.iter().find(|(stem, _)| stem == name).unwrap_or_else(|| panic!("{name}"));
        let preset = if name.starts_with("qwen3") { "stapo" } else { name };
        let expected = stapo_core::objective::preset(preset).unwrap();
        assert_eq!(plan.objective, expected.objective, "{name}");
        assert_eq!(plan.notes(), Vec::<String>::new(), "{name}");
    }
}

/// The values of the STAPO paper's training recipe.
#[test]
fn the_papers_recipe_has_the_papers_values() {
    for (name, plan) in shipped().iter().filter(|(name, _)| name.starts_with("qwen3")) {
        let Config { rollout, reward, update, .. } = &plan.config;
        assert_eq!(
            (rollout.problems_per_step, rollout.group_size, rollout.temperature),
            (256, 8, 1.0),
            "{name}"
        );
        assert_eq!((rollout.max_prompt_tokens, rollout.max_response_tokens), (1024, 15360), "{name}");
        assert_eq!(
            (rollout.truncated, rollout.max_redraws, rollout.overlong),
            (Truncated::Keep, 0, None),
            "{name}"
        );
        assert_eq!((update.problems_per_minibatch, plan.updates_per_step()), (64, 4), "{name}");
        // 3,000 optimizer steps, evaluated every 20 of them.
        assert_eq!((4 * plan.config.steps, 4 * plan.config.evaluation.every_steps), (3000, 20), "{name}");
        assert_eq!((update.learning_rate, update.schedule), (1e-6, Schedule::constant(10)), "{name}");
        assert_eq!((update.max_gradient_norm, update.weight_decay), (1.0, 0.1), "{name}");
        assert_eq!((reward.right, reward.wrong), (1.0, -1.0), "{name}");
        let TaskSpec::Parquet(rows) = &plan.task else { panic!("{name}: {:?}", plan.task) };
        let template = rows.template.as_deref().unwrap();
        assert!(
            template.ends_with("Please reason step by step, and put your final answer within \\boxed{}.")
        );
    }
}

#[test]
fn a_preset_without_what_its_paper_asks_of_the_loop_is_noted() {
    let plan = Plan::resolve(Config::from_toml("objective = { preset = \"dapo\" }", []).unwrap()).unwrap();
    let notes = plan.notes().join("; ");
    assert!(notes.contains("max_redraws is 0") && notes.contains("rollout.overlong is not set"), "{notes}");
}

/// An evaluation with every key.
fn full_evaluation() -> EvaluationConfig {
    EvaluationConfig {
        target_accuracy: Some(0.9),
        benchmarks: vec!["gsm8k".into()],
        benchmark_limit: Some(1),
        benchmark_samples: Some(1),
        benchmark_template: Some("{{problem}}".into()),
        patience: Some(1),
        idle_patience: Some(1),
        ..EvaluationConfig::default()
    }
}

#[test]
fn overrides_reach_into_a_preset() {
    let read = |overrides: &[&str]| {
        Plan::resolve(Config::from_toml("", overrides.iter().copied()).unwrap()).unwrap().objective
    };
    let mut expected = ObjectiveSpec::from_preset("stapo").unwrap();
    let stapo_core::objective::Mask::Spurious { tau_p, .. } = &mut expected.masks[0] else { panic!() };
    *tau_p = 0.001;
    assert_eq!(read(&["objective.masks.0.tau_p=0.001"]), expected);
    assert_eq!(read(&["objective.preset=stapo", "objective.masks.0.tau_p=0.001"]), expected);
    assert!(read(&["objective.masks=[]"]).masks.is_empty());
    assert!(complaint("", &["objective.masks.3.tau_p=1"]).contains("has no entry `3`"));
}

/// The string literals of Rust source, without those in comments.
fn string_literals(source: &str) -> Vec<String> {
    let code =
        source.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let code = code.replace("\\\\", "").replace("\\\"", "").replace("'\"'", "");
    code.split('"').skip(1).step_by(2).map(str::to_string).collect()
}

/// The config keys that a message names, such as `update.recompute`.
fn named_keys(message: &str, sections: &[&str]) -> Vec<String> {
    let is_inside = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '.';
    let words = message.split(|c: char| !is_inside(c)).map(|word| word.trim_end_matches('.'));
    let is_key = |word: &&str| word.split_once('.').is_some_and(|(section, _)| sections.contains(&section));
    words.filter(is_key).map(str::to_string).collect()
}

#[test]
fn every_config_key_that_a_message_names_exists() {
    let sections = ["rollout", "reward", "update", "evaluation", "record", "canaries"];
    let mut config = Config::default();
    config.rollout.overlong = Some(OverlongShaping { max_tokens: 96, buffer_tokens: 19 });
    config.evaluation = full_evaluation();
    config.update.schedule = Schedule {
        kind: Curve::Cosine,
        warmup_steps: Some(1),
        warmup_share: Some(0.1),
        total_steps: Some(1),
        final_factor: Some(0.0),
    };
    config.rollout.source = Some(RolloutSourceSpec::Jsonl { path: "x".into(), behavior: Behavior::Policy });
    config.rollout.lengths = Some(Lengths { mean: 48.0, sigma: 0.8 });
    config.rollout.draft = Some("x".to_string());
    (config.rollout.top_k, config.rollout.top_p, config.rollout.min_p) = (Some(1), Some(0.5), Some(0.1));
    config.update.reuse = Some(Reuse::default());
    config.update.sum = Some(GradientSum::Microbatches);
    config.update.share_prompts = Some(true);
    let table = Value::Table(settings::to_table(&config));
    let supervised = Value::Table(settings::to_table(&crate::learn::pretrain::PretrainConfig::preferring()));
    let is_in =
        |table, key: &str| key.split('.').try_fold(table, |table: &Value, part| table.get(part)).is_some();
    let exists = |key: &str| is_in(&table, key) || is_in(&supervised, key);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
    let mut folders: Vec<PathBuf> =
        ["stapo-rl/src", "stapo-ops/src/cuda", "stapo-cli/src"].map(|folder| root.join(folder)).into();
    let mut found = std::collections::BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs")
                // Names of another program are not ours.
                && !["tests", "openrlhf"].iter().any(|part| path.to_string_lossy().contains(part))
            {
                for text in string_literals(&std::fs::read_to_string(&path).unwrap()) {
                    for key in named_keys(&text, &sections) {
                        assert!(exists(&key), "{}: {key} in {text:?}", path.display());
                        found.insert(key);
                    }
                }
            }
        }
    }
    assert!(found.len() > 20 && found.contains("update.recompute"), "{found:?}");
    assert_eq!(
        named_keys("lower update.keep, or rollout.kv_mib.", &sections),
        ["update.keep", "rollout.kv_mib"]
    );
    assert!(!exists("update.keep"), "a key that does not exist is found");
}

#[test]
fn adapters_are_a_table_of_the_model() {
    let text = "[model]\npath = \"base\"\n[model.lora]\nrank = 8\ntargets = [\"v_proj\", \"q_proj\"]\n";
    let config = Config::from_toml(text, ["model.lora.scale=rank-stabilised"]).unwrap();
    let spec = config.lora.as_ref().unwrap().spec();
    assert_eq!((spec.rank, spec.alpha, spec.factor()), (8, 16.0, 16.0 / 8f64.sqrt()));
    assert_eq!(spec.targets.iter().map(|target| target.name()).collect::<Vec<_>>(), ["q_proj", "v_proj"]);
    assert_eq!(Config::from_toml(&config.to_toml(), []).unwrap(), config);
    assert!(config.to_toml().contains("[model.lora]"), "{}", config.to_toml());
    let kept = Config::from_toml(text, ["model.path=other", "model.lora.scale=rank-stabilised"]).unwrap();
    assert_eq!((kept.lora, kept.model.to_string()), (config.lora, "other".to_string()));
    let built_in = Config::from_toml("", ["model.lora.rank=1"]).unwrap();
    assert_eq!((built_in.model, built_in.lora.unwrap().rank), (ModelSource::Builtin, Some(1)));
    for (given, word) in [
        ("model.lora.rank=0", "model.lora.rank"),
        ("model.lora.alpha=-1", "model.lora.alpha"),
        ("model.lora.targets=[\"lm_head\"]", "lm_head"),
        ("model.lora.targets=everything", "all-linear"),
        ("model.lora.targets=[]", "empty"),
        ("model.lora.ranks=3", "ranks"),
        ("model.lora.scale=big", "scale"),
        ("model.lora.base=int4", "base"),
        // The device is the CPU.
        ("model.lora.base=quantised", "model.lora.base"),
    ] {
        let read = Config::from_toml("", [given]).and_then(Plan::resolve);
        let error = read.err().unwrap_or_else(|| panic!("{given} was read")).to_string();
        assert!(error.contains(word), "{given}: {error}");
    }
    for (rank, is_taken) in
        [("model.lora.rank=12", true), ("model.lora.rank=130", false), ("model.lora.rank=136", true)]
    {
        let on_gpu = Plan::resolve(Config::from_toml("", [rank, "device=cuda"]).unwrap());
        assert_eq!(on_gpu.is_ok(), is_taken, "{rank}");
        assert!(Plan::resolve(Config::from_toml("", [rank]).unwrap()).is_ok(), "{rank}");
    }
    let quantised = Config::from_toml("", ["model.lora.base=quantised", "device=cuda"]).unwrap();
    assert_eq!(Config::from_toml(&quantised.to_toml(), []).unwrap(), quantised);
    assert_eq!(quantised.lora.as_ref().unwrap().base_storage(), BaseStorage::Quantised);
    assert!(Plan::resolve(quantised).is_ok());
    let reuse = Config::from_toml("", ["model.lora.rank=1", "update.reuse={max=2}"]).unwrap();
    assert!(Plan::resolve(reuse).unwrap_err().to_string().contains("update.reuse"));
}

#[test]
fn a_default_of_the_verifier_can_be_named() {
    let rules = |text: &str| {
        let config = Config::from_toml("", ["task.kind=arithmetic", text]).unwrap();
        let plan = Plan::resolve(config).unwrap();
        let crate::reward::VerifierSpec::Rule(rule) = plan.rewards[0].verifier else { panic!("a rule") };
        stapo_verify::Rules::from(rule)
    };
    let default = stapo_verify::Rules::default();
    assert_eq!(rules("task.verifier.form=any"), default);
    assert_eq!(rules("task.verifier.rounding=six-decimals"), default);
    let worked_out = stapo_verify::Rules { form: stapo_verify::Form::WorkedOut, ..default };
    assert_eq!(rules("task.verifier={kind=\"rule\", form=\"worked-out\"}"), worked_out);
}
