use super::AdamW;
use crate::cuda::kernels::ELEMENTWISE;
use crate::cuda::{Cuda, Kind, Slice};

/// Moves the f32 master and rounds the copy that the model reads.
pub(super) fn step(
    cuda: &Cuda,
    rule: AdamW,
    grad_scale: f64,
    param: Slice,
    grad: Slice,
    (m, v): (Slice, Slice),
) {
    let op = "adamw::step";
    let (master, stored) = match (param.kind, param.master) {
        (Kind::Bf16, Some(master)) => (master, param.address),
        (Kind::F32, None) => (param.address, 0),
        _ => panic!("{op}: these weights have no f32 master\nhint: make the device with `trains`"),
    };
    let steps = rule.step as f64;
    let launch = cuda.kernel(&ELEMENTWISE, "adamw_step").arg(master).arg(stored);
    let launch = launch.arg(grad.f32(op)).arg(m.f32(op)).arg(v.f32(op)).arg(param.len);
    let factors = [
        grad_scale,
        rule.beta1,
        rule.beta2,
        1.0 - rule.beta1,
        1.0 - rule.beta2,
        1.0 - rule.lr * rule.weight_decay,
        -rule.lr / (1.0 - rule.beta1.powf(steps)),
        1.0 / (1.0 - rule.beta2.powf(steps)).sqrt(),
        rule.eps,
    ];
    let launch = factors.into_iter().fold(launch, |launch, factor| launch.arg(factor as f32));
    launch.run([param.len.div_ceil(8 * 256), 1], 256, 0);
}
