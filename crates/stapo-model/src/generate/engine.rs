//! Runs scheduled sequences through the model.

use super::block::Block;
use super::room::{Lent, Room, Size};
use super::rows::{Desk, Extent, Given, Numbers, StepRows};
use super::scheduler::{Capacity, Draw, Scheduler};
use super::sequence::Sequence;
use super::{Event, Finish, Request, RequestError, Response, SamplingRule, Ticket};
use crate::config::ModelConfig;
use crate::decoder::Policy;
use crate::decoder::forward::forward;
use crate::decoder::layer::{Rows, heads};
use crate::decoder::plan::{Keep, Plan};
use stapo_ops::attention::paged::{self, CacheDims, GROUPED_ROWS};
use stapo_ops::fused::rope_paged_attention;
use stapo_ops::rng::RngKey;
use stapo_ops::{Device, OutOfMemory, Recording, lm_head, sampling};
use std::collections::HashSet;

/// How responses are drawn, and in how much memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    pub seed: u64,
    pub rule: SamplingRule,
    /// Likeliest tokens to list with each sampled one.
    pub n_alternatives: usize,
    /// For keys and values.
    pub kv_bytes: usize,
    /// Rows in one step; longer prompts are cut in chunks.
    pub max_rows: usize,
    /// Sequences that run at once.
    pub max_sequences: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            seed: 0,
            rule: SamplingRule::Draw { temperature: 1.0, filter: sampling::Filter::NONE },
            n_alternatives: 0,
            kv_bytes: 1 << 30,
            max_rows: 1024,
            max_sequences: 1024,
        }
    }
}

/// Generates from one policy, which cannot change meanwhile.
pub struct Engine<'p> {
    policy: &'p Policy,
    settings: Settings,
    key: RngKey,
    scheduler: Scheduler,
    room: Lent<'p>,
    plans_ahead: bool,
    /// A step whose tokens are not yet read.
    queued: Option<Queued>,
    n_submitted: u64,
}

/// A step on its way.
struct Queued {
    draws: Vec<Draw>,
    numbers: Numbers,
}

impl<'p> Engine<'p> {
    pub fn new(policy: &'p Policy, mut settings: Settings) -> Result<Self, OutOfMemory> {
        let (device, config) = (policy.device(), policy.config());
        settings.n_alternatives = settings.n_alternatives.min(config.vocabulary);
        let n_blocks = settings.kv_bytes / block_bytes(device, config);
        let dims = CacheDims {
            // One more than the scheduler knows of: for rows that fill a recorded step up.
            blocks: n_blocks + usize::from(device.is_async()),
            block_size: CacheDims::best_block_size(device),
            kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
        };
        let capacity = Capacity {
            n_blocks,
            block_tokens: dims.block_size,
            max_rows: settings.max_rows,
            max_sequences: settings.max_sequences,
            max_draws: settings.max_rows.min(settings.max_sequences).max(1),
        };
        let max_drawn = filled_up(capacity.max_draws);
        let max_rows = settings.max_rows.max(max_drawn);
        let size = Size { cache: dims, max_rows, max_drawn, n_alternatives: settings.n_alternatives };
        Ok(Self {
            policy,
            settings,
            key: RngKey::new(settings.seed),
            scheduler: Scheduler::new(capacity),
            room: Lent::new(policy, size, settings.rule)?,
            plans_ahead: device.is_async(),
            queued: None,
            n_submitted: 0,
        })
    }

    /// Takes a request, to be worked on by [`Engine::step`].
    pub fn submit(&mut self, mut request: Request) -> Result<Ticket, RequestError> {
        let config = self.policy.config();
        let n_prompt = request.prompt.len();
        if n_prompt == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        if request.n_samples == 0 || request.max_tokens == 0 {
            let Request { n_samples, max_tokens, .. } = request;
            return Err(RequestError::NothingAsked { n_samples, max_tokens });
        }
        if let Some(&token) = request.prompt.iter().find(|&&token| token as usize >= config.vocabulary) {
            return Err(RequestError::UnknownToken { token, vocabulary: config.vocabulary });
        }
        if n_prompt >= config.max_positions {
            return Err(RequestError::PromptTooLong { n_prompt, max_positions: config.max_positions });
        }
        request.max_tokens = request.max_tokens.min(config.max_positions - n_prompt);
        // The last token sampled is never run.
        let n_tokens = n_prompt + request.max_tokens - 1;
        let n_cache_tokens = self.scheduler.max_sequence_tokens();
        if n_tokens > n_cache_tokens {
            return Err(RequestError::CacheTooSmall { n_tokens, n_cache_tokens });
        }
        let ticket = Ticket(self.n_submitted);
        self.n_submitted += 1;
        self.scheduler.submit(ticket, request);
        Ok(ticket)
    }

    /// Works until every response is finished or `on_event` returns false.
    pub fn run(&mut self, mut on_event: impl FnMut(Event<'_>) -> bool) -> Result<(), OutOfMemory> {
        while !self.scheduler.is_idle() {
            let mut goes_on = true;
            self.step(|event| goes_on &= on_event(event))?;
            if !goes_on {
                break;
            }
        }
        Ok(())
    }

    /// Every response, ordered by ticket and sample.
    pub fn finish(&mut self) -> Result<Vec<Response>, OutOfMemory> {
        let mut responses = Vec::new();
        self.run(|event| {
            if let Event::Finished(response) = event {
                responses.push(response);
            }
            true
        })?;
        responses.sort_by_key(|response| (response.ticket, response.sample));
        Ok(responses)
    }

    /// One forward pass: every running sequence gets a token, or a further piece of its prompt into the cache. Where the
    /// engine plans ahead, what happened is told a step later.
    pub fn step(&mut self, mut on_event: impl FnMut(Event<'_>)) -> Result<(), OutOfMemory> {
        let before = self.queued.take();
        self.queued = self.queue()?;
        let now = if self.plans_ahead { None } else { self.queued.take() };
        for step in before.into_iter().chain(now) {
            self.tell(step, &mut on_event);
        }
        Ok(())
    }

    /// Whether a step is queued before the tokens of the last one are read, which changes no result. By default so where
    /// the device works alone: it never waits for the host then.
    pub fn plan_ahead(&mut self, is_on: bool) {
        self.plans_ahead = is_on;
    }

    /// Waits for a step's tokens and hands them out.
    fn tell(&mut self, step: Queued, on_event: &mut impl FnMut(Event<'_>)) {
        let mut finished = Vec::new();
        for (draw, sampled) in step.draws.into_iter().zip(step.numbers.wait(self.settings.n_alternatives)) {
            let Draw { ticket, sample, .. } = draw;
            if self.scheduler.expects(draw) {
                on_event(Event::Token { ticket, sample, sampled: &sampled });
                finished.extend(self.scheduler.receive(draw, sampled, finish));
            }
        }
        for (sequence, finish) in finished {
            let Sequence { ticket, sample, sampled: tokens, .. } = sequence;
            on_event(Event::Finished(Response { ticket, sample, tokens, finish }));
        }
    }

    /// Asks the device for a step; `None` when there is nothing to do before tokens are read.
    fn queue(&mut self) -> Result<Option<Queued>, OutOfMemory> {
        let step = self.scheduler.plan();
        self.copy_blocks(&step.copies)?;
        if step.runs.is_empty() {
            return Ok(None);
        }
        let mut rows = StepRows::new(&step, self.scheduler.running(), self.room.caches[0].dims().block_size);
        let is_recorded = self.policy.device().is_async() && rows.is_decode();
        if is_recorded {
            rows.group(self.max_members(rows.extent().rows));
            let Extent { rows: n, groups, table_width, .. } = rows.extent();
            let spare_block = self.room.caches[0].dims().blocks - 1;
            rows.pad(filled_up(n), filled_up(groups), table_width.next_power_of_two().max(8), spare_block);
        }
        let extent = rows.extent();
        self.write(&rows, extent)?;
        if is_recorded {
            self.repeat(extent);
        } else {
            self.ask(extent);
        }
        let draws = self.scheduler.advance(&step.runs);
        let numbers = self.room.desk.fetch(draws.len(), self.settings.n_alternatives);
        Ok(Some(Queued { draws, numbers }))
    }

    /// How many sequences attention should take together where it can: none where a GPU would then not be busy.
    fn max_members(&self, n_sequences: usize) -> usize {
        const BUSY: usize = 512;
        let heads = heads(self.policy.config());
        (n_sequences * heads.kv / BUSY).clamp(1, (GROUPED_ROWS / heads.group()).max(1))
    }

    /// Blocks that several sequences share until one of them writes: it gets its own first.
    fn copy_blocks(&mut self, copies: &[(Block, Block)]) -> Result<(), OutOfMemory> {
        let device = self.policy.device();
        for together in independent(copies) {
            let pairs: Vec<u32> = together.iter().flat_map(|(from, to)| [from.0, to.0]).collect();
            let pairs = device.upload(&pairs)?;
            for cache in &mut self.room.caches {
                cache.copy_blocks(device, pairs.view());
            }
        }
        Ok(())
    }

    /// Puts the step's rows where the device finds them.
    fn write(&mut self, rows: &StepRows, extent: Extent) -> Result<(), OutOfMemory> {
        let (device, config) = (self.policy.device(), self.policy.config());
        let place = |&(ticket, sample, position): &(Ticket, u32, u32)| {
            self.key.uniform(self.scheduler.request(ticket).problem, sample, position)
        };
        let uniforms: Vec<f64> = rows.places.iter().map(place).collect();
        let plan = Plan::new(config, extent.rows, extent.drawn, Keep::Nothing);
        let room = &mut *self.room;
        let moved = room.work.reserve(device, &plan, rows.n_positions)?;
        if room.desk.write(device, rows, &uniforms)? || moved {
            room.recordings.clear();
        }
        Ok(())
    }

    /// As [`Engine::ask`], for a step of an extent that will come again: the first time the ops are asked for one by one,
    /// the second time they are recorded, and from then on repeated as a whole.
    fn repeat(&mut self, extent: Extent) {
        match self.room.recordings.remove(&extent) {
            None => {
                self.ask(extent);
                self.room.recordings.insert(extent, None);
            }
            Some(recorded) => {
                let device = self.policy.device();
                let recorded = recorded.or_else(|| device.record(|| self.ask(extent)));
                recorded.iter().for_each(Recording::replay);
                self.room.recordings.insert(extent, recorded);
            }
        }
    }

    /// Asks the device to run the rows through the model and to draw a token for each sequence that wants one, in order.
    fn ask(&mut self, extent: Extent) {
        let (policy, device, config) = (self.policy, self.policy.device(), self.policy.config());
        let Extent { rows: n_rows, sequences, table_width, drawn, .. } = extent;
        let plan = Plan::new(config, n_rows, drawn, Keep::Nothing);
        let Room { caches, work, desk, .. } = &mut *self.room;
        let (given, heads) = (Given::of(&desk.given, extent), heads(config));
        sampling::look_up(device, given.tokens, desk.ids.view(), desk.tokens.range_mut(0..n_rows));
        let dims = paged::Dims { tokens: n_rows, sequences, heads, table_width };
        let rows = Rows { n_tokens: n_rows, positions: given.positions, table: &work.table };
        let (arena, tokens) = (&mut work.arena, desk.tokens.range(0..n_rows));
        forward(policy, &plan, arena, &rows, tokens, given.drawing, |index, layer, arena| {
            layer.attend_unrotated(arena, |rows, out| {
                let (cache, sequences) = (&mut caches[index], given.sequences);
                rope_paged_attention::forward(device, dims, rows, given.slots, cache, sequences, out);
            });
        });
        self.draw(&plan);
    }

    fn draw(&mut self, plan: &Plan) {
        let (n_drawn, n) = (plan.n_scored, self.settings.n_alternatives);
        let Room { work, desk, logits, .. } = &mut *self.room;
        let Desk { uniforms, ids, logp, entropy, best_ids, best_logp, .. } = desk;
        let best = lm_head::Alternatives {
            n,
            ids: best_ids.range_mut(0..n_drawn * n),
            logp: best_logp.range_mut(0..n_drawn * n),
        };
        sampling::forward(
            self.policy.device(),
            self.settings.rule,
            sampling::Inputs {
                hidden: work.arena.compute.range(plan.head.norm.clone()),
                head: self.policy.matrix(self.policy.layout.head),
                uniforms: uniforms.range(0..n_drawn),
            },
            sampling::Drawn {
                ids: ids.range_mut(0..n_drawn),
                logp: logp.range_mut(0..n_drawn),
                entropy: entropy.range_mut(0..n_drawn),
                alternatives: (n > 0).then_some(best),
            },
            logits,
        );
    }

    /// How often a sequence had to give its memory back and start over.
    pub fn n_preemptions(&self) -> u64 {
        self.scheduler.n_preemptions()
    }
}

/// Rows of a recorded step of at least `n_rows`: few sizes, and little of a step wasted.
fn filled_up(n_rows: usize) -> usize {
    n_rows.next_multiple_of((n_rows.next_power_of_two() / 16).clamp(8, 64))
}

/// Cuts copies into runs of which each pair can be done at any time: nothing is read or written that another wrote, or
/// written that another reads.
fn independent(copies: &[(Block, Block)]) -> Vec<&[(Block, Block)]> {
    let (mut runs, mut start) = (Vec::new(), 0);
    let (mut read, mut written) = (HashSet::new(), HashSet::new());
    for (at, (from, to)) in copies.iter().enumerate() {
        if written.contains(from) || written.contains(to) || read.contains(to) {
            runs.push(&copies[start..at]);
            start = at;
            read.clear();
            written.clear();
        }
        read.insert(*from);
        written.insert(*to);
    }
    if start < copies.len() {
        runs.push(&copies[start..]);
    }
    runs
}

fn finish(sequence: &Sequence, request: &Request) -> Option<Finish> {
    let last = sequence.sampled.last()?.token;
    if request.stops.contains(&last) {
        Some(Finish::Stop(last))
    } else {
        (sequence.sampled.len() >= request.max_tokens).then_some(Finish::LengthLimit)
    }
}

/// Bytes of one block in all layers' caches.
fn block_bytes(device: &Device, config: &ModelConfig) -> usize {
    let dims = CacheDims {
        blocks: 1,
        block_size: CacheDims::best_block_size(device),
        kv_heads: config.n_kv_heads,
        head_dim: config.head_dim,
    };
    (dims.keys_len() + dims.values_len()) * device.compute_bytes() * config.n_layers
}
