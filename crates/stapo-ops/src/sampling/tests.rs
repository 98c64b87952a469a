use super::*;
use crate::lm_head;
use crate::rng::RngKey;
use crate::testing::*;

/// A head whose logits are the hidden state itself.
fn identity(device: &Device, vocab: usize) -> Weight<f32> {
    let eye: Vec<f32> = (0..vocab * vocab).map(|i| if i % vocab == i / vocab { 1.0 } else { 0.0 }).collect();
    weight(device, vocab, vocab, &eye)
}

/// Draws once per uniform from the same logits.
fn draws(
    device: &Device,
    rule: SamplingRule,
    logits: &[f32],
    uniforms: &[f64],
) -> (Vec<u32>, Vec<f32>, Vec<f32>) {
    let (tokens, vocab) = (uniforms.len(), logits.len());
    let hidden = upload(device, &logits.repeat(tokens));
    let mut ids = device.zeros(tokens).unwrap();
    let [mut logp, mut entropy] = [(); 2].map(|()| device.zeros(tokens).unwrap());
    let drawn = Drawn {
        ids: ids.view_mut(),
        logp: logp.view_mut(),
        entropy: entropy.view_mut(),
        alternatives: None,
        kept: None,
    };
    let uniforms = upload(device, uniforms);
    let head = identity(device, vocab);
    let mut logits = Logits::new(device, vocab, tokens).unwrap();
    let from =
        Inputs { hidden: hidden.view(), rule: LogitRule::default(), head: &head, uniforms: uniforms.view() };
    forward(device, rule, from, drawn, &mut logits);
    (ids.view().to_vec(), logp.view().to_vec(), entropy.view().to_vec())
}

fn uniforms(n: u32) -> Vec<f64> {
    (0..n).map(|i| RngKey::new(3).uniform(0, 0, i)).collect()
}

fn draw(temperature: f64, filter: Filter) -> SamplingRule {
    SamplingRule::Draw { temperature, filter }
}

fn kept(filter: Filter, logits: &[f32]) -> Vec<u32> {
    let (mut ids, ..) = draws(&device(), draw(1.0, filter), logits, &uniforms(400));
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[test]
fn frequencies_follow_the_probabilities() {
    let logits = values::<f32>(1, 40);
    let n = 20_000;
    let (ids, ..) = draws(&device(), draw(0.8, Filter::NONE), &logits, &uniforms(n));
    let e: Vec<f64> = logits.iter().map(|x| (f64::from(*x) / 0.8).exp()).collect();
    let sum: f64 = e.iter().sum();
    let chi2: f64 = (0..40)
        .map(|id| {
            let expected = e[id] / sum * f64::from(n);
            let seen = ids.iter().filter(|x| **x == id as u32).count() as f64;
            (seen - expected).powi(2) / expected
        })
        .sum();
    // 72.1 is the 0.1 % point of chi-square with 39 degrees of freedom.
    assert!(chi2 < 72.1, "chi-square {chi2}");
}

#[test]
fn the_ends_of_the_unit_interval_are_the_first_and_the_last_possible_token() {
    let mut logits = values::<f32>(1, 600);
    logits[0] = -200.0;
    logits[599] = -200.0;
    let (ids, ..) = draws(&device(), draw(1.0, Filter::NONE), &logits, &[0.0, 1.0 - f64::EPSILON / 2.0]);
    assert_eq!(ids, [1, 598], "tokens of probability 0 are never drawn");
}

#[test]
fn numbers_are_those_of_training_bit_for_bit() {
    let device = device();
    let tokens = 70;
    let width = 33;
    let vocab = 257;
    let hidden = upload(&device, &values::<f32>(1, tokens * width));
    let w = weight(&device, vocab, width, &values::<f32>(2, vocab * width));
    for rule in [
        SamplingRule::Greedy,
        draw(0.6, Filter::NONE),
        draw(1.0, Filter { top_k: Some(20), top_p: 0.9, min_p: 0.01 }),
    ] {
        let mut ids = device.zeros(tokens).unwrap();
        let [mut logp, mut entropy] = [(); 2].map(|()| device.zeros(tokens).unwrap());
        let drawn = Drawn {
            ids: ids.view_mut(),
            logp: logp.view_mut(),
            entropy: entropy.view_mut(),
            alternatives: None,
            kept: None,
        };
        let uniforms = upload(&device, &uniforms(tokens as u32));
        let mut logits = Logits::new(&device, w.shape().outputs, tokens).unwrap();
        let from =
            Inputs { hidden: hidden.view(), rule: LogitRule::default(), head: &w, uniforms: uniforms.view() };
        forward(&device, rule, from, drawn, &mut logits);
        let [mut t_logp, mut t_entropy, mut collision, mut lse] =
            [(); 4].map(|()| device.zeros(tokens).unwrap());
        let scores = lm_head::HeadScores {
            logp: t_logp.view_mut(),
            entropy: t_entropy.view_mut(),
            collision: collision.view_mut(),
            lse: lse.view_mut(),
            slopes: None,
        };
        let dims = lm_head::Dims { tokens, temperature: rule.temperature(), rule: LogitRule::default() };
        lm_head::forward(&device, dims, hidden.view(), &w, ids.view(), scores, None);
        assert_eq!(bits(&logp.view().to_vec()), bits(&t_logp.view().to_vec()));
        assert_eq!(bits(&entropy.view().to_vec()), bits(&t_entropy.view().to_vec()));
    }
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_id_among_equals() {
    let (ids, ..) = draws(&device(), SamplingRule::Greedy, &[0.0, 3.0, 3.0, 1.0], &[0.9]);
    assert_eq!(ids, [1]);
}

#[test]
fn filters_keep_what_they_promise() {
    // Probabilities 0.4, 0.3, 0.2, 0.1 in scattered order.
    let logits = [0.2f32, 0.4, 0.1, 0.3].map(f32::ln);
    let none = Filter::NONE;
    assert_eq!(kept(none, &logits), [0, 1, 2, 3]);
    assert_eq!(kept(Filter { top_k: Some(2), ..none }, &logits), [1, 3]);
    assert_eq!(kept(Filter { top_k: Some(99), ..none }, &logits), [0, 1, 2, 3]);
    assert_eq!(kept(Filter { top_k: Some(0), ..none }, &logits), [1], "the most probable always stays");
    assert_eq!(kept(Filter { top_p: 0.6, ..none }, &logits), [1, 3]);
    assert_eq!(kept(Filter { top_p: 0.75, ..none }, &logits), [0, 1, 3]);
    assert_eq!(kept(Filter { top_p: 0.0, ..none }, &logits), [1]);
    assert_eq!(kept(Filter { min_p: 0.6, ..none }, &logits), [1, 3]);
    assert_eq!(kept(Filter { top_k: Some(3), top_p: 0.9, min_p: 0.6 }, &logits), [1, 3]);
}

#[test]
fn equal_probabilities_are_cut_by_the_lower_id() {
    assert_eq!(kept(Filter { top_k: Some(2), ..Filter::NONE }, &[1.0; 5]), [0, 1]);
}

#[test]
fn all_devices_draw_the_same_tokens() {
    let logits = values::<f32>(1, 257);
    for filter in [Filter::NONE, Filter { top_k: Some(50), top_p: 0.8, min_p: 0.02 }] {
        assert_same_on_all_devices(|device| {
            let (ids, logp, entropy) = draws(device, draw(0.9, filter), &logits, &uniforms(50));
            vec![ids.iter().map(|id| *id as f32).collect(), logp, entropy]
        });
    }
}

/// The filters by their definition, on all tokens sorted.
fn kept_by_definition(filter: Filter, logits: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
    let weight = |id: &u32| f64::from(logits[*id as usize]).exp();
    order.truncate(filter.top_k.unwrap_or(usize::MAX).max(1));
    let total: f64 = order.iter().map(weight).sum();
    let mut seen = 0.0;
    let n = order.iter().take_while(|id| {
        let short = filter.top_p >= 1.0 || seen < filter.top_p * total;
        seen += weight(id);
        short
    });
    let n = n.count().max(1);
    order.truncate(n);
    let floor = filter.min_p * weight(&order[0]);
    order.retain(|id| weight(id) >= floor);
    order.sort_unstable();
    order
}

#[test]
fn filters_agree_with_their_definition_on_random_logits() {
    for seed in 0..4 {
        let logits: Vec<f32> = values::<f32>(seed, 61).iter().map(|x| 3.0 * x).collect();
        for top_k in [None, Some(1), Some(7), Some(40)] {
            for top_p in [1.0, 0.95, 0.5, 0.1] {
                for min_p in [0.0, 0.02, 0.3] {
                    let filter = Filter { top_k, top_p, min_p };
                    let expected = kept_by_definition(filter, &logits);
                    // A uniform number in the middle of a kept token's share draws that token.
                    let weights: Vec<f64> =
                        expected.iter().map(|id| f64::from(logits[*id as usize]).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    let mut seen = 0.0;
                    let middles: Vec<f64> = weights
                        .iter()
                        .map(|weight| {
                            seen += weight;
                            (seen - weight / 2.0) / total
                        })
                        .collect();
                    let (ids, ..) = draws(&device(), draw(1.0, filter), &logits, &middles);
                    assert_eq!(ids, expected, "{filter:?}");
                }
            }
        }
    }
}

#[test]
fn a_token_may_be_given_by_the_number_of_its_draw() {
    let device = device();
    let tokens = upload(&device, &[7, drawn(2), 0, drawn(0)]);
    let ids = upload(&device, &[50, 60, 70]);
    let mut out = upload(&device, &[0; 4]);
    look_up(&device, tokens.view(), ids.view(), out.view_mut());
    assert_eq!(out.view().to_vec(), [7, 70, 0, 50]);
}
