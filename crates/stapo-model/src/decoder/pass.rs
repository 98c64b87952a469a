//! Forward and backward over packed batches.

use super::accumulate::Accumulate;
use super::batch::{KeyRows, PackedBatch};
use super::context::{Context, CopiedKeys, Packed};
use super::head::{HeadOptions, HeadOutputs, PendingScores, TokenGradients, TokenScores};
use super::layer::Rows;
use super::layout::{ArenaLayout, BatchRows, Purpose, Recompute};
use super::lora::HiddenLayout;
use super::policy::Policy;
use super::rope_tables::RopeTables;
use super::score;
use super::stack::Stack;
use super::workspace::Workspace;
use stapo_ops::attention::key_copies::Copies;
use stapo_ops::lm_head::{Kept, Targets};
use stapo_ops::{Buffer, Device, Float, OutOfMemory};

/// Runs a policy over batches, one at a time. The memory of a pass is kept from batch to batch.
pub struct Pass<T: Float = f32> {
    purpose: Purpose,
    workspace: Workspace<T>,
    unfinished: Option<Unfinished<T>>,
}

/// A batch between forward and backward.
#[derive(Debug)]
struct Unfinished<T: Float> {
    n_updates: u64,
    layout: ArenaLayout,
    batch: DeviceBatch,
    /// `None` of a reward model, whose backward reads the arena alone.
    outputs: Option<HeadOutputs<T>>,
}

/// A [`PackedBatch`] on the device.
#[derive(Debug)]
struct DeviceBatch {
    n_sequences: usize,
    tokens: Buffer<u32>,
    positions: Buffer<u32>,
    offsets: Buffer<u32>,
    rows: Buffer<u32>,
    targets: Buffer<u32>,
    /// As in [`PackedBatch::kept`].
    kept: Option<(usize, Buffer<u32>)>,
    keys: Option<DeviceKeys>,
}

/// [`KeyRows`] on the device.
#[derive(Debug)]
struct DeviceKeys {
    rows: Buffer<u32>,
    offsets: Buffer<u32>,
    starts: Buffer<u32>,
    list: Buffer<u32>,
}

impl<T: Float> Pass<T> {
    /// A pass that only scores: nothing is kept for backward.
    pub fn scoring(policy: &Policy<T>) -> Result<Self, OutOfMemory> {
        Self::new(policy, policy.device(), Purpose::Inference)
    }

    /// A pass whose every forward may be followed by a backward.
    pub fn training(policy: &Policy<T>, recompute: Recompute) -> Result<Self, OutOfMemory> {
        Self::new(policy, policy.device(), Purpose::Training(recompute))
    }

    /// As [`Pass::scoring`], with activations in the memory of `memory` and room for batches of up to `rows`.
    pub fn scoring_in(policy: &Policy<T>, memory: &Device, rows: BatchRows) -> Result<Self, OutOfMemory> {
        Self::new(policy, memory, Purpose::Inference)?.with_room(policy, rows)
    }

    /// As [`Pass::training`], with activations in the memory of `memory` and room for batches of up to `rows`.
    pub fn training_in(
        policy: &Policy<T>,
        memory: &Device,
        recompute: Recompute,
        rows: BatchRows,
    ) -> Result<Self, OutOfMemory> {
        Self::new(policy, memory, Purpose::Training(recompute))?.with_room(policy, rows)
    }

    fn with_room(mut self, policy: &Policy<T>, rows: BatchRows) -> Result<Self, OutOfMemory> {
        let layout = ArenaLayout::new(policy.config(), rows, self.purpose, policy.hidden_layout());
        self.workspace.reserve(policy.device(), &layout, 0)?;
        Ok(self)
    }

    fn new(policy: &Policy<T>, memory: &Device, purpose: Purpose) -> Result<Self, OutOfMemory> {
        let workspace = Workspace::new(policy.device(), memory, policy.config())?;
        Ok(Self { purpose, workspace, unfinished: None })
    }

    /// The numbers of the batch's response tokens. Fails when the device has no room for the activations.
    pub fn forward(
        &mut self,
        policy: &Policy<T>,
        batch: &PackedBatch,
        options: HeadOptions,
    ) -> Result<TokenScores<T>, OutOfMemory> {
        Ok(self.start(policy, batch, options)?.wait())
    }

    /// As [`Pass::forward`], but does not wait for the device.
    pub fn start(
        &mut self,
        policy: &Policy<T>,
        batch: &PackedBatch,
        options: HeadOptions,
    ) -> Result<PendingScores<T>, OutOfMemory> {
        self.start_for(self.purpose, (policy, policy.hidden_layout()), batch, options)
    }

    /// As [`Pass::start`] with nothing kept for backward, under any policy of the same device. The next batch may be started
    /// before the scores of this one are read.
    pub fn start_score(
        &mut self,
        policy: &Policy<T>,
        batch: &PackedBatch,
        options: HeadOptions,
    ) -> Result<PendingScores<T>, OutOfMemory> {
        self.start_for(Purpose::Inference, (policy, policy.hidden_layout()), batch, options)
    }

    /// As [`Pass::start_score`], under the policy without its adapters.
    pub fn start_score_base(
        &mut self,
        policy: &Policy<T>,
        batch: &PackedBatch,
        options: HeadOptions,
    ) -> Result<PendingScores<T>, OutOfMemory> {
        self.start_for(Purpose::Inference, (policy, None), batch, options)
    }

    fn start_for(
        &mut self,
        purpose: Purpose,
        (policy, adapters): (&Policy<T>, Option<&HiddenLayout>),
        batch: &PackedBatch,
        options: HeadOptions,
    ) -> Result<PendingScores<T>, OutOfMemory> {
        let (layout, batch) = self.run_stack(purpose, (policy, adapters), batch)?;
        let arena = &mut self.workspace.arena;
        let (outputs, scores) = HeadOutputs::start(policy, &layout, arena, batch.targets(), options)?;
        self.keep(purpose, policy, (layout, batch), Some(outputs));
        Ok(scores)
    }

    /// The scores of the batch's sequences under a reward model, for sequences that were added by [`PackedBatch::push_whole`].
    /// The scores are the same bits whatever else is in the batch.
    pub fn forward_scores(
        &mut self,
        policy: &Policy<T>,
        batch: &PackedBatch,
    ) -> Result<Vec<f64>, OutOfMemory> {
        let (layout, batch) = self.run_stack(self.purpose, (policy, policy.hidden_layout()), batch)?;
        let scores = score::forward(policy, &layout, &mut self.workspace.arena);
        self.keep(self.purpose, policy, (layout, batch), None);
        Ok(scores)
    }

    /// Runs the batch through all layers and the final norm.
    fn run_stack(
        &mut self,
        purpose: Purpose,
        (policy, adapters): (&Policy<T>, Option<&HiddenLayout>),
        batch: &PackedBatch,
    ) -> Result<(ArenaLayout, DeviceBatch), OutOfMemory> {
        let device = policy.device();
        let rows = BatchRows { tokens: batch.n_tokens(), scored: batch.n_scored(), keys: batch.n_key_rows() };
        let layout = ArenaLayout::new(policy.config(), rows, purpose, adapters);
        self.unfinished = None;
        self.workspace.adopt(device, policy.config())?;
        self.workspace.reserve(device, &layout, batch.longest())?;
        let Workspace { arena, tables, .. } = &mut self.workspace;
        let batch = DeviceBatch::upload(device, batch)?;
        if layout.n_tokens > 0 {
            let mut context = Context::Packed(batch.packed());
            let stack = Stack::new(policy, &layout, batch.rows(tables, layout.n_tokens));
            stack.forward(arena, batch.tokens.view(), batch.rows.view(), &mut context);
        }
        Ok((layout, batch))
    }

    /// Keeps what backward needs, where one may follow.
    fn keep(
        &mut self,
        purpose: Purpose,
        policy: &Policy<T>,
        (layout, batch): (ArenaLayout, DeviceBatch),
        outputs: Option<HeadOutputs<T>>,
    ) {
        if purpose != Purpose::Inference {
            self.unfinished = Some(Unfinished { n_updates: policy.n_updates(), layout, batch, outputs });
        }
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
        gradients: &mut impl Accumulate<T>,
    ) -> Result<(), OutOfMemory> {
        let Unfinished { layout, batch, outputs, .. } = self.take_unfinished(policy);
        let outputs = outputs.expect("backward: the last forward gave scores, not log-probs");
        if layout.n_scored == 0 {
            return Ok(());
        }
        let arena = &mut self.workspace.arena;
        let token_gradients = TokenGradients { targets: batch.targets(), d_logp, d_entropy };
        outputs.backward(policy, &layout, arena, token_gradients, gradients)?;
        self.stack_backward(policy, &layout, &batch, gradients);
        Ok(())
    }

    /// Adds the gradient of `sum d_scores * score` over the sequences of the last [`Pass::forward_scores`].
    ///
    /// # Panics
    /// As [`Pass::backward`].
    pub fn backward_scores(
        &mut self,
        policy: &Policy<T>,
        d_scores: &[T],
        gradients: &mut impl Accumulate<T>,
    ) {
        let Unfinished { layout, batch, outputs, .. } = self.take_unfinished(policy);
        assert!(outputs.is_none(), "backward: the last forward gave log-probs, not scores");
        if layout.n_scored == 0 {
            return;
        }
        score::backward(policy, &layout, &mut self.workspace.arena, d_scores, gradients);
        self.stack_backward(policy, &layout, &batch, gradients);
    }

    fn take_unfinished(&mut self, policy: &Policy<T>) -> Unfinished<T> {
        let unfinished = self.unfinished.take().expect("backward: no forward to go back from");
        let n_updates = unfinished.n_updates;
        assert_eq!(n_updates, policy.n_updates(), "backward: the policy was updated since forward");
        unfinished
    }

    fn stack_backward(
        &mut self,
        policy: &Policy<T>,
        layout: &ArenaLayout,
        batch: &DeviceBatch,
        gradients: &mut impl Accumulate<T>,
    ) {
        let Workspace { arena, tables, .. } = &mut self.workspace;
        let stack = Stack::new(policy, layout, batch.rows(tables, layout.n_tokens));
        stack.backward(arena, batch.tokens.view(), batch.rows.view(), batch.packed(), gradients);
    }
}

impl DeviceKeys {
    fn upload(device: &Device, keys: &KeyRows) -> Result<Self, OutOfMemory> {
        Ok(Self {
            rows: device.upload(&keys.rows)?,
            offsets: device.upload(&keys.offsets)?,
            starts: device.upload(&keys.starts)?,
            list: device.upload(&keys.list)?,
        })
    }
}

impl DeviceBatch {
    fn upload(device: &Device, batch: &PackedBatch) -> Result<Self, OutOfMemory> {
        let offsets: Vec<u32> = batch.starts().iter().map(|&start| start as u32).collect();
        Ok(Self {
            n_sequences: batch.n_sequences(),
            tokens: device.upload(batch.tokens())?,
            positions: device.upload(&batch.positions())?,
            offsets: device.upload(&offsets)?,
            rows: device.upload(batch.rows())?,
            targets: device.upload(batch.targets())?,
            kept: batch.kept().map(|(n, ids)| device.upload(&ids).map(|ids| (n, ids))).transpose()?,
            keys: batch.key_rows().map(|keys| DeviceKeys::upload(device, &keys)).transpose()?,
        })
    }

    fn targets(&self) -> Targets<'_> {
        let kept = self.kept.as_ref().map(|(n, ids)| Kept { n: *n, ids: ids.view() });
        Targets { ids: self.targets.view(), kept }
    }

    fn packed(&self) -> Packed<'_> {
        let keys = self.keys.as_ref().map(|keys| CopiedKeys {
            copies: Copies { rows: keys.rows.view(), starts: keys.starts.view(), list: keys.list.view() },
            offsets: keys.offsets.view(),
        });
        Packed { n_sequences: self.n_sequences, offsets: self.offsets.view(), keys }
    }

    fn rows<'a, T: Float>(&'a self, tables: &'a RopeTables<T>, n_tokens: usize) -> Rows<'a, T> {
        Rows { n_tokens, positions: self.positions.view(), tables }
    }
}
