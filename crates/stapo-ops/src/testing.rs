//! What the ops' tests share: reproducible numbers, finite differences, comparison of devices and precisions.

use crate::rng::RngKey;
use crate::{Buffer, CpuOptions, Device, Element, Float, Shape, Simd, Weight};

/// Tensors in and out of a test's function.
pub(crate) type Tensors<T> = Vec<Vec<T>>;

/// `n` normal numbers, rounded to f32 in both precisions, so that f32 and f64 start from equal inputs.
pub(crate) fn values<T: Float>(seed: u64, n: usize) -> Vec<T> {
    let key = RngKey::new(seed);
    (0..n as u64).map(|idx| T::from_f64(f64::from(key.normal(idx) as f32))).collect()
}

/// `n` ids below `vocab`.
pub(crate) fn ids(seed: u64, n: usize, vocab: usize) -> Vec<u32> {
    let key = RngKey::new(seed);
    (0..n).map(|idx| (key.uniform(0, 0, idx as u32) * vocab as f64) as u32).collect()
}

pub(crate) fn device() -> Device {
    Device::cpu(CpuOptions { threads: 2, simd: Simd::best() })
}

/// Every level of this CPU, and several thread counts at the best.
pub(crate) fn devices() -> Vec<Device> {
    let levels = Simd::available().into_iter().map(|simd| CpuOptions { threads: 1, simd });
    let threads = [2, 3, 5].map(|threads| CpuOptions { threads, simd: Simd::best() });
    levels.chain(threads).map(Device::cpu).collect()
}

pub(crate) fn upload<T: Element>(device: &Device, x: &[T]) -> Buffer<T> {
    device.upload(x).unwrap()
}

pub(crate) fn weight<T: Float>(device: &Device, outputs: usize, inputs: usize, values: &[T]) -> Weight<T> {
    Weight::from_slice(device, Shape { outputs, inputs }, values).unwrap()
}

pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Asserts that every device gives the same bits.
pub(crate) fn assert_same_on_all_devices(run: impl Fn(&Device) -> Tensors<f32>) {
    let devices = devices();
    let expected = run(&devices[0]);
    for device in &devices[1..] {
        for (i, (got, expected)) in run(device).iter().zip(&expected).enumerate() {
            let at = bits(got).iter().zip(bits(expected)).position(|(a, b)| *a != b);
            let simd = device.simd().name();
            let threads = device.threads();
            assert_eq!(at, None, "output {i} differs on {simd} with {threads} threads");
        }
    }
}

/// Asserts `|a - b| <= tolerance * (1 + |b|)` for f32 results `a` and f64 results `b`.
pub(crate) fn assert_close(got: &Tensors<f32>, expected: &Tensors<f64>, tolerance: f64) {
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.len(), expected.len());
        for (j, (a, b)) in got.iter().zip(expected).enumerate() {
            let error = (f64::from(*a) - b).abs() / (1.0 + b.abs());
            assert!(error <= tolerance, "output {i}[{j}]: {a} in f32, {b} in f64, error {error:.2e}");
        }
    }
}

/// Asserts that `gradients[i]` is the derivative of `loss` by `inputs[i]`, by central differences.
pub(crate) fn assert_gradients(
    inputs: &Tensors<f64>,
    gradients: &Tensors<f64>,
    loss: impl Fn(&Tensors<f64>) -> f64,
) {
    let step = 1e-5;
    assert_eq!(inputs.len(), gradients.len());
    for (i, gradient) in gradients.iter().enumerate() {
        assert_eq!(inputs[i].len(), gradient.len(), "gradient {i}");
        // Of a large input every third element is checked.
        let stride = if gradient.len() > 400 { 3 } else { 1 };
        for j in (0..gradient.len()).step_by(stride) {
            let at = |delta: f64| {
                let mut moved = inputs.clone();
                moved[i][j] += delta;
                loss(&moved)
            };
            let numeric = (at(step) - at(-step)) / (2.0 * step);
            let error = (numeric - gradient[j]).abs() / (1.0 + numeric.abs());
            assert!(error < 1e-7, "input {i}[{j}]: {} by backward, {numeric} by differences", gradient[j]);
        }
    }
}

/// A fixed random projection of outputs to one number, and its gradient by the outputs.
pub(crate) fn project(outputs: &[Vec<f64>]) -> f64 {
    outputs
        .iter()
        .zip(cotangents(outputs))
        .map(|(x, c)| x.iter().zip(c).map(|(x, c)| x * c).sum::<f64>())
        .sum()
}

pub(crate) fn cotangents<T: Float>(outputs: &[Vec<T>]) -> Tensors<T> {
    outputs.iter().enumerate().map(|(i, x)| values(1000 + i as u64, x.len())).collect()
}
