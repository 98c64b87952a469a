use super::*;
use crate::testing::*;

fn dims(tokens: usize, width: usize) -> Dims {
    Dims { tokens, width, eps: 1e-6 }
}

/// normed, inv_rms.
fn forward_of<T: Float>(device: &Device, d: Dims, x: &[T], weight: &[T]) -> Tensors<T> {
    let (x, weight) = (upload(device, x), upload(device, weight));
    let mut out = device.zeros(x.len()).unwrap();
    let mut inv_rms = device.zeros(d.tokens).unwrap();
    let to = Out { normed: out.view_mut(), inv_rms: inv_rms.view_mut() };
    forward(device, d, x.view(), weight.view(), to);
    vec![out.view().to_vec(), inv_rms.view().to_vec()]
}

/// d_x, and `before` + d_weight.
fn backward_of<T: Float>(
    device: &Device,
    d: Dims,
    x: &[T],
    weight: &[T],
    d_out: &[T],
    before: &[T],
) -> Tensors<T> {
    let inv_rms = upload(device, &forward_of(device, d, x, weight)[1]);
    let (x, weight, d_out) = (upload(device, x), upload(device, weight), upload(device, d_out));
    let mut d_x = device.zeros(x.len()).unwrap();
    let mut d_weight = upload(device, before);
    let saved = Saved { x: x.view(), weight: weight.view(), inv_rms: inv_rms.view() };
    backward(device, d, saved, d_out.view(), Write::Set, d_x.view_mut(), d_weight.view_mut());
    vec![d_x.view().to_vec(), d_weight.view().to_vec()]
}

fn all_of<T: Float>(device: &Device, d: Dims) -> Tensors<T> {
    let x = values(1, d.tokens * d.width);
    let weight = values(2, d.width);
    let d_out = values(3, d.tokens * d.width);
    let before = values(4, d.width);
    let mut all = forward_of(device, d, &x, &weight);
    all.extend(backward_of(device, d, &x, &weight, &d_out, &before));
    all
}

#[test]
fn gradients_are_finite_differences() {
    for width in [1, 16, 33] {
        let device = device();
        let d = Dims { eps: 1e-2, ..dims(3, width) };
        let inputs = vec![values(1, 3 * width), values(2, width)];
        let d_out = &cotangents(&[vec![0.0; 3 * width]])[0];
        let gradients = backward_of(&device, d, &inputs[0], &inputs[1], d_out, &vec![0.0; width]);
        let loss = |x: &Tensors<f64>| project(&forward_of(&device, d, &x[0], &x[1])[..1]);
        assert_gradients(&inputs, &gradients, loss);
    }
}

#[test]
fn all_devices_agree_bitwise_and_stay_close_to_double() {
    for (tokens, width) in [(1, 1), (31, 33), (7, 257), (300, 64)] {
        let d = dims(tokens, width);
        assert_same_on_all_devices(|device| all_of(device, d));
        assert_close(&all_of(&device(), d), &all_of(&device(), d), 1e-5);
    }
}

#[test]
fn rows_do_not_depend_on_the_batch() {
    let device = device();
    let d = dims(40, 97);
    let (x, weight) = (values::<f32>(1, 40 * 97), values::<f32>(2, 97));
    let batch = forward_of(&device, d, &x, &weight);
    for t in 0..40 {
        let one = forward_of(&device, dims(1, 97), &x[t * 97..(t + 1) * 97], &weight);
        assert_eq!(bits(&one[0]), bits(&batch[0][t * 97..(t + 1) * 97]));
    }
}

#[test]
fn weight_gradient_does_not_depend_on_the_cut_into_micro_batches() {
    let device = device();
    let d = dims(60, 33);
    let (x, weight, d_out) = (values::<f32>(1, 60 * 33), values(2, 33), values(3, 60 * 33));
    let whole = backward_of(&device, d, &x, &weight, &d_out, &[0.0; 33]).remove(1);
    for cut in [1, 31] {
        let at = cut * 33;
        let first =
            backward_of(&device, dims(cut, 33), &x[..at], &weight, &d_out[..at], &[0.0; 33]).remove(1);
        let rest = dims(60 - cut, 33);
        let both = backward_of(&device, rest, &x[at..], &weight, &d_out[at..], &first).remove(1);
        assert_eq!(bits(&both), bits(&whole));
    }
}

#[test]
fn fused_addition_equals_addition_then_norm() {
    let device = device();
    let d = dims(9, 33);
    let [x, addend] = [1, 2].map(|seed| values::<f32>(seed, 9 * 33));
    let weight = values::<f32>(3, 33);
    let added: Vec<f32> = x.iter().zip(&addend).map(|(x, d)| x + d).collect();
    let expected = forward_of(&device, d, &added, &weight);
    let [x, addend] = [x, addend].map(|x| upload(&device, &x));
    let [mut sum, mut out] = [(); 2].map(|()| device.zeros(9 * 33).unwrap());
    let mut inv_rms = device.zeros(9).unwrap();
    let weight = upload(&device, &weight);
    let residual = Residual { stream: x.view(), addend: addend.view() };
    let to = Out { normed: out.view_mut(), inv_rms: inv_rms.view_mut() };
    forward_add(&device, d, residual, weight.view(), sum.view_mut(), to);
    assert_eq!(bits(&sum.view().to_vec()), bits(&added));
    assert_eq!(bits(&out.view().to_vec()), bits(&expected[0]));
    assert_eq!(bits(&inv_rms.view().to_vec()), bits(&expected[1]));
}

#[test]
fn input_gradient_adds_to_the_residuals() {
    let device = device();
    let d = dims(2, 5);
    let (x, weight, d_out) = (values::<f64>(1, 10), values::<f64>(2, 5), values::<f64>(3, 10));
    let set = backward_of(&device, d, &x, &weight, &d_out, &[0.0; 5]).remove(0);
    let inv_rms = upload(&device, &forward_of(&device, d, &x, &weight)[1]);
    let [x, weight, d_out] = [x, weight, d_out].map(|x| upload(&device, &x));
    let mut d_x = upload(&device, &[1.0; 10]);
    let mut d_weight = device.zeros(5).unwrap();
    let saved = Saved { x: x.view(), weight: weight.view(), inv_rms: inv_rms.view() };
    backward(&device, d, saved, d_out.view(), Write::Add, d_x.view_mut(), d_weight.view_mut());
    assert!(d_x.view().to_vec().iter().zip(set).all(|(a, b)| (a - 1.0 - b).abs() < 1e-12));
}
