//! Learned sinks: a logit of each head that joins the sum of exponentials.

use super::*;

const RULES: [Option<usize>; 2] = [None, Some(40)];

fn rule(heads: Heads, window: Option<usize>) -> ScoreRule {
    ScoreRule { window, ..ScoreRule::plain(heads.dim) }
}

/// The tensors out, lse, d_qkv and d_sinks.
fn all_with_sinks<T: Float>(
    device: &Device,
    d: Dims,
    lens: &[usize],
    [qkv, sinks, d_out]: [&[T]; 3],
) -> Tensors<T> {
    let offsets = upload(device, &offsets(lens));
    let [qkv, sinks, d_out] = [qkv, sinks, d_out].map(|x| upload(device, x));
    let mut out = device.zeros(d.tokens * d.heads.out_width()).unwrap();
    let mut lse = device.zeros(d.tokens * d.heads.query).unwrap();
    let inputs = Inputs { qkv: qkv.view(), sinks: Some(sinks.view()) };
    forward(device, d, inputs, offsets.view(), out.view_mut(), lse.view_mut());
    let saved = Saved { qkv: qkv.view(), out: out.view(), lse: lse.view() };
    let mut d_qkv = device.zeros(qkv.len()).unwrap();
    backward(device, d, saved, offsets.view(), d_out.view(), d_qkv.view_mut());
    let mut d_sinks = device.zeros(d.heads.query).unwrap();
    super::super::sinks::backward(device, d, saved, sinks.view(), d_out.view(), d_sinks.view_mut());
    [out, lse, d_qkv, d_sinks].map(|x| x.view().to_vec()).into()
}

/// The textbook's attention of one sequence with a column of logits in front of the scores, which is dropped after the softmax.
fn textbook_with_sinks(heads: Heads, rule: ScoreRule, qkv: &[f64], sinks: &[f64]) -> Vec<f64> {
    let (width, dim) = (heads.qkv_width(), heads.dim);
    let mut out = Vec::new();
    for (t, h) in (0..qkv.len() / width).flat_map(|t| (0..heads.query).map(move |h| (t, h))) {
        let first = rule.window.map_or(0, |window| (t + 1).saturating_sub(window));
        let key = (heads.query + h / heads.group()) * dim;
        let score = |j: usize| {
            let dot: f64 = (0..dim).map(|i| qkv[t * width + h * dim + i] * qkv[j * width + key + i]).sum();
            rule.scale * dot
        };
        let scores: Vec<f64> = (first..=t).map(score).collect();
        let top = scores.iter().fold(sinks[h], |top, score| top.max(*score));
        let sum = (sinks[h] - top).exp() + scores.iter().map(|score| (score - top).exp()).sum::<f64>();
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp() / sum).collect();
        for i in 0..dim {
            let value = key + heads.kv * dim + i;
            out.push((first..=t).zip(&weights).map(|(j, weight)| weight * qkv[j * width + value]).sum());
        }
    }
    out
}

/// Sinks that are small, that count, and that outweigh every key.
#[test]
fn a_sink_takes_its_share_of_the_softmax() {
    for (heads, window) in HEADS.into_iter().flat_map(|heads| RULES.map(|window| (heads, window))) {
        // Two parts of keys, with one kind of heads.
        let long = (heads == HEADS[0]).then_some(([SPLIT_KEYS + 77], 3.0));
        for (lens, factor) in [([300], 3.0), ([40], 2000.0)].into_iter().chain(long) {
            let d = Dims { rule: rule(heads, window), ..dims(heads, &lens) };
            let qkv: Vec<f64> = values(1, d.tokens * heads.qkv_width());
            let sinks: Vec<f64> = values::<f64>(2, heads.query).iter().map(|sink| factor * sink).collect();
            let d_out = vec![0.0; d.tokens * heads.out_width()];
            let got = all_with_sinks(&device(), d, &lens, [&qkv, &sinks, &d_out]);
            let expected = textbook_with_sinks(heads, d.rule, &qkv, &sinks);
            let is_near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-10;
            assert!(got[0].iter().zip(&expected).all(is_near), "{heads:?} {window:?} {factor}");
            assert!(got.iter().flatten().all(|x| x.is_finite()), "{heads:?} {window:?} {factor}");
        }
    }
}

#[test]
fn gradients_with_sinks_are_finite_differences() {
    for (heads, window) in [(HEADS[0], None), (HEADS[2], None), (HEADS[0], Some(3))] {
        let (device, lens) = (device(), [3, 8]);
        let d = Dims { rule: rule(heads, window), ..dims(heads, &lens) };
        let qkv: Vec<f64> = values(1, 11 * heads.qkv_width());
        let sinks: Vec<f64> = values(2, heads.query);
        let d_out = &cotangents(&[vec![0.0; 11 * heads.out_width()]])[0];
        let all = |x: &Tensors<f64>| all_with_sinks(&device, d, &lens, [&x[0], &x[1], d_out]);
        let inputs = vec![qkv, sinks];
        let gradients = all(&inputs)[2..].to_vec();
        assert_gradients(&inputs, &gradients, |x| project(&all(x)[..1]));
    }
}

#[test]
fn all_devices_agree_bitwise_with_sinks() {
    let (heads, lens) = (HEADS[1], [100, 300]);
    let d = Dims { rule: rule(heads, Some(40)), ..dims(heads, &lens) };
    assert_same_on_all_devices(|device| {
        let [qkv, d_out] = [heads.qkv_width(), heads.out_width()].map(|width| values::<f32>(1, 400 * width));
        all_with_sinks(device, d, &lens, [&qkv, &values(2, heads.query), &d_out])
    });
}

/// One sequence in chunks and then token by token through the cache, against the packed sequence.
#[test]
fn decode_with_sinks_is_packed_attention_bit_for_bit() {
    let (heads, device) = (HEADS[1], device());
    for (window, n) in [(None, 90), (Some(33), 90), (Some(700), SPLIT_KEYS + 500), (None, SPLIT_KEYS + 50)] {
        let d = Dims { rule: rule(heads, window), ..dims(heads, &[n]) };
        let qkv = values::<f32>(1, n * heads.qkv_width());
        let sinks = values::<f32>(2, heads.query);
        let d_out = vec![0.0; n * heads.out_width()];
        let packed = &all_with_sinks(&device, d, &[n], [&qkv, &sinks, &d_out])[0];
        let sinks = upload(&device, &sinks);
        let n_blocks = n.div_ceil(16);
        let cache_dims =
            CacheDims { blocks: n_blocks, block_size: 16, kv_heads: heads.kv, head_dim: heads.dim };
        let mut cache = Cache::zeros(&device, cache_dims).unwrap();
        let table = upload(&device, &(0..n_blocks as u32).collect::<Vec<_>>());
        let mut start = 0;
        while start < n {
            let asked = if start < n - 20 { 37.min(n - 20 - start) } else { 1 };
            let offsets = upload(&device, &[0, asked as u32]);
            let contexts = upload(&device, &[(start + asked) as u32]);
            let slots = upload(&device, &(start as u32..(start + asked) as u32).collect::<Vec<_>>());
            let rows = upload(&device, &qkv[start * heads.qkv_width()..(start + asked) * heads.qkv_width()]);
            let mut out = device.zeros(asked * heads.out_width()).unwrap();
            let d = paged::Dims { tokens: asked, sequences: 1, heads, rule: d.rule, table_width: n_blocks };
            let sequences = lists(&offsets, &contexts, &table);
            let inputs = Inputs { qkv: rows.view(), sinks: Some(sinks.view()) };
            paged::forward(&device, d, inputs, slots.view(), &mut cache, sequences, out.view_mut());
            let expected = &packed[start * heads.out_width()..(start + asked) * heads.out_width()];
            assert_eq!(bits(&out.view().to_vec()), bits(expected), "{window:?} from {start}");
            start += asked;
        }
    }
}
