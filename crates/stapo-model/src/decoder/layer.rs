//! One transformer layer, forward and backward side by side.
//!
//! ```text
//! middle = input + output(attention(rope(qkv(norm(input)))))
//! next   = middle + down(swiglu(gate_up(norm(middle))))
//! ```

use super::forward::Arena;
use super::gradients::Gradients;
use super::layout::LayerSlots;
use super::plan::{BackwardRanges, LayerRanges, qkv_width};
use super::policy::Policy;
use crate::config::ModelConfig;
use stapo_ops::attention::Heads;
use stapo_ops::fused::matmul_swiglu;
use stapo_ops::fused::rope_paged_attention::Unrotated;
use stapo_ops::rope::{HeadNorm, HeadNormGrad, Table};
use stapo_ops::{Float, View, ViewMut, Write, attention, matmul, rmsnorm, rope, swiglu};
use std::ops::Range;

/// What the rows of a batch are, the same for all layers.
pub struct Rows<'a, T: Float> {
    pub n_tokens: usize,
    /// `[T]`
    pub positions: View<'a, u32>,
    pub table: &'a Table<T>,
}

/// One layer's parameters and the arena it works in.
pub struct Layer<'a, T: Float> {
    pub policy: &'a Policy<T>,
    pub slots: LayerSlots,
    pub ranges: &'a LayerRanges,
    /// See `Plan::delta`.
    pub delta: Range<usize>,
    pub rows: &'a Rows<'a, T>,
    /// There will be a backward.
    pub keeps: bool,
}

impl<T: Float> Layer<'_, T> {
    /// Forward from `attention_norm` to `ffn`, which is as far as backward needs it. `attend` goes from `raw_qkv` to
    /// `attention`: see [`Layer::attend`] and [`Layer::attend_unrotated`].
    pub fn forward(&self, arena: &mut Arena<T>, attend: impl FnOnce(&Self, &mut Arena<T>)) {
        let at = self.ranges;
        let [x, raw] = arena.compute.disjoint_mut([at.attention_norm.clone(), at.raw_qkv.clone()]);
        self.project(self.slots.qkv, self.slots.qkv_bias, x.into_view(), raw);

        attend(self, arena);

        let [out, delta] = arena.compute.disjoint_mut([at.attention.clone(), self.delta.clone()]);
        self.project(self.slots.output, None, out.into_view(), delta);

        let [input, delta, middle, norm] = arena.compute.disjoint_mut([
            at.input.clone(),
            self.delta.clone(),
            at.middle.clone(),
            at.ffn_norm.clone(),
        ]);
        let inv_rms = arena.exact.range_mut(at.ffn_inv_rms.clone());
        let weight = self.policy.slot(self.slots.ffn_norm);
        let residual = rmsnorm::Residual { stream: input.into_view(), addend: delta.into_view() };
        let to = rmsnorm::Out { normed: norm, inv_rms };
        rmsnorm::forward_add(&self.policy.device, self.norm_dims(), residual, weight, middle, to);

        let [norm, gate_up, ffn] =
            arena.compute.disjoint_mut([at.ffn_norm.clone(), at.gate_up.clone(), at.ffn.clone()]);
        if self.keeps {
            self.project(self.slots.gate_up, None, norm.into_view(), gate_up);
            self.activate(arena);
        } else {
            let weight = self.policy.matrix(self.slots.gate_up);
            let (device, dims) = (&self.policy.device, self.swiglu_dims());
            matmul_swiglu::forward(device, dims, norm.into_view(), weight, gate_up, ffn);
        }
    }

    /// Rotates, and calls `attend` with what it goes from, `[T, W]`, and to, `[T, Q]` and its lse `[T, heads]`.
    pub fn attend(
        &self,
        arena: &mut Arena<T>,
        attend: impl FnOnce(View<'_, T>, ViewMut<'_, T>, ViewMut<'_, T>),
    ) {
        self.rotate(arena);
        let [qkv, out] = arena.compute.disjoint_mut([self.ranges.qkv.clone(), self.ranges.attention.clone()]);
        attend(qkv.into_view(), out, arena.exact.range_mut(self.ranges.lse.clone()));
    }

    /// Calls `attend`, which rotates too, with what it goes from and to.
    pub fn attend_unrotated(
        &self,
        arena: &mut Arena<T>,
        attend: impl FnOnce(Unrotated<'_, T>, ViewMut<'_, T>),
    ) {
        let at = self.ranges;
        let [raw, qkv, out] =
            arena.compute.disjoint_mut([at.raw_qkv.clone(), at.qkv.clone(), at.attention.clone()]);
        let Rows { table, positions, .. } = *self.rows;
        let (raw, inv_rms) = (raw.into_view(), arena.exact.range_mut(at.head_inv_rms.clone()));
        attend(Unrotated { table, positions, norm: self.head_norm(), raw, qkv, inv_rms }, out);
    }

    /// From `raw_qkv` to `qkv`.
    fn rotate(&self, arena: &mut Arena<T>) {
        let (at, rows) = (self.ranges, self.rows);
        let [raw, qkv] = arena.compute.disjoint_mut([at.raw_qkv.clone(), at.qkv.clone()]);
        let inv_rms = arena.exact.range_mut(at.head_inv_rms.clone());
        let norm = self.head_norm().map(|norm| (norm, inv_rms));
        let (device, raw) = (&self.policy.device, raw.into_view());
        rope::forward(device, self.rope_dims(), rows.table, rows.positions, norm, raw, qkv);
    }

    /// From `gate_up` to `ffn`.
    fn activate(&self, arena: &mut Arena<T>) {
        let [gate_up, ffn] =
            arena.compute.disjoint_mut([self.ranges.gate_up.clone(), self.ranges.ffn.clone()]);
        swiglu::forward(&self.policy.device, self.swiglu_dims(), gate_up.into_view(), ffn);
    }

    /// Forward again where the products' results were kept; the input's norm is there.
    pub fn restore(&self, arena: &mut Arena<T>) {
        let at = self.ranges;
        self.rotate(arena);
        let [middle, norm] = arena.compute.disjoint_mut([at.middle.clone(), at.ffn_norm.clone()]);
        let inv_rms = arena.exact.range_mut(at.ffn_inv_rms.clone());
        let weight = self.policy.slot(self.slots.ffn_norm);
        let to = rmsnorm::Out { normed: norm, inv_rms };
        rmsnorm::forward(&self.policy.device, self.norm_dims(), middle.into_view(), weight, to);
        self.activate(arena);
    }

    /// Backward: `back.residual` holds the gradient of what the layer gave out, and then that of what came in.
    pub fn backward(
        &self,
        arena: &mut Arena<T>,
        back: &BackwardRanges,
        offsets: View<'_, u32>,
        n_sequences: usize,
        gradients: &mut Gradients<T>,
    ) {
        self.backward_ffn(arena, back, gradients);
        self.backward_attention(arena, back, offsets, n_sequences, gradients);
    }

    /// Some rows at a time, whose gradients stay in the cache from one op to the next: they are not kept.
    fn backward_ffn(&self, arena: &mut Arena<T>, back: &BackwardRanges, gradients: &mut Gradients<T>) {
        let at = self.ranges;
        for rows in self.chunks() {
            let (n, of) = (rows.len(), |range: &Range<usize>| self.rows_of(range, &rows));
            let (d_ffn_at, d_gate_up_at) =
                (self.rows_of(&back.ffn, &(0..n)), self.rows_of(&back.gate_up, &(0..n)));
            let [ffn, d_next, d_ffn] =
                arena.compute.disjoint_mut([of(&at.ffn), of(&back.residual), d_ffn_at.clone()]);
            self.project_backward(self.slots.down, n, ffn.into_view(), d_next.into_view(), d_ffn, gradients);

            let [gate_up, d_ffn, d_gate_up] =
                arena.compute.disjoint_mut([of(&at.gate_up), d_ffn_at, d_gate_up_at.clone()]);
            let (gate_up, d_ffn) = (gate_up.into_view(), d_ffn.into_view());
            let dims = swiglu::Dims { tokens: n, width: self.config().ffn_width };
            swiglu::backward(&self.policy.device, dims, gate_up, d_ffn, d_gate_up);

            let [norm, d_gate_up, d_norm] =
                arena.compute.disjoint_mut([of(&at.ffn_norm), d_gate_up_at, of(&self.delta)]);
            let (norm, d_gate_up) = (norm.into_view(), d_gate_up.into_view());
            self.project_backward(self.slots.gate_up, n, norm, d_gate_up, d_norm, gradients);
        }
        self.norm_backward(arena, back, self.slots.ffn_norm, &at.middle, &at.ffn_inv_rms, gradients);
    }

    /// The batch's rows in pieces of as many as the device likes at a time.
    fn chunks(&self) -> impl Iterator<Item = Range<usize>> {
        let n_rows = self.rows.n_tokens;
        let at_once = self.policy.device.cached_rows().min(n_rows.max(1));
        (0..n_rows).step_by(at_once).map(move |start| start..(start + at_once).min(n_rows))
    }

    /// Where `rows` of the activation at `range` lie.
    fn rows_of(&self, range: &Range<usize>, rows: &Range<usize>) -> Range<usize> {
        let width = range.len() / self.rows.n_tokens;
        range.start + rows.start * width..range.start + rows.end * width
    }

    fn backward_attention(
        &self,
        arena: &mut Arena<T>,
        back: &BackwardRanges,
        offsets: View<'_, u32>,
        n_sequences: usize,
        gradients: &mut Gradients<T>,
    ) {
        let (at, device) = (self.ranges, &self.policy.device);
        let [out, d_middle, d_out] =
            arena.compute.disjoint_mut([at.attention.clone(), back.residual.clone(), back.attention.clone()]);
        let n_rows = self.rows.n_tokens;
        self.project_backward(
            self.slots.output,
            n_rows,
            out.into_view(),
            d_middle.into_view(),
            d_out,
            gradients,
        );

        let [qkv, out, d_out, d_qkv] = arena.compute.disjoint_mut([
            at.qkv.clone(),
            at.attention.clone(),
            back.attention.clone(),
            back.qkv.clone(),
        ]);
        let lse = arena.exact.range(at.lse.clone());
        let dims = attention::Dims {
            tokens: self.rows.n_tokens,
            sequences: n_sequences,
            heads: heads(self.config()),
        };
        let saved = attention::Saved { qkv: qkv.into_view(), out: out.into_view(), lse };
        attention::backward(device, dims, saved, offsets, d_out.into_view(), d_qkv);

        let [raw, d_qkv, d_raw] =
            arena.compute.disjoint_mut([at.raw_qkv.clone(), back.qkv.clone(), back.raw_qkv.clone()]);
        let inv_rms = arena.exact.range(at.head_inv_rms.clone());
        let norm =
            self.head_norm().zip(self.slots.q_norm.zip(self.slots.k_norm)).map(|(norm, (q_norm, k_norm))| {
                let [d_query_weight, d_key_weight] = gradients.two_slots_mut(q_norm, k_norm);
                HeadNormGrad { norm, raw: raw.into_view(), inv_rms, d_query_weight, d_key_weight }
            });
        let (table, positions) = (self.rows.table, self.rows.positions);
        rope::backward(device, self.rope_dims(), table, positions, norm, d_qkv.into_view(), d_raw);

        if let Some(bias) = self.slots.qkv_bias {
            let (n_rows, width) = (self.rows.n_tokens, qkv_width(self.config()));
            let d_raw = arena.compute.range(back.raw_qkv.clone());
            matmul::backward_bias(device, n_rows, width, d_raw, gradients.slot_mut(bias));
        }
        let [norm, d_raw, d_norm] =
            arena.compute.disjoint_mut([at.attention_norm.clone(), back.raw_qkv.clone(), self.delta.clone()]);
        self.project_backward(self.slots.qkv, n_rows, norm.into_view(), d_raw.into_view(), d_norm, gradients);

        self.norm_backward(
            arena,
            back,
            self.slots.attention_norm,
            &at.input,
            &at.attention_inv_rms,
            gradients,
        );
    }

    /// `y = x W^T (+ bias)`
    fn project(&self, slot: usize, bias: Option<usize>, x: View<'_, T>, y: ViewMut<'_, T>) {
        let bias = bias.map(|bias| self.policy.slot(bias));
        matmul::forward(&self.policy.device, self.rows.n_tokens, x, self.policy.matrix(slot), bias, y);
    }

    /// Sets `d_x`, adds to the weight's gradient.
    fn project_backward(
        &self,
        slot: usize,
        tokens: usize,
        x: View<'_, T>,
        d_y: View<'_, T>,
        d_x: ViewMut<'_, T>,
        gradients: &mut Gradients<T>,
    ) {
        let (device, weight) = (&self.policy.device, self.policy.matrix(slot));
        matmul::backward_input(device, tokens, d_y, weight, Write::Set, d_x);
        let dims = matmul::Dims { tokens, inputs: weight.shape().inputs, outputs: weight.shape().outputs };
        let (d_weight, write) = gradients.matrix_mut(slot);
        matmul::backward_weight(device, dims, x, d_y, write, d_weight);
    }

    /// Adds the norm's gradient, from `delta`, to the residual stream's.
    fn norm_backward(
        &self,
        arena: &mut Arena<T>,
        back: &BackwardRanges,
        slot: usize,
        x: &Range<usize>,
        inv_rms: &Range<usize>,
        gradients: &mut Gradients<T>,
    ) {
        let [x, d_norm, d_residual] =
            arena.compute.disjoint_mut([x.clone(), self.delta.clone(), back.residual.clone()]);
        let inv_rms = arena.exact.range(inv_rms.clone());
        let weight = self.policy.slot(slot);
        rmsnorm::backward(
            &self.policy.device,
            self.norm_dims(),
            rmsnorm::Saved { x: x.into_view(), weight, inv_rms },
            d_norm.into_view(),
            Write::Add,
            d_residual,
            gradients.slot_mut(slot),
        );
    }

    fn head_norm(&self) -> Option<HeadNorm<'_, T>> {
        let (q_norm, k_norm) = self.slots.q_norm.zip(self.slots.k_norm)?;
        Some(HeadNorm {
            query_weight: self.policy.slot(q_norm),
            key_weight: self.policy.slot(k_norm),
            eps: self.config().norm_eps.into(),
        })
    }

    fn config(&self) -> &ModelConfig {
        self.policy.config()
    }

    fn rope_dims(&self) -> rope::Dims {
        rope::Dims { tokens: self.rows.n_tokens, heads: heads(self.config()) }
    }

    fn norm_dims(&self) -> rmsnorm::Dims {
        norm_dims(self.config(), self.rows.n_tokens)
    }

    fn swiglu_dims(&self) -> swiglu::Dims {
        swiglu::Dims { tokens: self.rows.n_tokens, width: self.config().ffn_width }
    }
}

pub fn heads(config: &ModelConfig) -> Heads {
    Heads { query: config.n_heads, kv: config.n_kv_heads, dim: config.head_dim }
}

pub fn norm_dims(config: &ModelConfig, n_rows: usize) -> rmsnorm::Dims {
    rmsnorm::Dims { tokens: n_rows, width: config.width, eps: config.norm_eps.into() }
}
