//! The second half of a layer, in both directions:
//!
//! ```text
//! exit = stream + down(swiglu(gate_up(norm(stream))))
//! ```

use super::arena::{FfnBackward, FfnViews, HalfEntry, HiddenBackward, Input, JoinedViews, OutputRows};
use super::gradient::Gradient;
use super::layer::{Exit, LayerPass};
use super::linear::{Activation, ActivationBackward, NextRows, ResidualNorm};
use super::parameter::Parameter;
use super::weights::{Ffn, LayerWeights, SwiGlu};
pub use stapo_ops::fused::matmul_swiglu::GateUp;
use stapo_ops::{Float, View, ViewMut, swiglu};
use std::ops::Range;

/// From the normed stream at the entry to the stream and its norm at the exit; after the last layer, to the addend.
/// `next_norm` is the norm at the exit.
pub fn forward<T: Float>(
    layer: &LayerPass<'_, T>,
    views: FfnViews<'_, T>,
    kept: GateUp,
    next_norm: Option<View<'_, T>>,
) {
    let SwiGlu { gate_up, down } = swiglu_of(layer);
    let mut activated = views.activated;
    let to = Activation { dims: swiglu_dims(layer), gate_up: views.gate_up, kept, out: activated.reborrow() };
    gate_up.forward_swiglu(layer.device, views.hidden.first.with(views.entry.normed), to);
    let input = views.hidden.second.with(activated);
    let exit = Exit {
        stream: views.entry.stream.view(),
        addend: views.addend,
        result: views.result,
        result_norm: layer.weights.fed_norm.as_ref().map(Parameter::view),
        next: views.exit,
        next_norm,
    };
    layer.leave(down, input, exit);
}

/// From the normed stream at the entry to what the product of down takes in, once more.
pub fn recompute_activation<T: Float>(layer: &LayerPass<'_, T>, views: FfnViews<'_, T>) {
    let SwiGlu { gate_up, down } = swiglu_of(layer);
    let mut activated = views.activated;
    let out = activated.reborrow();
    let to = Activation { dims: swiglu_dims(layer), gate_up: views.gate_up, kept: GateUp::Kept, out };
    gate_up.forward_swiglu(layer.device, views.hidden.first.with(views.entry.normed), to);
    let input = views.hidden.second.with(activated);
    match &layer.weights.fed_norm {
        // The product with the norm on it makes `x A^T` again, too.
        Some(norm) => layer.product_and_norm(down, input, views.addend, views.result, norm.view()),
        None => down.project_again(layer.device, layer.rows.n_tokens, input),
    }
}

/// From what attention's heads have attended to `activated`, by way of the stream at the entry.
pub fn activate_attended<T: Float>(layer: &LayerPass<'_, T>, views: JoinedViews<'_, T>) {
    let SwiGlu { gate_up, .. } = swiglu_of(layer);
    let norm = layer.weights.ffn_norm.as_ref().expect("halves are joined where each begins with a norm");
    let residual = ResidualNorm {
        dims: layer.norm_dims(),
        stream: views.stream.view(),
        addend: views.addend,
        norm_weight: norm.view(),
        exit: views.exit,
    };
    let rows = NextRows::Swiglu { gate_up: views.gate_up, out: views.activated };
    layer.weights.output.forward_residual_norm_to(
        layer.device,
        views.attended.view(),
        residual,
        gate_up,
        rows,
    );
}

/// From `activated` to the addend.
pub fn project_down<T: Float>(layer: &LayerPass<'_, T>, views: FfnViews<'_, T>) {
    let SwiGlu { down, .. } = swiglu_of(layer);
    let input = Input::Plain(views.activated.view());
    down.forward(layer.device, layer.rows.n_tokens, input, views.addend);
}

/// The norm at the entry and `activated` once more, from the stream and `gate_up`, and `x A^T` that lies after them.
pub fn recompute_inputs<T: Float>(layer: &LayerPass<'_, T>, views: FfnViews<'_, T>) {
    let SwiGlu { gate_up, down } = swiglu_of(layer);
    let (device, n_tokens) = (layer.device, layer.rows.n_tokens);
    let (mut entry, mut activated) = (views.entry, views.activated);
    let (stream, normed) = (entry.stream, entry.normed.reborrow());
    layer.enter(layer.weights.ffn_norm.as_ref(), HalfEntry { stream, normed, inv_rms: entry.inv_rms });
    swiglu::forward(device, swiglu_dims(layer), views.gate_up.view(), activated.reborrow());
    gate_up.project_again(device, n_tokens, views.hidden.first.with(entry.normed));
    down.project_again(device, n_tokens, views.hidden.second.with(activated));
}

/// `d_stream` holds the gradient of the stream at the exit, and then that of the stream at the entry.
///
/// Rows are taken some at a time: the gradients of a chunk's activations stay in a CPU's cache from one op to the next.
/// They are not kept, so all chunks share the first rows of `d_activated` and `d_gate_up`.
pub fn backward<T: Float>(
    layer: &LayerPass<'_, T>,
    mut views: FfnBackward<'_, T>,
    gradients: &mut LayerWeights<Option<Gradient<T>>>,
) {
    let device = layer.device;
    let n_tokens = layer.rows.n_tokens;
    let SwiGlu { gate_up, down } = swiglu_of(layer);
    let norm = layer.weights.fed_norm.as_ref();
    let d_product = views.d_normed.reborrow();
    let d_norm = gradients.fed_norm.as_mut().and_then(Option::as_mut);
    layer.leave_backward(views.d_stream.view(), d_product, &views.result, norm, d_norm);
    let is_stream = layer.spec.adds_results_unchanged();
    let Ffn::SwiGlu(d) = &mut gradients.ffn;
    for rows in chunks(n_tokens, device.cached_rows()) {
        let n = rows.len();
        let mut d_activated = first_rows(&mut views.d_activated, n_tokens, n);
        let mut d_gate_up = first_rows(&mut views.d_gate_up.rows, n_tokens, n);
        // The gradient of a product that is normed or scaled lies where that of the entry's norm will.
        let d_product = if is_stream { views.d_stream.view() } else { views.d_normed.view() };
        let d_exit = rows_of(d_product, n_tokens, &rows);
        let activated = rows_of(views.activated, n_tokens, &rows);
        let mut hidden = views.hidden.as_mut();
        let of_down = hidden.as_mut().map(|hidden| of_rows(hidden.second(), n_tokens, &rows));
        let to = ActivationBackward {
            dims: swiglu::Dims { tokens: n, ..swiglu_dims(layer) },
            gate_up: rows_of(views.gate_up, n_tokens, &rows),
            d_gate_up: d_gate_up.reborrow(),
        };
        down.backward_swiglu(device, (activated, d_exit), d_activated.reborrow(), &mut d.down, of_down, to);
        let d_normed = rows_of_mut(&mut views.d_normed, n_tokens, &rows);
        let normed = rows_of(views.normed, n_tokens, &rows);
        let of_gate_up = hidden.as_mut().map(|hidden| of_rows(hidden.first(), n_tokens, &rows));
        let d_gate_up =
            gate_up.output_gradient(OutputRows { rows: d_gate_up, is_joined: views.d_gate_up.is_joined });
        gate_up.backward(device, n, (normed, d_gate_up), d_normed, &mut d.gate_up, of_gate_up);
    }
    let (norm, entry) = (layer.weights.ffn_norm.as_ref(), (views.stream, views.inv_rms));
    let d_norm = gradients.ffn_norm.as_mut().and_then(Option::as_mut);
    layer.enter_backward(norm, entry, views.d_normed.view(), views.d_stream, d_norm);
}

/// `0..n_rows` in runs of `at_once`.
fn chunks(n_rows: usize, at_once: usize) -> impl Iterator<Item = Range<usize>> {
    let at_once = at_once.min(n_rows.max(1));
    (0..n_rows).step_by(at_once).map(move |start| start..(start + at_once).min(n_rows))
}

/// `rows` of a view of `n_rows` rows.
fn rows_of<'a, T: Float>(view: View<'a, T>, n_rows: usize, rows: &Range<usize>) -> View<'a, T> {
    let width = view.len() / n_rows;
    view.range(rows.start * width..rows.end * width)
}

/// The same for some rows: these are read, and any memory serves for the gradient.
fn of_rows<'a, T: Float>(
    hidden: HiddenBackward<'a, T>,
    n_rows: usize,
    rows: &Range<usize>,
) -> HiddenBackward<'a, T> {
    HiddenBackward { hidden: hidden.hidden.map(|hidden| rows_of(hidden, n_rows, rows)), ..hidden }
}

fn rows_of_mut<'a, T: Float>(
    view: &'a mut ViewMut<'_, T>,
    n_rows: usize,
    rows: &Range<usize>,
) -> ViewMut<'a, T> {
    let width = view.len() / n_rows;
    view.reborrow().into_range(rows.start * width..rows.end * width)
}

fn first_rows<'a, T: Float>(view: &'a mut ViewMut<'_, T>, n_rows: usize, n: usize) -> ViewMut<'a, T> {
    rows_of_mut(view, n_rows, &(0..n))
}

fn swiglu_of<'a, T: Float>(layer: &LayerPass<'a, T>) -> &'a SwiGlu<Parameter<T>> {
    let Ffn::SwiGlu(ffn) = &layer.weights.ffn;
    ffn
}

fn swiglu_dims<T: Float>(layer: &LayerPass<'_, T>) -> swiglu::Dims {
    swiglu::Dims { tokens: layer.rows.n_tokens, width: layer.spec.ffn_width(), gate: layer.spec.gate() }
}
