//! What the low-rank adapters of a model are: which modules have one, and how its term is scaled.

use crate::config::{LayerSpec, LinearRole, ModelConfig, TensorSpec};
use serde::{Deserialize, Serialize};
use stapo_ops::lora::pitch;
use std::collections::BTreeMap;
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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
    DeltaNetQueryKeyValue,
    DeltaNetGate,
    DeltaNetBeta,
    DeltaNetDecay,
    DeltaNetOutput,
}

impl LoraTarget {
    /// All linear modules of layers with attention and of layers with DeltaNet.
    pub const ALL: [LoraTarget; 12] = [
        LoraTarget::Query,
        LoraTarget::Key,
        LoraTarget::Value,
        LoraTarget::Output,
        LoraTarget::Gate,
        LoraTarget::Up,
        LoraTarget::Down,
        LoraTarget::DeltaNetQueryKeyValue,
        LoraTarget::DeltaNetGate,
        LoraTarget::DeltaNetBeta,
        LoraTarget::DeltaNetDecay,
        LoraTarget::DeltaNetOutput,
    ];
    /// Those of layers with attention.
    const OF_ATTENTION_LAYERS: &[LoraTarget] = Self::ALL.split_at(7).0;

    pub fn name(self) -> &'static str {
        match self {
            LoraTarget::Query => "q_proj",
            LoraTarget::Key => "k_proj",
            LoraTarget::Value => "v_proj",
            LoraTarget::Output => "o_proj",
            LoraTarget::Gate => "gate_proj",
            LoraTarget::Up => "up_proj",
            LoraTarget::Down => "down_proj",
            LoraTarget::DeltaNetQueryKeyValue => "in_proj_qkv",
            LoraTarget::DeltaNetGate => "in_proj_z",
            LoraTarget::DeltaNetBeta => "in_proj_b",
            LoraTarget::DeltaNetDecay => "in_proj_a",
            LoraTarget::DeltaNetOutput => "out_proj",
        }
    }

    /// The linear layer that the module is part of; `None` in a layer with another mixer.
    fn role(self, layer: &LayerSpec) -> Option<LinearRole> {
        let has_delta_net = layer.delta_net().is_some();
        let (role, is_part) = match self {
            Self::Query | Self::Key | Self::Value => (LinearRole::QueryKeyValue, !has_delta_net),
            Self::Output => (LinearRole::AttentionOutput, !has_delta_net),
            Self::Gate | Self::Up => (LinearRole::GateUp, true),
            Self::Down => (LinearRole::Down, true),
            Self::DeltaNetQueryKeyValue | Self::DeltaNetGate | Self::DeltaNetBeta | Self::DeltaNetDecay => {
                (LinearRole::QueryKeyValue, has_delta_net)
            }
            Self::DeltaNetOutput => (LinearRole::AttentionOutput, has_delta_net),
        };
        is_part.then_some(role)
    }

    /// Targets in their order, each once. A list of all modules of layers with attention means all modules, as most models have no
    /// others.
    pub fn normalised(mut targets: Vec<Self>) -> Vec<Self> {
        targets.sort();
        targets.dedup();
        if targets == Self::OF_ATTENTION_LAYERS { Self::ALL.to_vec() } else { targets }
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

    /// The factors of every adapter of a model.
    pub fn tensors(&self, config: &ModelConfig) -> Vec<TensorSpec> {
        config.tensors().iter().filter_map(|weight| self.factors(weight)).flatten().collect()
    }

    /// Numbers in all adapters.
    pub fn n_parameters(&self, config: &ModelConfig) -> u64 {
        self.tensors(config).iter().map(|spec| spec.n_elements() as u64).sum()
    }

    /// Where `x A^T` lies on a device that joins adapters, or on one that does not, for plans of memory.
    pub fn hidden_layout(&self, config: &ModelConfig, joins: bool) -> HiddenLayout {
        let columns = |(role, n_modules)| {
            let pitch = pitch(n_modules, self.rank);
            (role, HiddenColumns { pitch, is_joined: joins, joins_gradients: joins })
        };
        let of_layer = |layer: &LayerSpec| {
            let mut n_modules = BTreeMap::<LinearRole, usize>::new();
            for role in self.targets.iter().filter_map(|target| target.role(layer)) {
                *n_modules.entry(role).or_default() += 1;
            }
            n_modules.into_iter().map(columns).collect()
        };
        HiddenLayout::new(config.layers.iter().map(of_layer).collect())
    }

    /// Numbers of factors that a GPU holds a second time, rows and columns filled up for its copy engine.
    pub fn n_padded(&self, config: &ModelConfig) -> u64 {
        let padded = |spec: &TensorSpec| {
            let (rows, columns) = (spec.shape[0].next_multiple_of(16), spec.shape[1].next_multiple_of(64));
            if [rows, columns] == spec.shape[..] { 0 } else { (rows * columns) as u64 }
        };
        self.tensors(config).iter().map(padded).sum()
    }

    /// A `[rank, inputs]` and B `[outputs, rank]` of the module whose weight `[outputs, inputs]` is given; `None` for a
    /// tensor that is no target's weight.
    pub(super) fn factors(&self, weight: &TensorSpec) -> Option<[TensorSpec; 2]> {
        let module = weight.name.strip_suffix(".weight")?;
        let [outputs, inputs] = weight.shape[..] else { return None };
        let target = LoraTarget::named(module.rsplit('.').next()?)?;
        let a = TensorSpec { name: format!("{module}{FIRST}"), shape: vec![self.rank, inputs] };
        let b = TensorSpec { name: format!("{module}{SECOND}"), shape: vec![outputs, self.rank] };
        self.targets.contains(&target).then_some([a, b])
    }
}

/// Where `x A^T` of a linear layer's adapters lies. By default the linear layer has no adapters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HiddenColumns {
    /// Its columns.
    pub pitch: usize,
    /// Whether it lies after x in the same rows, because the adapters are joined to the layer (see `stapo_ops::lora`).
    pub is_joined: bool,
    /// Whether its gradient may lie after that of the layer's outputs in the same rows.
    pub joins_gradients: bool,
}

/// Where `x A^T` of each linear layer of a model lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HiddenLayout {
    /// One map for each layer, of its linear layers with adapters.
    layers: Vec<BTreeMap<LinearRole, HiddenColumns>>,
}

impl HiddenLayout {
    pub(super) fn new(layers: Vec<BTreeMap<LinearRole, HiddenColumns>>) -> Self {
        Self { layers }
    }

    pub(super) fn columns(&self, layer: usize, role: LinearRole) -> HiddenColumns {
        self.layers[layer].get(&role).copied().unwrap_or_default()
    }

    /// The columns of the widest.
    pub(super) fn widest_pitch(&self) -> usize {
        let all = self.layers.iter().flat_map(BTreeMap::values);
        all.map(|columns| columns.pitch).max().unwrap_or(0)
    }
}

const FIRST: &str = ".lora_A.weight";
pub(super) const SECOND: &str = ".lora_B.weight";

/// The name of the weight whose adapter has this first factor; `None` for the name of another tensor. The first factor is
/// drawn at the start, the second is zero.
pub(super) fn weight_of_first_factor(name: &str) -> Option<String> {
    Some(format!("{}.weight", name.strip_suffix(FIRST)?))
}
