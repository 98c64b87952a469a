//! The whole decoder's backward against finite differences, in f64.

use super::{
    Gradients, HeadOptions, LoraScale, LoraSpec, LoraTarget, PackedBatch, Pass, Policy, PolicySpec, Recompute,
};
use crate::config::{Family, Heads, ModelConfig, Rope, RopeScaling, SCORE, TensorSpec};
use crate::testing::{tiny_config, tiny_layers};
use stapo_ops::rng::RngKey;
use stapo_ops::{CpuOptions, Device};
use std::collections::BTreeSet;
use std::convert::Infallible;

fn config(family: Family, tied: bool) -> ModelConfig {
    ModelConfig { tied_embeddings: tied, ..tiny_config(family) }
}

fn noise(stream: u64) -> impl Fn(usize) -> f64 {
    let key = RngKey::new(5).derive(stream);
    move |i| key.normal(i as u64)
}

/// Three layers that differ in everything in which layers can differ.
fn mixed_config() -> ModelConfig {
    let rope = Rope { theta: 1000.0, scaling: RopeScaling::Linear { factor: 2.0 } };
    let wide = Family::Qwen2.layer(Heads { query: 4, kv: 2, dim: 8 }, rope, 19);
    let [first, last] = [Family::Llama, Family::Qwen3].map(|family| tiny_config(family).layers[0].clone());
    ModelConfig { layers: vec![first, wide, last], ..tiny_config(Family::Qwen3) }
}

fn policy(family: Family, tied: bool) -> Policy<f64> {
    filled(&config(family, tied))
}

/// Norms and biases off their neutral values too.
fn filled(config: &ModelConfig) -> Policy<f64> {
    let device = Device::cpu(CpuOptions::default());
    let mut policy = Policy::zeros(&device, config).unwrap();
    let mut stream = 0;
    policy.fill(|spec, values| {
        stream += 1;
        let noise = noise(stream);
        let centre = if spec.name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        for (i, value) in values.iter_mut().enumerate() {
            *value = centre + 0.3 * noise(i);
        }
    });
    policy
}

/// The same model with adapters of all modules, or of one of each stacked product.
fn adapted(family: Family, tied: bool) -> Policy<f64> {
    use LoraTarget::{Key, Output, Up};
    let targets = if tied { LoraTarget::ALL.to_vec() } else { vec![Key, Output, Up] };
    with_adapters(&config(family, tied), targets)
}

fn with_adapters(config: &ModelConfig, targets: Vec<LoraTarget>) -> Policy<f64> {
    let lora = LoraSpec { rank: 3, alpha: 2.0, scale: LoraScale::RankStabilised, targets };
    let device = Device::cpu(CpuOptions::default());
    let mut adapted = Policy::zeros(&device, PolicySpec { config, lora: Some(&lora) }).unwrap();
    let base: Vec<Vec<f64>> = filled(config).tensors().map(|(_, values)| values.to_vec()).collect();
    let mut base = base.iter();
    adapted.fill(|_, values| values.copy_from_slice(base.next().unwrap()));
    let Ok(()) = adapted.try_fill_adapters(|spec, values| {
        let noise = noise(700 + spec.name.len() as u64);
        values.iter_mut().enumerate().for_each(|(i, value)| *value = 0.3 * noise(i));
        Ok::<_, Infallible>(())
    });
    adapted
}

fn batch() -> PackedBatch {
    let mut batch = PackedBatch::new();
    for (n, n_prompt) in [(9, 3), (1, 1), (14, 1), (5, 4)] {
        let tokens: Vec<u32> = (0..n).map(|i| (i * i + 3 * n) % 17).collect();
        batch.push_response(&tokens, n_prompt);
    }
    batch.push(&[3, 1, 4, 1, 5, 9, 2], &[false, true, true, false, false, true, false]);
    batch
}

const OPTIONS: HeadOptions = HeadOptions { temperature: 0.8, n_alternatives: 0, has_entropy_gradient: true };

fn coefficients(n: usize) -> (Vec<f64>, Vec<f64>) {
    ((0..n).map(noise(901)).collect(), (0..n).map(noise(902)).collect())
}

/// Whole sequences, for a reward model.
fn whole_batch() -> PackedBatch {
    let mut whole = PackedBatch::new();
    let packed = batch();
    for ends in packed.starts().windows(2) {
        whole.push_whole(&packed.tokens()[ends[0]..ends[1]]);
    }
    whole
}

fn loss(policy: &Policy<f64>) -> f64 {
    if policy.config().score.is_some() {
        let scores = Pass::scoring(policy).unwrap().forward_scores(policy, &whole_batch()).unwrap();
        return coefficients(scores.len())
            .0
            .iter()
            .zip(&scores)
            .map(|(d_score, score)| d_score * score)
            .sum();
    }
    let scores = Pass::scoring(policy).unwrap().forward(policy, &batch(), OPTIONS).unwrap();
    let (d_logp, d_entropy) = coefficients(scores.logp.len());
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(&d_logp, &scores.logp) + dot(&d_entropy, &scores.entropy)
}

fn gradients(policy: &Policy<f64>) -> Gradients<f64> {
    let mut gradients = Gradients::zeros(policy).unwrap();
    add_gradients(policy, &mut gradients);
    gradients
}

fn add_gradients(policy: &Policy<f64>, gradients: &mut Gradients<f64>) {
    let mut pass = Pass::training(policy, Recompute::Nothing).unwrap();
    if policy.config().score.is_some() {
        let n_scores = pass.forward_scores(policy, &whole_batch()).unwrap().len();
        return pass.backward_scores(policy, &coefficients(n_scores).0, gradients);
    }
    let n_scored = pass.forward(policy, &batch(), OPTIONS).unwrap().logp.len();
    let (d_logp, d_entropy) = coefficients(n_scored);
    pass.backward(policy, &d_logp, &d_entropy, gradients).unwrap();
}

/// Adds `step` times a random direction to one tensor.
fn nudge(policy: &mut Policy<f64>, tensor: &str, step: f64) {
    let direction = noise(tensor.len() as u64);
    let before: Vec<Vec<f64>> = policy.tensors().map(|(_, values)| values.to_vec()).collect();
    let names: Vec<String> = policy.tensors().map(|(spec, _)| spec.name.clone()).collect();
    let moved = |spec: &TensorSpec, values: &mut [f64]| {
        values.copy_from_slice(&before[names.iter().position(|name| *name == spec.name).unwrap()]);
        if spec.name == tensor {
            values.iter_mut().enumerate().for_each(|(i, value)| *value += step * direction(i));
        }
    };
    policy.fill(moved);
    let Ok(()) = policy.try_fill_adapters(|spec, values| {
        moved(spec, values);
        Ok::<_, Infallible>(())
    });
}

#[test]
fn a_tensor_that_begins_inside_a_block_is_found() {
    let policy = policy(Family::Qwen2, false);
    // Queries have 18 outputs, keys and values 6 each, inputs are 12.
    let (spec, start) = policy.first_unaligned_tensor(12).unwrap();
    assert!(spec.name.ends_with("k_proj.bias") && start == 18, "{} {start}", spec.name);
    assert!(policy.first_unaligned_tensor(6).is_none());
}

/// Export writes the tensors of a policy one after the other into a file that has them in the order of the config.
#[test]
fn tensors_come_in_the_order_of_the_config() {
    for (family, tied) in Family::ALL.into_iter().flat_map(|family| [(family, true), (family, false)]) {
        let expected: Vec<String> =
            config(family, tied).tensors().into_iter().map(|spec| spec.name).collect();
        let names = |policy: &Policy<f64>| -> Vec<String> {
            policy.merged_tensors().map(|(spec, _)| spec.name.clone()).collect()
        };
        assert_eq!(names(&policy(family, tied)), expected, "{family:?}");
        assert_eq!(names(&adapted(family, tied)), expected, "{family:?} with adapters");
    }
}

/// A checkpoint's file has the tensors in their order and no configuration.
#[test]
fn names_divide_the_trained_tensors_into_parameters() {
    for (family, tied) in Family::ALL.into_iter().flat_map(|family| [(family, true), (family, false)]) {
        for policy in [policy(family, tied), adapted(family, tied)] {
            let parameters = policy.weights.trained().map(|parameter| &parameter.spec.parts);
            let names: Vec<Vec<String>> = parameters
                .map(|parts| parts.iter().map(|part| super::parameter_of(&part.name)).collect())
                .collect();
            assert!(names.iter().all(|names| names.iter().all(|name| *name == names[0])), "{names:?}");
            assert!(names.windows(2).all(|pair| pair[0][0] != pair[1][0]), "{names:?}");
        }
    }
}

#[test]
fn every_gradient_equals_finite_differences() {
    for family in Family::ALL {
        let tied = family != Family::Qwen2;
        for mut policy in [policy(family, tied), adapted(family, tied)] {
            check_gradients(&format!("{family:?}"), &mut policy);
        }
    }
}

/// The head of a reward model is trained with adapters too.
#[test]
fn a_reward_model_has_the_gradients_of_finite_differences() {
    for family in [Family::Qwen3, Family::Gemma2] {
        let config = tiny_config(family).with_score(None);
        for mut policy in [filled(&config), with_adapters(&config, LoraTarget::ALL.to_vec())] {
            assert!(policy.trained_tensors().any(|(spec, _)| spec.name == SCORE));
            check_gradients(&format!("reward model {family:?}"), &mut policy);
        }
    }
}

#[test]
fn layers_that_differ_have_the_gradients_of_finite_differences() {
    let mixed = mixed_config();
    mixed.validate("test").unwrap();
    for mut policy in [filled(&mixed), with_adapters(&mixed, vec![LoraTarget::Query, LoraTarget::Down])] {
        check_gradients("layers that differ", &mut policy);
    }
}

fn check_gradients(name: &str, policy: &mut Policy<f64>) {
    const STEP: f64 = 1e-5;
    for (spec, gradient) in gradients(policy).tensors() {
        let direction = noise(spec.name.len() as u64);
        let analytic: f64 = gradient.iter().enumerate().map(|(i, g)| g * direction(i)).sum();
        let mut slope = |step: f64| {
            nudge(policy, &spec.name, step);
            let above = loss(policy);
            nudge(policy, &spec.name, -2.0 * step);
            let below = loss(policy);
            nudge(policy, &spec.name, step);
            (above - below) / (2.0 * step)
        };
        let error = |numeric: f64| (numeric - analytic).abs() / analytic.abs().max(1e-3);
        let mut numeric = slope(STEP);
        if error(numeric) >= 1e-6 {
            // A norm of small results bends much: Richardson's extrapolation removes the error of the step's square.
            numeric = (4.0 * slope(STEP / 2.0) - numeric) / 3.0;
        }
        assert!(error(numeric) < 1e-6, "{name} {}: {analytic} against {numeric}", spec.name);
    }
}

/// The gradient of log-probs alone, with logits computed once where the head is frozen, and twice.
fn gradients_of_logp(policy: &Policy<f64>, has_entropy_gradient: bool) -> Vec<f64> {
    let mut pass = Pass::training(policy, Recompute::Nothing).unwrap();
    let options = HeadOptions { has_entropy_gradient, ..OPTIONS };
    let n_scored = pass.forward(policy, &batch(), options).unwrap().logp.len();
    let (d_logp, _) = coefficients(n_scored);
    let mut gradients = Gradients::zeros(policy).unwrap();
    pass.backward(policy, &d_logp, &vec![0.0; n_scored], &mut gradients).unwrap();
    gradients.tensors().flat_map(|(_, values)| values).collect()
}

#[test]
fn a_frozen_head_that_computes_its_logits_once_gives_the_same_gradients() {
    for tied in [true, false] {
        let policy = adapted(Family::Qwen3, tied);
        let (once, twice) = (gradients_of_logp(&policy, false), gradients_of_logp(&policy, true));
        let largest = twice.iter().fold(0.0_f64, |max, g| max.max(g.abs()));
        assert!(largest > 1e-3);
        assert!(once.iter().zip(&twice).all(|(a, b)| (a - b).abs() < 1e-13 * largest), "tied {tied}");
        assert!(once != twice, "tied {tied}: logits were computed twice");
    }
    let trained = policy(Family::Qwen3, true);
    assert_eq!(gradients_of_logp(&trained, false), gradients_of_logp(&trained, true));
}

#[test]
#[should_panic(expected = "derivatives by entropies, which forward was asked to leave out")]
fn derivatives_by_entropies_need_a_forward_that_expects_them() {
    let policy = adapted(Family::Qwen3, true);
    let mut pass = Pass::training(&policy, Recompute::Nothing).unwrap();
    let options = HeadOptions { has_entropy_gradient: false, ..OPTIONS };
    let n_scored = pass.forward(&policy, &batch(), options).unwrap().logp.len();
    let (d_logp, d_entropy) = coefficients(n_scored);
    let _ = pass.backward(&policy, &d_logp, &d_entropy, &mut Gradients::zeros(&policy).unwrap());
}

#[test]
fn cleared_gradients_are_zero_and_take_up_new_ones() {
    let policy = policy(Family::Qwen3, true);
    let mut gradients = gradients(&policy);
    let first = gradients.in_a_row();
    assert_eq!(gradients.tensors().flat_map(|(_, values)| values).collect::<Vec<_>>(), first);
    assert!(first.iter().any(|value| *value != 0.0));
    gradients.clear();
    assert!(gradients.in_a_row().iter().all(|value| *value == 0.0));
    add_gradients(&policy, &mut gradients);
    assert_eq!(gradients.in_a_row(), first);
    gradients.clear();
    gradients.join();
    assert!(gradients.in_a_row().iter().all(|value| *value == 0.0));
    assert_eq!(gradients.sum_squares(), 0.0);
}

/// Behind attention, a pass without backward runs the last layer for scored rows only where these are few.
#[test]
fn few_scored_rows_have_the_bits_of_many() {
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
        let policy = policy(family, true);
        let sequences: [Vec<u32>; 2] = [vec![1, 4, 2, 3, 0, 4, 1, 2], vec![3, 2, 4, 1, 1]];
        let logp = |is_scored: fn(usize) -> bool| {
            let mut batch = PackedBatch::new();
            for tokens in &sequences {
                batch.push(tokens, &(0..tokens.len()).map(is_scored).collect::<Vec<_>>());
            }
            Pass::scoring(&policy).unwrap().forward(&policy, &batch, OPTIONS).unwrap().logp
        };
        let all = logp(|position| position > 0);
        assert_eq!(logp(|position| position == 3), [all[2], all[7 + 2]], "{family:?}");
        assert_eq!(logp(|position| position == 7), [all[6]], "{family:?}");
    }
}

#[test]
fn a_batch_without_responses_has_no_scores_and_no_gradient() {
    let policy = policy(Family::Llama, true);
    for batch in [PackedBatch::new(), {
        let mut batch = PackedBatch::new();
        batch.push_response(&[1, 2, 3], 3);
        batch
    }] {
        let mut pass = Pass::training(&policy, Recompute::Nothing).unwrap();
        let scores = pass.forward(&policy, &batch, OPTIONS).unwrap();
        assert!(scores.logp.is_empty());
        let mut gradients = Gradients::zeros(&policy).unwrap();
        pass.backward(&policy, &[], &[], &mut gradients).unwrap();
        assert!(gradients.tensors().all(|(_, values)| values.iter().all(|v| *v == 0.0)));
    }
}

#[test]
fn the_head_of_a_tied_embedding_is_measured_without_the_lookup() {
    for family in Family::ALL {
        let tied = policy(family, true);
        let embedding = tied.tensors().next().unwrap().1.to_vec();
        let weights: Vec<Vec<f64>> = tied.tensors().map(|(_, values)| values.to_vec()).collect();
        let mut untied = policy(family, false);
        let mut weights = weights.iter();
        untied.fill(|spec, values| {
            values.copy_from_slice(if spec.name == "lm_head.weight" {
                &embedding
            } else {
                weights.next().unwrap()
            });
        });
        let of_untied = gradients(&untied);
        let head = of_untied.tensors().find(|(spec, _)| spec.name == "lm_head.weight").unwrap().1;
        let expected: f64 = head.iter().map(|value| value * value).sum();
        let measured = of_untied.head_sum_squares();
        assert!(
            (measured - expected).abs() < 1e-12 * expected,
            "{family:?}: {measured}, expected {expected}"
        );
        let of_tied = gradients(&tied);
        assert_eq!(of_tied.head_sum_squares().to_bits(), measured.to_bits(), "{family:?}");
        let joined: f64 = of_tied.tensors().next().unwrap().1.iter().map(|value| value * value).sum();
        assert!((joined - measured).abs() > 1e-3 * measured, "{family:?}: the lookup has a part of its own");
    }
}

/// GPT-2's scaling: matrices that write to the residual stream are smaller by sqrt(2 layers).
#[test]
fn random_matrices_have_the_deviation_asked_for_and_those_of_the_residual_stream_less() {
    let heads = Heads { query: 4, kv: 2, dim: 16 };
    for family in [Family::Qwen2, Family::Qwen35] {
        let layers = tiny_layers(family, heads, 96, 2);
        let config = ModelConfig { width: 64, layers, ..tiny_config(family) };
        let policy = Policy::<f64>::random(&Device::cpu(CpuOptions::default()), &config, 3, 0.1).unwrap();
        // The next test has the vectors and convolutions of DeltaNet.
        let is_vector_of_delta =
            |spec: &TensorSpec| spec.shape.len() != 2 && spec.name.contains("linear_attn");
        let mut smaller = BTreeSet::new();
        for (spec, values) in policy.tensors().filter(|(spec, _)| !is_vector_of_delta(spec)) {
            let values = values.to_vec();
            let rms = (values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64).sqrt();
            let module = spec.name.rsplit('.').nth(1).unwrap();
            let expected = match module {
                "o_proj" | "out_proj" | "down_proj" => 0.05,
                _ if spec.shape.len() == 2 => 0.1,
                _ if spec.name.ends_with("bias") => 0.0,
                _ => 1.0,
            };
            // Three standard errors, where a matrix is small.
            let tolerance = f64::max(0.05, 3.0 / (2.0 * values.len() as f64).sqrt());
            assert!(
                (rms - expected).abs() <= tolerance * expected,
                "{}: {rms}, expected {expected}",
                spec.name
            );
            smaller.extend((expected == 0.05).then(|| module.to_string()));
        }
        assert_eq!(smaller.contains("out_proj"), family == Family::Qwen35, "{smaller:?}");
    }
}

/// A decay begins between 0.01 and 16, and a convolution over four positions between -1/2 and 1/2.
#[test]
fn a_delta_net_starts_in_its_ranges() {
    let policy =
        Policy::<f64>::random(&Device::cpu(CpuOptions::default()), &tiny_config(Family::Qwen35), 3, 0.1)
            .unwrap();
    let mut n_checked = 0;
    for (spec, values) in policy.tensors() {
        let values = values.to_vec();
        let within = |low: f64, high: f64| values.iter().all(|value| (low..=high).contains(value));
        if spec.name.ends_with("A_log") {
            assert!(within(0.01f64.ln(), 16f64.ln()), "{}: {values:?}", spec.name);
            n_checked += 1;
        } else if let [_, _, kernel] = spec.shape[..] {
            let most = 1.0 / (kernel as f64).sqrt();
            assert!(
                within(-most, most) && !within(-0.8 * most, most) && !within(-most, 0.8 * most),
                "{}",
                spec.name
            );
            n_checked += 1;
        }
    }
    assert!(n_checked > 1);
}

/// Heads that forget everything have hardly a gradient by which they could learn to keep something.
#[test]
fn random_states_of_delta_net_last_for_many_tokens() {
    let device = Device::cpu(CpuOptions::default());
    let kept = |seed: u64| {
        let policy = Policy::<f64>::random(&device, &tiny_config(Family::Qwen35), seed, 0.02).unwrap();
        let named = |suffix: &str| {
            let (_, values) = policy.tensors().find(|(spec, _)| spec.name.ends_with(suffix)).unwrap();
            values.to_vec()
        };
        let steps = named("dt_bias").into_iter().map(|bias| bias.exp().ln_1p());
        let steps: Vec<f64> = steps.collect();
        assert!(steps.iter().all(|step| (0.000_999..=0.1).contains(step)), "seed {seed}: {steps:?}");
        let rates = named("A_log").into_iter().map(f64::exp);
        rates.zip(steps).map(|(rate, step)| (-rate * step).exp()).collect::<Vec<f64>>()
    };
    let mut kept: Vec<f64> = (0..100).flat_map(kept).collect();
    kept.sort_by(f64::total_cmp);
    let quarters = [kept[kept.len() / 4], kept[kept.len() / 2], kept[kept.len() * 3 / 4]];
    assert!(quarters[0] > 0.7 && quarters[1] > 0.9 && quarters[2] > 0.97, "{quarters:?}");
}

/// PEFT draws the first factor by `kaiming_uniform_` with a = sqrt(5), which is uniform in +-1/sqrt(inputs).
#[test]
fn adapters_start_in_the_range_of_peft() {
    let config = config(Family::Llama, false);
    let lora = LoraSpec {
        rank: 40,
        alpha: 2.0,
        scale: LoraScale::Plain,
        targets: vec![LoraTarget::Query, LoraTarget::Down],
    };
    let device = Device::cpu(CpuOptions::default());
    let mut policy =
        Policy::<f64>::zeros(&device, PolicySpec { config: &config, lora: Some(&lora) }).unwrap();
    policy.start_adapters(7);
    for (spec, values) in policy.trained_tensors() {
        let values = values.to_vec();
        let (low, high) =
            values.iter().fold((0.0, 0.0), |(low, high): (f64, f64), &v| (low.min(v), high.max(v)));
        if spec.name.contains("lora_B") {
            assert_eq!((low, high), (0.0, 0.0), "{}", spec.name);
            continue;
        }
        let n_inputs: f64 = if spec.name.contains("down_proj") { 11.0 } else { 12.0 };
        let (low, high) = (low * n_inputs.sqrt(), high * n_inputs.sqrt());
        assert!(low >= -1.0 && high <= 1.0 && low < -0.95 && high > 0.95, "{}: {low} to {high}", spec.name);
    }
}
