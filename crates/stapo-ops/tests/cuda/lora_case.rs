//! A linear layer with adapters for the tests of `exact_lora`, and its law by plain products.

use std::cell::OnceCell;

use super::parity::{compute, empty, numbers};
use crate::cuda::{MatrixProduct, StridedBatch};
use crate::dtype::{bf16_to_f32, f32_to_bf16};
use crate::lora::{self, Adapter, Band, Input, Join, Module, pitch};
use crate::testing::weight;
use crate::{Buffer, Device, Shape, Weight, matmul};

const SCALE: f64 = 0.7;

/// A linear layer of `inputs` with modules of some widths, of which those that `adapted` names have an adapter.
pub(super) struct Case {
    pub(super) inputs: usize,
    widths: Vec<usize>,
    adapted: Vec<usize>,
    pub(super) rank: usize,
    /// Of the weight, made once.
    values: OnceCell<Vec<f32>>,
}

/// The factors of a case on a device.
pub(super) struct CaseFactors {
    pub(super) a: Weight<f32>,
    pub(super) b: Vec<Weight<f32>>,
    modules: Vec<Module>,
}

/// Numbers of standard deviation `scale` that bf16 holds.
pub(super) fn scaled(seed: u64, n: usize, scale: f32) -> Vec<f32> {
    numbers(seed, n).iter().map(|x| bf16_to_f32(f32_to_bf16(x * scale))).collect()
}

impl Case {
    pub(super) fn new(inputs: usize, widths: &[usize], adapted: &[usize], rank: usize) -> Self {
        let values = OnceCell::new();
        Self { inputs, widths: widths.to_vec(), adapted: adapted.to_vec(), rank, values }
    }

    pub(super) fn outputs(&self) -> usize {
        self.widths.iter().sum()
    }

    pub(super) fn pitch(&self) -> usize {
        pitch(self.adapted.len(), self.rank)
    }

    pub(super) fn name(&self) -> String {
        let Case { inputs, widths, adapted, rank, .. } = self;
        format!("{inputs} to {widths:?}, rank {rank} on {adapted:?}")
    }

    pub(super) fn factors(&self, device: &Device) -> CaseFactors {
        let (inputs, rank) = (self.inputs, self.rank);
        let n_first = self.adapted.len() * rank;
        let first = scaled(2, n_first * inputs, 1.0 / (inputs as f32).sqrt());
        let module = |(place, of): (usize, &usize)| Module {
            scale: SCALE,
            hidden: Band { start: place * rank, len: rank, of: self.pitch() },
            outputs: Band {
                start: self.widths[..*of].iter().sum(),
                len: self.widths[*of],
                of: self.outputs(),
            },
        };
        let factor = |outputs, inputs, n_modules, values: &[f32]| {
            let mut factor = Weight::factor_zeros(device, Shape { outputs, inputs }, n_modules).unwrap();
            factor.update(device, |mut flat| flat.write(values));
            factor
        };
        let second = |of: &usize| {
            let width = self.widths[*of];
            factor(width, rank, 1, &scaled(5 + *of as u64, width * rank, 0.3))
        };
        CaseFactors {
            a: factor(n_first, inputs, self.adapted.len(), &first),
            b: self.adapted.iter().map(second).collect(),
            modules: self.adapted.iter().enumerate().map(module).collect(),
        }
    }

    /// The weight that the adapter stands beside, and in bf16 on a Hopper GPU is joined to.
    pub(super) fn base(&self, device: &Device, factors: &CaseFactors) -> Weight<f32> {
        let shape = Shape { outputs: self.outputs(), inputs: self.inputs };
        let columns = lora::joined_columns(self.inputs, &factors.modules);
        let mut base = Weight::joined_zeros(device, shape, columns).unwrap();
        let values = self.values();
        base.update(device, |mut flat| flat.write(values));
        lora::join(
            device,
            &[Join {
                weight: &mut base,
                a: &factors.a,
                b: factors.b.iter().collect(),
                modules: &factors.modules,
            }],
        );
        assert!(base.rows(device, 1..shape.outputs).to_vec() == values[self.inputs..], "{}", self.name());
        base
    }

    /// The same, with nothing joined to it.
    pub(super) fn base_alone(&self, device: &Device) -> Weight<f32> {
        weight(device, self.outputs(), self.inputs, self.values())
    }

    pub(super) fn values(&self) -> &[f32] {
        let n = self.outputs() * self.inputs;
        self.values.get_or_init(|| scaled(3, n, 1.0 / (self.inputs as f32).sqrt()))
    }

    /// Memory of `n` rows of numbers for a layer's input, with room for x A^T.
    pub(super) fn memory(&self, device: &Device, base: &Weight<f32>, n: usize) -> Memory {
        let x = numbers(1, n * self.inputs);
        if !base.is_joined() {
            return Memory::Apart(compute(device, &x), empty(device, n * self.pitch()));
        }
        let pitch = self.inputs + self.pitch();
        let mut rows = vec![f32::NAN; n * pitch];
        for (row, x) in rows.chunks_exact_mut(pitch).zip(x.chunks_exact(self.inputs)) {
            row[..self.inputs].copy_from_slice(x);
        }
        Memory::Joined(compute(device, &rows))
    }

    /// y of `n` rows by the law of joined adapters, or of others, by plain products alone.
    pub(super) fn by_the_law(
        &self,
        device: &Device,
        base: &Weight<f32>,
        factors: &CaseFactors,
        n: usize,
    ) -> Vec<f32> {
        let (alone, adapter) = (self.base_alone(device), factors.adapter());
        let x = numbers(1, n * self.inputs);
        let [mut hidden, mut y] = [self.pitch(), self.outputs()].map(|width| empty(device, n * width));
        let on_device = compute(device, &x);
        let mut input = Input::Apart { x: on_device.view(), hidden: hidden.view_mut() };
        lora::project(device, n, &adapter, &mut input);
        if !base.is_joined() {
            matmul::forward(device, n, on_device.view(), &alone, None, y.view_mut());
            lora::expand(device, n, &adapter, hidden.view(), y.view_mut());
            return y.view().to_vec();
        }
        // Plain matrices [x | hidden] and [W | B], of a depth that uses split-K with 0 between the parts.
        let n_parts = if self.is_deep() { 4 } else { 1 };
        let (part, columns) = (self.inputs / n_parts, self.pitch());
        let depth = n_parts * (part + columns);
        let hidden = hidden.view().to_vec();
        let (mut xs, mut ws) = (vec![0.0; n * depth], vec![0.0; self.outputs() * depth]);
        let put = |to: &mut [f32], from: &[f32]| {
            for (to, from) in to.chunks_exact_mut(depth).zip(from.chunks_exact(self.inputs)) {
                for (to, from) in to.chunks_exact_mut(part + columns).zip(from.chunks_exact(part)) {
                    to[..part].copy_from_slice(from);
                }
            }
        };
        put(&mut xs, &x);
        put(&mut ws, self.values());
        for (row, hidden) in xs.chunks_exact_mut(depth).zip(hidden.chunks_exact(columns)) {
            row[depth - columns..].copy_from_slice(hidden);
        }
        for (place, (module, b)) in factors.modules.iter().zip(&factors.b).enumerate() {
            let (rank, b) = (self.rank, b.view().to_vec());
            let start = depth - columns + place * rank.next_multiple_of(16);
            for (row, b) in b.chunks_exact(rank).enumerate() {
                let at = (module.outputs.start + row) * depth + start;
                ws[at..at + rank].copy_from_slice(b);
            }
        }
        let (xs, ws) = (compute(device, &xs), weight(device, self.outputs(), depth, &ws));
        if self.is_deep() {
            return sum_of_parts(device, &xs, &ws, n);
        }
        matmul::forward(device, n, xs.view(), &ws, None, y.view_mut());
        y.view().to_vec()
    }

    pub(super) fn is_deep(&self) -> bool {
        self.inputs >= 2048 && self.inputs >= 2 * self.outputs()
    }
}

/// The product of four parts of the depth, each added in f32 to those before it.
fn sum_of_parts(device: &Device, x: &Buffer<f32>, w: &Weight<f32>, n: usize) -> Vec<f32> {
    let crate::device::Backend::Cuda(cuda) = device.backend() else { panic!("a GPU") };
    let Shape { outputs, inputs } = w.shape();
    let parts: Buffer<f32> = device.zeros(4 * n * outputs).unwrap();
    let d = matmul::Dims { tokens: n, inputs, outputs };
    let whole = matmul::cuda::product(d, x.view().cuda(), w.view().cuda(), parts.view().cuda());
    let batch = Some(StridedBatch { n: 4, apart: [inputs / 4, inputs / 4, n * outputs] });
    cuda.product(&MatrixProduct { k: inputs / 4, batch, ..whole });
    let parts = parts.view().to_vec();
    let sum = |i: usize| (1..4).fold(parts[i], |sum, part| sum + parts[part * n * outputs + i]);
    (0..n * outputs).map(|i| bf16_to_f32(f32_to_bf16(sum(i)))).collect()
}

/// A layer's input with memory for `x A^T`.
pub(super) enum Memory {
    Apart(Buffer<f32>, Buffer<f32>),
    Joined(Buffer<f32>),
}

impl Memory {
    /// Of the first `n` of `of` rows.
    pub(super) fn input(&mut self, n: usize, of: usize) -> Input<'_, f32> {
        let end = |buffer: &Buffer<f32>| buffer.len() / of * n;
        match self {
            Memory::Apart(x, hidden) => {
                let (x, end) = (x.range(0..end(x)), end(hidden));
                Input::Apart { x, hidden: hidden.range_mut(0..end) }
            }
            Memory::Joined(rows) => {
                let end = end(rows);
                Input::Joined(rows.range_mut(0..end))
            }
        }
    }
}

impl CaseFactors {
    pub(super) fn adapter(&self) -> Adapter<'_, f32> {
        Adapter { a: &self.a, b: self.b.iter().collect(), modules: &self.modules }
    }
}
