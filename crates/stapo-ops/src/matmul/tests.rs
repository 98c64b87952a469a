use super::*;
use crate::testing::*;

const SIZES: [(usize, usize, usize); 7] =
    [(1, 1, 1), (3, 31, 33), (33, 300, 31), (17, 5, 257), (64, 64, 64), (61, 513, 97), (2, 600, 40)];

fn forward_of<T: Float>(device: &Device, d: Dims, x: &[T], w: &[T], bias: Option<&[T]>) -> Vec<T> {
    let x = upload(device, x);
    let w = weight(device, d.outputs, d.inputs, w);
    let bias = bias.map(|bias| upload(device, bias));
    let mut y = device.zeros(d.tokens * d.outputs).unwrap();
    forward(device, d.tokens, x.view(), &w, bias.as_ref().map(Buffer::view), y.view_mut());
    y.view().to_vec()
}

use crate::Buffer;

/// d_x, `before` + d_weight, d_bias.
fn backward_of<T: Float>(device: &Device, d: Dims, x: &[T], w: &[T], d_y: &[T], before: &[T]) -> Tensors<T> {
    let x = upload(device, x);
    let w = weight(device, d.outputs, d.inputs, w);
    let d_y = upload(device, d_y);
    let mut d_x = device.zeros(d.tokens * d.inputs).unwrap();
    let mut d_w = upload(device, before);
    let mut d_bias = device.zeros(d.outputs).unwrap();
    backward_input(device, d.tokens, d_y.view(), &w, Write::Set, d_x.view_mut());
    backward_weight(device, d, x.view(), d_y.view(), Write::Add, d_w.view_mut());
    backward_bias(device, d.tokens, d.outputs, d_y.view(), d_bias.view_mut());
    vec![d_x.view().to_vec(), d_w.view().to_vec(), d_bias.view().to_vec()]
}

/// All outputs, from random inputs.
fn all_of<T: Float>(device: &Device, d: Dims) -> Tensors<T> {
    let x = values(1, d.tokens * d.inputs);
    let w = values(2, d.outputs * d.inputs);
    let bias = values(3, d.outputs);
    let (d_y, before) = (values(4, d.tokens * d.outputs), values(5, d.outputs * d.inputs));
    let mut all = vec![forward_of(device, d, &x, &w, Some(&bias))];
    all.extend(backward_of(device, d, &x, &w, &d_y, &before));
    all
}

fn dims((tokens, inputs, outputs): (usize, usize, usize)) -> Dims {
    Dims { tokens, inputs, outputs }
}

#[test]
fn forward_is_one_chain_over_the_inputs_with_the_bias_added_last() {
    for d in SIZES.map(dims) {
        let x = values::<f32>(1, d.tokens * d.inputs);
        let w = values::<f32>(2, d.outputs * d.inputs);
        let bias = values::<f32>(3, d.outputs);
        let y = forward_of(&device(), d, &x, &w, Some(&bias));
        for t in 0..d.tokens {
            for n in 0..d.outputs {
                let chain =
                    (0..d.inputs).fold(0f32, |sum, k| x[t * d.inputs + k].mul_add(w[n * d.inputs + k], sum));
                assert_eq!(y[t * d.outputs + n].to_bits(), (chain + bias[n]).to_bits(), "{d:?} [{t}, {n}]");
            }
        }
    }
}

#[test]
fn weight_gradient_is_one_chain_over_the_tokens_from_the_value_already_there() {
    for d in SIZES.map(dims) {
        let (x, d_y) = (values::<f32>(1, d.tokens * d.inputs), values::<f32>(4, d.tokens * d.outputs));
        let before = values::<f32>(5, d.outputs * d.inputs);
        let w = values(2, d.outputs * d.inputs);
        let d_w = &backward_of(&device(), d, &x, &w, &d_y, &before)[1];
        for n in 0..d.outputs {
            for k in 0..d.inputs {
                let start = before[n * d.inputs + k];
                let chain = (0..d.tokens)
                    .fold(start, |sum, t| d_y[t * d.outputs + n].mul_add(x[t * d.inputs + k], sum));
                assert_eq!(d_w[n * d.inputs + k].to_bits(), chain.to_bits(), "{d:?} [{n}, {k}]");
            }
        }
    }
}

#[test]
fn all_levels_and_thread_counts_give_the_same_bits() {
    for d in SIZES.map(dims) {
        assert_same_on_all_devices(|device| all_of(device, d));
    }
    // Large enough for rows and columns to be divided into tasks.
    let d = Dims { tokens: 1100, inputs: 64, outputs: 130 };
    assert_same_on_all_devices(|device| all_of(device, d));
}

#[test]
fn rows_do_not_depend_on_the_batch() {
    let d = Dims { tokens: 61, inputs: 333, outputs: 257 };
    let (x, w) = (values::<f32>(1, d.tokens * d.inputs), values::<f32>(2, d.outputs * d.inputs));
    let device = device();
    let batch = forward_of(&device, d, &x, &w, None);
    for t in 0..d.tokens {
        let one = Dims { tokens: 1, ..d };
        let row = forward_of(&device, one, &x[t * d.inputs..(t + 1) * d.inputs], &w, None);
        assert_eq!(bits(&row), bits(&batch[t * d.outputs..(t + 1) * d.outputs]), "row {t}");
    }
}

#[test]
fn weight_and_bias_gradients_do_not_depend_on_the_cut_into_micro_batches() {
    let d = Dims { tokens: 300, inputs: 33, outputs: 47 };
    let device = device();
    let (x, d_y) =
        (upload(&device, &values::<f32>(1, 300 * 33)), upload(&device, &values::<f32>(2, 300 * 47)));
    let run = |cuts: &[usize]| {
        let (mut d_w, mut d_bias) = (device.zeros(47 * 33).unwrap(), device.zeros(47).unwrap());
        for cut in cuts.windows(2) {
            let part = Dims { tokens: cut[1] - cut[0], ..d };
            let (x, d_y) = (x.range(cut[0] * 33..cut[1] * 33), d_y.range(cut[0] * 47..cut[1] * 47));
            backward_weight(&device, part, x, d_y, Write::Add, d_w.view_mut());
            backward_bias(&device, part.tokens, 47, d_y, d_bias.view_mut());
        }
        (bits(&d_w.view().to_vec()), bits(&d_bias.view().to_vec()))
    };
    let whole = run(&[0, 300]);
    for cuts in [&[0, 1, 300][..], &[0, 255, 257, 300], &[0, 100, 200, 300]] {
        assert!(run(cuts) == whole, "cuts {cuts:?}");
    }
}

#[test]
fn gradients_are_finite_differences() {
    let d = Dims { tokens: 3, inputs: 5, outputs: 33 };
    let device = device();
    let inputs: Tensors<f64> = vec![values(1, 15), values(2, 33 * 5), values(3, 33)];
    let loss = |x: &Tensors<f64>| project(&[forward_of(&device, d, &x[0], &x[1], Some(&x[2]))]);
    let d_y = &cotangents(&[vec![0.0; 99]])[0];
    let gradients = backward_of(&device, d, &inputs[0], &inputs[1], d_y, &[0.0; 33 * 5]);
    assert_gradients(&inputs, &gradients, loss);
}

#[test]
fn input_gradients_can_be_added() {
    let device = device();
    let d_y = upload(&device, &values::<f64>(1, 2 * 33));
    let w = weight(&device, 33, 7, &values::<f64>(2, 33 * 7));
    let mut set = device.zeros(14).unwrap();
    let mut added = upload(&device, &[1.0; 14]);
    backward_input(&device, 2, d_y.view(), &w, Write::Set, set.view_mut());
    backward_input(&device, 2, d_y.view(), &w, Write::Add, added.view_mut());
    for (a, b) in set.view().to_vec().iter().zip(added.view().to_vec()) {
        assert!((a + 1.0 - b).abs() < 1e-12);
    }
}

#[test]
fn single_precision_stays_close_to_double() {
    for d in SIZES.map(dims) {
        assert_close(&all_of(&device(), d), &all_of(&device(), d), 2e-5);
    }
}

#[test]
fn an_updated_weight_is_packed_anew() {
    let device = device();
    let mut w = weight(&device, 2, 1, &[1f32, 2.0]);
    w.update(&device, |mut flat| flat.write(&[3.0, 4.0]));
    let x = upload(&device, &[1f32]);
    let mut y = device.zeros(2).unwrap();
    forward(&device, 1, x.view(), &w, None, y.view_mut());
    assert_eq!(y.view().to_vec(), [3.0, 4.0]);
}

#[test]
fn no_tokens_is_no_work() {
    let d = Dims { tokens: 0, inputs: 3, outputs: 2 };
    let all = all_of::<f32>(&device(), d);
    assert!(all[0].is_empty());
    assert_eq!(all[2], values::<f32>(5, 6));
}

#[test]
#[should_panic(expected = "matmul::forward: x has 4 elements, expected 6")]
fn a_wrong_length_names_op_and_argument() {
    let device = device();
    let x = upload(&device, &[0f32; 4]);
    let w = weight(&device, 1, 3, &[0f32; 3]);
    forward(&device, 2, x.view(), &w, None, device.zeros(2).unwrap().view_mut());
}
