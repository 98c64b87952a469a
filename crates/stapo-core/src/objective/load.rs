//! Reads objectives from preset names, TOML and `key=value` overrides.

use super::{Mask, MaskKind, ObjectiveSpec, preset, presets};
use crate::settings::{self, Override, SettingsError, hint};
use schemars::{Schema, json_schema};
use thiserror::Error;
use toml::{Table, Value};

/// Why a spec was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpecError {
    #[error("objective: unknown preset `{name}`{}", hint(suggestion))]
    UnknownPreset { name: String, suggestion: String },
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("objective.{key}: {problem}{}", hint(remedy))]
    Refused { key: String, problem: String, remedy: String },
    #[error("preference.{key}: {problem}{}", hint(remedy))]
    RefusedPreference { key: String, problem: String, remedy: String },
}

/// Adds the key `preset` to the schema of an objective, in which a preset gives every axis.
pub(super) fn add_preset(schema: &mut Schema) {
    let names = presets().into_iter().map(|preset| preset.name);
    let names: Vec<String> = names.flat_map(|name| [name.to_string(), format!("{name}+spurious")]).collect();
    let preset = json_schema!({
        "description": "The preset whose values the other keys override; NAME+spurious adds S2T to a preset without it.",
        "enum": names,
    });
    schema.remove("required");
    if let Some(properties) = schema.get_mut("properties").and_then(|found| found.as_object_mut()) {
        properties.insert("preset".to_string(), preset.into());
    }
}

impl ObjectiveSpec {
    /// The preset of that name; `NAME+spurious` is the preset with S2T added.
    pub fn from_preset(name: &str) -> Result<Self, SpecError> {
        let (base, adds_s2t) = match name.strip_suffix("+spurious") {
            Some(base) => (base, true),
            None => (name, false),
        };
        let Some(found) = preset(base) else {
            let known: Vec<&str> = presets().iter().map(|preset| preset.name).collect();
            let suggestion = settings::suggest(base, &known);
            return Err(SpecError::UnknownPreset { name: name.to_string(), suggestion });
        };
        let mut spec = found.objective;
        if adds_s2t {
            if spec.masks.iter().any(|mask| mask.kind() == MaskKind::Spurious) {
                return Err(SpecError::Refused {
                    key: "preset".to_string(),
                    problem: format!("{name} would silence twice: {base} has S2T already"),
                    remedy: format!("take {base}, and change its mask with masks.0.tau_p=.."),
                });
            }
            spec.masks.push(Mask::spurious());
        }
        Ok(spec)
    }

    /// A spec from TOML. In a file with an `[objective]` table that table is read, so the plan of a run is a valid
    /// input.
    pub fn from_toml(text: &str) -> Result<Self, SpecError> {
        let mut table = settings::parse(text)?;
        if let Some(Value::Table(inner)) = table.remove("objective") {
            table = inner;
        }
        Self::from_table(table)
    }

    /// A spec from a table of axes. With `preset = "NAME"` the axes override those of the preset.
    pub fn from_table(table: Table) -> Result<Self, SpecError> {
        Self::read(Self::without_preset(table)?)
    }

    /// A table of axes with the values of the preset that it names instead of the name.
    pub fn without_preset(mut table: Table) -> Result<Table, SpecError> {
        let base = match table.remove("preset") {
            Some(Value::String(name)) => settings::to_table(&Self::from_preset(&name)?),
            Some(other) => {
                return Err(
                    settings::wrong_type("objective.preset", &other, "a preset name in quotes").into()
                );
            }
            None => Table::new(),
        };
        Ok(settings::overlay(base, table))
    }

    /// Applies `key.path=value` overrides; see [`settings::set_all`].
    pub fn with_overrides<'a>(
        &self,
        overrides: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, SpecError> {
        let overrides = overrides.into_iter().map(Override::parse).collect::<Result<Vec<_>, _>>()?;
        let mut table = settings::to_table(self);
        settings::set_all(&mut table, overrides)?;
        Self::read(table)
    }

    /// The whole spec as TOML.
    pub fn to_toml(&self) -> String {
        settings::to_table(self).to_string()
    }

    fn read(table: Table) -> Result<Self, SpecError> {
        let spec: Self = settings::read("objective", table)?;
        spec.check()?;
        Ok(spec)
    }
}
