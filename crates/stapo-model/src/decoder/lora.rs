//! What the low-rank adapters of a model are: which modules have one, and how its term is scaled.

use super::weights::{Adapter, Linear, Parameter, ParameterSpec, Role};
use crate::config::{ModelConfig, TensorSpec};
use serde::{Deserialize, Serialize};
use stapo_ops::Float;
use stapo_ops::lora::{Band, Module};
use std::fmt;

/// Adapters of one rank. A module with weight W `[outputs, inputs]` computes `x W^T + s (x A^T) B^T`.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSpec {
    /// Columns of B and rows of A.
    pub rank: usize,
    pub alpha: f64,
    pub scale: LoraScale,
    /// The modules that have an adapter, in every layer; without repetition, in the order of [`LoraTarget::ALL`].
    pub targets: Vec<LoraTarget>,
}

/// The factor s of an adapter's term.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoraScale {
    /// alpha / rank (Hu et al., 2021).
    #[default]
    #[serde(rename = "plain")]
    Plain,
    /// alpha / sqrt(rank) (Kalajdzievski, 2023).
    #[serde(rename = "rank-stabilised")]
    RankStabilised,
}

/// A module of a layer, by the last part of its Hugging Face name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LoraTarget {
    Query,
    Key,
    Value,
    Output,
    Gate,
    Up,
    Down,
}

impl LoraTarget {
    /// All linear modules of a layer.
    pub const ALL: [LoraTarget; 7] = [
        LoraTarget::Query,
        LoraTarget::Key,
        LoraTarget::Value,
        LoraTarget::Output,
        LoraTarget::Gate,
        LoraTarget::Up,
        LoraTarget::Down,
    ];

    pub fn name(self) -> &'static str {
        match self {
            LoraTarget::Query => "q_proj",
            LoraTarget::Key => "k_proj",
            LoraTarget::Value => "v_proj",
            LoraTarget::Output => "o_proj",
            LoraTarget::Gate => "gate_proj",
            LoraTarget::Up => "up_proj",
            LoraTarget::Down => "down_proj",
        }
    }

    /// The module of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|target| target.name() == name)
    }
}

impl fmt::Display for LoraTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl LoraSpec {
    /// The factor s.
    pub fn factor(&self) -> f64 {
        match self.scale {
            LoraScale::Plain => self.alpha / self.rank as f64,
            LoraScale::RankStabilised => self.alpha / (self.rank as f64).sqrt(),
        }
    }

    /// The factors of every adapter of a model, in the order of checkpoints.
    pub fn tensors(&self, config: &ModelConfig) -> Vec<TensorSpec> {
        let specs = super::weights::DecoderWeights::specs(config, Some(self));
        let adapters = specs.all().into_iter().filter(|spec| spec.role == Role::Adapter);
        adapters.flat_map(|spec| spec.parts.clone()).collect()
    }

    /// Numbers in all adapters.
    pub fn n_parameters(&self, config: &ModelConfig) -> u64 {
        self.tensors(config).iter().map(|spec| spec.n_elements() as u64).sum()
    }

    /// Columns of the widest `x A^T` of a linear layer: the ranks of its modules side by side.
    pub fn hidden_width(&self) -> usize {
        let has = |target: &LoraTarget| self.targets.contains(target);
        let stacks: [&[LoraTarget]; 2] = [&LoraTarget::ALL[..3], &LoraTarget::ALL[4..6]];
        let widest = stacks.map(|stack| stack.iter().filter(|target| has(target)).count());
        self.rank * widest.into_iter().max().unwrap_or(0).max(usize::from(!self.targets.is_empty()))
    }

    /// The adapters of a linear layer whose `weight` is one tensor or several stacked; `None` where no module of it is a
    /// target.
    pub(super) fn of_linear(&self, weight: &ParameterSpec) -> Option<Adapter<ParameterSpec>> {
        let outputs_of_layer = weight.parts.iter().map(|part| part.shape[0]).sum();
        let (mut a, mut b, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut start = 0;
        for part in &weight.parts {
            let [outputs, inputs] = part.shape[..] else { return None };
            let module = part.name.strip_suffix(".weight").unwrap_or(&part.name);
            let target = module.rsplit('.').next().and_then(LoraTarget::named);
            if target.is_some_and(|target| self.targets.contains(&target)) {
                a.push(TensorSpec { name: first_factor(module), shape: vec![self.rank, inputs] });
                let factor = TensorSpec { name: second_factor(module), shape: vec![outputs, self.rank] };
                b.push(ParameterSpec::stacked(vec![factor], Role::Adapter));
                places.push(Band { start, len: outputs, of: outputs_of_layer });
            }
            start += outputs;
        }
        let width = self.rank * places.len();
        let place = |(idx, outputs): (usize, Band)| Module {
            scale: self.factor(),
            hidden: Band { start: idx * self.rank, len: self.rank, of: width },
            outputs,
        };
        let modules = places.into_iter().enumerate().map(place).collect();
        (!a.is_empty()).then(|| Adapter { a: ParameterSpec::stacked(a, Role::Adapter), b, modules })
    }
}

impl<T: Float> Linear<Parameter<T>> {
    /// Adds `s B A` to `values`, where these are the weight `name` of a module with an adapter.
    pub(super) fn merge_into(&self, name: &str, values: &mut [T]) {
        let Some(Adapter { a, b, modules }) = &self.adapter else { return };
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let factor = first_factor(module);
        let mut factors = a.tensors().zip(b).zip(modules);
        let Some((((spec, a), b), module)) = factors.find(|(((spec, _), _), _)| spec.name == factor) else {
            return;
        };
        let (rank, inputs) = (spec.shape[0], spec.shape[1]);
        let (a, b) = (a.to_vec(), b.view().to_vec());
        for (row, b) in values.chunks_exact_mut(inputs).zip(b.chunks_exact(rank)) {
            for (column, value) in row.iter_mut().enumerate() {
                let product = |k: usize| b[k].to_f64() * a[k * inputs + column].to_f64();
                let sum: f64 = (0..rank).map(product).sum();
                *value = T::from_f64(value.to_f64() + module.scale * sum);
            }
        }
    }
}

/// The name of a module's first factor A.
fn first_factor(module: &str) -> String {
    format!("{module}{FIRST}")
}

fn second_factor(module: &str) -> String {
    format!("{module}.lora_B.weight")
}

const FIRST: &str = ".lora_A.weight";

/// Whether the tensor of that name is the first factor of an adapter, which is drawn at the start; the second is zero.
pub(super) fn is_first_factor(name: &str) -> bool {
    name.ends_with(FIRST)
}
