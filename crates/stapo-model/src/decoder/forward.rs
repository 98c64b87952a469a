//! From tokens to the hidden rows the head reads; the same for training, scoring and generation.

use super::layer::{Layer, Rows, norm_dims};
use super::plan::{Keep, Plan};
use super::policy::Policy;
use stapo_ops::fused::matmul_add_rmsnorm;
use stapo_ops::rope::{Frequencies, Scaling, Table};
use stapo_ops::{Buffer, Device, Float, OutOfMemory, View, embedding, matmul, rmsnorm};

use crate::config::{ModelConfig, RopeKind};

/// Runs all layers on `tokens` `[T]` and leaves the normed rows `scored` `[R]` of the last in `plan.head.norm`.
/// `attend` is given each layer and its number: see [`Layer::forward`].
pub fn forward<T: Float>(
    policy: &Policy<T>,
    plan: &Plan,
    arena: &mut Arena<T>,
    rows: &Rows<'_, T>,
    tokens: View<'_, u32>,
    scored: View<'_, u32>,
    mut attend: impl FnMut(usize, &Layer<'_, T>, &mut Arena<T>),
) {
    let (device, config, layout) = (&policy.device, policy.config(), &policy.layout);
    let dims = embedding::Dims { tokens: plan.n_tokens, vocab: config.vocabulary, width: config.width };
    let first = arena.compute.range_mut(plan.layers[0].input.clone());
    embedding::forward(device, dims, tokens, policy.slot(layout.embedding), first);
    norm_input(policy, plan, arena, 0);
    for layer in 0..config.n_layers {
        self::layer(policy, plan, rows, layer).forward(arena, |of, arena| attend(layer, of, arena));
        let (at, matrix) = (&plan.layers[layer], policy.matrix(layout.layers[layer].down));
        let Some(next) = plan.layers.get(layer + 1) else {
            let [ffn, delta] = arena.compute.disjoint_mut([at.ffn.clone(), plan.delta.clone()]);
            matmul::forward(device, plan.n_tokens, ffn.into_view(), matrix, None, delta);
            break;
        };
        let [ffn, middle, delta, input, norm] = arena.compute.disjoint_mut([
            at.ffn.clone(),
            at.middle.clone(),
            plan.delta.clone(),
            next.input.clone(),
            next.attention_norm.clone(),
        ]);
        let inv_rms = arena.exact.range_mut(next.attention_inv_rms.clone());
        let weight = policy.slot(layout.layers[layer + 1].attention_norm);
        let dims = norm_dims(config, plan.n_tokens);
        let product = matmul_add_rmsnorm::Product { x: ffn.into_view(), weight: matrix, y: delta };
        let to = rmsnorm::Out { normed: norm, inv_rms };
        matmul_add_rmsnorm::forward(device, dims, middle.into_view(), product, weight, input, to);
    }
    norm_scored(policy, plan, arena, scored);
}

/// The norm of a layer's input, where it was not made together with the input.
pub fn norm_input<T: Float>(policy: &Policy<T>, plan: &Plan, arena: &mut Arena<T>, layer: usize) {
    let at = &plan.layers[layer];
    let [input, norm] = arena.compute.disjoint_mut([at.input.clone(), at.attention_norm.clone()]);
    let inv_rms = arena.exact.range_mut(at.attention_inv_rms.clone());
    let weight = policy.slot(policy.layout.layers[layer].attention_norm);
    let dims = norm_dims(policy.config(), plan.n_tokens);
    let to = rmsnorm::Out { normed: norm, inv_rms };
    rmsnorm::forward(&policy.device, dims, input.into_view(), weight, to);
}

/// The last layer's output exists for scored rows only.
fn norm_scored<T: Float>(policy: &Policy<T>, plan: &Plan, arena: &mut Arena<T>, scored: View<'_, u32>) {
    let (device, config, at) = (&policy.device, policy.config(), &plan.head);
    let last = &plan.layers[config.n_layers - 1];
    let [middle, delta, rows, norm] = arena.compute.disjoint_mut([
        last.middle.clone(),
        plan.delta.clone(),
        at.rows.clone(),
        at.norm.clone(),
    ]);
    let inv_rms = arena.exact.range_mut(at.inv_rms.clone());
    let weight = policy.slot(policy.layout.final_norm);
    let dims = norm_dims(config, plan.n_scored);
    let residual = rmsnorm::Residual { stream: middle.into_view(), addend: delta.into_view() };
    let to = rmsnorm::Out { normed: norm, inv_rms };
    rmsnorm::forward_add_rows(device, dims, scored, residual, weight, rows, to);
}

pub fn layer<'a, T: Float>(
    policy: &'a Policy<T>,
    plan: &'a Plan,
    rows: &'a Rows<'a, T>,
    layer: usize,
) -> Layer<'a, T> {
    Layer {
        policy,
        slots: policy.layout.layers[layer],
        ranges: &plan.layers[layer],
        delta: plan.delta.clone(),
        rows,
        keeps: plan.keep != Keep::Nothing,
    }
}

/// Activations of a pass: rows in the device's compute precision, numbers per row exact.
#[derive(Debug)]
pub struct Arena<T: Float> {
    pub compute: Buffer<T>,
    pub exact: Buffer<T>,
}

/// Memory of a pass that grows when a batch asks for more and is kept from batch to batch.
#[derive(Debug)]
pub struct Workspace<T: Float> {
    pub arena: Arena<T>,
    pub table: Table<T>,
    frequencies: Frequencies,
}

impl<T: Float> Workspace<T> {
    pub fn new(device: &Device, config: &ModelConfig) -> Result<Self, OutOfMemory> {
        let frequencies = frequencies(config);
        let arena = Arena { compute: device.compute_zeros(0)?, exact: device.zeros(0)? };
        Ok(Self { arena, table: Table::new(device, &frequencies, 0)?, frequencies })
    }

    /// Room for the activations of `plan` and for positions below `n_positions`. True if anything moved.
    pub fn reserve(&mut self, device: &Device, plan: &Plan, n_positions: usize) -> Result<bool, OutOfMemory> {
        let mut moved = false;
        // Give back first: the old and the new need not fit beside each other.
        if self.arena.compute.len() < plan.n_elements {
            self.arena.compute = device.compute_zeros(0)?;
            self.arena.compute = device.compute_zeros(plan.n_elements)?;
            moved = true;
        }
        if self.arena.exact.len() < plan.n_exact {
            self.arena.exact = device.zeros(0)?;
            self.arena.exact = device.zeros(plan.n_exact)?;
            moved = true;
        }
        if self.table.positions() < n_positions {
            self.table = Table::new(device, &self.frequencies, n_positions.next_power_of_two())?;
            moved = true;
        }
        Ok(moved)
    }
}

fn frequencies(config: &ModelConfig) -> Frequencies {
    let scaling = match config.rope.kind {
        RopeKind::Default => Scaling::None,
        RopeKind::Linear { factor } => Scaling::Linear { factor },
        RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
            Scaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_positions: original_positions as f64,
            }
        }
        RopeKind::Yarn { factor, original_positions, beta_fast, beta_slow, attention_factor, truncate } => {
            Scaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_positions: original_positions as f64,
                attention_factor: Some(attention_factor),
                truncate,
            }
        }
    };
    Frequencies { head_dim: config.head_dim, theta: config.rope.theta, scaling }
}
