//! `manifest.json`, which is derived: its state hashes are in `metrics.jsonl` and the checkpoints, its accepted
//! changes in `events.jsonl`, its inputs in the checkpoints.

use super::checkpoint::Checkpoint;
use super::events::read_events;
use super::hashes::hash_bytes;
use crate::error::{Error, Result};
use serde_json::Value;
use stapo_core::record::{
    self, AcceptedChange, EventKind, Extra, FileHash, Identity, Manifest, SCHEMA, StepHash,
};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The manifest of a run that has made no step.
pub fn fresh(config_text: &str, plan_text: &str, identity: &Identity) -> Manifest {
    Manifest {
        schema: SCHEMA,
        inputs: inputs(config_text, plan_text, identity),
        steps: Vec::new(),
        program: identity.program.clone(),
        device: identity.device.clone(),
        accepted: Vec::new(),
        files: None,
        extra: Extra::new(),
    }
}

/// The hashes of config and plan, followed by those of the identity.
pub fn inputs(config_text: &str, plan_text: &str, identity: &Identity) -> Vec<FileHash> {
    let texts = [("config", config_text), ("plan", plan_text)];
    let texts = texts.map(|(name, text)| hash_bytes(name, text.as_bytes()));
    texts.into_iter().chain(identity.inputs.iter().cloned()).collect()
}

/// The manifest of a folder. One that is missing or damaged is derived from the other files.
pub fn read(folder: &Path) -> Result<Manifest> {
    match written(folder) {
        Some(manifest) => Ok(manifest),
        None => derive(folder),
    }
}

/// The manifest as written; `None` if it is missing or damaged.
pub fn written(folder: &Path) -> Option<Manifest> {
    fs::read_to_string(folder.join("manifest.json")).ok().and_then(|text| record::parse(&text).ok())
}

/// The manifest as the other files of the folder give it.
fn derive(folder: &Path) -> Result<Manifest> {
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read_to_string(&path).map_err(|e| Error::io(&path, e))
    };
    let provenance = Checkpoint::newest_weights(folder)?.0.and_then(|checkpoint| checkpoint.provenance);
    let identity = provenance.map(|provenance| provenance.identity).unwrap_or_default();
    let mut manifest = fresh(&read("config.toml").unwrap_or_default(), &read("plan.toml")?, &identity);
    manifest.steps = recorded_hashes(folder, &[], u64::MAX)?;
    manifest.accepted = accepted(folder)?;
    Ok(manifest)
}

/// The state hashes up to `last`: those of `metrics.jsonl` and of the checkpoints, and those in `known`.
pub fn recorded_hashes(folder: &Path, known: &[StepHash], last: u64) -> Result<Vec<StepHash>> {
    let mut found: BTreeMap<u64, String> =
        known.iter().map(|hash| (hash.step, hash.sha256.clone())).collect();
    for path in Checkpoint::list(folder)? {
        // A damaged checkpoint has no hash to give, and the state before the first step is no step's.
        found.extend(Checkpoint::recorded_hash(&path).filter(|(step, _)| *step > 0));
    }
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default();
    for line in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let hash = line["state_sha256"].as_str().map(str::to_owned);
        found.extend(line["step"].as_u64().zip(hash));
    }
    let hashes = found.into_iter().filter(|(step, _)| *step <= last);
    Ok(hashes.map(|(step, sha256)| StepHash { step, sha256 }).collect())
}

/// The accepted changes of a folder, from its manifest and its events: what was accepted once stays on record.
pub fn accepted(folder: &Path) -> Result<Vec<AcceptedChange>> {
    let mut accepted = written(folder).map_or(Vec::new(), |manifest| manifest.accepted);
    let events = read_events(folder)?.into_iter().filter(|event| event.event == EventKind::Accepted);
    for event in events {
        let change = event.change.map(|change| AcceptedChange { step: event.step, change });
        accepted.extend(change.filter(|change| !accepted.contains(change)));
    }
    Ok(accepted)
}
