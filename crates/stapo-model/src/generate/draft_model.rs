//! A second, smaller model that drafts where no text does. It draws with the keys of the positions it drafts for, so it
//! and the policy choose the same token where they agree on the distribution, at every temperature.

use super::engine::{Engine, EngineSettings};
use super::memory::EngineMemory;
use super::sequence::Sequence;
use super::speculation::{MODEL_DRAFT, ModelDrafts, Speculation};
use super::{Event, Request, Ticket};
use crate::decoder::Policy;
use stapo_ops::OutOfMemory;
use std::collections::BTreeMap;

/// Rows of its steps, at most.
pub const MODEL_DRAFT_ROWS: usize = 256;

/// An engine of the drafting model, whose sequences follow those of the policy.
pub struct DraftModel<'a> {
    engine: Engine<'a>,
    /// Drafts of this step.
    drafts: BTreeMap<(Ticket, u32), Vec<u32>>,
}

impl<'a> DraftModel<'a> {
    /// A model that drafts for an engine with these settings, in `kv_bytes` for keys and values.
    pub fn new(
        policy: &'a Policy,
        memory: &'a mut EngineMemory,
        kv_bytes: usize,
        settings: EngineSettings,
    ) -> Result<Self, OutOfMemory> {
        let mut engine = Engine::new(policy, memory, drafting(settings, kv_bytes))?;
        engine.park_turns();
        Ok(Self { engine, drafts: BTreeMap::new() })
    }
}

/// The settings of an engine that drafts for one with these settings.
fn drafting(settings: EngineSettings, kv_bytes: usize) -> EngineSettings {
    let max_rows = MODEL_DRAFT_ROWS.min(settings.max_rows);
    EngineSettings { n_alternatives: 0, kv_bytes, max_rows, speculation: Speculation::Off, ..settings }
}

impl ModelDrafts for DraftModel<'_> {
    fn n_parameters(&self) -> u64 {
        self.engine.policy.config().n_parameters()
    }

    fn draft(&mut self, sequences: &[(&Sequence, &Request)]) -> Result<(), OutOfMemory> {
        self.drafts.clear();
        let longest =
            self.engine.scheduler.max_sequence_tokens().min(self.engine.policy.config().position_limit());
        for (sequence, request) in sequences {
            if sequence.tokens.len() + MODEL_DRAFT <= longest {
                self.engine.scheduler.follow(sequence, request, MODEL_DRAFT);
            }
        }
        let drafts = &mut self.drafts;
        self.engine.run(|event| {
            if let Event::Finished(turn) = event {
                let tokens = turn.tokens.iter().map(|sampled| sampled.token).collect();
                drafts.insert((turn.ticket, turn.sample), tokens);
            }
            true
        })
    }

    fn take(&mut self, ticket: Ticket, sample: u32) -> Vec<u32> {
        self.drafts.remove(&(ticket, sample)).unwrap_or_default()
    }

    fn end(&mut self, ticket: Ticket, sample: u32) {
        let scheduler = &mut self.engine.scheduler;
        if scheduler.parked_tokens(ticket, sample).is_some() {
            scheduler.release(ticket, sample);
        }
    }
}

impl<'a> Engine<'a> {
    /// Lets a model of the same vocabulary draft where no text does, in `kv_bytes` of memory for keys and values.
    pub fn draft_with(
        &mut self,
        policy: &'a Policy,
        memory: &'a mut EngineMemory,
        kv_bytes: usize,
    ) -> Result<(), OutOfMemory> {
        let [ours, its] = [self.policy, policy].map(|policy| policy.config().vocabulary);
        assert_eq!(ours, its, "draft_with: vocabularies");
        let model = DraftModel::new(policy, memory, kv_bytes, self.settings)?;
        self.speculator.draft_with(model, self.policy.config().n_parameters());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drafting_engine_has_small_steps_and_no_drafts() {
        for (max_rows, expected) in [(1024, 256), (256, 256), (16, 16)] {
            let settings =
                EngineSettings { seed: 5, n_alternatives: 3, max_rows, ..EngineSettings::default() };
            let EngineSettings { seed, n_alternatives, kv_bytes, max_rows, speculation, .. } =
                drafting(settings, 4096);
            assert_eq!((seed, n_alternatives, kv_bytes, max_rows), (5, 0, 4096, expected));
            assert_eq!(speculation, Speculation::Off);
        }
    }
}
