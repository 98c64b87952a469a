//! Overrides of absent tables, and values without effect.

use super::complaint;
use crate::learn::pretrain::PretrainConfig;
use crate::plan::config::*;
use crate::reward::spec::{RuleSpec, VerifierSpec};

#[test]
fn an_override_may_name_a_key_of_an_absent_table() {
    let set = [
        "task.verifier.mode=exact",
        "update.reuse.max=3",
        "rollout.overlong.max_tokens=90",
        "rollout.overlong.buffer_tokens=9",
        "rollout.lengths.mean=20",
        "rollout.lengths.sigma=0.5",
        "rollout.chat_arguments.deep.key=1",
        "model.lora.rank=4",
    ];
    let config = Config::from_toml("", set).unwrap();
    let exact = VerifierSpec::Rule(RuleSpec { mode: stapo_verify::Mode::Exact, ..RuleSpec::default() });
    assert_eq!(config.update.reuse, Some(Reuse { max: 3, ..Reuse::default() }));
    assert_eq!(config.rollout.overlong, Some(OverlongShaping { max_tokens: 90, buffer_tokens: 9 }));
    assert_eq!(config.rollout.lengths, Some(Lengths { mean: 20.0, sigma: 0.5 }));
    assert_eq!(config.lora.unwrap().rank, Some(4));
    assert_eq!(config.task.verifier(), &exact);
    let supervised = PretrainConfig::fine_tuning();
    let rows = ["data={kind=\"jsonl\",path=\"a\"}", "data.chat_arguments.x=1"];
    assert!(PretrainConfig::with_defaults(&supervised, &RawConfig::new("", rows).unwrap()).is_ok());
    // Keys that the type does not have are refused, unlike those that it has.
    assert!(complaint("", &["update.reus.max=4"]).contains("did you mean `reuse`?"));
    assert!(complaint("", &["rollout.lengths.mean=20"]).contains("the key `sigma` is missing"));
    assert!(complaint("", &["rollout.xyzzy.a=1"]).contains("lengths, source"));
}

/// The date of templates that ask for one, with quotes and without.
#[test]
fn a_date_is_a_text_for_templates() {
    let given = ["chat_arguments = { today = 2026-11-18 }", "chat_arguments = { today = \"2026-11-18\" }"];
    for text in given.map(|line| format!("[rollout]\n{line}")) {
        let config = Config::from_toml(&text, []).unwrap();
        assert_eq!(
            PromptStyle::from_rollout(&config.rollout).chat_arguments["today"],
            "2026-11-18",
            "{text}"
        );
    }
    let config = Config::from_toml("", ["rollout.chat_arguments.today=2026-11-18"]).unwrap();
    assert_eq!(PromptStyle::from_rollout(&config.rollout).chat_arguments["today"], "2026-11-18");
}

#[test]
fn values_that_have_no_effect_or_always_one_are_refused() {
    let cases = [
        ("update.states=8bit", "config.update.states: 8bit is for a GPU; the CPU keeps f32 states"),
        ("task.held_out_share=1", "config.task.held_out_share: 1 leaves no problem to train on"),
        ("evaluation.target_accuracy=90", "evaluation.target_accuracy: 90, expected a number from 0 to 1"),
        ("evaluation.target_accuracy=-1", "evaluation.target_accuracy: -1, expected a number"),
        ("canaries.max_unjudged_share=5", "canaries.max_unjudged_share: 5, expected"),
        ("canaries.entropy_collapse_factor=9", "canaries.entropy_collapse_factor: 9, expected"),
        ("canaries.entropy_explosion_factor=0", "canaries.entropy_explosion_factor: 0, expected at least 1"),
        ("evaluation.benchmark_limit=3", "evaluation.benchmark_limit: given: has no effect"),
        ("update.schedule.total_steps=9", "update.schedule.total_steps: 9 has no effect with"),
    ];
    for (set, expected) in cases {
        let said = complaint("", &[set]);
        assert!(said.contains(expected), "{set}: {said}");
    }
    // The steps of a warm-up by share follow from the total, and the ends of a share are shares.
    let set = [
        "update.schedule={kind=\"constant\", warmup_share=0.1, total_steps=9}",
        "evaluation.target_accuracy=1",
    ];
    assert!(Plan::resolve(Config::from_toml("", set).unwrap()).is_ok());
}

#[test]
fn a_preset_may_stand_for_the_objective_and_a_path_for_the_task() {
    let preset = |text: &str, set: &[&str]| {
        let config = Config::from_toml(text, set.iter().copied()).map_err(|error| error.to_string())?;
        Plan::resolve(config).map(|plan| plan.objective.ratio).map_err(|error| error.to_string())
    };
    let gspo = preset("", &["objective.preset=gspo"]).unwrap();
    assert_eq!(preset("objective = \"gspo\"", &[]).unwrap(), gspo);
    assert_eq!(preset("", &["objective=gspo"]).unwrap(), gspo);
    assert_ne!(preset("", &[]).unwrap(), gspo);
    let said = preset("objective = \"gpso\"", &[]).unwrap_err();
    assert!(said.contains("did you mean `gspo`"), "{said}");

    let kind = |text: &str, set: &[&str]| Config::from_toml(text, set.iter().copied()).unwrap().task.kind();
    assert_eq!(kind("", &["task.path=x.jsonl"]), "jsonl");
    assert_eq!(kind("[task]\npath = \"x.parquet\"", &[]), "parquet");
    assert_eq!(kind("[task]\npath = [\"x.csv\", \"y/*.json\"]", &[]), "file");
    assert_eq!(kind("[task]\npath = \"x.csv\"", &["task.max_rows=3", "task.problem_field=q"]), "file");
    let said = Config::from_toml("", ["task.kind=arithmetic", "task.path=x.csv"]).unwrap_err().to_string();
    assert!(said.contains("unknown key `path`"), "{said}");
}

#[test]
fn settings_of_other_programs_are_answered_with_keys_that_exist() {
    let said = |set: &str| Config::from_toml("", [set]).unwrap_err().to_string();
    assert!(said("num_generations=8").contains("TRL's `num_generations` is `rollout.group_size`"));
    assert!(said("rollout.n=8").contains("verl's `actor_rollout_ref.rollout.n` is `rollout.group_size`"));
    assert!(said("actor_rollout_ref.actor.optim.lr=1e-6").contains("`update.learning_rate`"));
    assert!(said("actor_rollout_ref.rollout.top_p=0.9").contains("has no counterpart here"));
    let schema = schema::<Config>().to_string();
    for setting in settings::peer_settings() {
        let keys = setting
            .ours
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|text| text.contains('.') && !text.contains('/'));
        for key in keys.filter(|key| !key.starts_with("--") && *key != "metrics.jsonl") {
            let path = key.split([' ', '=']).next().unwrap_or_default();
            let last = path.rsplit('.').next().unwrap_or_default();
            assert!(
                schema.contains(&format!("\"{last}\"")),
                "{}: {} names {key}",
                setting.page,
                setting.name
            );
        }
    }
}

#[test]
fn settings_that_exclude_each_other_are_refused() {
    let judge = "task.verifier={kind=\"judge\",model=\"m\"}";
    let judges = "rewards=[{name=\"a\",verifier={kind=\"judge\",model=\"m\"}},{name=\"b\",verifier={kind=\"judge\",model=\"n\"}}]";
    let source = "rollout.source={kind=\"jsonl\",path=\"x\"}";
    let game = ["task={kind=\"guess\"}", "environment={kind=\"guess\"}"];
    let cases: [(&[&str], &str); 9] = [
        (&["device=cuda", "update.sum=tokens"], "config.update.sum: tokens is for the CPU"),
        (
            &["device=cuda", "model.lora.rank=4", "update.states=8bit"],
            "config.update.states: 8bit would round",
        ),
        (&[source, "rollout.draft=builtin"], "config.rollout.draft: builtin has nothing to draft"),
        (&["evaluation.benchmark_samples=2"], "config.evaluation.benchmark_samples: given: has no effect"),
        (
            &["evaluation.benchmark_template=\"{{problem}}\""],
            "config.evaluation.benchmark_template: given: has no effect",
        ),
        (&[judges], "config.rewards.verifier: several judges or reward models"),
        (&[game[0], game[1], judge], "config.environment: given together with a judge"),
        (&[game[0], game[1], source], "config.rollout.source: given: has no meaning for episodes"),
        (
            &["evaluation.benchmarks=[\"gsm8k\"]", "evaluation.best=math"],
            "config.evaluation.best: math is neither",
        ),
    ];
    for (set, expected) in cases {
        let said = complaint("", set);
        assert!(said.starts_with(expected), "{set:?}: {said}");
    }
}

/// The value at a limit is taken, the next one is refused.
#[test]
fn numbers_of_updates_and_records_have_limits() {
    for (taken, refused) in [
        ("update.weight_decay=0", "update.weight_decay=-0.1"),
        ("update.beta1=0", "update.beta1=1"),
        ("update.beta2=0", "update.beta2=1"),
        ("update.epsilon=1e-300", "update.epsilon=0"),
        ("update.max_gradient_norm=1e-300", "update.max_gradient_norm=0"),
        ("record.checkpoint_every_steps=1", "record.checkpoint_every_steps=0"),
        ("record.keep_checkpoints=1", "record.keep_checkpoints=0"),
        ("record.responses_every_steps=1", "record.responses_every_steps=0"),
        ("rollout.lengths={mean=0.5,sigma=0.0}", "rollout.lengths={mean=0.0,sigma=0.0}"),
        ("rollout.lengths={mean=5.0,sigma=0.0}", "rollout.lengths={mean=5.0,sigma=-0.1}"),
        ("rollout.group_size=65536", "rollout.group_size=65537"),
        ("rollout.kv_mib=1", "rollout.kv_mib=0"),
        ("evaluation.samples=1", "evaluation.samples=0"),
        ("evaluation.problems=1", "evaluation.problems=0"),
        ("canaries.entropy_explosion_factor=1", "canaries.entropy_explosion_factor=0.99"),
    ] {
        assert!(Plan::resolve(Config::from_toml("", [taken]).unwrap()).is_ok(), "{taken}");
        let key = refused.split('=').next().unwrap();
        let said = complaint("", &[refused]);
        assert!(said.starts_with(&format!("config.{key}")), "{refused}: {said}");
    }
}

/// Records have a benchmark of a file by this name, and so `evaluation.best` has.
#[test]
fn the_best_evaluation_may_be_that_of_a_compressed_file() {
    for (file, name) in [
        ("own.jsonl", "own"),
        ("data/own.jsonl.gz", "own"),
        ("data/own.v2.csv.zst", "own.v2"),
        ("gsm8k", "gsm8k"),
    ] {
        let config = |best: &str| {
            let set = [format!("evaluation.benchmarks=[{file:?}]"), format!("evaluation.best={best:?}")];
            Config::from_toml("", set.iter().map(String::as_str)).and_then(Plan::resolve)
        };
        assert!(config(name).is_ok(), "{file}");
        assert!(config("own.jsonl").is_err(), "{file}");
    }
}
