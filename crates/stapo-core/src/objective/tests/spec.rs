use super::*;

#[test]
fn every_preset_passes_its_own_check_and_survives_toml() {
    assert_eq!(presets().len(), 26);
    for (name, spec) in all_specs() {
        spec.check().unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = spec.to_toml();
        assert_eq!(ObjectiveSpec::from_toml(&text).unwrap(), spec, "{name}\n{text}");
        assert_eq!(spec.with_overrides([]).unwrap(), spec, "{name}");
    }
}

#[test]
fn a_file_may_start_from_a_preset_and_change_one_axis() {
    let spec = ObjectiveSpec::from_toml(
        "preset = \"stapo\"\nsurrogate.high = 0.3\nkl = { kind = \"k3\", beta = 0.01 }",
    )
    .unwrap();
    assert_eq!(spec.surrogate, Surrogate::Clip { low: 0.2, high: 0.3, dual: None });
    assert_eq!(spec.kl, Kl::K3 { beta: 0.01 });
    assert_eq!(spec.masks, [Mask::spurious()]);
    let other_kind =
        ObjectiveSpec::from_toml("preset = \"stapo\"\nsurrogate = { kind = \"reinforce\" }").unwrap();
    assert_eq!(other_kind.surrogate, Surrogate::Reinforce);
    let in_plan = ObjectiveSpec::from_toml("steps = 3\n[objective]\npreset = \"gspo\"").unwrap();
    assert_eq!(in_plan, ObjectiveSpec::from_preset("gspo").unwrap());
    let from_scratch =
        ObjectiveSpec::from_toml("surrogate = { kind = \"clip\", low = 0.2, high = 0.28, dual = 10.0 }")
            .unwrap();
    assert_eq!(from_scratch, ObjectiveSpec::from_preset("justrl").unwrap());
}

#[test]
fn overrides_reach_into_masks_and_axes() {
    let set = |name: &str, text: &str| ObjectiveSpec::from_preset(name).unwrap().with_overrides([text]);
    let masks = set("stapo", "masks.0.tau_p=0.001").unwrap().masks;
    assert!(matches!(masks[0], Mask::Spurious { tau_p: 0.001, q: 0.75, .. }));
    assert_eq!(set("stapo", "masks=[]").unwrap().masks, []);
    assert_eq!(set("grpo", "kl.kind=none").unwrap().kl, Kl::None);
    assert_eq!(
        set("stapo", "surrogate.dual = 10").unwrap().surrogate,
        Surrogate::Clip { low: 0.2, high: 0.28, dual: Some(10.0) }
    );
    assert_eq!(set("stapo", "mask_signals=\"behavior\"").unwrap().mask_signals, MaskSignals::Behavior);
}

/// The error message of a spec that is refused.
fn complaint(result: Result<ObjectiveSpec, SpecError>) -> String {
    result.map(|spec| spec.to_toml()).expect_err("must be refused").to_string()
}

#[test]
fn unknown_names_suggest_the_nearest() {
    let preset = |name| complaint(ObjectiveSpec::from_preset(name));
    assert!(preset("stpo").contains("unknown preset `stpo`\nhint: did you mean `stapo`?"));
    assert!(preset("entropy-20").contains("did you mean `entropy20`?"));
    assert!(preset("xyzzy").contains("known: stapo, stapo-v1"));
    let set = |text: &str| complaint(ObjectiveSpec::from_preset("stapo").unwrap().with_overrides([text]));
    assert!(
        set("masks.0.tau_q=0.1").contains("masks.0: unknown key `tau_q`")
            && set("masks.0.tau_q=0.1").contains("did you mean `tau_p`?")
    );
    assert!(set("surogate.high=0.1").contains("unknown key `surogate`\nhint: did you mean `surrogate`?"));
    assert!(set("surrogat=1").contains("unknown key `surrogat`"));
    assert!(
        set("surrogate.kind=clipp").contains("unknown kind `clipp`")
            && set("surrogate.kind=clipp").contains("did you mean `clip`?")
    );
    assert!(set("masks.3.q=0.1").contains("masks has no entry `3`; it has 1"));
    assert!(set("q").contains("has no `=`"));
    assert!(set("kl.beta=0.1").contains("kl.beta: this kind has no such key"));
    let signals = set("mask_signals=sometimes");
    assert!(
        signals.contains("unknown kind `sometimes`") && signals.ends_with("known: current, behavior"),
        "{signals}"
    );
    assert!(
        complaint(ObjectiveSpec::from_toml("preset = 3"))
            .contains("preset: must be a preset name in quotes, not 3")
    );
    assert!(complaint(ObjectiveSpec::from_toml("masks = []")).contains("surrogate"));
    assert!(complaint(ObjectiveSpec::from_toml("x = = 1")).contains("not TOML"));
}

#[test]
fn impossible_combinations_are_refused_with_the_reason() {
    let set = |name: &str, texts: &[&str]| {
        complaint(ObjectiveSpec::from_preset(name).unwrap().with_overrides(texts.iter().copied()))
    };
    let cases: [(&str, &[&str], &str); 30] = [
        ("cispo", &["ratio.kind=sequence"], "cispo weighs each token's own log-prob"),
        ("reinforce", &["ratio.kind=sequence"], "reinforce uses no ratio"),
        ("dr-grpo", &["denominator.kind=kept_tokens"], "divides by a constant length"),
        (
            "stapo",
            &["denominator={kind=\"constant\",length=10}"],
            "goes only with aggregate sequence_mean_of_token_sum",
        ),
        ("stapo", &["off_policy={kind=\"mis\",low=2.0,high=1.0}"], "off_policy.high: 1 is below low 2"),
        ("stapo", &["surrogate.high=-0.1"], "surrogate.high: -0.1, expected at least 0"),
        ("vespo", &["ratio.kind=token"], "vespo weighs a response by the ratio of its whole probabilities"),
        ("stapo", &["ratio.kind=product"], "product does not go with this surrogate"),
        ("dppo-kl", &["ratio.kind=sequence"], "it bounds the move of each token's own probability"),
        ("gmpo", &["ratio.low=0"], "ratio.low: 0, expected a positive number"),
        ("dppo-tv", &["surrogate.cap=0.5"], "surrogate.cap: 0.5, expected at least 1"),
        (
            "stapo",
            &["masks.0.threshold.kind=surprise", "masks.0.tau_p=0.001"],
            "masks.0.tau_p: 0.001 is read by threshold.kind = \"tau_p\" alone",
        ),
        ("stapo", &["masks.0.threshold={kind=\"influence\",kappa=1.5}"], "masks.0.threshold.kappa: 1.5"),
        (
            "stapo",
            &["masks.0.threshold.kind=influence", "mask_signals=behavior"],
            "behavior does not go with the threshold influence",
        ),
        (
            "reinforce++",
            &["multiple_rewards=normalize_each"],
            "normalize_each needs an advantage that normalises",
        ),
        ("stapo", &["kl_in_reward={kind=\"unbiased_k3\",beta=0.1}"], "the ratio at sampling is 1"),
        (
            "stapo",
            &["entropy_bonus={kind=\"target\",initial=2.0}"],
            "entropy_bonus.max: 1 is below initial 2",
        ),
        ("stare", &["masks.0.weight=1.6"], "masks.0.weight: 1.6, expected a number in [0.5, 1.5]"),
        (
            "stapo",
            &["surrogate.low=1.5", "surrogate.high=2"],
            "surrogate.low: 1.5, expected a number in [0, 1]",
        ),
        ("justrl", &["surrogate.dual=1.1"], "surrogate.dual: 1.1 is not above 1 + high"),
        ("stapo", &["masks.0.tau_p=2"], "masks.0.tau_p: 2, expected a probability in (0, 1]"),
        ("stapo", &["masks.0.tau_p=0"], "expected a probability in (0, 1]"),
        ("stapo", &["masks.0.q=1.5"], "masks.0.q: 1.5"),
        ("entropy20", &["masks.0.share=0"], "masks.0.share: 0, expected a share in (0, 1]"),
        ("clip-cov", &["masks.0.low=9"], "masks.0.high: 5 is not above low 9"),
        ("grpo", &["kl.beta=-1"], "kl.beta: -1, expected at least 0"),
        ("kl-cov", &["surrogate.share=1.5"], "surrogate.share: 1.5, expected a number in [0, 1]"),
        ("sapo", &["surrogate.tau_positive=0"], "tau_positive: 0, expected a positive number"),
        ("stapo", &["advantage.ddof=2"], "advantage.ddof: 2, expected 0 or 1"),
        (
            "lopti",
            &["masks=[{kind=\"low_probability_first\"},{kind=\"low_probability_first\"}]"],
            "appears twice",
        ),
    ];
    for (name, texts, reason) in cases {
        let message = set(name, texts);
        assert!(message.contains(reason), "{name} {texts:?}: {message}");
    }
}

#[test]
fn an_upper_clip_below_the_lower_one_is_a_warning() {
    let low_first =
        ObjectiveSpec::from_preset("stapo").unwrap().with_overrides(["surrogate.low=0.3"]).unwrap();
    assert_eq!(low_first.surrogate, Surrogate::Clip { low: 0.3, high: 0.28, dual: None });
    let warnings = low_first.warnings();
    assert!(
        warnings.len() == 1 && warnings[0].contains("surrogate.high 0.28 is below low 0.3"),
        "{warnings:?}"
    );
    let of_ratio = ObjectiveSpec::from_preset("gmpo").unwrap().with_overrides(["ratio.low=0.5"]).unwrap();
    let warnings = of_ratio.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("ratio.high 0.4 is below low 0.5"), "{warnings:?}");
    for (name, spec) in all_specs() {
        assert!(spec.warnings().is_empty(), "{name}: {:?}", spec.warnings());
    }
}

#[test]
fn the_deviation_is_that_of_a_sample_unless_a_key_says_otherwise() {
    let ddof = |kind: &str, key: &str| {
        let text = format!("preset = \"grpo\"\nadvantage = {{ kind = \"{kind}\"{key} }}");
        match ObjectiveSpec::from_toml(&text).unwrap().advantage {
            Advantage::GroupZScore { ddof, .. } | Advantage::GroupMeanBatchStd { ddof, .. } => ddof,
            other => panic!("{other:?}"),
        }
    };
    for kind in ["group_z_score", "group_mean_batch_std"] {
        assert_eq!((ddof(kind, ""), ddof(kind, ", ddof = 0")), (1, 0), "{kind}");
    }
}

#[test]
fn the_schema_of_an_objective_offers_every_preset() {
    let schema = serde_json::to_value(schemars::schema_for!(ObjectiveSpec)).unwrap();
    let names = schema["properties"]["preset"]["enum"].as_array().unwrap();
    for (name, _) in all_specs() {
        assert!(names.iter().any(|offered| *offered == *name), "{name}");
    }
    assert!(names.iter().any(|offered| *offered == "grpo+spurious"));
    assert!(schema.get("required").is_none(), "a preset gives every axis");
}

#[test]
fn s2t_is_not_added_twice() {
    for name in ["stapo", "stapo-v1", "stapo-taco"] {
        let message = complaint(ObjectiveSpec::from_preset(&format!("{name}+spurious")));
        let expected =
            format!("{name}+spurious would silence twice: {name} has S2T already\nhint: take {name}");
        assert!(message.contains(&expected), "{message}");
    }
    assert_eq!(ObjectiveSpec::from_preset("gspo+spurious").unwrap().masks, [Mask::spurious()]);
}

#[test]
fn the_order_of_overrides_does_not_matter() {
    let orders: [&[&str]; 3] = [
        &["surrogate.high=.2", "surrogate.kind=cispo"],
        &["masks.0.q=0.5", "masks=[{kind=\"spurious\"}]"],
        &["masks.0.threshold.share=0.5", "masks.0.threshold.kind=target_share", "masks.0.q=0.1"],
    ];
    for texts in orders {
        let base = ObjectiveSpec::from_preset("stapo").unwrap();
        let forth = base.with_overrides(texts.iter().copied()).unwrap();
        assert_eq!(forth, base.with_overrides(texts.iter().rev().copied()).unwrap(), "{texts:?}");
        assert_ne!(forth, base);
    }
    let base = ObjectiveSpec::from_preset("stapo").unwrap();
    let last = base.with_overrides(["surrogate.high=0.1", "surrogate.high=0.5"]).unwrap();
    assert_eq!(
        last.surrogate,
        Surrogate::Clip { low: 0.2, high: 0.5, dual: None },
        "of one key the last stands"
    );
    let same_kind = base.with_overrides(["surrogate.kind=clip"]).unwrap();
    assert_eq!(same_kind, base, "the same kind keeps its keys");
}

#[test]
fn a_byte_order_mark_is_no_part_of_a_file() {
    let spec = ObjectiveSpec::from_toml("\u{feff}preset = \"gspo\"").unwrap();
    assert_eq!(spec, ObjectiveSpec::from_preset("gspo").unwrap());
}

#[test]
fn dapo_asks_for_dynamic_sampling_and_overlong_shaping() {
    let rollout = preset("dapo").unwrap().rollout;
    assert!(rollout.dynamic_sampling && rollout.group_size == 16);
    let overlong = rollout.overlong.unwrap();
    assert_eq!([0, 16384, 18432, 20480].map(|n| overlong.penalty(n)), [0.0, 0.0, -0.5, -1.0]);
    assert!(!preset("entropy20").unwrap().rollout.dynamic_sampling);
}

/// One response of four tokens with three kept, and one that is silenced altogether.
#[test]
fn a_silenced_response_leaves_the_mean_or_stays_in_it() {
    let kept = SequenceTally {
        n_tokens: 4,
        n_kept: 3,
        loss: 6.0,
        ratio_min: 0.5,
        ratio_max: 2.0,
        ..Default::default()
    };
    let silenced = SequenceTally { n_tokens: 2, n_silenced: 2, ..Default::default() };
    for (silenced_responses, scale) in [(SilencedResponses::Leave, 1.0), (SilencedResponses::Stay, 0.5)] {
        let spec = ObjectiveSpec {
            aggregate: Aggregate::SequenceMeanOfTokenMean,
            denominator: Denominator::KeptTokens { silenced_responses },
            ..ObjectiveSpec::from_preset("grpo").unwrap()
        };
        let tally = spec.total(&[kept, silenced]);
        assert_eq!((tally.scale, tally.loss, tally.n_sequences), (scale, 6.0 * scale, 2));
        assert_eq!((tally.ratio_min, tally.ratio_max), (0.5, 2.0), "only kept tokens have ratios");
    }
}
