//! The state of a run: counters, and weights and optimizer state: written, restored, and checked to be finite, one
//! tensor at a time and in the form in which the device stores it.

use crate::error::{Error, Result};
use crate::ranks::wire::{Malformed, Packer, Unpacker};
use crate::ranks::{RankError, Transport};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use stapo_model::decoder::Policy;
use stapo_model::optimizer::{Moment, Optimizer, TensorState};
use stapo_model::read_f32;
use stapo_model::{Form, Stored, TensorSpec, ViewMut};
use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::sync::mpsc;

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
pub(super) const PARTS: [&str; 3] = ["weight", "moment1", "moment2"];

/// Ends the name of a tensor that holds the scales of an 8-bit moment.
pub(super) const SCALES: &str = "scales";

/// Tensors that are read before they are written.
const AHEAD: usize = 2;

/// Numbers that one thread reads from a file in turn.
const READ_AT_ONCE: usize = 1 << 20;

/// Small tensors are collected up to this many bytes and written together.
const WRITTEN_AT_ONCE: usize = 64 << 20;

fn part_of(moment: Moment) -> &'static str {
    match moment {
        Moment::First => PARTS[1],
        Moment::Second => PARTS[2],
    }
}

/// The tensors of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Weights,
    Moments,
}

/// The part of a rank other than the first in what rank 0 reads of the state.
pub(crate) fn send_state(policy: &Policy, optimizer: &Optimizer) -> std::result::Result<(), RankError> {
    optimizer.visit_weights(policy, |_| Ok::<(), RankError>(()))?;
    optimizer.visit_moments(policy, |_, _, _| Ok::<(), RankError>(()))
}

/// Refuses weights, and optimizer states of this rank, that are not finite numbers.
pub(crate) fn check_finite(step: u64, policy: &Policy, optimizer: &Optimizer) -> Result<()> {
    let weight = policy.first_non_finite().map(|(spec, element)| (PARTS[0], spec, element));
    let moment = || {
        let (spec, moment, element) = optimizer.first_non_finite(policy)?;
        Some((part_of(moment), spec, element))
    };
    match weight.or_else(moment) {
        Some((part, spec, element)) => {
            Err(Error::NotFinite { step, part, tensor: spec.name.clone(), element })
        }
        None => Ok(()),
    }
}

/// Writes the safetensors file of one part of the state. A tensor is written by a separate thread while the next one is read
/// from the device and from other ranks.
pub(super) fn stream(
    policy: &Policy,
    optimizer: &Optimizer,
    part: Part,
    to: &mut (dyn Write + Send),
) -> io::Result<()> {
    let head = head(policy, optimizer, part);
    let (to_write, written) = mpsc::sync_channel::<TensorState>(AHEAD);
    std::thread::scope(|scope| {
        let writing = scope.spawn(move || {
            let mut file = BufWriter::with_capacity(WRITTEN_AT_ONCE, to);
            file.write_all(&head)?;
            for state in written {
                state.slices().into_iter().try_for_each(|slice| file.write_all(slice))?;
            }
            file.flush()
        });
        // All ranks send all of their state; a thread that ended early reports its error below.
        let take = |state: TensorState| {
            let _ = to_write.send(state);
            Ok::<(), RankError>(())
        };
        let visited = match part {
            Part::Weights => optimizer.visit_weights(policy, take),
            Part::Moments => optimizer.visit_moments(policy, |_, _, state| take(state)),
        };
        drop(to_write);
        let written = writing.join();
        visited.map_err(io::Error::other)?;
        written.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// What a safetensors file begins with: the length of its header, and as JSON the name, type, shape and place of every tensor,
/// filled up with spaces to a multiple of 8 bytes.
pub(super) fn head(policy: &Policy, optimizer: &Optimizer, part: Part) -> Vec<u8> {
    let mut keys = Map::new();
    let mut end = 0;
    let mut add = |name: String, dtype: Dtype, shape: &[usize], n_bytes: usize| {
        let start = end;
        end += n_bytes;
        keys.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    };
    let mut add_tensor = |part: &str, spec: &TensorSpec, form: Form| {
        let name = format!("{part}.{}", spec.name);
        let n = spec.n_elements();
        add(name.clone(), dtype(form), &spec.shape, n * form.n_bytes());
        let n_scales = form.n_scales(n);
        if n_scales > 0 {
            add(format!("{name}.{SCALES}"), Dtype::F32, &[n_scales], 4 * n_scales);
        }
    };
    for (spec, values) in policy.trained_tensors() {
        match part {
            Part::Weights => add_tensor(PARTS[0], spec, values.form()),
            Part::Moments => {
                for moment in [Moment::First, Moment::Second] {
                    add_tensor(part_of(moment), spec, optimizer.form(moment));
                }
            }
        }
    }
    let mut text = Value::Object(keys).to_string();
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn dtype(form: Form) -> Dtype {
    match form {
        Form::F32 => Dtype::F32,
        Form::Bf16 => Dtype::BF16,
        Form::First8 => Dtype::I8,
        Form::Second8 => Dtype::U8,
    }
}

/// The form of a part of the state that a file holds as `dtype`.
pub(super) fn form(part: &str, dtype: Dtype) -> Option<Form> {
    match dtype {
        Dtype::F32 => Some(Form::F32),
        Dtype::BF16 if part == PARTS[0] => Some(Form::Bf16),
        Dtype::I8 if part == PARTS[1] => Some(Form::First8),
        Dtype::U8 if part == PARTS[2] => Some(Form::Second8),
        _ => None,
    }
}

/// Copies the weights of a state file to the trained tensors of a policy of the same shape; the error names the tensor.
pub(super) fn restore_weights(state: &[u8], policy: &mut Policy) -> std::result::Result<(), String> {
    let tensors = SafeTensors::deserialize(state).map_err(|e| e.to_string())?;
    policy.try_write(|spec, values| restore_tensor(&tensors, spec, values))
}

/// As [`restore_weights`], to the tensors that are no adapter's.
pub(super) fn restore_base(state: &[u8], policy: &mut Policy) -> std::result::Result<(), String> {
    let tensors = SafeTensors::deserialize(state).map_err(|e| e.to_string())?;
    policy.try_write_base(|spec, values| restore_tensor(&tensors, spec, values))
}

fn restore_tensor(
    tensors: &SafeTensors<'_>,
    spec: &TensorSpec,
    mut values: ViewMut<'_, f32>,
) -> std::result::Result<(), String> {
    let name = format!("{}.{}", PARTS[0], spec.name);
    match tensors.tensor(&name) {
        // Several threads read the file and copy the numbers once.
        Ok(tensor) if tensor.dtype() == Dtype::F32 && tensor.data().len() == 4 * spec.n_elements() => {
            let mut numbers = vec![0.0; spec.n_elements()];
            let pieces = numbers.par_chunks_mut(READ_AT_ONCE).zip(tensor.data().par_chunks(4 * READ_AT_ONCE));
            pieces.for_each(|(numbers, bytes)| read_f32(bytes, numbers));
            values.write(&numbers);
        }
        _ => values.write_stored(&read(tensors, PARTS[0], spec)?),
    }
    Ok(())
}

/// Copies the weights and moments of the two files that rank 0 has to a policy and an optimizer of the same shape, on every
/// rank; the error names the tensor.
pub(super) fn restore(
    files: Option<[&[u8]; 2]>,
    ranks: &dyn Transport,
    n_updates: u64,
    (policy, optimizer): (&mut Policy, &mut Optimizer),
) -> std::result::Result<(), String> {
    let opened = |idx: usize| {
        let file = files.map(|files| SafeTensors::deserialize(files[idx]));
        file.transpose().map_err(|e| e.to_string())
    };
    let [weights, moments] = [opened(0)?, opened(1)?];
    let shared = |part: &str, spec: &TensorSpec| {
        let tensors = if part == PARTS[0] { &weights } else { &moments };
        let stored = tensors.as_ref().map(|tensors| read(tensors, part, spec)).transpose()?;
        if ranks.world() == 1 {
            return stored.ok_or_else(|| "there is no state file".to_string());
        }
        let packed = stored.as_ref().map(packed).unwrap_or_default();
        let bytes = ranks.broadcast(&packed).map_err(|lost| lost.to_string())?;
        unpacked(&bytes, spec).map_err(|Malformed| format!("{}: rank 0 sent another tensor", spec.name))
    };
    policy.try_write(|spec, mut values| {
        values.write_stored(&shared(PARTS[0], spec)?);
        Ok::<(), String>(())
    })?;
    optimizer.restore(policy, n_updates, |spec, moment| shared(part_of(moment), spec))
}

/// A tensor as a message.
fn packed(stored: &Stored) -> Vec<u8> {
    let mut packer = Packer::default();
    let form = [Form::F32, Form::Bf16, Form::First8, Form::Second8].iter().position(|f| *f == stored.form);
    packer.number(form.unwrap_or_default());
    packer.bytes(&stored.bytes);
    packer.singles(&stored.scales);
    packer.0
}

fn unpacked(bytes: &[u8], spec: &TensorSpec) -> std::result::Result<Stored, Malformed> {
    let mut read = Unpacker(bytes);
    let forms = [Form::F32, Form::Bf16, Form::First8, Form::Second8];
    let form = *forms.get(read.number()?).ok_or(Malformed)?;
    let stored = Stored { form, bytes: read.bytes()?.to_vec(), scales: read.singles()? };
    let is_right = stored.len() == spec.n_elements() && stored.scales.len() == form.n_scales(stored.len());
    is_right.then_some(stored).ok_or(Malformed)
}

/// One part of the state of a tensor, in the form that the file has.
fn read(tensors: &SafeTensors<'_>, part: &str, spec: &TensorSpec) -> std::result::Result<Stored, String> {
    let name = &spec.name;
    let find = |name: &str| tensors.tensor(name).map_err(|e| format!("{name}: {e}"));
    let tensor = find(&format!("{part}.{name}"))?;
    let form = form(part, tensor.dtype())
        .ok_or_else(|| format!("{part}.{name}: {:?} is no type of such a tensor", tensor.dtype()))?;
    let check = |what: &str, found: usize, expected: usize| {
        let is_right = found == expected;
        is_right.then_some(()).ok_or_else(|| format!("{name}: {found} bytes{what}, expected {expected}"))
    };
    let n = spec.n_elements();
    check("", tensor.data().len(), n * form.n_bytes())?;
    let mut scales = Vec::new();
    if form.n_scales(n) > 0 {
        let tensor = find(&format!("{part}.{name}.{SCALES}"))?;
        check(" of scales", tensor.data().len(), 4 * form.n_scales(n))?;
        scales =
            tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    }
    Ok(Stored { form, bytes: tensor.data().to_vec(), scales })
}

/// What is wrong with a state file in which a number is not finite; `None` for a good file.
pub(super) fn first_not_finite_in(state: &[u8]) -> Option<String> {
    let tensors = match SafeTensors::deserialize(state) {
        Ok(tensors) => tensors,
        Err(error) => return Some(error.to_string()),
    };
    let tensors: Vec<_> = tensors.iter().collect();
    tensors.par_iter().find_map_first(|(name, tensor)| {
        let form = match tensor.dtype() {
            Dtype::F32 => Form::F32,
            Dtype::BF16 => Form::Bf16,
            Dtype::I8 => Form::First8,
            Dtype::U8 => Form::Second8,
            other => return Some(format!("{name}: {other:?}, expected F32, BF16, I8 or U8")),
        };
        let element = form.first_non_finite(tensor.data());
        Some(format!("{name}: element {} is not a finite number", element?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_of_another_size_or_form_from_another_rank_is_refused() {
        let spec = TensorSpec { name: "w".into(), shape: vec![3, Form::SCALED] };
        let n = spec.n_elements();
        let message = |form, n_bytes, n_scales| {
            packed(&Stored { form, bytes: vec![7; n_bytes], scales: vec![0.5; n_scales] })
        };
        for (form, n_bytes, n_scales) in
            [(Form::F32, 4 * n, 0), (Form::Bf16, 2 * n, 0), (Form::Second8, n, 3)]
        {
            let read = unpacked(&message(form, n_bytes, n_scales), &spec).unwrap();
            assert_eq!((read.form, read.bytes.len(), read.scales), (form, n_bytes, vec![0.5; n_scales]));
            let element = form.n_bytes();
            for (n_bytes, n_scales) in
                [(n_bytes - element, n_scales), (n_bytes + element, n_scales), (n_bytes, n_scales + 1)]
            {
                assert!(unpacked(&message(form, n_bytes, n_scales), &spec).is_err(), "{form:?} {n_bytes}");
            }
        }
        let mut unknown = message(Form::First8, n, 3);
        assert!(unpacked(&unknown, &spec).is_ok());
        unknown[0] = 4;
        assert!(unpacked(&unknown, &spec).is_err(), "a form that nobody has");
    }
}
