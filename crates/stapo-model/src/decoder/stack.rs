//! The whole stack: embedding, layers, final norm; from tokens to the rows that the head reads, and back. Training,
//! scoring and generation go through the same forward.

use super::accumulate::{Accumulate, Lookup};
use super::arena::Arena;
use super::attention;
use super::context::{Context, Packed};
use super::ffn::{self, GateUp};
use super::layer::{LayerPass, Rows, norm_dims};
use super::layout::{ArenaLayout, Purpose, Recompute, ScoredRows};
use super::parameter::Parameter;
use super::policy::Policy;
use crate::config::{Gate, LayerSpec};
use stapo_ops::{Float, View, Write, embedding, residual, rmsnorm};

/// A policy at work on the rows of a batch.
pub struct Stack<'a, T: Float> {
    policy: &'a Policy<T>,
    layout: &'a ArenaLayout,
    rows: Rows<'a, T>,
    /// See [`LayerPass::joins_halves`].
    joins_halves: bool,
}

impl<'a, T: Float> Stack<'a, T> {
    pub fn new(policy: &'a Policy<T>, layout: &'a ArenaLayout, rows: Rows<'a, T>) -> Self {
        // Every layer must end with one product. Adapters read the normed stream, which the joined op does not leave in
        // memory.
        let is_plain = |layer: &LayerSpec| {
            layer.adds_results_unchanged()
                && layer.gate() == Gate::Silu
                && layer.attention().is_some_and(|attention| !attention.has_output_gate)
        };
        let joins_halves = layout.purpose == Purpose::Inference
            && policy.lora().is_none()
            && policy.config().layers.iter().all(is_plain)
            && policy.weights.layers.iter().all(|layer| layer.ffn.down().is_some());
        Self { policy, layout, rows, joins_halves }
    }

    /// Runs `tokens` `[T]` through all layers and leaves the normed rows `scored` `[R]` of the last layer's output where
    /// [`Arena::hidden`] finds them.
    pub fn forward(
        &self,
        arena: &mut Arena<T>,
        tokens: View<'_, u32>,
        scored: View<'_, u32>,
        context: &mut Context<'_, T>,
    ) {
        let weights = &self.policy.weights;
        let stream = arena.attention(self.layout, 0).entry.stream;
        let device = self.policy.device();
        let mut stream = stream;
        embedding::forward(
            device,
            self.embedding_dims(),
            tokens,
            weights.embedding.view(),
            stream.reborrow(),
        );
        if let Some(factor) = self.embedding_factor() {
            residual::scale(device, stream, factor);
        }
        attention::norm_entry(&self.layer(0), arena.attention(self.layout, 0));
        for index in 0..weights.layers.len() {
            let layer = self.layer(index);
            let next = weights.layers.get(index + 1);
            let next_norm = next.and_then(|next| next.attention_norm.as_ref()).map(Parameter::view);
            attention::forward(&layer, arena.attention(self.layout, index), context);
            if next.is_none()
                && layer.joins_halves
                && let Some(rows) = self.layout.scored_rows()
            {
                return self.finish_scored(arena, scored, &rows);
            }
            if layer.joins_halves {
                ffn::activate_attended(&layer, arena.joined(self.layout, index));
            } else {
                ffn::forward(&layer, arena.ffn(self.layout, index), self.gate_up(), next_norm);
            }
        }
        if let Some(last) = weights.layers.len().checked_sub(1).filter(|_| self.joins_halves) {
            ffn::project_down(&self.layer(last), arena.ffn(self.layout, last));
        }
        self.norm_scored(arena, scored);
    }

    /// From what the last layer has attended to the final norm, for scored rows only: of a prompt, only the last row is read behind
    /// its keys and values.
    fn finish_scored(&self, arena: &mut Arena<T>, scored: View<'_, u32>, rows: &ScoredRows) {
        let (device, n_scored) = (self.policy.device(), self.layout.n_scored);
        if n_scored == 0 {
            return;
        }
        for (from, to) in arena.last_attended(rows) {
            let (vocab, width) = (self.layout.n_tokens, to.len() / n_scored);
            embedding::forward(device, embedding::Dims { tokens: n_scored, vocab, width }, scored, from, to);
        }
        let few = Rows { n_tokens: n_scored, ..self.rows };
        let stack = Stack { layout: &rows.layout, rows: few, policy: self.policy, joins_halves: true };
        let last = self.policy.weights.layers.len() - 1;
        ffn::activate_attended(&stack.layer(last), arena.joined(stack.layout, last));
        ffn::project_down(&stack.layer(last), arena.ffn(stack.layout, last));
        let views = arena.head(stack.layout);
        let residual = rmsnorm::Residual { stream: views.layer_stream, addend: views.addend };
        let out = rmsnorm::Out { normed: views.normed, inv_rms: views.inv_rms };
        let (dims, weight) =
            (norm_dims(self.policy.config(), n_scored), self.policy.weights.final_norm.view());
        rmsnorm::forward_add(device, dims, residual, weight, views.stream, out);
    }

    /// The last residual addition and the final norm, for scored rows only.
    fn norm_scored(&self, arena: &mut Arena<T>, scored: View<'_, u32>) {
        let views = arena.head(self.layout);
        let residual = rmsnorm::Residual { stream: views.layer_stream, addend: views.addend };
        let out = rmsnorm::Out { normed: views.normed, inv_rms: views.inv_rms };
        let weight = self.policy.weights.final_norm.view();
        let dims = norm_dims(self.policy.config(), self.layout.n_scored);
        rmsnorm::forward_add_rows(self.policy.device(), dims, scored, residual, weight, views.stream, out);
    }

    /// From the gradient of the normed scored rows, which the head left in the arena, to all gradients of the stack.
    pub fn backward(
        &self,
        arena: &mut Arena<T>,
        tokens: View<'_, u32>,
        scored: View<'_, u32>,
        packed: Packed<'_>,
        gradients: &mut impl Accumulate<T>,
    ) {
        self.norm_scored_backward(arena, scored, gradients);
        for index in (0..self.policy.weights.layers.len()).rev() {
            let layer = self.layer(index);
            self.recompute(arena, &layer, packed);
            let layer_gradients = gradients.layer(index);
            ffn::backward(&layer, arena.ffn_backward(self.layout, index), layer_gradients);
            let views = arena.attention_backward(self.layout, index);
            attention::backward(&layer, views, packed, layer_gradients);
            gradients.layer_done(index);
        }
        if let Some(Lookup { d_table, apart }) = gradients.lookup() {
            let (device, dims) = (self.policy.device(), self.embedding_dims());
            let mut d_stream = arena.attention_backward(self.layout, 0).d_stream;
            if let Some(factor) = self.embedding_factor() {
                residual::scale(device, d_stream.reborrow(), factor);
            }
            let d_stream = d_stream.into_view();
            match apart {
                Some(apart) => embedding::backward_apart(device, dims, tokens, d_stream, apart, d_table),
                None => embedding::backward(device, dims, tokens, d_stream, d_table),
            }
        }
        gradients.lookup_done();
    }

    fn norm_scored_backward(
        &self,
        arena: &mut Arena<T>,
        scored: View<'_, u32>,
        gradients: &mut impl Accumulate<T>,
    ) {
        let device = self.policy.device();
        let config = self.policy.config();
        let mut views = arena.head_backward(self.layout);
        let weight = self.policy.weights.final_norm.view();
        let saved = rmsnorm::Saved { x: views.stream, weight, inv_rms: views.inv_rms };
        rmsnorm::backward(
            device,
            norm_dims(config, self.layout.n_scored),
            saved,
            views.d_normed.into_view(),
            Write::Set,
            views.d_stream.reborrow(),
            gradients.final_norm(),
        );
        views.d_layer_stream.fill(T::ZERO);
        let scatter = embedding::Dims {
            tokens: self.layout.n_scored,
            vocab: self.layout.n_tokens,
            width: config.width,
        };
        embedding::backward(device, scatter, scored, views.d_stream.into_view(), views.d_layer_stream);
    }

    /// Computes once more what forward did not keep of a layer.
    fn recompute(&self, arena: &mut Arena<T>, layer: &LayerPass<'_, T>, packed: Packed<'_>) {
        let Purpose::Training(recompute) = self.layout.purpose else { return };
        let index = layer.index;
        if recompute == Recompute::Nothing {
            return;
        }
        attention::norm_entry(layer, arena.attention(self.layout, index));
        if recompute == Recompute::Layers {
            let views = arena.attention(self.layout, index);
            attention::forward(layer, views, &mut Context::Packed(packed));
            ffn::recompute_activation(layer, arena.ffn(self.layout, index));
        } else {
            attention::recompute_inputs(layer, arena.attention(self.layout, index), packed);
            ffn::recompute_inputs(layer, arena.ffn(self.layout, index));
        }
    }

    fn layer(&self, index: usize) -> LayerPass<'_, T> {
        let layers = &self.policy.weights.layers;
        let joins_halves = self.joins_halves;
        LayerPass {
            device: self.policy.device(),
            config: self.policy.config(),
            index,
            spec: &self.policy.config().layers[index],
            weights: &layers[index],
            rows: self.rows,
            joins_halves,
            unfinished: index.checked_sub(1).filter(|_| joins_halves).and_then(|at| layers[at].ffn.down()),
        }
    }

    fn gate_up(&self) -> GateUp {
        match self.layout.purpose {
            Purpose::Training(_) => GateUp::Kept,
            Purpose::Inference => GateUp::Dropped,
        }
    }

    /// What embeddings are multiplied by; `None` for 1.
    fn embedding_factor(&self) -> Option<f64> {
        let config = self.policy.config();
        let factor = config.embedding_scale.factor(config.width, self.policy.device().compute_bytes());
        (factor != 1.0).then_some(factor)
    }

    fn embedding_dims(&self) -> embedding::Dims {
        let config = self.policy.config();
        embedding::Dims { tokens: self.layout.n_tokens, vocab: config.vocabulary, width: config.width }
    }
}
