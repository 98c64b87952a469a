use super::*;

fn complaint(text: &str, overrides: &[&str]) -> String {
    let read = Config::from_toml(text, overrides.iter().copied());
    match read.map_err(PlanError::from).and_then(Plan::resolve) {
        Ok(_) => panic!("{text} {overrides:?} must be refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn an_empty_config_is_the_builtin_run() {
    let plan = Plan::resolve(Config::from_toml("", []).unwrap()).unwrap();
    assert_eq!(plan.config, Config::default());
    assert_eq!(plan.objective, stapo_core::ObjectiveSpec::from_preset("stapo").unwrap());
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
    let cases: [(&str, &[&str], &str); 14] = [
        ("stepz = 3", &[], "config.stepz: unknown key `stepz`"),
        ("stepz = 3", &[], "did you mean `steps`?"),
        ("[rollout]\ngroup_sise = 3", &[], "config.rollout.group_sise: unknown key `group_sise`"),
        ("steps = \"many\"", &[], "config.steps: invalid type"),
        ("", &["rollout.group_size=1"], "config.rollout.group_size: 1 expected at least 2"),
        ("", &["rollout.temperature=0"], "config.rollout.temperature: 0 expected a positive number"),
        ("", &["update.problems_per_minibatch=64"], "is above rollout.problems_per_step"),
        ("", &["update.microbatch_tokens=100"], "is below the longest sequence, 160 tokens"),
        ("", &["update.learning_rate=-1"], "config.update.learning_rate: -1 expected a positive number"),
        ("", &["name=../x"], "config.name: ../x expected letters"),
        ("", &["reward.right=-2"], "expected a number above reward.wrong"),
        ("[objective]\npreset = \"stpo\"", &[], "did you mean `stapo`?"),
        ("[task]\nkind = \"arithmetics\"", &[], "did you mean `arithmetic`?"),
        ("[model]\nkind = \"path\"", &[], "missing field `path`"),
    ];
    for (text, overrides, expected) in cases {
        let said = complaint(text, overrides);
        assert!(said.contains(expected), "{text} {overrides:?}: {said}");
    }
}

#[test]
fn schedules_warm_up_and_come_down() {
    let constant = Schedule::Constant { warmup_steps: 4 };
    assert_eq!([0, 1, 3, 4, 100].map(|s| constant.factor(s)), [0.25, 0.5, 1.0, 1.0, 1.0]);
    let cosine = Schedule::Cosine { warmup_steps: 2, total_steps: 10, final_factor: 0.1 };
    assert_eq!(cosine.factor(1), 1.0);
    assert_eq!(cosine.factor(2), 1.0);
    assert!((cosine.factor(6) - 0.55).abs() < 1e-12);
    assert!((cosine.factor(10) - 0.1).abs() < 1e-12 && (cosine.factor(1000) - 0.1).abs() < 1e-12);
}
