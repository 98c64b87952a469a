use super::*;
use crate::testing::*;

const RULE: AdamW = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1 };

/// param, m, v after `steps` updates with gradients seeded by the step.
fn run<T: Float>(device: &Device, len: usize, steps: u64, grad_scale: f64) -> Tensors<T> {
    let mut param = upload(device, &values::<T>(1, len));
    let (mut m, mut v) = (device.zeros::<T>(len).unwrap(), device.zeros::<T>(len).unwrap());
    for step_idx in 1..=steps {
        let grad = upload(device, &values::<T>(10 + step_idx, len));
        let rule = AdamW { step: step_idx, ..RULE };
        step(device, rule, grad_scale, param.view_mut(), grad.view(), m.view_mut(), v.view_mut());
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
