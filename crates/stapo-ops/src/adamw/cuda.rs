use super::AdamW;
use crate::cuda::kernels::ADAMW;
use crate::cuda::{Cuda, ElementType, Fields, Launch, Slice};

/// Updates the f32 master weights and rounds them to the copy that ops read. With 8-bit moments there are no master
/// weights: the bf16 weights are updated with stochastic rounding.
pub(super) fn step(
    cuda: &Cuda,
    rule: AdamW,
    grad_scale: f64,
    param: Slice,
    grad: Slice,
    (m, v): (Slice, Slice),
) {
    let op = "adamw::step";
    let steps = rule.step as f64;
    let launch = match (param.kind, param.master(), m.scales.zip(v.scales)) {
        (ElementType::Bf16, None, Some((m_scales, v_scales))) => {
            let launch = cuda.kernel(&ADAMW, "adamw_step_8bit").arg(param).arg(grad.f32(op));
            launch.arg(m).arg(m_scales).arg(v).arg(v_scales).arg(param.len).arg(rule.first).arg(rule.step)
        }
        (ElementType::Bf16, Some(master), None) => f32_states(cuda, (master, param.address), grad, (m, v)),
        (ElementType::F32, None, None) => f32_states(cuda, (param.address, 0), grad, (m, v)),
        _ => panic!("{op}: these weights have no f32 master\nhint: make the device for training"),
    };
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
    let rule = factors.into_iter().fold(Fields::default(), |rule, factor| rule.four_bytes(factor as f32));
    launch.fields(&rule).run([param.len.div_ceil(8 * 256), 1], 256, 0);
}

/// `stored`: the address of the rounded copy, or 0 where the weights are f32.
fn f32_states(cuda: &Cuda, (master, stored): (u64, u64), grad: Slice, (m, v): (Slice, Slice)) -> Launch<'_> {
    let op = "adamw::step";
    let launch = cuda.kernel(&ADAMW, "adamw_step").arg(master).arg(stored);
    launch.arg(grad.f32(op)).arg(m.f32(op)).arg(v.f32(op)).arg(grad.len)
}
