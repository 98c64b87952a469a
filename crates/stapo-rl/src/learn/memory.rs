//! The memory of a run on its device. On a GPU, keys and values lie idle while the policy learns, gradients and
//! activations while it samples: both use one region in turn, and so does a judge whose weights the host keeps.

use crate::error::Result;
use crate::learn::learner::Accumulated;
use crate::learn::teacher::check_vocabulary;
use crate::plan::config::{GradientSum, ModelSource, Plan};
use crate::plan::memory::{CPU_KV_BYTES, MemoryPlan, draft_kv_bytes};
use crate::policy::loaded::LoadedModel;
use crate::ranks::Ranks;
use stapo_model::decoder::{BatchRows, GradientSums, Gradients, Pass, Policy};
use stapo_model::generate::{EngineMemory, EngineSettings};
use stapo_model::{Device, Region, Tenant};

/// The memory that responses are sampled in.
pub struct SamplingMemory {
    pub engine: EngineMemory,
    /// For keys and values.
    pub kv_bytes: usize,
    /// The most rows of a step. Engines in the same memory must agree on it: another size would be allocated anew.
    pub step_rows: usize,
    pub drafter: Option<Drafter>,
}

/// A model that drafts, and the memory in which it does.
pub struct Drafter {
    pub policy: Box<Policy>,
    pub engine: EngineMemory,
    pub kv_bytes: usize,
}

impl Drafter {
    /// The model of `rollout.draft`, which drafts for `model`.
    pub fn open(plan: &Plan, model: &LoadedModel, device: &Device) -> Result<Option<Self>> {
        let Some(name) = &plan.config.rollout.draft else { return Ok(None) };
        let mut draft = LoadedModel::open(&ModelSource::named(name), &device.read_only())?;
        draft.policy.fit_longest(plan.longest_sequence());
        let remedy = "drafts are tokens of the policy: take a smaller model of the same family";
        check_vocabulary(model, &draft, ("rollout.draft", remedy))?;
        let kv_bytes = draft_kv_bytes(plan, draft.policy.config(), device.compute_bytes()) as usize;
        Ok(Some(Self { policy: Box::new(draft.policy), engine: EngineMemory::new(), kv_bytes }))
    }
}

impl SamplingMemory {
    /// Memory outside of any plan, for a few responses at a time.
    pub fn small() -> Self {
        let step_rows = EngineSettings::default().max_rows;
        Self { engine: EngineMemory::new(), kv_bytes: CPU_KV_BYTES as usize, step_rows, drafter: None }
    }

    /// The settings of an engine that works in this memory.
    pub fn settings(&self) -> EngineSettings {
        EngineSettings { kv_bytes: self.kv_bytes, max_rows: self.step_rows, ..EngineSettings::default() }
    }
}

/// What a run uses in turns.
pub struct RunMemory {
    pub planned: MemoryPlan,
    /// `None` on the CPU, where the two have separate memory.
    region: Option<Region>,
    sampling: SamplingMemory,
    pass: Pass,
}

impl RunMemory {
    /// Takes the planned memory of the policy's device. The gradients lie in the region too.
    pub fn new(
        plan: &Plan,
        planned: MemoryPlan,
        policy: &Policy,
        ranks: &Ranks,
    ) -> Result<(Self, Accumulated)> {
        let device = policy.device();
        let (kv_bytes, step_rows) = (planned.kv_bytes as usize, planned.step_rows);
        let recompute = planned.recompute;
        let Some(region) = device.region(planned.region_bytes() as usize)? else {
            let sampling = SamplingMemory { engine: EngineMemory::new(), kv_bytes, step_rows, drafter: None };
            let pass = Pass::training(policy, recompute)?;
            let gradients = match plan.sum() {
                GradientSum::Microbatches => Accumulated::ByOwner(GradientSums::new(policy, device, ranks)?),
                GradientSum::Tokens => Accumulated::InPlace(Gradients::zeros(policy)?),
            };
            return Ok((Self { planned, region: None, sampling, pass }, gradients));
        };
        let engine = EngineMemory::new_in(device.in_region(&region, Tenant::Sampling));
        let memory = device.in_region(&region, Tenant::Updating);
        region.enter(Tenant::Updating);
        // A GPU alone adds each micro-batch to the sums as it goes, from zero as well: the same sums.
        let gradients = match ranks.world() {
            1 => Accumulated::InPlace(Gradients::by_microbatch_in(policy, &memory)?),
            _ => Accumulated::ByOwner(GradientSums::new(policy, &memory, ranks)?),
        };
        let packing = plan.packing(policy.config());
        let tokens = packing.budget_tokens;
        let rows = BatchRows { tokens, scored: tokens, keys: packing.budget_keys.unwrap_or(0) };
        let pass = Pass::training_in(policy, &memory, recompute, rows)?;
        let sampling = SamplingMemory { engine, kv_bytes, step_rows, drafter: None };
        Ok((Self { planned, region: Some(region), sampling, pass }, gradients))
    }

    /// The memory that phases use in turn; `None` on the CPU.
    pub fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }

    /// Samples with a model that drafts.
    pub fn draft_with(&mut self, drafter: Option<Drafter>) {
        self.sampling.drafter = drafter;
    }

    /// Begins to sample.
    pub fn sample(&mut self) -> &mut SamplingMemory {
        self.enter(Tenant::Sampling);
        &mut self.sampling
    }

    /// Begins to score responses.
    pub fn score(&mut self) -> &mut Pass {
        self.enter(Tenant::Updating);
        &mut self.pass
    }

    /// Begins to update: the gradients are zero.
    pub fn update(&mut self, gradients: &mut Accumulated) -> &mut Pass {
        self.enter(Tenant::Updating);
        if self.region.is_some() {
            gradients.clear();
        }
        &mut self.pass
    }

    fn enter(&self, tenant: Tenant) {
        if let Some(region) = &self.region {
            region.enter(tenant);
        }
    }
}
