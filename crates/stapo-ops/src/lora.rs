//! Low-rank adapters: the term `s (x A^T) B^T` that an adapter adds to a linear layer's product, and its gradients.
//!
//! A linear layer may be several modules stacked (queries, keys and values), each with a separate adapter. `hidden`
//! `[T, pitch]` has `s x A^T` of the modules side by side, filled up to [`pitch`] columns; only the functions of this
//! module and of `fused::matmul_lora` read it.
//!
//! Law: on the CPU an element of `hidden` is one chain over the inputs, multiplied by s, and an element of y is the chain
//! of the layer's own product (with its bias), continued over the ranks in increasing order. On a Hopper GPU in bf16 an
//! element of `hidden` is the sum of four chains, each over a quarter of the inputs (rounded up to 128), times s, rounded
//! to bf16. Adapters may be *joined* to a layer there: hidden lies after x in the same row, the second factors lie after
//! the weight in the same rows, with 0 for the outputs of other modules, and y is one product of depth `inputs + pitch`,
//! whose chain (of a split-K product the last one) continues over the ranks and is rounded once. The gradient of x may be one
//! product too, over d_y and the gradient of hidden after it, with the first factors below the weight. Other GPUs, and adapters that
//! cannot be joined, take the kernels of `matmul`: one chain for `hidden`, and one over the ranks that starts from 0 and is
//! added in f32 to the rounded product, after which the sum is rounded once more. No result depends on the number of rows
//! or threads. On the CPU the gradients follow the laws of `matmul`; on a Hopper GPU those of the factors are the sums of
//! chains over an eighth of the tokens each, added in order.

mod beside;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod cuda_backward;
mod cuda_plain;
mod middle_m;
mod small_m;
#[cfg(test)]
mod tests;
mod unpack;

pub use unpack::unpack;

use crate::cuda::TILE_COLUMNS;
use crate::device::Backend;
use crate::matmul::cuda::GROUP_ROWS;
use crate::{Device, Float, Shape, View, ViewMut, Weight, Write, check, pitch_of};

/// Some neighbouring columns of a matrix with `of` columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Band {
    pub start: usize,
    pub len: usize,
    pub of: usize,
}

/// One module of a linear layer: where it lies, and the factor s of its adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Module {
    pub scale: f64,
    /// Of `hidden`; as many columns as the adapter has ranks.
    pub hidden: Band,
    /// Of y.
    pub outputs: Band,
}

/// Columns of `hidden` for the adapters of `n_modules` modules: whole matrix instructions of a GPU for each module, and in all
/// whole tiles of 128 bytes, so that rows of joined adapters begin at such multiples as they do without them.
pub fn pitch(n_modules: usize, rank: usize) -> usize {
    (n_modules * rank.next_multiple_of(GROUP_ROWS)).next_multiple_of(TILE_COLUMNS)
}

/// Columns that the adapters of a layer take after its weight, on a device that joins them; 0 if they cannot be joined.
pub fn joined_columns(inputs: usize, modules: &[Module]) -> usize {
    match modules.first() {
        Some(first) if cuda::fits_shape(inputs, modules) => first.hidden.of,
        _ => 0,
    }
}

/// Where `hidden` `[T, pitch]` lies: columns from `start` on of the rows of a matrix.
#[derive(Clone, Copy)]
pub struct Hidden<'a, T: Float> {
    rows: View<'a, T>,
    start: usize,
}

impl<'a, T: Float> Hidden<'a, T> {
    /// A matrix of its own.
    pub fn apart(rows: View<'a, T>) -> Self {
        Self { rows, start: 0 }
    }

    /// After each row of x, whose `inputs` columns come first.
    pub fn joined(rows: View<'a, T>, inputs: usize) -> Self {
        Self { rows, start: inputs }
    }

    #[track_caller]
    fn check<U: Float>(&self, op: &str, tokens: usize, adapter: &Adapter<'_, U>) {
        pitch_of(op, "hidden", self.rows.len(), tokens, self.start + adapter.pitch());
    }

    pub(crate) fn placed(&self, tokens: usize) -> cuda::Placed {
        cuda::Placed::new(self.rows.cuda(), tokens, self.start)
    }
}

/// What a layer with adapters takes in, and the place of its `hidden`; or the gradient of what the layer gives, and the place
/// of the gradient of its `hidden`.
pub enum Input<'a, T: Float> {
    /// Shapes: x `[T, inputs]`; hidden `[T, pitch]`.
    Apart { x: View<'a, T>, hidden: ViewMut<'a, T> },
    /// `[T, inputs + pitch]`: x, and hidden after it in the same row, for a layer with joined adapters.
    Joined(ViewMut<'a, T>),
}

impl<T: Float> Input<'_, T> {
    /// x `[T, inputs]`, which may have further columns after its rows.
    pub fn x(&self) -> View<'_, T> {
        match self {
            Input::Apart { x, .. } => *x,
            Input::Joined(rows) => rows.view(),
        }
    }

    /// Of an x of `inputs` columns.
    pub fn hidden(&self, inputs: usize) -> Hidden<'_, T> {
        match self {
            Input::Apart { hidden, .. } => Hidden::apart(hidden.view()),
            Input::Joined(rows) => Hidden::joined(rows.view(), inputs),
        }
    }
}

/// A frozen weight, and the factors of the adapters that are joined to it, as in [`Adapter`].
pub struct Join<'a, T: Float> {
    pub weight: &'a mut Weight<T>,
    pub a: &'a Weight<T>,
    pub b: Vec<&'a Weight<T>>,
    pub modules: &'a [Module],
}

/// Copies factors to the weights that they are joined to; called after each change of the factors. Nothing for weights
/// without room for them.
pub fn join<T: Float>(device: &Device, layers: &[Join<'_, T>]) {
    if let Backend::Cuda(cuda) = device.backend() {
        cuda::join(cuda, layers);
    }
}

/// The adapters of a linear layer: of one rank and one factor s.
pub struct Adapter<'a, T: Float> {
    /// `[n rank, inputs]`: the first factors of n modules, one below the other.
    pub a: &'a Weight<T>,
    /// `[outputs of the module, rank]` each: the second factors.
    pub b: Vec<&'a Weight<T>>,
    /// One for each of the second factors.
    pub modules: &'a [Module],
}

impl<T: Float> Adapter<'_, T> {
    pub(crate) fn scale(&self) -> f64 {
        self.modules[0].scale
    }

    pub(crate) fn rank(&self) -> usize {
        self.modules[0].hidden.len
    }

    pub(crate) fn pitch(&self) -> usize {
        self.modules[0].hidden.of
    }

    fn inputs(&self) -> usize {
        self.a.shape().inputs
    }

    /// Columns of y.
    pub(crate) fn outputs(&self) -> usize {
        self.modules[0].outputs.of
    }

    #[track_caller]
    fn check_hidden(&self, op: &str, tokens: usize, hidden: usize) {
        self.check(op);
        check(op, "hidden", hidden, tokens * self.pitch());
    }

    #[track_caller]
    fn check(&self, op: &str) {
        check(op, "second factors", self.b.len(), self.modules.len());
        check(op, "a", self.a.shape().outputs, self.modules.len() * self.rank());
        check(op, "pitch", self.pitch(), pitch(self.modules.len(), self.rank()));
        for (place, (module, b)) in self.modules.iter().zip(&self.b).enumerate() {
            let Shape { outputs, inputs } = b.shape();
            check(op, "b", outputs, module.outputs.len);
            check(op, "rank", inputs, self.rank());
            check(op, "start of a module", module.hidden.start, place * self.rank());
            let Band { start, len, of } = module.outputs;
            assert!(
                start + len <= of && of == self.outputs(),
                "{op}: columns {start}..{} of {of}",
                start + len
            );
        }
    }
}

/// What the terms of all modules are made from: overwrites `hidden` of the input.
pub fn project<T: Float>(device: &Device, tokens: usize, adapter: &Adapter<'_, T>, input: &mut Input<'_, T>) {
    let op = "lora::project";
    adapter.check(op);
    input.hidden(adapter.inputs()).check(op, tokens, adapter);
    match device.backend() {
        Backend::Cpu(cpu) => {
            let Input::Apart { x, hidden } = input else { panic!("{op}: joined adapters on the CPU") };
            check(op, "x", x.len(), tokens * adapter.inputs());
            let scale_and_pitch = (adapter.scale(), adapter.pitch());
            T::lora_project(cpu, (tokens, adapter.a), x.host(), scale_and_pitch, hidden.host_mut());
        }
        Backend::Cuda(cuda) => {
            let hidden = input.hidden(adapter.inputs()).placed(tokens);
            if cuda::fits(cuda, adapter) {
                cuda::project(cuda, tokens, input.x().cuda(), adapter, hidden, None);
            } else {
                cuda_plain::project(cuda, tokens, input.x().cuda(), adapter, hidden);
            }
        }
    }
}

/// Adds every module's term to its columns of y. Shapes: hidden `[T, pitch]`; y `[T, outputs of the layer]`.
pub fn expand<T: Float>(
    device: &Device,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    hidden: View<'_, T>,
    y: ViewMut<'_, T>,
) {
    let op = "lora::expand";
    adapter.check_hidden(op, tokens, hidden.len());
    check(op, "y", y.len(), tokens * adapter.outputs());
    match device.backend() {
        Backend::Cpu(cpu) => {
            let y = y.into_host();
            for (module, b) in adapter.modules.iter().zip(&adapter.b) {
                T::lora_expand(cpu, (tokens, *module), hidden.host(), b, y);
            }
        }
        Backend::Cuda(cuda) => cuda_plain::expand(cuda, tokens, adapter, hidden.cuda(), y.cuda()),
    }
}

/// The gradient of `x A^T` of all modules: `s d_y B`, overwritten. `gradient` has d_y `[T, outputs of the layer]` for x and
/// that gradient, d_hidden `[T, pitch]`, for hidden.
pub fn backward_hidden<T: Float>(
    device: &Device,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    gradient: &mut Input<'_, T>,
) {
    let op = "lora::backward_hidden";
    adapter.check(op);
    pitch_of(op, "d_y", gradient.x().len(), tokens, adapter.outputs());
    gradient.hidden(adapter.outputs()).check(op, tokens, adapter);
    match device.backend() {
        Backend::Cpu(cpu) => {
            let Input::Apart { x: d_y, hidden } = gradient else {
                panic!("{op}: joined adapters on the CPU")
            };
            let d_hidden = hidden.host_mut();
            for (module, b) in adapter.modules.iter().zip(&adapter.b) {
                T::lora_backward_hidden(cpu, (tokens, *module), d_y.host(), b, d_hidden);
            }
        }
        Backend::Cuda(cuda) => {
            let (d_y, d_hidden) = (gradient.x().cuda(), gradient.hidden(adapter.outputs()).placed(tokens));
            if cuda::fits(cuda, adapter) {
                cuda_backward::backward_hidden(cuda, tokens, adapter, d_y, d_hidden);
            } else {
                cuda_plain::backward_hidden(cuda, tokens, adapter, d_y, d_hidden);
            }
        }
    }
}

/// What the gradients of factors are made from. Shapes: x `[T, inputs]` and d_y `[T, outputs of the layer]`, on a GPU possibly
/// with further columns after their rows; d_hidden from [`backward_hidden`].
#[derive(Clone, Copy)]
pub struct Backward<'a, T: Float> {
    pub x: View<'a, T>,
    pub d_y: View<'a, T>,
    pub hidden: Hidden<'a, T>,
    pub d_hidden: Hidden<'a, T>,
}

/// Where the gradients of factors go. Shapes: b `[outputs of the module, rank]`, one for each module, or none at all; a
/// `[n rank, inputs]`.
pub struct FactorGradients<'a, T: Float> {
    pub b: Vec<(ViewMut<'a, T>, Write)>,
    pub a: Option<(ViewMut<'a, T>, Write)>,
}

/// The gradients of the factors: `d_b (+)= d_y^T hidden`, `d_a (+)= d_hidden^T x`.
pub fn backward_factors<T: Float>(
    device: &Device,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    of: Backward<'_, T>,
    to: FactorGradients<'_, T>,
) {
    let op = "lora::backward_factors";
    let Backward { x, d_y, hidden, d_hidden } = of;
    adapter.check(op);
    hidden.check(op, tokens, adapter);
    d_hidden.check(op, tokens, adapter);
    pitch_of(op, "x", x.len(), tokens, adapter.inputs());
    pitch_of(op, "d_y", d_y.len(), tokens, adapter.outputs());
    assert!(to.b.is_empty() || to.b.len() == adapter.modules.len(), "{op}: gradients of some second factors");
    for (module, (d_b, _)) in adapter.modules.iter().zip(&to.b) {
        check(op, "d_b", d_b.len(), module.outputs.len * module.hidden.len);
    }
    if let Some((d_a, _)) = &to.a {
        check(op, "d_a", d_a.len(), adapter.a.shape().len());
    }
    if tokens == 0 {
        return to.b.into_iter().chain(to.a).for_each(clear);
    }
    match device.backend() {
        Backend::Cpu(cpu) => {
            for (module, d_b) in adapter.modules.iter().zip(to.b) {
                let d_b = cleared(d_b);
                T::lora_backward_b(cpu, (tokens, *module), d_y.host(), hidden.rows.host(), d_b.into_host());
            }
            if let Some(d_a) = to.a.map(cleared) {
                let shape = (tokens, adapter.a.shape(), adapter.pitch());
                T::lora_backward_a(cpu, shape, x.host(), d_hidden.rows.host(), d_a.into_host());
            }
        }
        Backend::Cuda(cuda) => {
            let d_b: Vec<_> = to.b.iter().map(|(d_b, write)| (d_b.cuda(), *write)).collect();
            let d_a = to.a.as_ref().map(|(d_a, write)| (d_a.cuda(), *write));
            let (hidden, d_hidden) = (hidden.placed(tokens), d_hidden.placed(tokens));
            let saved = cuda_backward::Backward { x: x.cuda(), d_y: d_y.cuda(), hidden, d_hidden };
            if cuda::fits(cuda, adapter) {
                cuda_backward::backward_factors(cuda, tokens, adapter, &saved, &d_b, d_a);
            } else {
                cuda_plain::backward_factors(cuda, tokens, adapter, &saved, &d_b, d_a);
            }
        }
    }
}

/// Adds the terms' part to the gradient of x: `d_x += d_hidden A`. Shapes: d_hidden `[T, pitch]`; d_x `[T, inputs]`.
pub fn backward_input<T: Float>(
    device: &Device,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    d_hidden: View<'_, T>,
    d_x: ViewMut<'_, T>,
) {
    let op = "lora::backward_input";
    adapter.check_hidden(op, tokens, d_hidden.len());
    check(op, "d_x", d_x.len(), tokens * adapter.inputs());
    match device.backend() {
        Backend::Cpu(cpu) => {
            let tokens_and_pitch = (tokens, adapter.pitch());
            T::lora_backward_input(cpu, tokens_and_pitch, d_hidden.host(), adapter.a, d_x.into_host());
        }
        Backend::Cuda(cuda) if cuda::fits(cuda, adapter) => {
            cuda_backward::backward_input(cuda, tokens, adapter, d_hidden.cuda(), d_x.cuda());
        }
        Backend::Cuda(cuda) => {
            cuda_plain::backward_input(cuda, tokens, adapter, d_hidden.cuda(), d_x.cuda());
        }
    }
}

/// A gradient that an op adds to, cleared where it is to be overwritten.
fn cleared<T: Float>((mut to, write): (ViewMut<'_, T>, Write)) -> ViewMut<'_, T> {
    if write == Write::Set {
        to.fill(T::ZERO);
    }
    to
}

/// What becomes of a gradient without tokens.
pub(crate) fn clear<T: Float>(gradient: (ViewMut<'_, T>, Write)) {
    cleared(gradient);
}
