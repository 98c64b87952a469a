use super::AdamW;
use crate::Float;
use crate::cpu::simd::{Kernel, Lanes, WIDTH};
use crate::cpu::{Cpu, Shared};

pub(crate) fn step<E: Float>(
    cpu: &Cpu,
    rule: AdamW,
    grad_scale: f64,
    param: &mut [E],
    grad: &[E],
    m: &mut [E],
    v: &mut [E],
) {
    let steps = rule.step as f64;
    let factors = StepFactors {
        grad_scale: E::from_f64(grad_scale),
        beta1: E::from_f64(rule.beta1),
        beta2: E::from_f64(rule.beta2),
        rest1: E::from_f64(1.0 - rule.beta1),
        rest2: E::from_f64(1.0 - rule.beta2),
        keep: E::from_f64(1.0 - rule.lr * rule.weight_decay),
        rate: E::from_f64(-rule.lr / (1.0 - rule.beta1.powf(steps))),
        root: E::from_f64(1.0 / (1.0 - rule.beta2.powf(steps)).sqrt()),
        eps: E::from_f64(rule.eps),
    };
    let len = param.len();
    let (param, m, v) = (Shared::new(param), Shared::new(m), Shared::new(v));
    cpu.rows(len.div_ceil(WIDTH), 4 * WIDTH, |vectors| {
        let range = vectors.start * WIDTH..(vectors.end * WIDTH).min(len);
        // SAFETY: each task has its own range of all three.
        let (param, m, v) =
            unsafe { (param.range(range.clone()), m.range(range.clone()), v.range(range.clone())) };
        cpu.dispatch(Step { factors, param, grad: &grad[range], m, v });
    });
}

#[derive(Clone, Copy)]
struct StepFactors<E> {
    grad_scale: E,
    beta1: E,
    beta2: E,
    /// `1 - beta1`.
    rest1: E,
    /// `1 - beta2`.
    rest2: E,
    /// `1 - lr decay`.
    keep: E,
    /// `-lr / (1 - beta1^step)`.
    rate: E,
    /// `1 / sqrt(1 - beta2^step)`.
    root: E,
    eps: E,
}

struct Step<'a, E> {
    factors: StepFactors<E>,
    param: &'a mut [E],
    grad: &'a [E],
    m: &'a mut [E],
    v: &'a mut [E],
}

impl<E: Float> Kernel<E> for Step<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let f = self.factors;
        let zero = E::ZERO;
        for at in (0..self.param.len()).step_by(WIDTH) {
            let g = l.mul(l.get(self.grad, at, zero), l.splat(f.grad_scale));
            let m = l.fma(l.get(self.m, at, zero), l.splat(f.beta1), l.mul(g, l.splat(f.rest1)));
            let v = l.fma(l.get(self.v, at, zero), l.splat(f.beta2), l.mul(l.mul(g, g), l.splat(f.rest2)));
            l.put(self.m, at, m);
            l.put(self.v, at, v);
            let scale = l.fma(l.sqrt(v), l.splat(f.root), l.splat(f.eps));
            let kept = l.mul(l.get(self.param, at, zero), l.splat(f.keep));
            l.put(self.param, at, l.fma(l.div(m, scale), l.splat(f.rate), kept));
        }
    }
}
