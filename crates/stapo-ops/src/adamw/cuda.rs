use std::sync::Arc;

use super::{AdamW, Tensor};
use crate::Float;
use crate::cuda::kernels::ADAMW;
use crate::cuda::{Cuda, ElementType, Fields, Slice, upload_table};

/// Elements that a block of threads updates.
const BLOCK: usize = 8 * 256;

/// Updates the f32 master weights and rounds them to the copy that ops read, all tensors in one launch. With 8-bit moments
/// there are no master weights: the bf16 weights are updated with stochastic rounding, one tensor a launch.
pub(super) fn step<T: Float>(cuda: &Arc<Cuda>, grad_scale: f64, tensors: &[Tensor<'_, T>]) {
    let op = "adamw::step";
    let mut rows = Vec::new();
    let mut n_blocks = 0;
    for Tensor { rule, param, grad, m, v } in tensors.iter().filter(|tensor| tensor.param.len() > 0) {
        let common =
            AdamW { weight_decay: tensors[0].rule.weight_decay, first: tensors[0].rule.first, ..*rule };
        assert!(common == tensors[0].rule, "{op}: tensors of one update with two rules");
        let (param, grad, m, v) = (param.cuda(), grad.cuda().f32(op), m.cuda(), v.cuda());
        let (master, stored) = match (param.kind, param.master(), m.scales.zip(v.scales)) {
            (ElementType::Bf16, None, Some(scales)) => {
                step_8bit(cuda, *rule, grad_scale, (param, grad), (m, v), scales);
                continue;
            }
            (ElementType::Bf16, Some(master), None) => (master, param.address),
            (ElementType::F32, None, None) => (param.address, 0),
            _ => panic!("{op}: these weights have no f32 master\nhint: make the device for training"),
        };
        let row = Fields::default().eight_bytes(master).eight_bytes(stored).eight_bytes(grad);
        let row = row.eight_bytes(m.f32(op)).eight_bytes(v.f32(op)).eight_bytes(param.len);
        rows.push(row.four_bytes(n_blocks).four_bytes(decay(*rule)));
        n_blocks += param.len.div_ceil(BLOCK);
    }
    if rows.is_empty() {
        return;
    }
    let table = upload_table(cuda, &rows);
    let launch = cuda.kernel(&ADAMW, "adamw_step").arg(table.slice()).arg(rows.len());
    launch.fields(&factors(tensors[0].rule, grad_scale)).run([n_blocks, 1], 256, 0);
}

fn step_8bit(
    cuda: &Cuda,
    rule: AdamW,
    grad_scale: f64,
    (param, grad): (Slice, Slice),
    (m, v): (Slice, Slice),
    (m_scales, v_scales): (u64, u64),
) {
    let launch = cuda.kernel(&ADAMW, "adamw_step_8bit").arg(param).arg(grad).arg(m).arg(m_scales);
    let launch = launch.arg(v).arg(v_scales).arg(param.len).arg(rule.first).arg(rule.step);
    launch.fields(&factors(rule, grad_scale)).run([param.len.div_ceil(BLOCK), 1], 256, 0);
}

/// What an update multiplies a parameter by.
fn decay(rule: AdamW) -> f32 {
    (1.0 - rule.lr * rule.weight_decay) as f32
}

/// The struct `AdamW` of adamw.cu.
fn factors(rule: AdamW, grad_scale: f64) -> Fields {
    let steps = rule.step as f64;
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
    factors.into_iter().fold(Fields::default(), |rule, factor| rule.four_bytes(factor as f32))
}
