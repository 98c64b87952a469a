//! `[model.lora]`: adapters that are trained instead of the model's weights.

use super::PlanError;
use super::refusal::{positive, require};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stapo_core::settings::Override;
use stapo_model::DeviceName;
use stapo_model::decoder::{LoraScale, LoraSpec, LoraTarget};
use stapo_model::peft::MAX_RANK;
use std::path::PathBuf;
use toml::{Table, Value};

/// The adapters of a run. With `adapter`, absent keys have the values of that folder; otherwise their defaults.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// The rank of the adapters; 32 by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// The numerator of the scale; twice the rank by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// The modules with an adapter: `"all-linear"`, the default, or a list such as `["q_proj", "v_proj"]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub targets: Option<Targets>,
    /// The factor on an adapter's term; `"plain"` by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<LoraScale>,
    /// A folder in PEFT's format whose adapter the run starts from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<PathBuf>,
    /// How a GPU stores the frozen weights. Results do not depend on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseStorage>,
}

/// How a GPU holds the frozen weights below adapters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BaseStorage {
    /// As products read them.
    #[default]
    Bf16,
    /// Layers in the blocks of their GGUF file, unpacked before each product.
    Quantised,
}

/// Modules of a layer, in the order of the layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "TargetNames", into = "TargetNames")]
pub struct Targets(pub Vec<LoraTarget>);

/// [`Targets`] as written.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
enum TargetNames {
    Word(String),
    List(Vec<String>),
}

const ALL: &str = "all-linear";

impl TryFrom<TargetNames> for Targets {
    type Error = String;

    fn try_from(names: TargetNames) -> Result<Self, String> {
        let known = || LoraTarget::ALL.map(LoraTarget::name).join(", ");
        let list = match names {
            TargetNames::Word(word) if word == ALL => return Ok(Targets(LoraTarget::ALL.to_vec())),
            TargetNames::Word(word) => {
                return Err(format!("{word:?}, expected {ALL:?} or a list of modules"));
            }
            TargetNames::List(list) => list,
        };
        let named = |name: &String| {
            let unknown = || format!("{name:?} is no module of a layer, expected some of {}", known());
            LoraTarget::named(name).ok_or_else(unknown)
        };
        let targets = LoraTarget::normalised(list.iter().map(named).collect::<Result<Vec<_>, _>>()?);
        if targets.is_empty() {
            return Err(format!("an empty list, expected some of {}", known()));
        }
        Ok(Targets(targets))
    }
}

impl From<Targets> for TargetNames {
    fn from(targets: Targets) -> Self {
        if targets.0 == LoraTarget::ALL {
            return TargetNames::Word(ALL.to_string());
        }
        TargetNames::List(targets.0.into_iter().map(|target| target.name().to_string()).collect())
    }
}

impl LoraConfig {
    /// The key to which [`lift`] moves the table.
    pub const KEY: &str = "model.lora";

    /// Checks what can be checked without files.
    pub fn check(&self, device: DeviceName) -> Result<(), PlanError> {
        if self.base_storage() == BaseStorage::Quantised && device == DeviceName::Cpu {
            let problem =
                "quantised is for a GPU, and the device is the CPU, which computes in f32".to_string();
            let remedy = "leave it out, or set device to cuda";
            return Err(PlanError::Refused { key: "model.lora.base", problem, remedy });
        }
        if let Some(rank) = self.rank {
            let is_good = (1..=MAX_RANK).contains(&rank);
            require(is_good, "model.lora.rank", rank, &format!("expected 1 to {MAX_RANK}"), "")?;
        }
        self.alpha.map_or(Ok(()), |alpha| positive("model.lora.alpha", alpha))
    }

    pub fn base_storage(&self) -> BaseStorage {
        self.base.unwrap_or_default()
    }

    /// The adapters without a look at the folder of `adapter`: absent keys have their defaults.
    pub fn spec(&self) -> LoraSpec {
        let rank = self.rank.unwrap_or(32);
        LoraSpec {
            rank,
            alpha: self.alpha.unwrap_or(2.0 * rank as f64),
            scale: self.scale.unwrap_or_default(),
            targets: self.targets.clone().map_or(LoraTarget::ALL.to_vec(), |targets| targets.0),
        }
    }

    /// Writes out all keys.
    pub(crate) fn write_out(&mut self, spec: LoraSpec) {
        let LoraSpec { rank, alpha, scale, targets } = spec;
        (self.rank, self.alpha, self.scale) = (Some(rank), Some(alpha), Some(scale));
        self.targets = Some(Targets(targets));
    }
}

/// Moves the table `lora` of a config's model out of the model, to where [`LoraConfig`] is read: the model may then be
/// replaced, and keeps its adapters.
pub(crate) fn lift(table: &mut Table) {
    let model = table.get_mut("model").and_then(Value::as_table_mut);
    if let Some(lora) = model.and_then(|model| model.remove(INNER)) {
        table.insert(LoraConfig::KEY.to_string(), lora);
    }
}

/// An override of a key that [`lift`] moved.
pub(crate) fn renamed(mut set: Override) -> Override {
    if set.keys.starts_with(&["model".to_string(), INNER.to_string()]) {
        set.keys.splice(..2, [LoraConfig::KEY.to_string()]);
    }
    set
}

/// Undoes [`lift`].
pub(crate) fn lower(table: &mut Table) {
    let Some(lora) = table.remove(LoraConfig::KEY) else { return };
    if let Some(Value::Table(model)) = table.get_mut("model") {
        model.insert(INNER.to_string(), lora);
    }
}

const INNER: &str = "lora";
