use super::*;
use crate::testing::*;

mod parts;

const HEADS: Heads = Heads { query: 6, kv: 2, dim: 10 };
const PLAIN: Frequencies = Frequencies { head_dim: 10, rotary_dim: 10, theta: 100.0, scaling: Scaling::None };

fn dims(tokens: usize, heads: Heads) -> Dims {
    Dims { tokens, heads }
}

fn table<T: Float>(device: &Device, heads: Heads) -> Table<T> {
    Table::new(device, &Frequencies { head_dim: heads.dim, rotary_dim: heads.dim, ..PLAIN }, 50).unwrap()
}

/// out, inv_rms.
fn forward_of<T: Float>(device: &Device, d: Dims, raw: &[T], norm: Option<[&[T]; 2]>) -> Tensors<T> {
    let positions = upload(device, &ids(9, d.tokens, 50));
    let raw = upload(device, raw);
    let mut out = device.zeros(raw.len()).unwrap();
    let mut inv_rms = device.zeros(d.tokens * (d.heads.query + d.heads.kv)).unwrap();
    let weights = norm.map(|w| w.map(|w| upload(device, w)));
    let norm = weights.as_ref().map(|[q, k]| {
        (
            HeadNorm { extent: NormExtent::Head, query_weight: q.view(), key_weight: k.view(), eps: 1e-3 },
            inv_rms.view_mut(),
        )
    });
    forward(device, d, &table(device, d.heads), positions.view(), norm, raw.view(), out.view_mut());
    vec![out.view().to_vec(), inv_rms.view().to_vec()]
}

/// d_raw and, with a norm, d_query_weight, d_key_weight.
fn backward_of<T: Float>(
    device: &Device,
    d: Dims,
    raw: &[T],
    norm: Option<[&[T]; 2]>,
    d_out: &[T],
) -> Tensors<T> {
    let positions = upload(device, &ids(9, d.tokens, 50));
    let inv_rms = upload(device, &forward_of(device, d, raw, norm)[1]);
    let (raw, d_out) = (upload(device, raw), upload(device, d_out));
    let mut d_raw = device.zeros(raw.len()).unwrap();
    let [mut d_q, mut d_k] = [(); 2].map(|()| device.zeros(d.heads.dim).unwrap());
    let weights = norm.map(|w| w.map(|w| upload(device, w)));
    let grad = weights.as_ref().map(|[q, k]| HeadNormGrad {
        norm: HeadNorm { extent: NormExtent::Head, query_weight: q.view(), key_weight: k.view(), eps: 1e-3 },
        raw: raw.view(),
        inv_rms: inv_rms.view(),
        to: Some(HeadNormSums { d_query_weight: d_q.view_mut(), d_key_weight: d_k.view_mut() }),
    });
    let has_norm = grad.is_some();
    backward(device, d, &table(device, d.heads), positions.view(), grad, d_out.view(), d_raw.view_mut());
    let all = [d_raw, d_q, d_k].map(|x| x.view().to_vec()).to_vec();
    if has_norm { all } else { all[..1].to_vec() }
}

fn all_of<T: Float>(device: &Device, d: Dims) -> Tensors<T> {
    let n = d.tokens * d.heads.qkv_width();
    let raw = values(1, n);
    let d_out = values(2, n);
    let q = values(3, d.heads.dim);
    let k = values(4, d.heads.dim);
    let mut all = forward_of(device, d, &raw, None);
    all.extend(forward_of(device, d, &raw, Some([&q, &k])));
    all.extend(backward_of(device, d, &raw, None, &d_out));
    all.extend(backward_of(device, d, &raw, Some([&q, &k]), &d_out));
    all
}

#[test]
fn gradients_are_finite_differences() {
    let device = device();
    let d = dims(3, HEADS);
    let n = 3 * HEADS.qkv_width();
    let d_out = &cotangents(&[vec![0.0; n]])[0];
    let raw: Vec<f64> = values(1, n);
    let gradients = backward_of(&device, d, &raw, None, d_out);
    assert_gradients(&vec![raw.clone()], &gradients, |x| project(&forward_of(&device, d, &x[0], None)[..1]));

    let inputs = vec![raw, values(2, 10), values(3, 10)];
    let gradients = backward_of(&device, d, &inputs[0], Some([&inputs[1], &inputs[2]]), d_out);
    assert_gradients(&inputs, &gradients, |x| {
        project(&forward_of(&device, d, &x[0], Some([&x[1], &x[2]]))[..1])
    });
}

#[test]
fn all_devices_agree_bitwise_and_stay_close_to_double() {
    for (tokens, dim) in [(1, 2), (31, 34), (70, 128)] {
        let d = dims(tokens, Heads { dim, ..HEADS });
        assert_same_on_all_devices(|device| all_of(device, d));
        assert_close(&all_of(&device(), d), &all_of(&device(), d), 1e-5);
    }
}

#[test]
fn rotation_pairs_a_dimension_with_the_one_half_a_head_on() {
    let device = device();
    let heads = Heads { query: 1, kv: 1, dim: 4 };
    let d = dims(1, heads);
    let table = Table::new(
        &device,
        &Frequencies { head_dim: 4, rotary_dim: 4, theta: 16.0, scaling: Scaling::None },
        8,
    )
    .unwrap();
    let raw: Vec<f64> = (1..=12).map(f64::from).collect();
    let raw_on = upload(&device, &raw);
    let positions = upload(&device, &[3]);
    let mut out = device.zeros(12).unwrap();
    forward(&device, d, &table, positions.view(), None, raw_on.view(), out.view_mut());
    // The two pairs have the frequencies 1 and 1/4.
    let (a, b) = (3f64, 0.75f64);
    let expected = [
        a.cos() - 3.0 * a.sin(),
        2.0 * b.cos() - 4.0 * b.sin(),
        3.0 * a.cos() + a.sin(),
        4.0 * b.cos() + 2.0 * b.sin(),
    ];
    let out = out.view().to_vec();
    assert!(out.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-12), "{out:?}");
    assert_eq!(out[8..], raw[8..], "values pass through");
}

fn assert_frequencies(scaling: &Scaling, dim: usize, theta: f64, expected: &[f64], factor: f64) {
    let frequencies = Frequencies { head_dim: dim, rotary_dim: dim, theta, scaling: scaling.clone() };
    for (got, expected) in frequencies.per_pair().iter().zip(expected) {
        assert!((got / expected - 1.0).abs() < 1e-6, "{scaling:?}: {got} {expected}");
    }
    assert_eq!(frequencies.per_pair().len(), dim / 2);
    assert!((frequencies.attention_factor() - factor).abs() < 1e-9);
}

/// The expected frequencies are those of transformers 5 for the same settings.
#[test]
fn scalings_match_transformers() {
    let linear = [0.25, 0.07905694, 0.025, 0.0079056947, 0.0025, 0.00079056947, 0.00025, 7.9056947e-5];
    assert_frequencies(&Scaling::Linear { factor: 4.0 }, 16, 1e4, &linear, 1.0);
    let llama = Scaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 8192,
    };
    let expected = [
        1.0,
        0.193922758,
        0.0376060307,
        0.00729266508,
        0.000524846022,
        3.42810235e-5,
        6.64786967e-6,
        1.28917316e-6,
    ];
    assert_frequencies(&llama, 16, 5e5, &expected, 1.0);
    let yarn = |original_positions, attention_factor, truncate| Scaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_positions,
        attention_factor,
        truncate,
    };
    let expected = [
        1.0,
        0.177827939,
        0.0316227786,
        0.00421755994,
        0.000500000024,
        4.44569851e-5,
        7.90569356e-6,
        1.40585337e-6,
    ];
    assert_frequencies(&yarn(32768, 1.25, true), 16, 1e6, &expected, 1.25);
    let expected =
        [1.0, 0.316227764, 0.1, 0.0286136102, 0.006556971, 0.00128563191, 0.000250000012, 7.90569466e-5];
    assert_frequencies(&yarn(4096, 1.5, false), 16, 1e4, &expected, 1.5);
}

#[test]
#[should_panic(expected = "rope::forward: position 50 of a table of 50")]
fn a_position_beyond_the_table_is_named() {
    let device = device();
    let heads = Heads { query: 1, kv: 1, dim: 2 };
    let positions = upload(&device, &[50]);
    let raw = upload(&device, &[0f32; 6]);
    let mut out = device.zeros(6).unwrap();
    forward(
        &device,
        dims(1, heads),
        &table(&device, heads),
        positions.view(),
        None,
        raw.view(),
        out.view_mut(),
    );
}
