//! The memory that a run needs, by part, and what the settings left to the program become.

use crate::error::{Error, Result};
use crate::plan::config::{
    BaseStorage, GradientSum, KvMemory, LoraConfig, ModelSource, Plan, States, TeacherSource,
};
use crate::plan::host::HostMemory;
use crate::policy::found::FoundModel;
use crate::reward::{JUDGE, JudgeReading, JudgeSpec, REWARD_MODEL, RewardModelSpec};
use serde::Serialize;
use stapo_model::decoder::{ArenaLayout, BatchRows, LoraSpec, Purpose, QuantisedBase, Recompute, SumsLayout};
use stapo_model::generate::{EngineSettings, MODEL_DRAFT_ROWS};
use stapo_model::{DeltaNetSpec, Device, DeviceName, LayerSpec, ModelConfig, TensorSpec, gpu_logit_rows};
use std::fmt;

/// A part of a run's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPart {
    pub name: &'static str,
    pub bytes: u64,
}

/// What a run takes of its device's memory. On a GPU, sampling and updating take turns in one region; on the CPU they
/// have separate memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// From the start to the end of the run.
    pub held: Vec<MemoryPart>,
    pub sampling: Vec<MemoryPart>,
    pub updating: Vec<MemoryPart>,
    /// Of a judge or a reward model whose weights the host keeps, in the same region.
    pub judging: Vec<MemoryPart>,
    /// Bytes for keys and values.
    pub kv_bytes: u64,
    /// The most rows of a sampling step.
    pub step_rows: usize,
    pub recompute: Recompute,
    is_shared: bool,
}

impl MemoryPlan {
    /// The region that sampling, judging and updating use in turn.
    pub fn region_bytes(&self) -> u64 {
        sum(&self.sampling).max(sum(&self.updating)).max(sum(&self.judging))
    }

    /// The largest sum of all parts that exist at one time.
    pub fn peak_bytes(&self) -> u64 {
        let in_turns =
            if self.is_shared { self.region_bytes() } else { sum(&self.sampling) + sum(&self.updating) };
        sum(&self.held) + in_turns
    }

    /// What the settings left to the program became, by their keys; `None` on the CPU, where they have fixed values.
    pub fn chosen(&self) -> Option<Chosen> {
        self.is_shared.then_some(Chosen { kv_mib: self.kv_bytes >> 20, recompute: self.recompute })
    }

    /// All parts, those of the region included.
    pub fn parts(&self) -> impl Iterator<Item = &MemoryPart> {
        self.held.iter().chain(&self.sampling).chain(&self.updating).chain(&self.judging)
    }
}

/// The values of `rollout.kv_mib` and `update.recompute` that a run on a GPU works with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Chosen {
    pub kv_mib: u64,
    pub recompute: Recompute,
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = match self.recompute {
            Recompute::Nothing => "all activations are kept",
            Recompute::Inputs => "the inputs of attention and feed-forward are recomputed",
            Recompute::Layers => "layers are recomputed",
        };
        write!(f, "{} MiB for keys and values; {kept}", self.kv_mib)
    }
}

fn sum(parts: &[MemoryPart]) -> u64 {
    parts.iter().map(|part| part.bytes).sum()
}

/// Context, kernels and workspace, as measured on an H200.
const GPU_LIBRARY_BYTES: u64 = 700 << 20;
/// Rounding of the many buffers in a region, and buffers of a step.
const GPU_REGION_SLACK: u64 = 64 << 20;
/// The most rows of a sampling step on a GPU: about 45 ms at 1.7B on an H200.
const MAX_STEP_ROWS: usize = 8192;
/// More rows than the least take at most one part of this many of the memory for sampling.
const STEP_MEMORY_SHARE: u64 = 32;
/// Keys and values on the CPU where `rollout.kv_mib` is `"auto"`.
pub const CPU_KV_BYTES: u64 = 256 << 20;

/// The model in training, as far as memory is concerned.
#[derive(Debug, Clone, Copy)]
pub struct TrainedModel<'a> {
    pub config: &'a ModelConfig,
    /// The layers that stay quantised (`model.lora.base`).
    pub quantised: Option<QuantisedBase>,
}

impl<'a> From<&'a ModelConfig> for TrainedModel<'a> {
    fn from(config: &'a ModelConfig) -> Self {
        Self { config, quantised: None }
    }
}

impl<'a> TrainedModel<'a> {
    /// The model of a plan, which was found with the shape `config`.
    pub fn from_plan(plan: &Plan, found: &FoundModel, config: &'a ModelConfig) -> Result<Self> {
        let lora = plan.config.lora.as_ref();
        let lora = lora.filter(|lora| lora.base_storage() == BaseStorage::Quantised);
        let quantised = lora.map(|lora| found.quantised_base(&lora.spec())).transpose()?;
        Ok(Self { config, quantised })
    }
}

/// The memory of a run on the plan's device, of which `free` bytes are free; `None` if that is unknown or, as on the
/// CPU, no limit. `frozen` are the models besides the one in training, by their roles.
pub fn resolve<'a>(
    plan: &Plan,
    model: impl Into<TrainedModel<'a>>,
    frozen: &[(&'static str, ModelConfig)],
    free: Option<u64>,
) -> MemoryPlan {
    resolve_for(plan, model, frozen, free, 1)
}

/// As [`resolve`], for one of `n_ranks` ranks, each on a separate device.
pub fn resolve_for<'a>(
    plan: &Plan,
    model: impl Into<TrainedModel<'a>>,
    frozen: &[(&'static str, ModelConfig)],
    free: Option<u64>,
    n_ranks: usize,
) -> MemoryPlan {
    let lora = plan.config.lora.as_ref().map(LoraConfig::spec);
    let TrainedModel { config: model, quantised } = model.into();
    let quantised = quantised.unwrap_or_default();
    let needs = Needs { plan, model, lora, quantised, device: plan.device(), n_ranks: n_ranks.max(1) };
    let is_shared = needs.device != DeviceName::Cpu;
    let is_lent = is_shared && plan.keeps_verifier_on_host();
    let is_of_verifier =
        |part: &MemoryPart| [JUDGE, REWARD_MODEL].iter().any(|role| part.name.starts_with(role));
    let (judging, held): (Vec<_>, Vec<_>) =
        needs.held(frozen).into_iter().partition(|part| is_lent && is_of_verifier(part));
    // A little is left free: the driver rounds allocations up, and other programs may ask for some.
    let left = free.map(|free| (free - free / 64).saturating_sub(sum(&held)));
    let updating = |recompute| needs.updating(frozen, recompute);
    let candidates = plan.config.update.recompute.candidates();
    let fits = |recompute: &&Recompute| left.is_none_or(|left| sum(&updating(**recompute)) <= left);
    let recompute = candidates.iter().find(fits).or(candidates.last()).copied().unwrap_or_default();
    let step_rows = if is_shared { needs.step_rows(left) } else { EngineSettings::default().max_rows };
    let kv_bytes = match plan.config.rollout.kv_mib {
        KvMemory::Mib(mib) => (mib as u64) << 20,
        KvMemory::Auto if !is_shared => CPU_KV_BYTES,
        KvMemory::Auto => {
            let useful = needs.useful_kv_bytes();
            let left = left.unwrap_or(u64::MAX).saturating_sub(needs.engine_bytes(step_rows));
            useful.min(left.max(needs.sequence_kv_bytes(step_rows)))
        }
    };
    let sampling = vec![MemoryPart { name: "keys, values", bytes: kv_bytes + needs.engine_bytes(step_rows) }];
    let updating = updating(recompute);
    MemoryPlan { held, sampling, updating, judging, kv_bytes, step_rows, recompute, is_shared }
}

/// Refuses a run that does not fit the free memory of a GPU, or the main memory and the swap that are left to this process.
pub fn check(planned: &MemoryPlan, device: &Device) -> Result<()> {
    let of_host = || HostMemory::find().map(|memory| memory.usable());
    let Some(free) = device.memory().map(|(free, _)| free as u64).or_else(of_host) else { return Ok(()) };
    let needed = planned.peak_bytes();
    if needed <= free {
        return Ok(());
    }
    Err(Error::DoesNotFit { device: device.name(), needed_mib: needed >> 20, free_mib: free >> 20 })
}

/// The configurations of the models besides the one in training, by their roles.
pub fn frozen(plan: &Plan) -> Result<Vec<(&'static str, ModelConfig)>> {
    let reference = plan.config.reference.as_ref().unwrap_or(&plan.config.model);
    let needs_copy = plan.objective.needs_reference() && !plan.has_free_reference();
    let reference = needs_copy.then(|| reference.clone());
    let teacher = plan.config.teacher.as_ref().and_then(TeacherSource::model);
    let draft = plan.config.rollout.draft.as_deref().map(ModelSource::named);
    let roles = [("reference", reference), ("teacher", teacher), (DRAFT, draft)];
    let named = roles.into_iter().filter_map(|(role, source)| Some((role, source?)));
    let named = named.chain(plan.verifying_model());
    named.map(|(role, source)| Ok((role, source.find()?.shape()?))).collect()
}

/// The role of the model that drafts tokens.
pub const DRAFT: &str = "draft";
/// Sequences of a drafting model for which there are keys and values, the most that are drafted for at once, and the most bytes
/// of these on a GPU.
const DRAFT_SEQUENCES: u64 = 32;
const MAX_DRAFT_KV_BYTES: u64 = 2 << 30;

/// Keys and values of a model that drafts.
pub fn draft_kv_bytes(plan: &Plan, model: &ModelConfig, n_bytes: usize) -> u64 {
    let n_tokens = plan.longest_sequence() + GPU_BLOCK_TOKENS;
    let sequence = model.sequence_bytes(n_tokens, MODEL_DRAFT_ROWS, n_bytes);
    (DRAFT_SEQUENCES * sequence).min(MAX_DRAFT_KV_BYTES).max(2 * sequence)
}

/// Tokens of a forward pass of a judge that is read by log-probs, or of a reward model; a longer prompt has a separate pass.
pub const JUDGE_BATCH_TOKENS: usize = 4096;
/// Sequences of a judge that writes its verdicts for which a GPU has keys and values, and the most bytes of these.
const JUDGE_SEQUENCES: u64 = 64;
const MAX_JUDGE_KV_BYTES: u64 = 2 << 30;

/// Keys and values of a judge that writes its verdicts.
pub fn judge_kv_bytes(spec: &JudgeSpec, model: &ModelConfig, device: &Device) -> u64 {
    kv_bytes_of_judge(spec, model, device.compute_bytes(), device.is_async())
}

fn kv_bytes_of_judge(spec: &JudgeSpec, model: &ModelConfig, n_bytes: usize, is_gpu: bool) -> u64 {
    let n_tokens = spec.max_prompt_tokens + spec.max_tokens + GPU_BLOCK_TOKENS;
    let n_rows = EngineSettings::default().max_rows;
    let sequence = model.sequence_bytes(n_tokens, n_rows, n_bytes);
    let most = if is_gpu { (JUDGE_SEQUENCES * sequence).min(MAX_JUDGE_KV_BYTES) } else { CPU_KV_BYTES };
    most.max(sequence)
}

/// Whether a role is that of a model which verifies responses, in separate memory.
fn is_verifying(role: &str) -> bool {
    role == JUDGE || role == REWARD_MODEL
}

/// The memory of a run's parts.
struct Needs<'a> {
    plan: &'a Plan,
    model: &'a ModelConfig,
    lora: Option<LoraSpec>,
    /// Zero where no layer stays quantised.
    quantised: QuantisedBase,
    device: DeviceName,
    n_ranks: usize,
}

/// Whether a device keeps what an optimizer needs besides the weights that ops read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Weights {
    /// Of the model in training: every rank holds what its optimizer updates.
    Trained,
    /// Of a model that no optimizer updates.
    Frozen,
}

impl Needs<'_> {
    fn is_8bit(&self) -> bool {
        self.plan.config.update.states == States::EightBit
    }

    fn held(&self, frozen: &[(&'static str, ModelConfig)]) -> Vec<MemoryPart> {
        let n = self.n_trained();
        let moments = if self.is_8bit() { 2 * n + n / 32 } else { 8 * n };
        let weights = match &self.lora {
            Some(_) => {
                self.policy_bytes(self.model, Weights::Frozen) - 2 * self.quantised.n_weights
                    + self.quantised.n_bytes
            }
            None => self.policy_bytes(self.model, Weights::Trained),
        };
        let mut parts = vec![MemoryPart { name: "weights", bytes: weights }];
        if let Some(lora) = &self.lora {
            let padded = if self.device == DeviceName::Cpu {
                0
            } else {
                let n_joined = lora.n_joined(self.model) - self.quantised.n_joined;
                2 * (lora.n_padded(self.model) + n_joined)
            };
            let bytes = self.bytes_of(n, n, Weights::Trained) + padded;
            parts.push(MemoryPart { name: "adapters", bytes });
        }
        if self.quantised.n_unpacked > 0 {
            parts.push(MemoryPart { name: "unpacked", bytes: 2 * self.quantised.n_unpacked });
        }
        parts.push(MemoryPart { name: "optimizer", bytes: moments.div_ceil(self.n_ranks as u64) });
        let of_frozen = |(name, model): &(&'static str, ModelConfig)| MemoryPart {
            name,
            bytes: self.policy_bytes(model, Weights::Frozen),
        };
        parts.extend(frozen.iter().map(of_frozen));
        let verifying = frozen.iter().find(|(name, _)| is_verifying(name));
        parts.extend(verifying.into_iter().flat_map(|(_, model)| {
            let judge = self.plan.judge().map(|spec| ("judge's work", self.judge_bytes(model, spec)));
            let scored = self.plan.scored_reward();
            let scorer = scored.map(|(_, spec)| ("reward model's work", self.scorer_bytes(model, spec)));
            judge.into_iter().chain(scorer).map(|(name, bytes)| MemoryPart { name, bytes })
        }));
        let draft = frozen.iter().find(|(name, _)| *name == DRAFT);
        parts.extend(
            draft.map(|(_, model)| MemoryPart { name: "draft's work", bytes: self.draft_bytes(model) }),
        );
        if self.device != DeviceName::Cpu {
            // Rows of logits in f32, which their gradient overwrites.
            let vocabulary = self.model.vocabulary;
            let rows = self.plan.config.update.microbatch_tokens.min(gpu_logit_rows(vocabulary));
            let logits = (4 * rows * vocabulary) as u64;
            parts.push(MemoryPart { name: "logits", bytes: logits });
            let chunks = |spec: DeltaNetSpec| spec.heads.backward_bytes(self.microbatch_tokens()) as u64;
            let chunks = self.model.layers.iter().filter_map(LayerSpec::delta_net).map(chunks).max();
            parts.extend(chunks.map(|bytes| MemoryPart { name: "DeltaNet's chunks", bytes }));
            parts.push(MemoryPart { name: "libraries", bytes: GPU_LIBRARY_BYTES });
        }
        parts
    }

    /// What updates take: gradients and activations. Frozen models score in the memory of the activations.
    fn updating(&self, frozen: &[(&'static str, ModelConfig)], recompute: Recompute) -> Vec<MemoryPart> {
        let tokens = self.microbatch_tokens();
        let rows = |model: &ModelConfig| {
            let packing = self.plan.packing(model);
            let keys = packing.budget_keys.map_or(0, |most| most / packing.budget_tokens * tokens);
            BatchRows { tokens, scored: tokens, keys }
        };
        let scoring = frozen.iter().filter(|(name, _)| !is_verifying(name) && *name != DRAFT);
        let scoring = scoring.map(|(_, model)| self.arena(model, None, rows(model), Purpose::Inference));
        let training =
            self.arena(self.model, self.lora.as_ref(), rows(self.model), Purpose::Training(recompute));
        vec![
            MemoryPart { name: "gradients", bytes: 4 * self.n_gradients() + self.slack() },
            MemoryPart { name: "activations", bytes: scoring.fold(training, u64::max) },
        ]
    }

    /// The memory of a judge besides its weights: it has separate memory, in which it scores or writes.
    fn judge_bytes(&self, model: &ModelConfig, spec: &JudgeSpec) -> u64 {
        let writes = spec.read != JudgeReading::YesNo;
        let most = if writes { 0 } else { spec.max_prompt_tokens.max(JUDGE_BATCH_TOKENS) };
        let rows = if writes { EngineSettings::default().max_rows } else { most };
        let n_bytes = self.device.compute_bytes();
        let is_gpu = self.device != DeviceName::Cpu;
        let kv_bytes = if writes { kv_bytes_of_judge(spec, model, n_bytes, is_gpu) } else { 0 };
        let logits =
            if is_gpu { 4 * rows.min(gpu_logit_rows(model.vocabulary)) * model.vocabulary } else { 0 };
        self.arena(model, None, (rows, rows).into(), Purpose::Inference)
            + logits as u64
            + kv_bytes
            + self.slack()
    }

    /// The memory of a model that drafts, besides its weights.
    fn draft_bytes(&self, model: &ModelConfig) -> u64 {
        let rows = MODEL_DRAFT_ROWS;
        let kv_bytes = draft_kv_bytes(self.plan, model, self.device.compute_bytes());
        let logits = if self.device == DeviceName::Cpu { 0 } else { 4 * rows * model.vocabulary };
        self.arena(model, None, (rows, rows).into(), Purpose::Inference)
            + logits as u64
            + kv_bytes
            + self.slack()
    }

    /// The memory of a reward model besides its weights.
    fn scorer_bytes(&self, model: &ModelConfig, spec: &RewardModelSpec) -> u64 {
        let rows = spec.max_tokens.max(JUDGE_BATCH_TOKENS);
        self.arena(model, None, (rows, rows).into(), Purpose::Inference) + self.slack()
    }

    /// Tokens of the largest micro-batch. A CPU takes memory for those that a mini-batch has, a GPU for all that the plan
    /// allows.
    fn microbatch_tokens(&self) -> usize {
        let config = &self.plan.config;
        let limit = config.update.microbatch_tokens;
        if self.device != DeviceName::Cpu || config.rollout.source.is_some() {
            return limit;
        }
        let longest = config.rollout.max_prompt_tokens.saturating_add(config.rollout.max_response_tokens);
        let n_sequences = config.update.problems_per_minibatch.saturating_mul(config.rollout.group_size);
        limit.min(n_sequences.saturating_mul(longest))
    }

    /// Numbers in all gradients and sums of gradients.
    fn n_gradients(&self) -> u64 {
        let is_gpu = self.device != DeviceName::Cpu;
        if self.n_ranks > 1 || (!is_gpu && self.plan.sum() == GradientSum::Microbatches) {
            return SumsLayout::new(self.model, self.lora.as_ref(), self.n_ranks).most_elements() as u64;
        }
        // Beside adapters the embedding is frozen.
        let embedding = (self.model.vocabulary * self.model.width) as u64;
        let embedding = if self.lora.is_some() { 0 } else { embedding };
        // A tied embedding has two gradients, of the lookup and of the head, until the end of a mini-batch adds these.
        let tied = if self.model.tied_embeddings { embedding } else { 0 };
        // On a GPU the head and the embedding have a separate sum within a micro-batch.
        let apart = if is_gpu { embedding } else { 0 };
        self.n_trained() + tied + apart
    }

    /// The most rows of a sampling step on a GPU with `left` bytes for sampling: prompts run faster in larger steps. Where the
    /// memory is unknown, or some layers see a window of keys, whose cache grows with the rows, a step is small.
    fn step_rows(&self, left: Option<u64>) -> usize {
        let least = EngineSettings::default().max_rows;
        let has_window = |layer: &LayerSpec| layer.attention().is_some_and(|spec| spec.rule.window.is_some());
        let most = match left {
            Some(left) if !self.model.layers.iter().any(has_window) => left / STEP_MEMORY_SHARE,
            _ => 0,
        };
        let mut rows = MAX_STEP_ROWS;
        while rows > least && self.engine_bytes(rows) - self.engine_bytes(least) > most {
            rows /= 2;
        }
        rows.max(least)
    }

    /// What an engine takes in addition to its keys and values, with up to `rows` rows in a step.
    fn engine_bytes(&self, rows: usize) -> u64 {
        let EngineSettings { max_rows, max_sequences, .. } = EngineSettings::default();
        let drawn = rows.min(max_sequences.max(max_rows));
        // A CPU's threads have scratch memory for logits.
        let logits = if self.device == DeviceName::Cpu { 0 } else { 4 * drawn * self.model.vocabulary };
        let arena = self.arena(self.model, self.lora.as_ref(), (rows, drawn).into(), Purpose::Inference);
        arena + logits as u64 + self.slack()
    }

    fn slack(&self) -> u64 {
        if self.device == DeviceName::Cpu { 0 } else { GPU_REGION_SLACK }
    }

    fn arena(&self, model: &ModelConfig, lora: Option<&LoraSpec>, rows: BatchRows, purpose: Purpose) -> u64 {
        // Counted as a Hopper GPU lays it out.
        let adapters = lora.map(|lora| lora.hidden_layout(model, self.device != DeviceName::Cpu));
        let layout = ArenaLayout::new(model, rows, purpose, adapters.as_ref());
        layout.bytes(self.device.compute_bytes()) as u64
    }

    /// Numbers that training changes.
    fn n_trained(&self) -> u64 {
        self.lora.as_ref().map_or(self.model.n_parameters(), |lora| lora.n_parameters(self.model))
    }

    /// Keys and values of one sequence of the greatest length, with the block that its last tokens begin, while a step computes
    /// up to `n_rows` of its tokens.
    fn sequence_kv_bytes(&self, n_rows: usize) -> u64 {
        let rollout = &self.plan.config.rollout;
        let n_tokens = rollout.max_prompt_tokens + rollout.max_response_tokens + GPU_BLOCK_TOKENS;
        self.model.sequence_bytes(n_tokens, n_rows, self.device.compute_bytes())
    }

    /// Keys and values of all sequences that can run at once; more would never be used.
    fn useful_kv_bytes(&self) -> u64 {
        let config = &self.plan.config;
        let rollouts = config.rollout.problems_per_step * config.rollout.group_size;
        let evaluated = config.evaluation.problems * config.evaluation.samples;
        let n_sequences = rollouts.max(evaluated).div_ceil(self.n_ranks);
        let n_sequences = n_sequences.min(EngineSettings::default().max_sequences);
        // Sequences that decode have one row; those in their prompt, fewer, the others' share.
        n_sequences as u64 * self.sequence_kv_bytes(GPU_BLOCK_TOKENS)
    }

    /// Bytes of a model's weights.
    fn policy_bytes(&self, model: &ModelConfig, weights: Weights) -> u64 {
        let matrices: usize =
            model.tensors().iter().filter(|spec| spec.shape.len() == 2).map(TensorSpec::n_elements).sum();
        self.bytes_of(model.n_parameters(), matrices as u64, weights)
    }

    /// Bytes of `n` weights, of which `n_matrix` are in matrices. The CPU holds matrices a second time in the panel order
    /// that its kernels read; a GPU holds trained weights a second time in f32 for the optimizer, unless states have 8
    /// bits; of several ranks, each those that it owns.
    fn bytes_of(&self, n: u64, n_matrix: u64, weights: Weights) -> u64 {
        match self.device {
            DeviceName::Cpu => 4 * (n + n_matrix),
            DeviceName::Cuda { .. } if self.is_8bit() || weights == Weights::Frozen => 2 * n,
            DeviceName::Cuda { .. } => 2 * n + (4 * n).div_ceil(self.n_ranks as u64),
        }
    }
}

/// Positions in a block of a GPU's cache.
const GPU_BLOCK_TOKENS: usize = 32;

#[cfg(test)]
mod tests;
