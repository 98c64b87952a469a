//! The memory an engine works in. The policy keeps it from one engine to the next: fresh memory is slow to touch, and what
//! a device has recorded holds as long as everything stays in its place.

use super::SamplingRule;
use super::rows::{Desk, Extent};
use crate::decoder::Policy;
use crate::decoder::forward::Workspace;
use crate::decoder::plan::{Keep, Plan};
use stapo_ops::attention::paged::{Cache, CacheDims};
use stapo_ops::{OutOfMemory, Recording, sampling};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

/// How large a room is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Of each layer.
    pub cache: CacheDims,
    pub max_rows: usize,
    pub max_drawn: usize,
    pub n_alternatives: usize,
}

/// Caches hold what earlier engines left there: of a sequence, only what it stored itself is ever weighed.
pub struct Room {
    size: Size,
    /// One for each layer.
    pub caches: Vec<Cache<f32>>,
    pub work: Workspace<f32>,
    pub desk: Desk,
    pub logits: sampling::Logits<f32>,
    /// Decode steps by their extent, where the device records: `None` of one that ran once.
    pub recordings: BTreeMap<Extent, Option<Recording>>,
    /// By which the recorded steps draw.
    rule: SamplingRule,
}

impl Room {
    fn new(policy: &Policy, size: Size, rule: SamplingRule) -> Result<Self, OutOfMemory> {
        let (device, config) = (policy.device(), policy.config());
        let Size { cache, max_rows, max_drawn, n_alternatives } = size;
        let mut work = Workspace::new(device, config)?;
        work.reserve(device, &Plan::new(config, max_rows, max_drawn, Keep::Nothing), 0)?;
        Ok(Self {
            size,
            caches: (0..config.n_layers).map(|_| Cache::zeros(device, cache)).collect::<Result<_, _>>()?,
            work,
            desk: Desk::new(device, max_rows, max_drawn, n_alternatives)?,
            logits: sampling::Logits::new(device, config.vocabulary, max_drawn)?,
            recordings: BTreeMap::new(),
            rule,
        })
    }
}

/// A room that goes back to its policy.
pub struct Lent<'p> {
    policy: &'p Policy,
    room: Option<Room>,
}

impl<'p> Lent<'p> {
    /// The room the policy keeps, if it is of this size, or a new one. The old one is given up first: both need not fit.
    pub fn new(policy: &'p Policy, size: Size, rule: SamplingRule) -> Result<Self, OutOfMemory> {
        let kept = policy.room.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut room = match kept.filter(|room| room.size == size) {
            Some(room) => room,
            None => Room::new(policy, size, rule)?,
        };
        if room.rule != rule {
            room.recordings.clear();
            room.rule = rule;
        }
        Ok(Self { policy, room: Some(room) })
    }
}

const HELD: &str = "held until it is dropped";

impl Deref for Lent<'_> {
    type Target = Room;

    fn deref(&self) -> &Room {
        self.room.as_ref().expect(HELD)
    }
}

impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut Room {
        self.room.as_mut().expect(HELD)
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        *self.policy.room.lock().unwrap_or_else(PoisonError::into_inner) = self.room.take();
    }
}
