use super::*;

/// A response of a rollout batch, owned.
struct Response {
    group: usize,
    rewards: Vec<f64>,
    student: Vec<f64>,
    entropy: Vec<f64>,
    reference: Vec<f64>,
    teacher: Vec<f64>,
}

impl Response {
    fn scored(&self) -> ScoredResponse<'_> {
        ScoredResponse {
            behavior_logp: Some(&self.student),
            behavior_entropy: Some(&self.entropy),
            reference_logp: Some(&self.reference),
            teacher_logp: Some(&self.teacher),
            ..ScoredResponse::new(self.group, &self.rewards, self.student.len())
        }
    }
}

/// 4 groups of 3 responses whose order in the batch is mixed, with two rewards of different scale and 1 to 9 tokens.
fn random_batch(case: u64) -> Vec<Response> {
    let response = |i: u64| {
        let n = 1 + bits(31, &[case, i]) % 9;
        let column = |key: u64, low: f64, high: f64| -> Vec<f64> {
            (0..n).map(|t| low + (high - low) * uniform(key, &[case, i, t])).collect()
        };
        Response {
            group: (i % 4) as usize,
            rewards: vec![f64::from(uniform(32, &[case, i]) < 0.5), 100.0 * uniform(33, &[case, i])],
            student: column(34, -4.0, 0.0),
            entropy: column(35, 0.0, 2.0),
            reference: column(36, -4.0, 0.0),
            teacher: column(37, -4.0, 0.0),
        }
    };
    (0..12).map(response).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn std(values: &[f64], ddof: f64) -> f64 {
    let m = mean(values);
    (values.iter().map(|x| (x - m).powi(2)).sum::<f64>() / (values.len() as f64 - ddof)).sqrt()
}

/// The advantage of each response from one reward, from the formulas of the papers.
fn naive_of(rule: Advantage, rewards: &[f64], batch: &[Response]) -> Vec<f64> {
    let expected = |i: usize| {
        let group: Vec<usize> = (0..batch.len()).filter(|&j| batch[j].group == batch[i].group).collect();
        let group_rewards: Vec<f64> = group.iter().map(|&j| rewards[j]).collect();
        let others: Vec<f64> = group.iter().filter(|&&j| j != i).map(|&j| rewards[j]).collect();
        let scaled = |std: f64, epsilon: f64| {
            let d = rewards[i] - mean(&group_rewards);
            if d == 0.0 { 0.0 } else { d / (std + epsilon) }
        };
        match rule {
            Advantage::GroupZScore { ddof, epsilon } => scaled(std(&group_rewards, f64::from(ddof)), epsilon),
            Advantage::GroupMean => rewards[i] - mean(&group_rewards),
            Advantage::LeaveOneOut => rewards[i] - mean(&others),
            Advantage::GroupMeanBatchStd { ddof, epsilon } => scaled(std(rewards, f64::from(ddof)), epsilon),
            Advantage::LengthWeightedMean => {
                let length = |j: usize| batch[j].student.len() as f64;
                let weighted: f64 = group.iter().map(|&j| length(j) * rewards[j]).sum();
                rewards[i] - weighted / group.iter().map(|&j| length(j)).sum::<f64>()
            }
            Advantage::GroupMeanNonzeroShare => {
                let n_nonzero = rewards.iter().filter(|r| **r != 0.0).count() as f64;
                (rewards[i] - mean(&group_rewards)) * rewards.len() as f64 / n_nonzero
            }
            Advantage::BestAboveSecond => {
                let best_other = others.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                (rewards[i] - best_other).max(0.0)
            }
            Advantage::Return { .. } => rewards[i],
        }
    };
    (0..batch.len()).map(expected).collect()
}

/// One advantage per token, written from the formulas.
fn naive(spec: &ObjectiveSpec, batch: &[Response], weights: &[f64]) -> Vec<Vec<f64>> {
    let kl = |response: &Response, t: usize| {
        let d = response.reference[t] - response.student[t];
        match spec.kl_in_reward {
            Kl::K1 { beta } => -beta * d,
            Kl::K2 { beta } => beta * d * d / 2.0,
            Kl::K3 { beta } => beta * (d.exp() - d - 1.0),
            _ => 0.0,
        }
    };
    let total_kl = |r: &Response| (0..r.student.len()).map(|t| kl(r, t)).sum::<f64>();
    let weighted = |r: &Response| r.rewards.iter().zip(weights).map(|(a, b)| a * b).sum::<f64>();
    let mut tokens: Vec<Vec<f64>> = match (spec.advantage, spec.multiple_rewards) {
        (Advantage::Return { gamma }, _) => batch
            .iter()
            .map(|r| {
                let n = r.student.len();
                let reward = |s: usize| if s + 1 == n { weighted(r) } else { 0.0 } - kl(r, s);
                (0..n).map(|t| (t..n).map(|s| gamma.powi((s - t) as i32) * reward(s)).sum()).collect()
            })
            .collect(),
        (rule, multiple) => {
            let of_response: Vec<f64> = if multiple == MultipleRewards::Sum {
                naive_of(rule, &batch.iter().map(|r| weighted(r) - total_kl(r)).collect::<Vec<_>>(), batch)
            } else {
                let each = weights.iter().enumerate().map(|(k, weight)| {
                    let rewards: Vec<f64> = batch.iter().map(|r| r.rewards[k]).collect();
                    naive_of(rule, &rewards, batch).into_iter().map(|a| weight * a).collect::<Vec<_>>()
                });
                each.reduce(|a, b| a.iter().zip(b).map(|(a, b)| a + b).collect()).unwrap()
            };
            batch.iter().zip(of_response).map(|(r, a)| vec![a; r.student.len()]).collect()
        }
    };
    let (counted, epsilon) = match spec.whiten {
        Whiten::None => (Vec::new(), 0.0),
        Whiten::Responses { epsilon } => (tokens.iter().map(|own| own[0]).collect(), epsilon),
        Whiten::Tokens { epsilon } => (tokens.iter().flatten().copied().collect(), epsilon),
    };
    if !counted.is_empty() {
        let whiten = |a: &mut f64| *a = (*a - mean(&counted)) / (std(&counted, 1.0) + epsilon);
        tokens.iter_mut().flatten().for_each(whiten);
    }
    for (r, own) in batch.iter().zip(&mut tokens) {
        let d: Vec<f64> = r.teacher.iter().zip(&r.student).map(|(a, b)| a - b).collect();
        let mut sorted = r.entropy.clone();
        sorted.sort_by(f64::total_cmp);
        for t in 0..own.len() {
            match spec.distillation {
                Distillation::None => {}
                Distillation::ReverseKl { beta, reward_weight } => {
                    own[t] = reward_weight * own[t] + beta * d[t];
                }
                Distillation::Dasd { beta, quantile, normalizer } => {
                    let rank = quantile * (sorted.len() - 1) as f64;
                    let (low, high) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
                    let tau = low + (high - low) * rank.fract();
                    let sigma =
                        mean(&r.entropy.iter().map(|h| (h - mean(&r.entropy)).abs()).collect::<Vec<_>>());
                    let unit = match normalizer {
                        Normalizer::MeanAbs => mean(&d.iter().map(|d| d.abs()).collect::<Vec<_>>()),
                        Normalizer::RootMeanSquare => {
                            mean(&d.iter().map(|d| d * d).collect::<Vec<_>>()).sqrt()
                        }
                        Normalizer::None => 1.0,
                    };
                    if sigma > 0.0 {
                        let e = d[t] / unit;
                        let w = ((tau - r.entropy[t]) / sigma).tanh() / (1.0 + (1.0 - e.abs()).exp());
                        own[t] += beta * w * e;
                    }
                }
            }
        }
    }
    tokens
}

fn spec(overrides: &[&str]) -> ObjectiveSpec {
    ObjectiveSpec::from_preset("stapo").unwrap().with_overrides(overrides.iter().copied()).unwrap()
}

#[test]
fn advantages_are_those_of_the_formulas() {
    let variants: [(&[&str], bool); 19] = [
        (&[], false),
        (&["advantage.epsilon=0.01"], false),
        (&["advantage.kind=group_mean"], false),
        (&["advantage.kind=leave_one_out"], false),
        (&["advantage.kind=length_weighted_mean"], false),
        (&["advantage.kind=group_mean_nonzero_share"], false),
        (&["advantage.kind=best_above_second"], false),
        (&["advantage={kind=\"group_mean_batch_std\",epsilon=1e-4}"], false),
        (&["advantage={kind=\"group_mean_batch_std\",ddof=0}"], false),
        (&["advantage.kind=return", "whiten.kind=tokens"], false),
        (&["advantage={kind=\"return\",gamma=0.9}", "whiten={kind=\"tokens\",epsilon=0.01}"], true),
        (&["advantage.kind=return", "kl_in_reward={kind=\"k1\",beta=0.2}", "whiten.kind=tokens"], true),
        (&["advantage.kind=group_mean", "whiten.kind=tokens"], false),
        (&["multiple_rewards=normalize_each"], false),
        (&["multiple_rewards=normalize_each", "whiten={kind=\"responses\",epsilon=1e-4}"], false),
        (&["kl_in_reward={kind=\"k3\",beta=0.1}"], false),
        (&["distillation={kind=\"dasd\",beta=0.3,normalizer=\"root_mean_square\"}"], true),
        (&["distillation={kind=\"dasd\",quantile=0.2}"], true),
        (&["distillation={kind=\"reverse_kl\",beta=0.5,reward_weight=0.25}"], true),
    ];
    for (overrides, is_by_token) in variants {
        for case in 0..20 {
            let batch = random_batch(case);
            let spec = spec(overrides);
            let scored: Vec<ScoredResponse> = batch.iter().map(Response::scored).collect();
            let ours = spec.advantages(&scored, &[2.0, 0.5]).unwrap();
            for ((ours, naive), response) in ours.iter().zip(naive(&spec, &batch, &[2.0, 0.5])).zip(&batch) {
                assert_eq!(matches!(ours, Advantages::Tokens(_)), is_by_token, "{overrides:?}");
                for (t, expected) in naive.iter().enumerate() {
                    let got = ours.view().at(t);
                    assert!(
                        (got - expected).abs() <= 1e-11 * (1.0 + expected.abs()),
                        "{overrides:?}: {got} {expected}"
                    );
                }
                assert!((ours.mean() - mean(&naive)).abs() < 1e-9);
                assert_eq!(naive.len(), response.student.len());
            }
        }
    }
}

#[test]
fn one_advantage_per_token_or_per_response_gives_the_same_bits() {
    for (name, spec) in all_specs() {
        let drift = if matches!(spec.ratio, Ratio::Sequence { .. }) { 2e-3 } else { 0.6 };
        let mut samples = random_minibatch(&spec, 5, drift);
        let whole = run(&spec, &samples, UpdateKey::default()).unwrap();
        for sample in &mut samples {
            sample.advantage = Advantages::Tokens((0..sample.logp.len()).map(|t| sample.a(t)).collect());
        }
        let by_token = run(&spec, &samples, UpdateKey::default()).unwrap();
        // Clip-Cov and KL-Cov sum the advantages of all tokens, where a product rounds otherwise than a sum.
        if !name.contains("cov") {
            assert_eq!(whole, by_token, "{name}");
        }
    }
}

/// The numbers of verl 0.9's `opo`, `gpg` and `grpo_passk` (the last without the deviation), computed by hand.
#[test]
fn baselines_of_opo_gpg_and_pass_at_k() {
    let rewards = [[1.0], [0.0], [0.5], [0.0]];
    let scored: Vec<ScoredResponse> =
        rewards.iter().zip([2, 4, 6, 8]).map(|(reward, n)| ScoredResponse::new(0, reward, n)).collect();
    let advantages_of = |kind: &str| -> Vec<f64> {
        let advantages = spec(&[&format!("advantage.kind={kind}")]).advantages(&scored, &[1.0]).unwrap();
        advantages.iter().map(|advantage| advantage.view().at(0)).collect()
    };
    assert_eq!(advantages_of("length_weighted_mean"), [0.75, -0.25, 0.25, -0.25]);
    assert_eq!(advantages_of("group_mean_nonzero_share"), [1.25, -0.75, 0.25, -0.75]);
    assert_eq!(advantages_of("best_above_second"), [0.5, 0.0, 0.0, 0.0]);
}

#[test]
fn rounding_is_no_spread_and_spread_beyond_f64_is_an_error() {
    let noisy = [0.1 + 0.2, 0.3, 0.3, 0.3];
    assert_ne!(noisy[0], noisy[1]);
    let rules = [
        Advantage::default(),
        Advantage::GroupMean,
        Advantage::LeaveOneOut,
        Advantage::LengthWeightedMean,
        Advantage::GroupMeanNonzeroShare,
        Advantage::BestAboveSecond,
    ];
    for rule in rules {
        assert_eq!(rule.of_group(&noisy).unwrap(), [0.0; 4], "{rule:?}");
    }
    let just_above = Advantage::default().of_group(&[1.0, 1.0 + 1e-8]).unwrap();
    assert!((just_above[1] - 0.5f64.sqrt()).abs() < 1e-6, "{just_above:?}");
    assert_eq!(Advantage::default().of_group(&[1.0, 1.0 + 1e-10]).unwrap(), [0.0; 2]);
    assert_eq!(Advantage::default().of_group(&[0.0; 3]).unwrap(), [0.0; 3]);
    for rewards in [[1e200, -1e200], [1e308, -1e308], [1e-200, -1e-200]] {
        let error = Advantage::default().of_group(&rewards).unwrap_err();
        let ObjectiveError::Spread { response_idx: Some(0), lowest, highest } = error else {
            panic!("{error}")
        };
        assert_eq!([lowest, highest], [rewards[1], rewards[0]]);
        assert!(error.to_string().contains("hint: scale the rewards"), "{error}");
    }
    let scored = [ScoredResponse::new(0, &[1e200], 1), ScoredResponse::new(1, &[-1e200], 1)];
    let whitened = spec(&["advantage.kind=return", "whiten.kind=responses"]).advantages(&scored, &[1.0]);
    assert!(matches!(whitened, Err(ObjectiveError::Spread { response_idx: None, .. })), "{whitened:?}");
    let tiny = [ScoredResponse::new(0, &[1e-200], 1), ScoredResponse::new(1, &[-1e-200], 1)];
    let whitened = spec(&["advantage.kind=return", "whiten.kind=responses"]).advantages(&tiny, &[1.0]);
    assert!(whitened.is_err(), "their deviation is 0 in f64: {whitened:?}");
    // A response without tokens has no part in the spread of tokens.
    let empty = [ScoredResponse::new(0, &[0.3], 3), ScoredResponse::new(1, &[7.0], 0)];
    let whitened = spec(&["advantage.kind=return", "whiten.kind=tokens"]).advantages(&empty, &[1.0]).unwrap();
    assert_eq!(whitened, [Advantages::Response(0.0), Advantages::Response(0.0)]);
    let equal = [ScoredResponse::new(0, &[0.1 + 0.2], 3), ScoredResponse::new(1, &[0.3], 5)];
    let whitened = spec(&["advantage.kind=return", "whiten.kind=tokens"]).advantages(&equal, &[1.0]).unwrap();
    assert_eq!(whitened, [Advantages::Response(0.0), Advantages::Response(0.0)]);
}

#[test]
fn dynamic_sampling_and_advantages_agree_on_what_is_unanimous() {
    use crate::rollout::{Finish, Group, Problem, Rollout, Scored, Verdict};
    let group = |rewards: &[f64]| Group {
        problem: Problem {
            id: String::new(),
            earlier_turns: Vec::new(),
            prompt: String::new(),
            reference: String::new(),
        },
        members: rewards
            .iter()
            .map(|&reward| Scored {
                rollout: Rollout {
                    problem_idx: 0,
                    sample_idx: 0,
                    tokens: vec![],
                    is_sampled: vec![],
                    logp: vec![],
                    entropy: vec![],
                    kept: vec![],
                    finish: Finish::LengthLimit,
                    policy_version: None,
                },
                verdict: Verdict::Right,
                reward,
                rewards: vec![reward, 0.5],
                program: None,
                judge: None,
                episode: None,
            })
            .collect(),
    };
    for (rewards, expected) in [(vec![0.1 + 0.2, 0.3], true), (vec![1.0, -1.0], false), (vec![], true)] {
        assert_eq!(group(&rewards).is_unanimous(), expected, "{rewards:?}");
    }
    let mut same_sum = group(&[1.0, 1.0]);
    same_sum.members[0].rewards = vec![1.0, 0.0];
    same_sum.members[1].rewards = vec![0.0, 1.0];
    assert!(!same_sum.is_unanimous(), "rewards that differ one by one have advantages one by one");
}

#[test]
fn missing_and_impossible_columns_are_named() {
    let batch = random_batch(0);
    let refusal = |overrides: &[&str], change: fn(&mut ScoredResponse)| {
        let mut scored: Vec<ScoredResponse> = batch.iter().map(Response::scored).collect();
        change(&mut scored[2]);
        spec(overrides).advantages(&scored, &[1.0, 1.0]).unwrap_err().to_string()
    };
    let dasd = ["distillation.kind=dasd"];
    assert!(
        refusal(&dasd, |r| r.teacher_logp = None)
            .contains("response 2: teacher_logp is missing; distillation needs")
    );
    assert!(refusal(&dasd, |r| r.behavior_entropy = None).contains("behavior_entropy is missing"));
    let kl = ["kl_in_reward={kind=\"k1\",beta=0.1}"];
    assert!(
        refusal(&kl, |r| r.reference_logp = None).contains("reference_logp is missing; kl_in_reward needs")
    );
    assert!(
        refusal(&kl, |r| r.reference_logp = Some(&[0.5]))
            .contains("response 2: reference_logp has 1 entries")
    );
    assert!(refusal(&[], |r| r.rewards = &[1.0]).contains("response 2: 1 rewards, expected 2"));
    assert!(refusal(&[], |r| r.rewards = &[1.0, f64::NAN]).contains("response 2: reward[1] is NaN"));
    assert!(refusal(&["advantage.kind=leave_one_out"], |r| r.group = 9).contains("group of 1 response"));
    let plain = spec(&[]);
    let bare: Vec<ScoredResponse> =
        batch.iter().map(|r| ScoredResponse::new(r.group, &r.rewards, r.student.len())).collect();
    assert!(plain.advantages(&bare, &[1.0, 1.0]).is_ok(), "the plain case reads no column");
}

#[test]
fn a_teacher_pulls_where_the_student_is_sure_and_pushes_elsewhere() {
    let response = Response {
        group: 0,
        rewards: vec![1.0],
        student: vec![-2.0; 5],
        entropy: vec![0.0, 0.1, 0.2, 0.3, 2.0],
        reference: vec![-2.0; 5],
        teacher: vec![-1.0; 5],
    };
    let ours = spec(&["distillation={kind=\"dasd\",beta=1.0}", "advantage.kind=group_mean"])
        .advantages(&[response.scored()], &[1.0])
        .unwrap();
    let Advantages::Tokens(ours) = &ours[0] else { panic!("one per token") };
    assert!(ours[0] > 0.0 && ours[4] < 0.0, "{ours:?}");
    let flat = Response { entropy: vec![0.5; 5], ..response };
    let unmoved = spec(&["distillation={kind=\"dasd\",beta=1.0}", "advantage.kind=group_mean"])
        .advantages(&[flat.scored()], &[1.0])
        .unwrap();
    assert_eq!(unmoved, [Advantages::Tokens(vec![0.0; 5])], "equal entropies say nothing");
}
