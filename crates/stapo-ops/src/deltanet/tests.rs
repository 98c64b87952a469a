use super::*;
use crate::Buffer;
use crate::testing::*;

const HEADS: [Heads; 3] = [
    Heads { key: 2, value: 2, key_dim: 5, value_dim: 7 },
    Heads { key: 2, value: 4, key_dim: 8, value_dim: 18 },
    Heads { key: 1, value: 2, key_dim: 16, value_dim: 80 },
];

/// The epsilon is large, because differences of a norm of small rows are not close to its derivative.
pub(crate) fn dims(heads: Heads, lengths: &[usize]) -> Dims {
    Dims { tokens: lengths.iter().sum(), sequences: lengths.len(), heads, kernel: 4, eps: 0.1 }
}

fn offsets(lengths: &[usize]) -> Vec<u32> {
    let ends = lengths.iter().scan(0, |end, len| {
        *end += *len as u32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// The input, then the weights: conv, a_log, dt_bias, norm.
pub(crate) fn inputs<T: Float>(d: Dims) -> Tensors<T> {
    let lens = [
        d.tokens * d.heads.input_width(),
        d.heads.conv_width() * d.kernel,
        d.heads.value,
        d.heads.value,
        d.heads.value_dim,
    ];
    (0..).zip(lens).map(|(seed, len)| values(seed + 1, len)).collect()
}

fn parameters<T: Float>(x: &[Buffer<T>]) -> Parameters<'_, T> {
    Parameters { conv: x[1].view(), a_log: x[2].view(), dt_bias: x[3].view(), norm: x[4].view() }
}

/// A buffer in compute precision that holds `x`.
fn compute<T: Float>(device: &Device, x: &[T]) -> Buffer<T> {
    let mut buffer = device.compute_zeros(x.len()).unwrap();
    buffer.view_mut().write(x);
    buffer
}

/// Memory that forward fills: mixed, inv_norms, out.
fn memory<T: Float>(device: &Device, d: Dims) -> [Buffer<T>; 3] {
    let [mixed, out] = [d.heads.input_width(), d.heads.value_width()]
        .map(|width| device.compute_zeros(d.tokens * width).unwrap());
    [mixed, device.zeros(d.tokens * d.heads.n_norms()).unwrap(), out]
}

/// `mixed`, whose layout depends on the device, `inv_norms` and `out`.
pub(crate) fn forward_of<T: Float>(
    device: &Device,
    d: Dims,
    lengths: &[usize],
    x: &Tensors<T>,
) -> Tensors<T> {
    let x: Vec<_> = x.iter().map(|x| compute(device, x)).collect();
    let offsets = upload(device, &offsets(lengths));
    let [mut mixed, mut inv_norms, mut out] = memory(device, d);
    let to = Out { mixed: mixed.view_mut(), inv_norms: inv_norms.view_mut(), out: out.view_mut() };
    let sequences = Sequences { offsets: offsets.view(), carried: None };
    forward(device, d, parameters(&x), x[0].view(), sequences, to);
    [mixed, inv_norms, out].map(|buffer| buffer.view().to_vec()).to_vec()
}

/// The gradients of all inputs; the sums begin at `start`.
pub(crate) fn backward_of<T: Float>(
    device: &Device,
    d: Dims,
    lengths: &[usize],
    x: &Tensors<T>,
    start: T,
) -> Tensors<T> {
    let saved = forward_of(device, d, lengths, x);
    let (mixed, inv_norms) = (compute(device, &saved[0]), upload(device, &saved[1]));
    let d_out = compute(device, &cotangents(&[vec![T::ZERO; d.tokens * d.heads.value_width()]])[0]);
    let mut sums: Vec<_> = x.iter().map(|x| upload(device, &vec![start; x.len()])).collect();
    sums[0] = device.compute_zeros(x[0].len()).unwrap();
    let x: Vec<_> = x.iter().map(|x| compute(device, x)).collect();
    let offsets = upload(device, &offsets(lengths));
    let mut d_mixed = device.compute_zeros(saved[0].len()).unwrap();
    let [d_raw, d_conv, d_a_log, d_dt_bias, d_norm] = &mut sums[..] else { panic!() };
    let to = ParameterSums {
        d_conv: d_conv.view_mut(),
        d_a_log: d_a_log.view_mut(),
        d_dt_bias: d_dt_bias.view_mut(),
        d_norm: d_norm.view_mut(),
    };
    let saved = Saved { raw: x[0].view(), mixed: mixed.view(), inv_norms: inv_norms.view() };
    let gradients = (d_mixed.view_mut(), d_raw.view_mut());
    backward(device, d, (parameters(&x), saved), offsets.view(), d_out.view(), gradients, Some(to));
    sums.iter().map(|sum| sum.view().to_vec()).collect()
}

/// The equations of the module, one token and one number at a time.
fn naive(d: Dims, lengths: &[usize], x: &Tensors<f64>) -> Vec<f64> {
    let h = d.heads;
    let (raw, conv) = (&x[0], &x[1]);
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let mut out = Vec::new();
    let mut first = 0;
    for &len in lengths {
        let mut states = vec![vec![vec![0.0; h.value_dim]; h.key_dim]; h.value];
        for t in first..first + len {
            let at = |column: usize| raw[t * h.input_width() + column];
            let convolved = |column: usize| {
                let lags = (0..d.kernel).filter(|lag| t - first >= *lag);
                let term = |lag: usize| {
                    conv[column * d.kernel + d.kernel - 1 - lag] * raw[(t - lag) * h.input_width() + column]
                };
                silu(lags.map(term).sum())
            };
            for (head, state) in states.iter_mut().enumerate() {
                let unit = |start: usize| {
                    let start = start + head / h.group() * h.key_dim;
                    let x: Vec<f64> = (start..start + h.key_dim).map(convolved).collect();
                    let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    x.into_iter().map(|x| x / length).collect::<Vec<f64>>()
                };
                let (q, k) = (unit(0), unit(h.key_width()));
                let gates = h.conv_width() + h.value_width();
                let beta = 1.0 / (1.0 + (-at(gates + head)).exp());
                let step = at(gates + h.value + head) + x[3][head];
                let decay = (-x[2][head].exp() * step.exp().ln_1p()).exp();
                let mut o = vec![0.0; h.value_dim];
                for (column, o) in o.iter_mut().enumerate() {
                    for row in state.iter_mut() {
                        row[column] *= decay;
                    }
                    let read: f64 = state.iter().zip(&k).map(|(row, k)| row[column] * k).sum();
                    let value = convolved(2 * h.key_width() + head * h.value_dim + column);
                    let corrected = beta * (value - read);
                    state.iter_mut().zip(&k).for_each(|(row, k)| row[column] += k * corrected);
                    *o = state.iter().zip(&q).map(|(row, q)| row[column] * q).sum::<f64>()
                        / (h.key_dim as f64).sqrt();
                }
                let rms = (o.iter().map(|o| o * o).sum::<f64>() / h.value_dim as f64 + d.eps).sqrt();
                out.extend(o.iter().enumerate().map(|(column, o)| {
                    o / rms * x[4][column] * silu(at(h.conv_width() + head * h.value_dim + column))
                }));
            }
        }
        first += len;
    }
    out
}

#[test]
fn outputs_are_those_of_the_equations() {
    for heads in HEADS {
        let lengths = [1, 70, 3];
        let d = dims(heads, &lengths);
        let x = inputs::<f64>(d);
        let (got, expected) = (&forward_of(&device(), d, &lengths, &x)[2], naive(d, &lengths, &x));
        let off = got.iter().zip(&expected).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f64::max);
        assert!(off < 1e-11, "{heads:?}: {off:.1e}");
    }
}

#[test]
fn gradients_are_finite_differences() {
    let device = device();
    // Lengths on both sides of the chunks whose states backward recomputes.
    for (heads, lengths) in [(HEADS[0], &[3, 1, 5][..]), (HEADS[1], &[2, 4]), (HEADS[0], &[CHUNK + 2])] {
        let d = dims(heads, lengths);
        let x = inputs::<f64>(d);
        let gradients = backward_of(&device, d, lengths, &x, 0.0);
        assert_gradients(&x, &gradients, |x| project(&forward_of(&device, d, lengths, x)[2..]));
    }
}

#[test]
fn all_devices_agree_bitwise_and_stay_close_to_double() {
    for (heads, lengths) in [(HEADS[1], &[1, 70, 33][..]), (HEADS[2], &[5, 129])] {
        let d = dims(heads, lengths);
        let all = |device: &Device| {
            let x = inputs(d);
            [forward_of(device, d, lengths, &x), backward_of(device, d, lengths, &x, 0.5)].concat()
        };
        assert_same_on_all_devices(all);
        let x = inputs::<f64>(d);
        let expected = [forward_of(&device(), d, lengths, &x), backward_of(&device(), d, lengths, &x, 0.5)];
        assert_close(&all(&device()), &expected.concat(), 2e-5);
    }
}

#[test]
fn calls_that_go_on_behind_kept_states_give_the_bits_of_one_call() {
    for heads in HEADS {
        check_calls(&device(), heads, [9, 70, 4], &[1, 2, 1, 3, 1, 40, 1, 30]);
    }
}

/// Sequences in calls of up to `rows` rows give the bits of one call; slots are used in any order and hold anything before.
pub(crate) fn check_calls(device: &Device, heads: Heads, lengths: [usize; 3], rows: &[usize]) {
    let d = dims(heads, &lengths);
    let x = inputs::<f32>(d);
    let whole = &forward_of(device, d, &lengths, &x)[2];
    let mut states = States::zeros(device, heads, d.kernel, 5).unwrap();
    for buffer in states.buffers_mut() {
        let len = buffer.len();
        buffer.view_mut().write(&vec![7.0; len]);
    }
    let weights: Vec<_> = x.iter().map(|x| compute(device, x)).collect();
    let mut slots = [4u32, 0, 2];
    let mut done = [0; 3];
    for (call, &n) in rows.iter().enumerate() {
        let (mut raw, mut new, mut at) = (vec![], vec![], vec![]);
        for (s, &len) in lengths.iter().enumerate() {
            let n = n.min(len - done[s]);
            if n > 0 {
                let first = lengths[..s].iter().sum::<usize>() + done[s];
                raw.extend_from_slice(&x[0][first * heads.input_width()..][..n * heads.input_width()]);
                done[s] += n;
                new.push(n);
                at.push((s, first));
            }
        }
        let part = dims(heads, &new);
        let [mut mixed, mut inv_norms, mut out] = memory(device, part);
        let to = Out { mixed: mixed.view_mut(), inv_norms: inv_norms.view_mut(), out: out.view_mut() };
        let (raw, offsets) = (compute(device, &raw), upload(device, &offsets(&new)));
        let contexts = upload(device, &at.iter().map(|(s, _)| done[*s] as u32).collect::<Vec<_>>());
        let used = upload(device, &at.iter().map(|(s, _)| slots[*s]).collect::<Vec<_>>());
        let carried = Carried { contexts: contexts.view(), slots: used.view(), states: &mut states };
        let sequences = Sequences { offsets: offsets.view(), carried: Some(carried) };
        forward(device, part, parameters(&weights), raw.view(), sequences, to);
        let width = heads.value_width();
        let out = out.view().to_vec();
        let mut rows = out.chunks_exact(width);
        for ((s, first), n) in at.iter().zip(&new) {
            for row in 0..*n {
                let expected = &whole[(first + row) * width..][..width];
                assert_eq!(
                    bits(rows.next().unwrap()),
                    bits(expected),
                    "{heads:?} call {call} of {s}, row {row}"
                );
            }
        }
        // A sequence moves to another slot.
        if call == 3 {
            states.copy_slots(device, device.upload(&[0, 3]).unwrap().view());
            slots[1] = 3;
        }
    }
    assert_eq!(done, lengths);
}

#[test]
fn gradients_do_not_depend_on_the_cut_into_micro_batches() {
    let device = device();
    let (heads, lengths) = (HEADS[1], [5, 66]);
    let d = dims(heads, &lengths);
    let x = inputs::<f32>(d);
    let whole = backward_of(&device, d, &lengths, &x, 0.0);
    // The first sequence is a prefix of the numbers, so its cotangents are too.
    let first = dims(heads, &lengths[..1]);
    let mut alone = x.clone();
    alone[0].truncate(first.tokens * heads.input_width());
    let part = backward_of(&device, first, &lengths[..1], &alone, 0.0);
    assert_eq!(bits(&whole[0][..part[0].len()]), bits(&part[0]));
}

#[test]
fn extreme_gates_give_finite_numbers() {
    check_extreme_gates(&device(), HEADS[0]);
}

pub(crate) fn check_extreme_gates(device: &Device, heads: Heads) {
    let lengths = [70];
    let d = dims(heads, &lengths);
    let mut x = inputs::<f32>(d);
    let gates = d.heads.conv_width() + d.heads.value_width();
    for (idx, row) in x[0].chunks_exact_mut(d.heads.input_width()).enumerate() {
        row[gates..].fill([-200.0, 200.0, -90.0, 90.0, 0.0][idx % 5]);
        row[..d.heads.conv_width()].fill(if idx == 2 { 0.0 } else { 1.0 });
    }
    let all = [forward_of(device, d, &lengths, &x), backward_of(device, d, &lengths, &x, 0.0)].concat();
    assert!(all.iter().flatten().all(|x| x.is_finite()), "{heads:?}");
}
