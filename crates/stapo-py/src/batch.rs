//! A mini-batch from Python, and its effects as columns.

use crate::border::{check_signals, refused};
use crate::columns::{Column, groups, loss_mask, offsets, rewards};
use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use stapo_core::minibatch::{self, ResponseColumns, Totals, meant_key};
use stapo_core::objective::{
    Advantages, AdvantagesRef, EntropyBonus, ObjectiveError, ObjectiveSpec, TokenEffect, UpdateKey,
};
use std::ops::Range;

/// Tokens between two looks for signals.
const LOOK_TOKENS: usize = 1 << 20;

/// The columns that an objective reads, in the order of [`PythonBatch::columns`]; the first three are required.
const COLUMNS: [&str; 8] = [
    "logp",
    "behavior_logp",
    "entropy",
    "reference_logp",
    "behavior_entropy",
    "sampler_logp",
    "collision",
    "teacher_logp",
];

/// The other keys.
const OTHERS: [&str; 5] = ["offsets", "advantage", "reward", "group", "loss_mask"];

/// The columns of a mini-batch as Python gives them. Tokens that the loss mask leaves out are in no column.
pub struct PythonBatch<'py> {
    columns: [Option<Column<'py>>; 8],
    /// Where responses begin in the columns.
    offsets: Vec<usize>,
    source: Source<'py>,
    mask: Option<Mask>,
}

/// Where the advantages come from.
enum Source<'py> {
    Given(Column<'py>),
    Rewards { rewards: Vec<f64>, n_each: usize, groups: Vec<usize> },
}

/// True for a token that is in the loss, and where responses begin in this mask.
struct Mask {
    is_in_loss: Vec<bool>,
    offsets: Vec<usize>,
}

impl<'py> PythonBatch<'py> {
    /// Reads a mapping with the keys of `stapo objective`.
    pub fn read(batch: &Bound<'py, PyAny>) -> PyResult<Self> {
        let get = |key: &str| -> PyResult<Option<Bound<'py, PyAny>>> {
            match batch.get_item(key) {
                Ok(value) => Ok(Some(value).filter(|value| !value.is_none())),
                Err(error) if error.is_instance_of::<PyKeyError>(batch.py()) => Ok(None),
                Err(error) => Err(error),
            }
        };
        if !batch.hasattr("keys")? {
            let kind = batch.get_type();
            return Err(PyTypeError::new_err(format!(
                "batch: {kind}, expected a dict of columns such as logp"
            )));
        }
        check_keys(batch)?;
        let required =
            |key: &str, hint: &str| get(key)?.ok_or_else(|| refused(format!("missing key `{key}`{hint}")));
        let mut columns = [const { None }; 8];
        for (idx, (name, column)) in COLUMNS.iter().zip(&mut columns).enumerate() {
            let values = if idx < 3 { Some(required(name, "")?) } else { get(name)? };
            *column = values.map(|values| Column::read(name, &values)).transpose()?;
        }
        let n_tokens = columns[0].as_ref().map_or(Ok(0), |logp| logp.as_slice().map(<[f64]>::len))?;
        for (name, column) in COLUMNS.iter().zip(&columns) {
            if let Some(column) = column {
                check_length(name, column, n_tokens)?;
            }
        }
        let offsets = offsets(
            &required("offsets", "\nhint: numpy.cumsum of the lengths with a 0 in front")?,
            n_tokens,
        )?;
        let n_responses = offsets.len().saturating_sub(1);
        if n_responses == 0 {
            return Err(refused("offsets: no responses"));
        }
        let source = if let Some(values) = get("advantage")? {
            let given = Column::read("advantage", &values)?;
            if given.as_slice()?.len() != n_responses {
                check_length("advantage", &given, n_tokens)?;
            }
            Source::Given(given)
        } else {
            let hint = "\nhint: a batch without a reward needs an advantage";
            let (rewards, n_each) = rewards(&required("reward", hint)?, n_responses)?;
            Source::Rewards { rewards, n_each, groups: groups(&required("group", "")?, n_responses)? }
        };
        let mask = get("loss_mask")?.map(|values| loss_mask(&values, n_tokens)).transpose()?;
        let batch = Self { columns, offsets, source, mask: None };
        match mask {
            Some(is_in_loss) => batch.leave_out(is_in_loss),
            None => Ok(batch),
        }
    }

    /// Takes the tokens that a loss mask leaves out from every column.
    fn leave_out(mut self, is_in_loss: Vec<bool>) -> PyResult<Self> {
        for column in self.columns.iter_mut().flatten() {
            *column = Column::Converted(kept(column.as_slice()?, &is_in_loss));
        }
        let n_responses = self.offsets.len() - 1;
        if let Source::Given(given) = &mut self.source
            && given.as_slice()?.len() != n_responses
        {
            *given = Column::Converted(kept(given.as_slice()?, &is_in_loss));
        }
        let mut in_loss = vec![0];
        for range in ranges(&self.offsets) {
            let n_before = in_loss.last().copied().unwrap_or(0);
            in_loss.push(n_before + is_in_loss[range].iter().filter(|bit| **bit).count());
        }
        let offsets = std::mem::replace(&mut self.offsets, in_loss);
        self.mask = Some(Mask { is_in_loss, offsets });
        Ok(self)
    }

    /// The same numbers as plain slices, which other threads may read.
    pub fn table(&self) -> PyResult<Table<'_>> {
        let mut columns = [None; 8];
        for (slice, column) in columns.iter_mut().zip(&self.columns) {
            *slice = column.as_ref().map(Column::as_slice).transpose()?;
        }
        let n_responses = self.offsets.len() - 1;
        let advantages = match &self.source {
            Source::Rewards { rewards, n_each, groups } => {
                AdvantageTable::Rewards { rewards, n_each: *n_each, groups }
            }
            Source::Given(given) if given.as_slice()?.len() == n_responses => {
                AdvantageTable::PerResponse(given.as_slice()?)
            }
            Source::Given(given) => AdvantageTable::PerToken(given.as_slice()?),
        };
        let mask = self.mask.as_ref().map(|mask| (&mask.is_in_loss[..], &mask.offsets[..]));
        Ok(Table { columns, offsets: &self.offsets, advantages, mask })
    }
}

/// Unknown keys belong to the user and are ignored, except a misspelt optional key, which is refused.
fn check_keys(batch: &Bound<'_, PyAny>) -> PyResult<()> {
    for key in batch.call_method0("keys")?.try_iter()? {
        let Ok(key) = key?.extract::<String>() else { continue };
        if COLUMNS.contains(&key.as_str()) || OTHERS.contains(&key.as_str()) {
            continue;
        }
        if let Some(meant) = meant_key(&key) {
            return Err(refused(format!("unknown key `{key}`\nhint: did you mean `{meant}`?")));
        }
    }
    Ok(())
}

fn check_length(name: &str, column: &Column, n_tokens: usize) -> PyResult<()> {
    let n = column.as_slice()?.len();
    if n == n_tokens { Ok(()) } else { Err(refused(format!("{name} has {n} entries, logp has {n_tokens}"))) }
}

fn kept(values: &[f64], is_in_loss: &[bool]) -> Vec<f64> {
    values.iter().zip(is_in_loss).filter(|(_, bit)| **bit).map(|(value, _)| *value).collect()
}

fn ranges(offsets: &[usize]) -> impl Iterator<Item = Range<usize>> {
    offsets.windows(2).map(|pair| pair[0]..pair[1])
}

/// A mini-batch as plain slices.
pub struct Table<'a> {
    columns: [Option<&'a [f64]>; 8],
    offsets: &'a [usize],
    advantages: AdvantageTable<'a>,
    /// Which tokens are in the loss, and where responses begin among all tokens.
    mask: Option<(&'a [bool], &'a [usize])>,
}

#[derive(Clone, Copy)]
enum AdvantageTable<'a> {
    PerResponse(&'a [f64]),
    PerToken(&'a [f64]),
    Rewards { rewards: &'a [f64], n_each: usize, groups: &'a [usize] },
}

impl<'a> Table<'a> {
    fn responses(&self) -> impl Iterator<Item = ResponseColumns<'a>> {
        let [
            logp,
            behavior_logp,
            entropy,
            reference_logp,
            behavior_entropy,
            sampler_logp,
            collision,
            teacher_logp,
        ] = self.columns;
        let required = [logp, behavior_logp, entropy].map(Option::unwrap_or_default);
        ranges(self.offsets).map(move |range| {
            let part = |column: Option<&'a [f64]>| column.map(|column| &column[range.clone()]);
            ResponseColumns {
                logp: &required[0][range.clone()],
                behavior_logp: &required[1][range.clone()],
                entropy: &required[2][range.clone()],
                reference_logp: part(reference_logp),
                behavior_entropy: part(behavior_entropy),
                sampler_logp: part(sampler_logp),
                collision: part(collision),
                teacher_logp: part(teacher_logp),
            }
        })
    }

    /// The advantages that follow from rewards; none if they are given.
    fn rewarded(&self, spec: &ObjectiveSpec, weights: &[f64]) -> Result<Vec<Advantages>, ObjectiveError> {
        let AdvantageTable::Rewards { rewards, n_each, groups } = self.advantages else {
            return Ok(Vec::new());
        };
        let own_rewards = |idx: usize| &rewards[idx * n_each..(idx + 1) * n_each];
        let scored = self.responses().zip(groups).enumerate();
        let scored: Vec<_> =
            scored.map(|(idx, (columns, &group))| columns.scored(group, own_rewards(idx))).collect();
        let equal = vec![1.0; n_each];
        spec.advantages(&scored, if weights.is_empty() { &equal } else { weights })
    }

    /// An advantage, or one per token, for each response.
    fn advantages<'b>(&'b self, from_rewards: &'b [Advantages]) -> Vec<AdvantagesRef<'b>> {
        match self.advantages {
            AdvantageTable::PerResponse(given) => {
                given.iter().map(|&own| AdvantagesRef::Response(own)).collect()
            }
            AdvantageTable::PerToken(given) => {
                ranges(self.offsets).map(|range| AdvantagesRef::Tokens(&given[range])).collect()
            }
            AdvantageTable::Rewards { .. } => from_rewards.iter().map(Advantages::view).collect(),
        }
    }

    /// The error with the place of its token in the response as Python gave it.
    pub fn placed(&self, error: ObjectiveError) -> ObjectiveError {
        let (Some(idx), Some((is_in_loss, offsets))) = (error.response_idx(), self.mask) else {
            return error;
        };
        let is_in_loss = &is_in_loss[offsets[idx]..offsets[idx + 1]];
        error.map_token_idx(|token_idx| {
            let mut places = (0..is_in_loss.len()).filter(|&place| is_in_loss[place]);
            places.nth(token_idx).unwrap_or(token_idx)
        })
    }
}

/// Why an evaluation ended early.
pub enum Stopped {
    Refused(ObjectiveError),
    Signal(PyErr),
}

impl From<ObjectiveError> for Stopped {
    fn from(error: ObjectiveError) -> Self {
        Stopped::Refused(error)
    }
}

/// The effects of all tokens, also of those that are not in the loss.
#[derive(Default)]
pub struct EffectColumns {
    pub kept: Vec<bool>,
    pub silenced_by: Vec<i8>,
    pub is_candidate: Vec<bool>,
    pub clipped: Vec<bool>,
    pub ratio: Vec<f64>,
    pub d_logp: Vec<f64>,
    pub d_entropy: Option<Vec<f64>>,
    pub advantage: Vec<f64>,
}

/// The effects and totals of the mini-batch, as `stapo objective` computes them.
pub fn evaluate(
    spec: &ObjectiveSpec,
    table: &Table,
    reward_weights: &[f64],
    update: UpdateKey,
) -> Result<(EffectColumns, Totals), Stopped> {
    let from_rewards = table.rewarded(spec, reward_weights)?;
    let responses: Vec<_> = table.responses().zip(table.advantages(&from_rewards)).collect();
    let has_entropy_bonus = spec.entropy_bonus != EntropyBonus::None;
    let mut columns = EffectColumns::with_capacity(table.n_tokens(), has_entropy_bonus);
    let is_per_token = responses.iter().any(|(_, own)| matches!(own, AdvantagesRef::Tokens(_)));
    let mut n_since_look = 0;
    let take = |idx: usize, effects: &[TokenEffect]| {
        columns.add(effects, table.mask_of(idx));
        match responses[idx].1 {
            AdvantagesRef::Response(own) if !is_per_token => columns.advantage.push(own),
            own => spread(
                &mut columns.advantage,
                (0..effects.len()).map(|t| own.at(t)),
                f64::NAN,
                table.mask_of(idx),
            ),
        }
        n_since_look += effects.len();
        if n_since_look >= LOOK_TOKENS {
            n_since_look = 0;
            check_signals().map_err(Stopped::Signal)?;
        }
        Ok::<(), Stopped>(())
    };
    let (tally, totals) = minibatch::evaluate(spec, &responses, update, take)?;
    columns.d_logp.iter_mut().for_each(|d| *d *= tally.scale);
    columns.d_entropy.iter_mut().flatten().for_each(|d| *d *= tally.scale);
    Ok((columns, totals))
}

impl Table<'_> {
    /// Tokens in and out of the loss.
    fn n_tokens(&self) -> usize {
        self.mask.map_or(self.offsets.last().copied().unwrap_or(0), |(is_in_loss, _)| is_in_loss.len())
    }

    fn mask_of(&self, idx: usize) -> Option<&[bool]> {
        self.mask.map(|(is_in_loss, offsets)| &is_in_loss[offsets[idx]..offsets[idx + 1]])
    }
}

impl EffectColumns {
    fn with_capacity(n_tokens: usize, has_entropy_bonus: bool) -> Self {
        Self {
            kept: Vec::with_capacity(n_tokens),
            silenced_by: Vec::with_capacity(n_tokens),
            is_candidate: Vec::with_capacity(n_tokens),
            clipped: Vec::with_capacity(n_tokens),
            ratio: Vec::with_capacity(n_tokens),
            d_logp: Vec::with_capacity(n_tokens),
            d_entropy: has_entropy_bonus.then(|| Vec::with_capacity(n_tokens)),
            advantage: Vec::new(),
        }
    }

    /// Adds the tokens of a response; a token that the mask leaves out is not kept and has no ratio.
    fn add(&mut self, effects: &[TokenEffect], mask: Option<&[bool]>) {
        let effects = || effects.iter();
        spread(&mut self.kept, effects().map(|e| e.kept), false, mask);
        spread(
            &mut self.silenced_by,
            effects().map(|e| e.silenced_by.map_or(-1, |kind| kind as i8)),
            -1,
            mask,
        );
        spread(&mut self.is_candidate, effects().map(|e| e.is_candidate), false, mask);
        spread(&mut self.clipped, effects().map(|e| e.clipped), false, mask);
        spread(&mut self.ratio, effects().map(|e| e.ratio), f64::NAN, mask);
        spread(&mut self.d_logp, effects().map(|e| e.d_logp), 0.0, mask);
        if let Some(d_entropy) = &mut self.d_entropy {
            spread(d_entropy, effects().map(|e| e.d_entropy), 0.0, mask);
        }
    }
}

/// Adds the values of the tokens in the loss, and `absent` for the others.
fn spread<T: Copy>(
    column: &mut Vec<T>,
    mut values: impl Iterator<Item = T>,
    absent: T,
    mask: Option<&[bool]>,
) {
    match mask {
        None => column.extend(values),
        Some(mask) => column.extend(
            mask.iter().map(|&in_loss| if in_loss { values.next().unwrap_or(absent) } else { absent }),
        ),
    }
}
