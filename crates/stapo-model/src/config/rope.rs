//! Rotary positions: what a layer's rope is, and its keys in `config.json`, in both layouts: `rope_theta` + `rope_scaling`, and
//! `rope_parameters`.

use super::reader::ObjectReader;
use crate::error::{Error, Result};
use crate::json;
use serde_json::{Map, Value, json};
use stapo_ops::rope::{LongFactors, Scaling as RopeScaling};

/// Rotary positions. Base frequencies: `theta^(-2i / n)` for i from 0 to half of the n rotated dimensions, in the half-split
/// layout (dimension i turns with dimension i + n / 2).
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub theta: f64,
    /// How the base frequencies are stretched to longer contexts.
    pub scaling: RopeScaling,
}

/// The layers without a window, as `transformers` names them.
pub(super) const FULL: &str = "full_attention";

/// What the rotary keys of a model are read with, besides the keys themselves.
#[derive(Clone, Copy)]
pub(super) struct RopeContext {
    pub head_dim: usize,
    pub max_positions: usize,
    /// Theta where no key names it.
    pub theta: f64,
}

/// The rope of all layers, or of the layers of `kind` where the keys are given by kind, and how many dimensions of a head it
/// rotates.
pub(super) fn read(keys: &ObjectReader, kind: &str, context: RopeContext) -> Result<(Rope, usize)> {
    let theta = || Ok(keys.optional_number("rope_theta")?.unwrap_or(context.theta));
    let (scaling, parameters) = (keys.get("rope_scaling"), keys.get("rope_parameters"));
    let of_kind = parameters.and_then(|table| table.get(kind)).filter(|table| !table.is_null());
    let (name, table) = match (of_kind, scaling, parameters) {
        (Some(table), ..) | (None, None, Some(table)) => ("rope_parameters", table),
        (None, Some(table), _) => ("rope_scaling", table),
        (None, None, None) => {
            let rope = Rope { theta: theta()?, scaling: RopeScaling::None };
            return Ok((rope, rotary_dim(keys, keys, context.head_dim)?));
        }
    };
    let location = format!("{}: {name}", keys.location);
    let object = |table: &Value| match table {
        Value::Object(table) => Ok(table.clone()),
        other => {
            let problem = format!("is {}, expected an object", json::kind(other));
            Err(Error::malformed(&location, problem))
        }
    };
    let mut table = object(table)?;
    // As in transformers, the older key beside tables by kind changes the rope of full layers alone.
    if let (Some(_), Some(scaling), FULL) = (of_kind, scaling, kind) {
        table.extend(object(scaling)?);
    }
    let table = &table;
    let rope = ObjectReader { location: keys.location, prefix: name, keys: table };
    let theta = match rope.optional_number("rope_theta")? {
        Some(theta) => theta,
        None => theta()?,
    };
    let original = "original_max_position_embeddings";
    let given = keys.optional_whole(original)?.or(rope.optional_whole(original)?);
    let original_positions = given.unwrap_or(context.max_positions);
    let scaling = match rope.text("rope_type")?.or(rope.text("type")?).unwrap_or("default") {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: rope.number("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: rope.number("factor")?,
            low_freq_factor: rope.number("low_freq_factor")?,
            high_freq_factor: rope.number("high_freq_factor")?,
            original_positions,
        },
        "yarn" if rope.get("short_factor").is_none() => {
            yarn(&rope, context.max_positions, original_positions)?
        }
        // In older files of Phi, "su" and "yarn" are names of LongRoPE too.
        "longrope" | "su" | "yarn" => {
            longrope(&rope, context.max_positions, given.map_or_else(|| rope.whole(original), Ok)?)?
        }
        other => {
            let problem = format!("rope type {other:?} is not supported");
            let hint = "supported: default, linear, llama3, yarn, longrope";
            return Err(Error::unsupported(location, problem, hint));
        }
    };
    Ok((Rope { theta, scaling }, rotary_dim(&rope, keys, context.head_dim)?))
}

/// Dimensions of a head that are rotated, by `partial_rotary_factor` of the rotary keys or of the model.
fn rotary_dim(rope: &ObjectReader, keys: &ObjectReader, head_dim: usize) -> Result<usize> {
    let inner = rope.optional_number("partial_rotary_factor")?;
    let factor = inner.or(keys.optional_number("partial_rotary_factor")?).unwrap_or(1.0);
    if !(factor > 0.0 && factor <= 1.0) {
        let location = rope.path("partial_rotary_factor");
        return Err(Error::malformed(location, format!("is {factor}, expected above 0 and at most 1")));
    }
    Ok((head_dim as f64 * factor) as usize)
}

/// `YaRN` with its attention factor: as given, or from the two `mscale` keys, or 0.1 ln(factor) + 1.
fn yarn(rope: &ObjectReader, max_positions: usize, original_positions: usize) -> Result<RopeScaling> {
    let factor =
        rope.optional_number("factor")?.unwrap_or(max_positions as f64 / original_positions.max(1) as f64);
    let magnitude = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let nonzero = |key| rope.optional_number(key).map(|value| value.filter(|&value| value != 0.0));
    let attention_factor =
        match (rope.optional_number("attention_factor")?, nonzero("mscale")?, nonzero("mscale_all_dim")?) {
            (Some(given), ..) => given,
            (None, Some(mscale), Some(all_dim)) => magnitude(mscale) / magnitude(all_dim),
            (None, ..) => magnitude(1.0),
        };
    Ok(RopeScaling::Yarn {
        factor,
        original_positions,
        beta_fast: nonzero("beta_fast")?.unwrap_or(32.0),
        beta_slow: nonzero("beta_slow")?.unwrap_or(1.0),
        attention_factor,
        truncate: rope.flag("truncate")?.unwrap_or(true),
    })
}

/// `LongRoPE` with the factors for short sequences; [`super::ModelConfig::fit_longest`] chooses those for long ones.
fn longrope(rope: &ObjectReader, max_positions: usize, original_positions: usize) -> Result<RopeScaling> {
    let original = original_positions.max(2) as f64;
    let factor = rope.optional_number("factor")?.unwrap_or(max_positions as f64 / original);
    let worked_out = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
    Ok(RopeScaling::Long {
        short: rope.numbers("short_factor")?.into(),
        long: rope.numbers("long_factor")?.into(),
        used: LongFactors::Short,
        original_positions,
        attention_factor: rope.optional_number("attention_factor")?.unwrap_or(worked_out),
    })
}

impl Rope {
    /// `rope_scaling` as `transformers` spells it.
    pub(super) fn scaling_keys(&self) -> Map<String, Value> {
        let value = match &self.scaling {
            RopeScaling::None => json!({"rope_type": "default"}),
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_positions,
            }),
            RopeScaling::Yarn {
                factor,
                original_positions,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original_positions,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "attention_factor": attention_factor,
                "truncate": truncate,
            }),
            RopeScaling::Long { short, long, original_positions, attention_factor, .. } => json!({
                "rope_type": "longrope",
                "short_factor": short[..],
                "long_factor": long[..],
                "original_max_position_embeddings": original_positions,
                "attention_factor": attention_factor,
            }),
        };
        let Value::Object(keys) = value else { unreachable!("json! was given an object") };
        keys
    }

    pub(super) fn validate(&self, location: &str, rotary_dim: usize) -> Result<()> {
        let positive = |name: &str, value: f64| {
            if value.is_finite() && value > 0.0 {
                return Ok(());
            }
            Err(Error::malformed(location, format!("rope {name} is {value}, expected above 0")))
        };
        positive("theta", self.theta)?;
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("factor", *factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                positive("factor", *factor)?;
                positive("low_freq_factor", *low_freq_factor)?;
                positive("original positions", *original_positions as f64)?;
                positive("high_freq_factor - low_freq_factor", high_freq_factor - low_freq_factor)
            }
            RopeScaling::Yarn {
                factor, original_positions, beta_fast, beta_slow, attention_factor, ..
            } => {
                positive("theta - 1", self.theta - 1.0)?;
                positive("factor", *factor)?;
                positive("original positions", *original_positions as f64)?;
                positive("beta_slow", *beta_slow)?;
                positive("beta_fast - beta_slow", beta_fast - beta_slow)?;
                positive("attention factor", *attention_factor)
            }
            RopeScaling::Long { short, long, original_positions, attention_factor, .. } => {
                positive("original positions", *original_positions as f64)?;
                positive("attention factor", *attention_factor)?;
                for (name, factors) in [("short_factor", short), ("long_factor", long)] {
                    if factors.len() != rotary_dim / 2 {
                        let problem =
                            format!("rope {name} has {} entries, expected {}", factors.len(), rotary_dim / 2);
                        return Err(Error::malformed(location, problem));
                    }
                    factors.iter().try_for_each(|factor| positive(name, *factor))?;
                }
                Ok(())
            }
        }
    }
}
