//! Forward and backward over packed batches.

use super::batch::Batch;
use super::forward::{Workspace, forward, layer, norm_input};
use super::gradients::Gradients;
use super::layer::{Rows, heads, norm_dims};
use super::plan::{Keep, Plan};
use super::policy::Policy;
use stapo_ops::lm_head::LastLogits;
use stapo_ops::rope::Table;
use stapo_ops::{Buffer, Device, Float, OutOfMemory, Write, attention, embedding, lm_head, rmsnorm};

/// Runs a policy over batches, one at a time. Its memory is kept from batch to batch.
#[derive(Debug)]
pub struct Pass<T: Float = f32> {
    keep: Keep,
    work: Workspace<T>,
    open: Option<Open<T>>,
}

/// How the head is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    /// Divides the logits; above 0.
    pub temperature: f64,
    /// Likeliest tokens to list in each scored token's place.
    pub n_alternatives: usize,
}

impl Default for Reading {
    fn default() -> Self {
        Self { temperature: 1.0, n_alternatives: 0 }
    }
}

/// Numbers of each scored token, in the order of the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores<T = f32> {
    /// `[R]`: its log-probability.
    pub logp: Vec<T>,
    /// `[R]`: entropy of the distribution in its place, in nats.
    pub entropy: Vec<T>,
    /// `[R]`: the chance that two draws from that distribution agree, sum of p^2.
    pub collision: Vec<T>,
    /// `[R]`, or empty if not asked for: the likeliest tokens in its place and their log-probabilities, likeliest first.
    pub alternatives: Vec<Vec<(u32, T)>>,
}

/// A batch between forward and backward.
#[derive(Debug)]
struct Open<T: Float> {
    n_updates: u64,
    plan: Plan,
    batch: Uploaded,
    dims: lm_head::Dims,
    numbers: Numbers<T>,
}

/// `[R]` each: what the head gives for scored rows.
#[derive(Debug)]
struct Numbers<T: Float> {
    logp: Buffer<T>,
    entropy: Buffer<T>,
    collision: Buffer<T>,
    lse: Buffer<T>,
    /// What backward need not compute again.
    logits: LastLogits,
}

/// A batch on the device.
#[derive(Debug)]
struct Uploaded {
    n_sequences: usize,
    tokens: Buffer<u32>,
    positions: Buffer<u32>,
    offsets: Buffer<u32>,
    rows: Buffer<u32>,
    targets: Buffer<u32>,
}

impl<T: Float> Pass<T> {
    pub fn new(policy: &Policy<T>, keep: Keep) -> Result<Self, OutOfMemory> {
        Ok(Self { keep, work: Workspace::new(&policy.device, policy.config())?, open: None })
    }

    /// The numbers of the batch's response tokens. Fails when the device has no room for the activations.
    pub fn forward(
        &mut self,
        policy: &Policy<T>,
        batch: &Batch,
        reading: Reading,
    ) -> Result<Scores<T>, OutOfMemory> {
        let device = &policy.device;
        let plan = Plan::new(policy.config(), batch.n_tokens(), batch.n_scored(), self.keep);
        self.open = None;
        self.work.reserve(device, &plan, batch.longest())?;
        let uploaded = Uploaded::new(device, batch)?;
        if batch.n_tokens() > 0 {
            let rows = rows(&uploaded, &self.work.table, plan.n_tokens);
            let (tokens, scored) = (uploaded.tokens.view(), uploaded.rows.view());
            let (dims, offsets) = (attention_dims(policy, &plan, &uploaded), uploaded.offsets.view());
            forward(policy, &plan, &mut self.work.arena, &rows, tokens, scored, |_, layer, arena| {
                layer.attend(arena, |qkv, out, lse| {
                    attention::forward(device, dims, qkv, offsets, out, lse);
                });
            });
        }
        let dims = lm_head::Dims { tokens: plan.n_scored, temperature: reading.temperature };
        let n_alternatives = reading.n_alternatives.min(policy.config().vocabulary);
        let mut numbers = Numbers::zeros(device, plan.n_scored)?;
        let alternatives = self.read_head(policy, &plan, dims, &uploaded, n_alternatives, &mut numbers)?;
        let scores = Scores {
            logp: numbers.logp.view().to_vec(),
            entropy: numbers.entropy.view().to_vec(),
            collision: numbers.collision.view().to_vec(),
            alternatives,
        };
        if self.keep != Keep::Nothing {
            let n_updates = policy.n_updates();
            self.open = Some(Open { n_updates, plan, batch: uploaded, dims, numbers });
        }
        Ok(scores)
    }

    /// Fills `numbers` and returns the `n` likeliest tokens of each row.
    fn read_head(
        &self,
        policy: &Policy<T>,
        plan: &Plan,
        dims: lm_head::Dims,
        batch: &Uploaded,
        n: usize,
        numbers: &mut Numbers<T>,
    ) -> Result<Vec<Vec<(u32, T)>>, OutOfMemory> {
        let device = &policy.device;
        let (mut ids, mut logp) = (device.zeros(dims.tokens * n)?, device.zeros(dims.tokens * n)?);
        let best = lm_head::Alternatives { n, ids: ids.view_mut(), logp: logp.view_mut() };
        let out = lm_head::HeadScores {
            logp: numbers.logp.view_mut(),
            entropy: numbers.entropy.view_mut(),
            collision: numbers.collision.view_mut(),
            lse: numbers.lse.view_mut(),
        };
        let hidden = self.work.arena.compute.range(plan.head.norm.clone());
        let (head, targets) = (policy.matrix(policy.layout.head), batch.targets.view());
        numbers.logits = lm_head::forward(device, dims, hidden, head, targets, out, (n > 0).then_some(best));
        Ok(alternatives(n, &ids.view().to_vec(), &logp.view().to_vec()))
    }

    /// Adds the gradient of `sum d_logp * logp + d_entropy * entropy` over the last forward's scored tokens.
    ///
    /// # Panics
    /// Without a forward before it that keeps what backward needs, if the policy was updated in between, or if a slice
    /// is not as long as the batch has scored tokens.
    pub fn backward(
        &mut self,
        policy: &Policy<T>,
        d_logp: &[T],
        d_entropy: &[T],
        gradients: &mut Gradients<T>,
    ) -> Result<(), OutOfMemory> {
        let mut open = self.open.take().expect("backward: no forward to go back from");
        assert_eq!(open.n_updates, policy.n_updates(), "backward: the policy was updated since forward");
        if open.plan.n_scored == 0 {
            return Ok(());
        }
        let logits = std::mem::take(&mut open.numbers.logits);
        self.backward_head(policy, &open, logits, d_logp, d_entropy, gradients)?;
        let (device, plan, batch) = (&policy.device, &open.plan, &open.batch);
        let arena = &mut self.work.arena;
        let rows = rows(batch, &self.work.table, plan.n_tokens);
        let offsets = batch.offsets.view();
        for index in (0..policy.config().n_layers).rev() {
            let layer = layer(policy, plan, &rows, index);
            if plan.keep != Keep::Everything {
                norm_input(policy, plan, arena, index);
            }
            match plan.keep {
                Keep::LayerInputs => layer.forward(arena, |layer, arena| {
                    let dims = attention_dims(policy, plan, batch);
                    layer.attend(arena, |qkv, out, lse| {
                        attention::forward(device, dims, qkv, offsets, out, lse);
                    });
                }),
                Keep::Products => layer.restore(arena),
                Keep::Everything | Keep::Nothing => {}
            }
            layer.backward(arena, &plan.backward, offsets, batch.n_sequences, gradients);
        }
        let config = policy.config();
        let dims = embedding::Dims { tokens: plan.n_tokens, vocab: config.vocabulary, width: config.width };
        let d_input = arena.compute.range(plan.backward.residual.clone());
        embedding::backward(device, dims, batch.tokens.view(), d_input, gradients.lookup_mut());
        Ok(())
    }

    /// From the numbers back to the residual stream behind the last layer.
    fn backward_head(
        &mut self,
        policy: &Policy<T>,
        open: &Open<T>,
        logits: LastLogits,
        d_logp: &[T],
        d_entropy: &[T],
        gradients: &mut Gradients<T>,
    ) -> Result<(), OutOfMemory> {
        let (device, layout, plan) = (&policy.device, &policy.layout, &open.plan);
        let (d_logp, d_entropy) = (device.upload(d_logp)?, device.upload(d_entropy)?);
        let (at, back) = (&plan.head, &plan.backward);
        let grads = lm_head::ScoreGrads {
            targets: open.batch.targets.view(),
            lse: open.numbers.lse.view(),
            entropy: open.numbers.entropy.view(),
            d_logp: d_logp.view(),
            d_entropy: d_entropy.view(),
        };
        let arena = &mut self.work.arena;
        let [hidden, d_hidden] = arena.compute.disjoint_mut([at.norm.clone(), back.head_norm.clone()]);
        let (hidden, head) = (hidden.into_view(), policy.matrix(layout.head));
        let to = lm_head::HeadGrads { d_hidden, d_weight: gradients.slot_mut(layout.head) };
        lm_head::backward(device, open.dims, hidden, head, grads, logits, to);

        let inv_rms = arena.exact.range(at.inv_rms.clone());
        let [x, d_norm, mut d_rows, mut d_residual] = arena.compute.disjoint_mut([
            at.rows.clone(),
            back.head_norm.clone(),
            back.rows.clone(),
            back.residual.clone(),
        ]);
        rmsnorm::backward(
            device,
            norm_dims(policy.config(), plan.n_scored),
            rmsnorm::Saved { x: x.into_view(), weight: policy.slot(layout.final_norm), inv_rms },
            d_norm.into_view(),
            Write::Set,
            d_rows.reborrow(),
            gradients.slot_mut(layout.final_norm),
        );
        d_residual.fill(T::ZERO);
        let scatter =
            embedding::Dims { tokens: plan.n_scored, vocab: plan.n_tokens, width: policy.config().width };
        embedding::backward(device, scatter, open.batch.rows.view(), d_rows.into_view(), d_residual);
        Ok(())
    }
}

impl<T: Float> Numbers<T> {
    fn zeros(device: &Device, n_scored: usize) -> Result<Self, OutOfMemory> {
        let zeros = || device.zeros(n_scored);
        let logits = LastLogits::default();
        Ok(Self { logp: zeros()?, entropy: zeros()?, collision: zeros()?, lse: zeros()?, logits })
    }
}

impl Uploaded {
    fn new(device: &Device, batch: &Batch) -> Result<Self, OutOfMemory> {
        let positions: Vec<u32> =
            batch.starts().windows(2).flat_map(|ends| 0..(ends[1] - ends[0]) as u32).collect();
        let offsets: Vec<u32> = batch.starts().iter().map(|&start| start as u32).collect();
        Ok(Self {
            n_sequences: batch.n_sequences(),
            tokens: device.upload(batch.tokens())?,
            positions: device.upload(&positions)?,
            offsets: device.upload(&offsets)?,
            rows: device.upload(batch.rows())?,
            targets: device.upload(batch.targets())?,
        })
    }
}

fn rows<'a, T: Float>(batch: &'a Uploaded, table: &'a Table<T>, n_tokens: usize) -> Rows<'a, T> {
    Rows { n_tokens, positions: batch.positions.view(), table }
}

fn attention_dims<T: Float>(policy: &Policy<T>, plan: &Plan, batch: &Uploaded) -> attention::Dims {
    attention::Dims { tokens: plan.n_tokens, sequences: batch.n_sequences, heads: heads(policy.config()) }
}

/// `[R, n]` to one list per row; a vocabulary smaller than `n` gives shorter lists.
pub(crate) fn alternatives<T: Float>(n: usize, ids: &[u32], logp: &[T]) -> Vec<Vec<(u32, T)>> {
    let rows = ids.chunks_exact(n.max(1)).zip(logp.chunks_exact(n.max(1)));
    rows.map(|(ids, logp)| {
        ids.iter().copied().zip(logp.iter().copied()).filter(|(id, _)| *id != u32::MAX).collect()
    })
    .collect()
}
