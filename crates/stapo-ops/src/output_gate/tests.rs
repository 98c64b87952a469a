use super::*;
use crate::testing::*;

const HEADS: Heads = Heads { query: 4, kv: 2, dim: 6 };

/// From rows of projections to the columns of attention, each a function of its own input: the gated queries and the rest.
fn forward_of<T: Float>(device: &Device, tokens: usize, projected: &[T]) -> Tensors<T> {
    let dims = Dims { tokens, heads: HEADS };
    let projected = upload(device, projected);
    let [mut qkv, mut gate, mut out] = [HEADS.qkv_width(), HEADS.out_width(), HEADS.out_width()]
        .map(|width| device.zeros(tokens * width).unwrap());
    divide(device, dims, projected.view(), qkv.view_mut(), gate.view_mut());
    let rows = qkv.view().to_vec();
    let queries: Vec<T> =
        rows.chunks(HEADS.qkv_width()).flat_map(|row| row[..HEADS.out_width()].to_vec()).collect();
    let queries = upload(device, &queries);
    forward(device, dims, queries.view(), gate.view(), out.view_mut());
    let rest = rows.chunks(HEADS.qkv_width()).flat_map(|row| row[HEADS.out_width()..].to_vec());
    vec![out.view().to_vec(), rest.collect(), gate.view().to_vec(), queries.view().to_vec()]
}

fn backward_of<T: Float>(device: &Device, tokens: usize, projected: &[T]) -> Vec<T> {
    let dims = Dims { tokens, heads: HEADS };
    let outputs = forward_of(device, tokens, projected);
    let d = cotangents(&outputs[..2]);
    let [gate, queries, d_out] = [&outputs[2], &outputs[3], &d[0]].map(|x| upload(device, x));
    let [mut d_queries, mut d_gate] = [0, 1].map(|_| device.zeros(queries.len()).unwrap());
    let saved = (queries.view(), gate.view());
    backward(device, dims, saved, d_out.view(), d_queries.view_mut(), d_gate.view_mut());
    let rows = d_queries.view().to_vec();
    let rows = rows.chunks(HEADS.out_width()).zip(d[1].chunks(2 * HEADS.kv * HEADS.dim));
    let d_qkv: Vec<T> = rows.flat_map(|(queries, rest)| [queries, rest].concat()).collect();
    let d_qkv = upload(device, &d_qkv);
    let mut d_projected = device.zeros(projected.len()).unwrap();
    join(device, dims, d_qkv.view(), d_gate.view(), d_projected.view_mut());
    d_projected.view().to_vec()
}

#[test]
fn each_query_is_gated_by_the_numbers_behind_it() {
    let width = Dims { tokens: 1, heads: HEADS }.projected_width();
    let projected: Vec<f64> = (0..2 * width).map(|x| x as f64 / 10.0).collect();
    let [out, rest, ..] = &forward_of(&device(), 2, &projected)[..] else { panic!() };
    for (i, out) in out.iter().enumerate() {
        let (token, head, column) = (i / 24, i / 6 % 4, i % 6);
        let at = token * width + head * 12 + column;
        let expected = projected[at] / (1.0 + (-projected[at + 6]).exp());
        assert!((out - expected).abs() < 1e-12, "{i}");
    }
    assert_eq!(rest[24..], projected[width + 48..]);
}

#[test]
fn gradients_are_finite_differences() {
    let device = device();
    let projected = values(1, 3 * Dims { tokens: 3, heads: HEADS }.projected_width());
    let gradients = vec![backward_of(&device, 3, &projected)];
    assert_gradients(&vec![projected], &gradients, |x| project(&forward_of(&device, 3, &x[0])[..2]));
}

#[test]
fn all_devices_agree_bitwise_and_stay_close_to_double() {
    let n = 300 * Dims { tokens: 300, heads: HEADS }.projected_width();
    let all = |device: &Device| {
        let x = values(2, n);
        vec![forward_of(device, 300, &x)[0].clone(), backward_of(device, 300, &x)]
    };
    assert_same_on_all_devices(all);
    let x = values::<f64>(2, n);
    let device = device();
    let double = vec![forward_of(&device, 300, &x)[0].clone(), backward_of(&device, 300, &x)];
    assert_close(&all(&device), &double, 1e-6);
}
