//! Published algorithms by name.

use super::{
    Advantage, Aggregate, Denominator, Distillation, EntropyBonus, Kl, Mask, MaskSignals, MultipleRewards,
    ObjectiveSpec, OffPolicy, QuantileOver, Ratio, Select, SilencedTokens, StareSigns, Surrogate, Threshold,
    Whiten,
};
use crate::rollout::OverlongShaping;
use serde::Serialize;

/// A published algorithm: the objective, and the settings of the training loop that the paper uses with the objective.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Preset {
    pub name: &'static str,
    /// The paper's arXiv number; empty for an algorithm without a separate paper.
    pub paper: &'static str,
    /// What distinguishes the algorithm, in a few words.
    pub summary: &'static str,
    pub objective: ObjectiveSpec,
    pub rollout: RolloutSettings,
}

/// Settings of the training loop that a paper uses and that are not part of the loss.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RolloutSettings {
    /// Responses per problem.
    pub group_size: usize,
    /// Groups with equal rewards are replaced by groups of other problems.
    pub dynamic_sampling: bool,
    pub overlong: Option<OverlongShaping>,
}

/// The preset of that name.
pub fn preset(name: &str) -> Option<Preset> {
    presets().into_iter().find(|preset| preset.name == name)
}

/// All presets, in the order of the documentation.
pub fn presets() -> Vec<Preset> {
    let mut all = s2t_presets();
    all.extend(masked_presets());
    all.extend(unmasked_presets());
    all
}

fn entry(name: &'static str, paper: &'static str, summary: &'static str, objective: ObjectiveSpec) -> Preset {
    let rollout = RolloutSettings { group_size: 8, dynamic_sampling: false, overlong: None };
    Preset { name, paper, summary, objective, rollout }
}

/// STAPO and its other readings.
fn s2t_presets() -> Vec<Preset> {
    let with = |q, quantile_over| {
        let threshold = Threshold::TauP;
        let select = Select::LowEntropy;
        let mask = Mask::Spurious { tau_p: 0.002, threshold, q, select, quantile_over, seed: 0 };
        ObjectiveSpec { masks: vec![mask], ..clipped(0.2, 0.28, None) }
    };
    vec![
        entry(
            "stapo",
            "2602.15620",
            "silences spurious tokens: rewarded, improbable, low entropy",
            with(0.75, QuantileOver::Candidates),
        ),
        entry(
            "stapo-v1",
            "2602.15620v1",
            "entropy threshold from all tokens of the mini-batch",
            with(0.8, QuantileOver::AllTokens),
        ),
        entry(
            "stapo-taco",
            "2607.07976",
            "another reading of STAPO: entropy threshold from the tokens of rewarded responses",
            with(0.1, QuantileOver::RewardedTokens),
        ),
    ]
}

/// The other algorithms with a mask.
fn masked_presets() -> Vec<Preset> {
    let with = |mask: Mask, objective: ObjectiveSpec| ObjectiveSpec { masks: vec![mask], ..objective };
    let stare = Mask::Stare {
        share: 0.1,
        weight: 1.1,
        entropy_below: 0.3,
        signs: StareSigns::Positive,
        step: 0.0,
        min: 0.5,
        max: 1.5,
    };
    let clip_cov = ObjectiveSpec { denominator: Denominator::AllTokens, ..clipped(1.0, 1.0, None) };
    vec![
        entry(
            "entropy20",
            "2506.01939",
            "updates the 20 % of tokens with the highest entropy",
            with(Mask::TopEntropy { share: 0.2 }, clipped(0.2, 0.28, None)),
        ),
        entry(
            "clip-cov",
            "2505.22617",
            "drops a few tokens of high covariance",
            with(Mask::ClipCov { share: 2e-4, low: 1.0, high: 5.0, seed: 0 }, clip_cov),
        ),
        entry(
            "ar",
            "2505.12929",
            "weighs advantages by behavior probability",
            with(Mask::ProbabilityWeight { alpha: 0.2 }, clipped(0.2, 0.2, None)),
        ),
        entry(
            "lopti",
            "2505.12929",
            "updates improbable tokens first, then the rest",
            with(Mask::LowProbabilityFirst { eta: 0.4 }, clipped(0.2, 0.2, None)),
        ),
        entry(
            "taco",
            "2607.07976",
            "soft S2T: weighs spurious tokens down",
            with(Mask::Taco { a: 0.01, l: 0.9 }, clipped(0.2, 0.28, None)),
        ),
        entry(
            "stare",
            "2606.19236",
            "weighs surprising rewarded tokens up while entropy is low",
            with(stare, clipped(0.2, 0.28, None)),
        ),
        entry(
            "rsi",
            "2606.31575",
            "keeps tokens whose surprisal is near their entropy",
            with(Mask::Rsi { low: 0.5, high: 2.0 }, clipped(0.2, 0.28, None)),
        ),
    ]
}

/// The algorithms without a mask.
fn unmasked_presets() -> Vec<Preset> {
    let by_sequence = |objective: ObjectiveSpec| ObjectiveSpec {
        aggregate: Aggregate::SequenceMeanOfTokenMean,
        ..objective
    };
    let summed = |length, objective: ObjectiveSpec| ObjectiveSpec {
        aggregate: Aggregate::SequenceMeanOfTokenSum,
        denominator: Denominator::Constant { length },
        ..objective
    };
    let grpo = by_sequence(ObjectiveSpec { kl: Kl::K3 { beta: 0.04 }, ..clipped(0.2, 0.2, None) });
    let dr_grpo =
        summed(3000.0, ObjectiveSpec { advantage: Advantage::GroupMean, ..clipped(0.2, 0.2, None) });
    let by_response = Ratio::Sequence { silenced: SilencedTokens::Leave };
    let gspo = by_sequence(ObjectiveSpec { ratio: by_response, ..clipped(3e-4, 4e-4, None) });
    let luspo = summed(1.0, ObjectiveSpec { ratio: by_response, ..clipped(2e-3, 2.5e-3, None) });
    let geometric = Ratio::Geometric { low: 0.4, high: 0.4, silenced: SilencedTokens::Leave };
    let gmpo = by_sequence(ObjectiveSpec { ratio: geometric, ..plain(Surrogate::Unclipped) });
    let rloo =
        summed(1.0, ObjectiveSpec { advantage: Advantage::LeaveOneOut, ..plain(Surrogate::Reinforce) });
    let over_all = |surrogate| ObjectiveSpec { denominator: Denominator::AllTokens, ..plain(surrogate) };
    let dppo_tv = over_all(Surrogate::TotalVariation { low: 0.15, high: 0.15, cap: None });
    let dppo_kl = over_all(Surrogate::BinaryKl { low: 0.05, high: 0.05, cap: None });
    let reinforce_pp = ObjectiveSpec {
        advantage: Advantage::Return { gamma: 1.0 },
        whiten: Whiten::Tokens { epsilon: 0.0 },
        ..clipped(0.2, 0.2, Some(3.0))
    };
    let vespo = ObjectiveSpec { ratio: Ratio::Product, ..plain(VESPO) };
    vec![
        entry(
            "justrl",
            "2512.16649",
            "STAPO's objective without a mask, with dual clip",
            clipped(0.2, 0.28, Some(10.0)),
        ),
        entry("grpo", "2402.03300", "clip, mean over tokens then responses, KL to a reference", grpo),
        dapo(),
        entry("dr-grpo", "2503.20783", "no deviation, no length normalisation", dr_grpo),
        entry("gspo", "2507.18071", "one ratio per response", gspo),
        entry(
            "cispo",
            "2506.13585",
            "clips the weight, not the update",
            plain(Surrogate::Cispo { low: None, high: 0.2 }),
        ),
        entry("reinforce", "", "advantage times log-prob", plain(Surrogate::Reinforce)),
        entry("rloo", "2402.14740", "leave-one-out baseline, whole responses", rloo),
        entry(
            "kl-cov",
            "2505.22617",
            "penalises tokens of high covariance",
            plain(Surrogate::KlCov { share: 2e-3, coefficient: 1.0 }),
        ),
        entry(
            "sapo",
            "2511.20347",
            "soft gate instead of a clip",
            by_sequence(plain(Surrogate::Sapo { tau_positive: 1.0, tau_negative: 1.05 })),
        ),
        entry("gmpo", "2507.20673", "geometric mean of clipped ratios", gmpo),
        entry("dppo-tv", "2602.04879", "drops tokens whose probability moved too far", dppo_tv),
        entry("dppo-kl", "2602.04879", "drops tokens whose binary KL moved too far", dppo_kl),
        entry("luspo", "2602.05261", "gspo with every response weighted by its length", luspo),
        entry("vespo", "2602.10693", "smooth weight on the ratio of whole responses", vespo),
        entry(
            "reinforce++",
            "2501.03262",
            "advantages normalised over the tokens of the batch",
            reinforce_pp,
        ),
    ]
}

fn dapo() -> Preset {
    let summary = "clip-higher, token mean, dynamic sampling, overlong shaping";
    let overlong = Some(OverlongShaping { max_tokens: 20480, buffer_tokens: 4096 });
    Preset {
        rollout: RolloutSettings { group_size: 16, dynamic_sampling: true, overlong },
        ..entry("dapo", "2503.14476", summary, clipped(0.2, 0.28, None))
    }
}

const VESPO: Surrogate =
    Surrogate::Vespo { k_positive: 2.0, lambda_positive: 3.0, k_negative: 3.0, lambda_negative: 2.0 };

/// A token-mean objective with that surrogate and no further term.
pub(crate) fn plain(surrogate: Surrogate) -> ObjectiveSpec {
    ObjectiveSpec {
        advantage: Advantage::default(),
        multiple_rewards: MultipleRewards::Sum,
        whiten: Whiten::None,
        kl_in_reward: Kl::None,
        distillation: Distillation::None,
        masks: Vec::new(),
        mask_signals: MaskSignals::Current,
        ratio: Ratio::default(),
        surrogate,
        aggregate: Aggregate::TokenMean,
        denominator: Denominator::default(),
        kl: Kl::None,
        entropy_bonus: EntropyBonus::None,
        off_policy: OffPolicy::None,
    }
}

fn clipped(low: f64, high: f64, dual: Option<f64>) -> ObjectiveSpec {
    plain(Surrogate::Clip { low, high, dual })
}
