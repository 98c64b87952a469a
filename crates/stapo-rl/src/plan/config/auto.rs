//! Settings that the program can choose by itself. No choice changes a bit of any result.

use schemars::JsonSchema;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use stapo_model::decoder::Recompute;
use stapo_model::generate::Speculation;
use std::fmt;

/// Memory for keys and values: `"auto"` or a number of MiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvMemory {
    /// What the rollouts can use of the memory that a GPU has left; 256 MiB on the CPU.
    #[default]
    Auto,
    Mib(usize),
}

/// Whether tokens are drafted and verified several at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Speculate {
    /// Where few sequences run and drafts are right often enough to pay for their rows.
    #[default]
    Auto,
    Off,
}

impl From<Speculate> for Speculation {
    fn from(speculate: Speculate) -> Self {
        match speculate {
            Speculate::Auto => Speculation::Auto,
            Speculate::Off => Speculation::Off,
        }
    }
}

const AUTO: &str = "auto";

impl Serialize for KvMemory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            KvMemory::Auto => serializer.serialize_str(AUTO),
            KvMemory::Mib(mib) => mib.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for KvMemory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Mib;
        impl Visitor<'_> for Mib {
            type Value = KvMemory;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a number of MiB, or \"auto\"")
            }

            fn visit_i64<E: de::Error>(self, mib: i64) -> Result<KvMemory, E> {
                let mib = usize::try_from(mib);
                mib.map(KvMemory::Mib).map_err(|_| E::custom("a number of MiB cannot be below 0"))
            }

            fn visit_u64<E: de::Error>(self, mib: u64) -> Result<KvMemory, E> {
                usize::try_from(mib).map(KvMemory::Mib).map_err(E::custom)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<KvMemory, E> {
                if text == AUTO {
                    return Ok(KvMemory::Auto);
                }
                Err(E::invalid_value(de::Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_any(Mib)
    }
}

impl JsonSchema for KvMemory {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "KvMemory".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "oneOf": [{ "const": AUTO }, { "type": "integer", "minimum": 0 }] })
    }
}

/// What backward computes once more instead of keeping it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeChoice {
    /// The least that fits the memory of a GPU; nothing on the CPU.
    #[default]
    Auto,
    /// Nothing: every activation is kept.
    Nothing,
    /// What attention and feed-forward take in; no product is computed twice.
    Inputs,
    /// Everything of a layer but its input.
    Layers,
}

impl RecomputeChoice {
    /// The choices that the setting leaves, the fastest first.
    pub fn candidates(self) -> &'static [Recompute] {
        match self {
            RecomputeChoice::Auto => &[Recompute::Nothing, Recompute::Inputs, Recompute::Layers],
            RecomputeChoice::Nothing => &[Recompute::Nothing],
            RecomputeChoice::Inputs => &[Recompute::Inputs],
            RecomputeChoice::Layers => &[Recompute::Layers],
        }
    }
}
