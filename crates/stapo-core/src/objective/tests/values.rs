//! The value that each key has where a config leaves it out, and the values that are refused.

use super::*;

fn set(overrides: &[&str]) -> Result<ObjectiveSpec, SpecError> {
    ObjectiveSpec::from_preset("stapo").unwrap().with_overrides(overrides.iter().copied())
}

#[test]
fn masks_have_the_values_of_their_papers() {
    let cases = [
        ("spurious", Mask::spurious()),
        ("random_tokens", Mask::RandomTokens { tau_p: 0.002, q: 0.75, seed: 0 }),
        ("top_entropy", Mask::TopEntropy { share: 0.2 }),
        ("clip_cov", Mask::ClipCov { share: 2e-4, low: 1.0, high: 5.0, seed: 0 }),
        ("low_probability_first", Mask::LowProbabilityFirst { eta: 0.4 }),
        ("probability_weight", Mask::ProbabilityWeight { alpha: 0.2 }),
        ("taco", Mask::Taco { a: 0.01, l: 0.9 }),
        (
            "stare",
            Mask::Stare {
                share: 0.1,
                weight: 1.1,
                entropy_below: 0.3,
                signs: StareSigns::Positive,
                step: 0.0,
                min: 0.5,
                max: 1.5,
            },
        ),
        ("rsi", Mask::Rsi { low: 0.5, high: 2.0 }),
        ("off_policy_sequence", Mask::OffPolicySequence { delta: 0.5 }),
    ];
    assert_eq!(cases.map(|(_, mask)| mask.kind()), MaskKind::ALL);
    for (kind, mask) in cases {
        assert_eq!(set(&[&format!("masks=[{{kind=\"{kind}\"}}]")]).unwrap().masks, [mask], "{kind}");
    }
    assert_eq!((mask::PUBLISHED_TAU_P, Mask::spurious()), (0.002, set(&[]).unwrap().masks[0]));
}

#[test]
fn thresholds_penalties_and_corrections_have_the_values_of_their_papers() {
    let thresholds = [
        ("tau_p", Threshold::TauP),
        ("target_share", Threshold::TargetShare { share: 1e-3 }),
        ("surprise", Threshold::Surprise { c: 2.0, b: 4.6 }),
        ("influence", Threshold::Influence { kappa: 0.97, vocabulary: None }),
    ];
    assert_eq!(thresholds.map(|(_, threshold)| threshold), Threshold::defaults());
    assert_eq!(thresholds.map(|(kind, _)| kind), Threshold::defaults().map(Threshold::kind));
    for (kind, given) in thresholds {
        let spec = set(&[&format!("masks.0.threshold={{kind=\"{kind}\"}}")]).unwrap();
        assert!(matches!(spec.masks[0], Mask::Spurious { threshold, .. } if threshold == given), "{kind}");
    }
    assert_eq!(
        set(&["entropy_bonus={kind=\"target\"}"]).unwrap().entropy_bonus,
        EntropyBonus::Target { target: 0.2, initial: 0.0, step: 0.005, min: 0.0, max: 1.0 }
    );
    let off_policy = |kind: &str| set(&[&format!("off_policy={{kind=\"{kind}\"}}")]).unwrap().off_policy;
    assert_eq!(off_policy("tis"), OffPolicy::Tis { cap: 2.0, level: WeightLevel::Token });
    assert_eq!(off_policy("icepop"), OffPolicy::Icepop { low: 0.5, high: 5.0 });
    assert_eq!(off_policy("mis"), OffPolicy::Mis { low: 0.0, high: 3.0, level: WeightLevel::Sequence });
    let distillation =
        |kind: &str| set(&[&format!("distillation={{kind=\"{kind}\"}}")]).unwrap().distillation;
    assert_eq!(distillation("reverse_kl"), Distillation::ReverseKl { beta: 1.0, reward_weight: 0.0 });
    assert_eq!(
        distillation("dasd"),
        Distillation::Dasd { beta: 0.1, quantile: 0.8, normalizer: Normalizer::MeanAbs }
    );
}

/// What a spec reads decides which policies a run loads.
#[test]
fn a_spec_names_the_policies_that_it_reads() {
    let reads = |overrides: &[&str]| {
        let spec = set(overrides).unwrap();
        (spec.needs_reference(), spec.needs_teacher(), spec.advantages_read_tokens())
    };
    assert_eq!(reads(&[]), (false, false, false));
    assert_eq!(reads(&["kl={kind=\"k3\",beta=0.1}"]), (true, false, false));
    assert_eq!(reads(&["kl_in_reward={kind=\"k1\",beta=0.1}"]), (true, false, true));
    assert_eq!(reads(&["distillation={kind=\"dasd\"}"]), (false, true, true));
}

fn message(overrides: &[&str]) -> String {
    let refused = set(overrides).map(|spec| spec.to_toml());
    refused.map_or_else(|error| error.to_string(), |spec| panic!("{overrides:?} is taken:\n{spec}"))
}

#[test]
fn a_value_outside_the_range_of_its_key_is_refused() {
    let cases = [
        ("advantage={kind=\"group_z_score\",epsilon=-0.1}", "advantage.epsilon: -0.1, expected at least 0"),
        ("advantage={kind=\"return\",gamma=1.5}", "advantage.gamma: 1.5, expected a number in [0, 1]"),
        ("whiten={kind=\"tokens\",epsilon=-0.1}", "whiten.epsilon: -0.1, expected at least 0"),
        ("kl_in_reward={kind=\"k1\",beta=-0.1}", "kl_in_reward.beta: -0.1, expected at least 0"),
        ("kl={kind=\"k1\",beta=inf}", "kl.beta: inf, expected at least 0"),
        ("distillation={kind=\"reverse_kl\",beta=inf}", "distillation.beta: inf, expected a finite number"),
        ("distillation={kind=\"reverse_kl\",reward_weight=nan}", "distillation.reward_weight: NaN"),
        ("distillation={kind=\"dasd\",beta=nan}", "distillation.beta: NaN, expected a finite number"),
        ("distillation={kind=\"dasd\",quantile=1.1}", "distillation.quantile: 1.1, expected a number in"),
        ("entropy_bonus={kind=\"constant\",coefficient=inf}", "entropy_bonus.coefficient: inf"),
        ("entropy_bonus={kind=\"target\",target=-1.0}", "entropy_bonus.target: -1, expected at least 0"),
        ("entropy_bonus={kind=\"target\",step=-1.0}", "entropy_bonus.step: -1, expected at least 0"),
        ("entropy_bonus={kind=\"target\",min=-inf}", "entropy_bonus.min: -inf, expected a finite number"),
        ("entropy_bonus={kind=\"target\",min=0.5}", "entropy_bonus.initial: 0 is below min 0.5"),
        ("entropy_bonus={kind=\"target\",max=-0.5}", "entropy_bonus.max: -0.5 is below initial 0"),
        ("off_policy={kind=\"tis\",cap=0.0}", "off_policy.cap: 0, expected a positive number"),
        ("off_policy={kind=\"mis\",low=-1.0}", "off_policy.low: -1, expected at least 0"),
        ("off_policy={kind=\"icepop\",high=0.4}", "off_policy.high: 0.4 is below low 0.5"),
        ("surrogate={kind=\"cispo\",low=1.5,high=0.2}", "surrogate.low: 1.5, expected a number in [0, 1]"),
        ("surrogate={kind=\"cispo\",high=-1.0}", "surrogate.high: -1, expected at least 0"),
        ("surrogate={kind=\"kl_cov\",share=0.1,coefficient=-1.0}", "surrogate.coefficient: -1, expected at"),
        (
            "surrogate={kind=\"sapo\",tau_positive=1.0,tau_negative=0.0}",
            "surrogate.tau_negative: 0, expected",
        ),
        ("surrogate={kind=\"total_variation\",low=0.0,high=0.1}", "surrogate.low: 0, expected a positive"),
        ("surrogate={kind=\"binary_kl\",low=0.1,high=0.0}", "surrogate.high: 0, expected a positive number"),
        ("surrogate={kind=\"squared_log_ratio\",beta=-1.0}", "surrogate.beta: -1, expected at least 0"),
        ("ratio={kind=\"geometric\",low=0.1,high=0.0}", "ratio.high: 0, expected a positive number"),
        ("ratio={kind=\"token\",max_log_ratio=0.0}", "ratio.max_log_ratio: 0, expected a positive number"),
    ];
    for (text, reason) in cases {
        let message = message(&[text]);
        assert!(message.contains(reason), "{text}: {message}");
    }
    for key in ["k_positive", "lambda_positive", "k_negative", "lambda_negative"] {
        let text = format!("surrogate.{key}=-1");
        let vespo = ObjectiveSpec::from_preset("vespo").unwrap();
        let error = vespo.with_overrides([text.as_str()]).unwrap_err().to_string();
        assert!(error.contains(&format!("surrogate.{key}: -1, expected")), "{error}");
    }
    let length = ObjectiveSpec::from_preset("dr-grpo").unwrap().with_overrides(["denominator.length=0"]);
    assert!(length.unwrap_err().to_string().contains("denominator.length: 0, expected a positive number"));
}

#[test]
fn a_value_of_a_mask_outside_its_range_is_refused() {
    let cases = [
        ("random_tokens", "tau_p=0.0", "tau_p: 0, expected a probability"),
        ("random_tokens", "q=1.5", "q: 1.5, expected a number in [0, 1]"),
        ("clip_cov", "share=1.5", "share: 1.5, expected a number in [0, 1]"),
        ("clip_cov", "low=-inf", "high: 5 is not above low -inf"),
        ("low_probability_first", "eta=0.0", "eta: 0, expected a probability"),
        ("probability_weight", "alpha=1.5", "alpha: 1.5, expected a number in [0, 1]"),
        ("taco", "l=1.5", "l: 1.5, expected a number in [0, 1]"),
        ("taco", "a=0.0", "a: 0, expected a number above 0"),
        ("taco", "a=inf", "a: inf, expected a number above 0"),
        ("stare", "share=1.5", "share: 1.5, expected a number in [0, 1]"),
        ("stare", "min=-0.1", "min: -0.1, expected a number in [0, 1.5]"),
        ("stare", "entropy_below=-0.1", "entropy_below: -0.1, expected a number in [0, inf]"),
        ("stare", "step=1.5", "step: 1.5, expected a number in [0, 1]"),
        ("stare", "max=2.5", "max: 2.5, expected a number in [0, 2]"),
        ("rsi", "low=-0.1", "low: -0.1, expected a number in [0,"),
        ("rsi", "high=0.5", "high: 0.5, expected a number above 0.5"),
        ("off_policy_sequence", "delta=-0.1", "delta: -0.1, expected a number in [0,"),
        (
            "spurious",
            "threshold={kind=\"target_share\",share=1.5}",
            "threshold.share: 1.5, expected a number",
        ),
        ("spurious", "threshold={kind=\"surprise\",c=-0.1}", "threshold.c: -0.1, expected a number in [0,"),
        ("spurious", "threshold={kind=\"surprise\",b=inf}", "threshold.b: inf, expected a number in ["),
        ("spurious", "threshold={kind=\"influence\",vocabulary=1}", "threshold.vocabulary: 1, expected at"),
    ];
    for (kind, text, reason) in cases {
        let message = message(&[&format!("masks=[{{kind=\"{kind}\",{text}}}]")]);
        assert!(message.contains(&format!("masks.0.{reason}")), "{kind} {text}: {message}");
    }
}

#[test]
fn axes_that_contradict_each_other_are_refused() {
    let cases: [(&[&str], &str); 4] = [
        (
            &["surrogate={kind=\"reinforce\"}", "ratio={kind=\"token\",max_log_ratio=1.0}"],
            "ratio.max_log_ratio: only clip, unclipped and cispo hold log-ratios",
        ),
        (
            &["multiple_rewards=normalize_each", "kl_in_reward={kind=\"k1\",beta=0.1}"],
            "normalize_each has no such sum",
        ),
        (
            &["surrogate={kind=\"squared_log_ratio\",beta=0.1}", "ratio={kind=\"sequence\"}"],
            "it penalises tokens by their own ratio",
        ),
        (
            &["surrogate={kind=\"cispo\",low=0.4,high=0.2}", "ratio={kind=\"sequence\"}"],
            "cispo weighs each token's own log-prob by its own ratio",
        ),
    ];
    for (overrides, reason) in cases {
        let message = message(overrides);
        assert!(message.contains(reason), "{overrides:?}: {message}");
    }
}
