//! The state of a run: counters, and weights and optimizer state as bytes: serialised, restored, hashed, and checked to be finite.

use crate::disk::hex;
use crate::error::{Error, Result};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stapo_model::decoder::Policy;
use stapo_model::optimizer::Optimizer;
use std::collections::BTreeMap;

/// The progress of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Training steps made.
    pub step: u64,
    /// Problems drawn.
    pub position: u64,
    /// Optimizer steps made.
    pub n_updates: u64,
}

/// State of the training loop besides weights, optimizer and counters: texts by name, sealed like the counters.
pub type LoopState = BTreeMap<String, String>;

/// Prefixes of tensor names: the weights and the optimizer's two moments.
const PARTS: [&str; 3] = ["weight", "moment1", "moment2"];

/// One hash of weights, optimizer state, counters and loop state.
pub(crate) fn state_hash(
    counters: Counters,
    loop_state: &LoopState,
    policy: &Policy,
    optimizer: &Optimizer,
) -> String {
    let mut hash = Sha256::new();
    let mut add = |values: &[f32]| hash.update(bytes_of(values));
    for (_, values) in policy.tensors() {
        add(&values.to_vec());
    }
    for (_, m, v) in optimizer.state(policy) {
        add(&m.to_vec());
        add(&v.to_vec());
    }
    for count in [counters.step, counters.position, counters.n_updates] {
        hash.update(count.to_le_bytes());
    }
    for text in loop_state.iter().flat_map(|(key, value)| [key, value]) {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    hex(&hash.finalize())
}

/// Refuses weights and optimizer states that are not finite numbers.
pub(crate) fn check_finite(step: u64, policy: &Policy, optimizer: &Optimizer) -> Result<()> {
    for (spec, values) in policy.tensors() {
        refuse_not_finite(step, PARTS[0], &spec.name, &values.to_vec())?;
    }
    for (spec, m, v) in optimizer.state(policy) {
        for (part, values) in [(PARTS[1], m), (PARTS[2], v)] {
            refuse_not_finite(step, part, &spec.name, &values.to_vec())?;
        }
    }
    Ok(())
}

fn refuse_not_finite(step: u64, part: &'static str, name: &str, values: &[f32]) -> Result<()> {
    match values.iter().position(|value| !value.is_finite()) {
        Some(element) => Err(Error::NotFinite { step, part, tensor: name.to_string(), element }),
        None => Ok(()),
    }
}

/// Weights and moments as a safetensors file.
pub(super) fn serialize(policy: &Policy, optimizer: &Optimizer) -> Vec<u8> {
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (spec, values) in policy.tensors() {
        tensors.push((format!("{}.{}", PARTS[0], spec.name), spec.shape.clone(), bytes_of(&values.to_vec())));
    }
    for (spec, m, v) in optimizer.state(policy) {
        tensors.push((format!("{}.{}", PARTS[1], spec.name), spec.shape.clone(), bytes_of(&m.to_vec())));
        tensors.push((format!("{}.{}", PARTS[2], spec.name), spec.shape.clone(), bytes_of(&v.to_vec())));
    }
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view =
            TensorView::new(Dtype::F32, shape.clone(), bytes).expect("as many bytes as the shape says");
        (name, view)
    });
    safetensors::serialize(views, None).expect("f32 tensors of distinct names")
}

/// Copies the weights of a serialised state to a policy of the same shape; the error names the tensor.
pub(super) fn restore_weights(state: &[u8], policy: &mut Policy) -> std::result::Result<(), String> {
    let tensors = SafeTensors::deserialize(state).map_err(|e| e.to_string())?;
    let mut outcome = Ok(());
    policy.fill(|spec, values| {
        if outcome.is_ok() {
            outcome = read(&tensors, PARTS[0], &spec.name, values);
        }
    });
    outcome
}

/// Copies the moments of a serialised state to an optimizer of the same shape; the error names the tensor.
pub(super) fn restore_moments(
    state: &[u8],
    n_updates: u64,
    policy: &Policy,
    optimizer: &mut Optimizer,
) -> std::result::Result<(), String> {
    let tensors = SafeTensors::deserialize(state).map_err(|e| e.to_string())?;
    optimizer.restore(policy, n_updates, |spec, m, v| {
        read(&tensors, PARTS[1], &spec.name, m)?;
        read(&tensors, PARTS[2], &spec.name, v)
    })
}

fn read(
    tensors: &SafeTensors<'_>,
    part: &str,
    name: &str,
    values: &mut [f32],
) -> std::result::Result<(), String> {
    let tensor = tensors.tensor(&format!("{part}.{name}")).map_err(|e| format!("{name}: {e}"))?;
    let bytes = tensor.data();
    if bytes.len() != 4 * values.len() {
        return Err(format!("{name}: {} bytes, expected {}", bytes.len(), 4 * values.len()));
    }
    for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(4)) {
        *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    Ok(())
}

/// What is wrong with a serialised state in which a number is not finite; `None` for a good state.
pub(super) fn first_not_finite_in(state: &[u8]) -> Option<String> {
    let tensors = match SafeTensors::deserialize(state) {
        Ok(tensors) => tensors,
        Err(error) => return Some(error.to_string()),
    };
    // The exponent of an infinity or a NaN is all ones.
    let is_finite = |bytes: &[u8]| u16::from_le_bytes([bytes[2], bytes[3]]) & 0x7f80 != 0x7f80;
    tensors.iter().find_map(|(name, tensor)| {
        if tensor.dtype() != Dtype::F32 {
            return Some(format!("{name}: {:?}, expected F32", tensor.dtype()));
        }
        let element = tensor.data().chunks_exact(4).position(|bytes| !is_finite(bytes))?;
        Some(format!("{name}: element {element} is not a finite number"))
    })
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
