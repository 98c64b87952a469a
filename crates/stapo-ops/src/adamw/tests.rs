use super::*;
use crate::cuda::{CudaOptions, Training};
use crate::testing::*;
use crate::{Buffer, Moment};

const RULE: AdamW =
    AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, first: 0, step: 1 };

/// param, m, v after `steps` updates; the step is the seed of its gradient.
fn run<T: Float>(device: &Device, len: usize, steps: u64, grad_scale: f64) -> Tensors<T> {
    let mut param = upload(device, &values::<T>(1, len));
    let (mut m, mut v) = (device.zeros::<T>(len).unwrap(), device.zeros::<T>(len).unwrap());
    for step_idx in 1..=steps {
        let grad = upload(device, &values::<T>(10 + step_idx, len));
        let rule = AdamW { step: step_idx, ..RULE };
        let (m, v) = (m.view_mut(), v.view_mut());
        let tensor = Tensor { rule, param: param.view_mut(), grad: grad.view(), m, v };
        step(device, grad_scale, vec![tensor]);
    }
    [param, m, v].map(|x| x.view().to_vec()).to_vec()
}

#[test]
fn updates_follow_the_published_rule() {
    let (len, scale) = (37, 0.25);
    let mut param = values::<f64>(1, len);
    let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
    for t in 1..=4 {
        let grad = values::<f64>(10 + t as u64, len);
        for i in 0..len {
            let g = grad[i] * scale;
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            let (mhat, vhat) = (m[i] / (1.0 - 0.9f64.powi(t)), v[i] / (1.0 - 0.95f64.powi(t)));
            param[i] -= 1e-2 * 0.1 * param[i] + 1e-2 * mhat / (vhat.sqrt() + 1e-8);
        }
    }
    let got = run::<f64>(&device(), len, 4, scale);
    for (a, b) in got.concat().iter().zip([param, m, v].concat()) {
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }
}

#[test]
fn all_devices_agree_bitwise_and_stay_close_to_double() {
    for len in [1, 33, 40_001] {
        assert_same_on_all_devices(|device| run(device, len, 3, 0.5));
    }
    assert_close(&run(&device(), 1000, 5, 0.5), &run(&device(), 1000, 5, 0.5), 1e-6);
}

#[test]
fn clip_factor_brings_a_large_norm_to_the_limit_and_leaves_a_small_one() {
    assert_eq!(clip_factor(4.0, 1.0), 0.25);
    assert_eq!(clip_factor(0.5, 1.0), 1.0);
    assert_eq!(clip_factor(0.0, 1.0), 1.0);
}

/// 8-bit moments follow those in f32; bf16 weights follow those in f32 on average, though each step is smaller than
/// their last digit; and moments that are read and written back keep their bits.
#[test]
fn eight_bit_states_on_cuda_follow_f32_and_survive_a_checkpoint() {
    let options = CudaOptions { training: Training::EightBit, ..CudaOptions::default() };
    let gpu = match Device::cuda(options) {
        Ok(gpu) => gpu,
        Err(error) => return println!("skipped: {error}"),
    };
    let n = 100_000;
    let run = |device: &Device| {
        let mut param = device.weight_zeros(n).unwrap();
        param.view_mut().write(&vec![1.0f32; n]);
        let mut m = device.moment_zeros(n, Moment::First).unwrap();
        let mut v = device.moment_zeros(n, Moment::Second).unwrap();
        for step in 1..=20u64 {
            let grad: Vec<f32> = values::<f32>(step, n).iter().map(|x| x * 1e-3 + 5e-4).collect();
            let rule =
                AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, first: 0, step };
            let grad = upload(device, &grad);
            step_once(device, rule, &mut param, &grad, &mut m, &mut v);
        }
        (param, m, v)
    };
    let (param, mut m, mut v) = run(&gpu);
    let (exact_param, exact_m, exact_v) = run(&device());
    let mean = |x: &Buffer<f32>| x.view().to_vec().iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
    let (moved, expected) = (1.0 - mean(&param), 1.0 - mean(&exact_param));
    println!("moved by {moved:.3e}, in f32 by {expected:.3e}");
    assert!((moved / expected - 1.0).abs() < 0.05, "moved by {moved}, in f32 by {expected}");
    for (moments, exact) in [(&m, &exact_m), (&v, &exact_v)] {
        let (got, exact) = (moments.view().to_vec(), exact.view().to_vec());
        let off: f64 = got.iter().zip(&exact).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let norm: f64 = exact.iter().map(|b| f64::from(*b).powi(2)).sum();
        println!("moments off by {:.1e}", (off / norm).sqrt());
        assert!((off / norm).sqrt() < 0.05);
    }
    for moments in [&mut m, &mut v] {
        let before = moments.view().to_vec();
        moments.view_mut().write(&before);
        assert_eq!(bits(&moments.view().to_vec()), bits(&before));
    }
}

fn step_once(
    device: &Device,
    rule: AdamW,
    param: &mut Buffer<f32>,
    grad: &Buffer<f32>,
    m: &mut Buffer<f32>,
    v: &mut Buffer<f32>,
) {
    let (m, v) = (m.view_mut(), v.view_mut());
    step(device, 1.0, vec![Tensor { rule, param: param.view_mut(), grad: grad.view(), m, v }]);
}
