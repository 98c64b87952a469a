//! Windows, softcaps and other scales than `dim^-0.5`.

use super::*;

const RULES: [ScoreRule; 4] = [
    ScoreRule { scale: 0.3, softcap: None, window: None },
    ScoreRule { scale: 0.25, softcap: None, window: Some(5) },
    ScoreRule { scale: 0.4, softcap: Some(0.7), window: None },
    ScoreRule { scale: 0.2, softcap: Some(1.5), window: Some(33) },
];

fn forward_by<T: Float>(
    device: &Device,
    (heads, rule): (Heads, ScoreRule),
    lens: &[usize],
    qkv: &[T],
) -> Tensors<T> {
    let d = Dims { rule, ..dims(heads, lens) };
    let (qkv, offsets) = (upload(device, qkv), upload(device, &offsets(lens)));
    let mut out = device.zeros(d.tokens * heads.out_width()).unwrap();
    let mut lse = device.zeros(d.tokens * heads.query).unwrap();
    forward(device, d, qkv.view(), offsets.view(), out.view_mut(), lse.view_mut());
    vec![out.view().to_vec(), lse.view().to_vec()]
}

fn backward_by<T: Float>(
    device: &Device,
    (heads, rule): (Heads, ScoreRule),
    lens: &[usize],
    qkv: &[T],
    d_out: &[T],
) -> Vec<T> {
    let d = Dims { rule, ..dims(heads, lens) };
    let saved = forward_by(device, (heads, rule), lens, qkv);
    let [out, lse] = [0, 1].map(|i| upload(device, &saved[i]));
    let (qkv, d_out, offsets) = (upload(device, qkv), upload(device, d_out), upload(device, &offsets(lens)));
    let mut d_qkv = device.zeros(qkv.len()).unwrap();
    let saved = Saved { qkv: qkv.view(), out: out.view(), lse: lse.view() };
    backward(device, d, saved, offsets.view(), d_out.view(), d_qkv.view_mut());
    d_qkv.view().to_vec()
}

/// The textbook's attention of one sequence.
fn textbook(heads: Heads, rule: ScoreRule, qkv: &[f64]) -> Vec<f64> {
    let (width, dim) = (heads.qkv_width(), heads.dim);
    let mut out = Vec::new();
    for (t, h) in (0..qkv.len() / width).flat_map(|t| (0..heads.query).map(move |h| (t, h))) {
        let first = rule.window.map_or(0, |window| (t + 1).saturating_sub(window));
        let key = (heads.query + h / heads.group()) * dim;
        let score = |j: usize| {
            let dot: f64 = (0..dim).map(|i| qkv[t * width + h * dim + i] * qkv[j * width + key + i]).sum();
            let scaled = rule.scale * dot;
            rule.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh()).exp()
        };
        let weights: Vec<f64> = (first..=t).map(score).collect();
        let sum: f64 = weights.iter().sum();
        for i in 0..dim {
            let value = key + heads.kv * dim + i;
            out.push((first..=t).zip(&weights).map(|(j, p)| p / sum * qkv[j * width + value]).sum());
        }
    }
    out
}

#[test]
fn every_rule_is_the_textbook_formula() {
    for (heads, rule) in HEADS.into_iter().flat_map(|heads| RULES.map(|rule| (heads, rule))) {
        let qkv: Vec<f64> = values(1, 300 * heads.qkv_width());
        let got = forward_by(&device(), (heads, rule), &[300], &qkv);
        let expected = textbook(heads, rule, &qkv);
        assert!(got[0].iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-10), "{heads:?} {rule:?}");
    }
}

/// A window that ends within a split, and whose first tile is not the sequence's.
#[test]
fn windows_cross_the_borders_of_splits() {
    let heads = Heads { query: 2, kv: 1, dim: 6 };
    for window in [1, 255, 600, 1024, 1500] {
        let rule = ScoreRule { window: Some(window), ..ScoreRule::plain(6) };
        let n = 2 * SPLIT_KEYS + 77;
        let qkv: Vec<f64> = values(1, n * heads.qkv_width());
        let got = forward_by(&device(), (heads, rule), &[n], &qkv);
        let expected = textbook(heads, rule, &qkv);
        assert!(got[0].iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-10), "{window}");
    }
}

#[test]
fn gradients_of_every_rule_are_finite_differences() {
    for (heads, rule) in [HEADS[0], HEADS[2]].into_iter().flat_map(|heads| RULES.map(|rule| (heads, rule))) {
        let (device, lens) = (device(), [3, 8]);
        let qkv: Vec<f64> = values(1, 11 * heads.qkv_width());
        let d_out = &cotangents(&[vec![0.0; 11 * heads.out_width()]])[0];
        let gradients = vec![backward_by(&device, (heads, rule), &lens, &qkv, d_out)];
        let out = |x: &Tensors<f64>| project(&forward_by(&device, (heads, rule), &lens, &x[0])[..1]);
        assert_gradients(&vec![qkv], &gradients, out);
    }
}

/// The gradient of a long windowed sequence is that of its last tokens alone, where no earlier key is seen.
#[test]
fn keys_outside_the_window_have_no_gradient() {
    let heads = Heads { query: 2, kv: 1, dim: 6 };
    let rule = ScoreRule { window: Some(40), ..ScoreRule::plain(6) };
    let (n, device) = (700, device());
    let qkv: Vec<f64> = values(1, n * heads.qkv_width());
    let mut d_out = vec![0.0; n * heads.out_width()];
    d_out[(n - 1) * heads.out_width()..].fill(1.0);
    let d_qkv = backward_by(&device, (heads, rule), &[n], &qkv, &d_out);
    let first_seen = (n - 40) * heads.qkv_width();
    assert!(d_qkv[..first_seen].iter().all(|d| *d == 0.0));
    assert!(d_qkv[first_seen..].iter().any(|d| *d != 0.0));
}

#[test]
fn all_devices_agree_bitwise_on_every_rule() {
    for rule in RULES {
        let heads = HEADS[1];
        assert_same_on_all_devices(|device| {
            let qkv = values::<f32>(1, 400 * heads.qkv_width());
            let d_out = values::<f32>(2, 400 * heads.out_width());
            let mut all = forward_by(device, (heads, rule), &[100, 300], &qkv);
            all.push(backward_by(device, (heads, rule), &[100, 300], &qkv, &d_out));
            all
        });
    }
}

/// One sequence token by token through the cache, against the packed sequence.
#[test]
fn decode_is_packed_attention_bit_for_bit_under_every_rule() {
    let heads = HEADS[1];
    let device = device();
    let crossing = ScoreRule { window: Some(700), ..ScoreRule::plain(heads.dim) };
    for (rule, n) in RULES.into_iter().map(|rule| (rule, 90)).chain([(crossing, SPLIT_KEYS + 500)]) {
        let qkv = values::<f32>(1, n * heads.qkv_width());
        let packed = forward_by(&device, (heads, rule), &[n], &qkv);
        let n_blocks = n.div_ceil(16);
        let cache_dims =
            CacheDims { blocks: n_blocks, block_size: 16, kv_heads: heads.kv, head_dim: heads.dim };
        let mut cache = Cache::zeros(&device, cache_dims).unwrap();
        let table = upload(&device, &(0..n_blocks as u32).collect::<Vec<_>>());
        let mut start = 0;
        while start < n {
            // Chunks of a prefill, then single tokens.
            let asked = if start < n - 20 { 37.min(n - 20 - start) } else { 1 };
            let offsets = upload(&device, &[0, asked as u32]);
            let contexts = upload(&device, &[(start + asked) as u32]);
            let slots = upload(&device, &(start as u32..(start + asked) as u32).collect::<Vec<_>>());
            let rows = upload(&device, &qkv[start * heads.qkv_width()..(start + asked) * heads.qkv_width()]);
            let mut out = device.zeros(asked * heads.out_width()).unwrap();
            let d = paged::Dims { tokens: asked, sequences: 1, heads, rule, table_width: n_blocks };
            let sequences = lists(&offsets, &contexts, &table);
            paged::forward(&device, d, rows.view(), slots.view(), &mut cache, sequences, out.view_mut());
            let expected = &packed[0][start * heads.out_width()..(start + asked) * heads.out_width()];
            assert_eq!(bits(&out.view().to_vec()), bits(expected), "{rule:?} from {start}");
            start += asked;
        }
    }
}
