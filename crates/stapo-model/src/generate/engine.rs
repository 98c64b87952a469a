//! Runs scheduled sequences through the model.

use super::scheduler::{Capacity, Run, Scheduler, Step};
use super::sequence::Sequence;
use super::{Alternative, Event, Finish, Request, RequestError, Response, Rule, Sampled, Ticket};
use crate::decoder::Policy;
use crate::decoder::alternatives;
use crate::decoder::forward::{Workspace, forward};
use crate::decoder::layer::{Rows, heads};
use crate::decoder::plan::{Keep, Plan};
use stapo_ops::attention::paged::{self, Cache, CacheDims};
use stapo_ops::rng::Key;
use stapo_ops::{OutOfMemory, lm_head, sampling};

/// How responses are drawn, and in how much memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    pub seed: u64,
    pub rule: Rule,
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
            rule: Rule::Draw { temperature: 1.0, filter: sampling::Filter::NONE },
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
    key: Key,
    scheduler: Scheduler,
    /// One for each layer.
    caches: Vec<Cache<f32>>,
    work: Workspace<f32>,
    n_submitted: u64,
}

impl<'p> Engine<'p> {
    pub fn new(policy: &'p Policy, mut settings: Settings) -> Result<Self, OutOfMemory> {
        let (device, config) = (policy.device(), policy.config());
        settings.n_alternatives = settings.n_alternatives.min(config.vocabulary);
        let block = CacheDims {
            blocks: 1,
            block_size: CacheDims::best_block_size(device),
            kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
        };
        let block_bytes = (block.keys_len() + block.values_len()) * device.compute_bytes() * config.n_layers;
        let dims = CacheDims { blocks: settings.kv_bytes / block_bytes, ..block };
        let caches = (0..config.n_layers).map(|_| Cache::zeros(device, dims)).collect::<Result<_, _>>()?;
        let capacity = Capacity {
            n_blocks: dims.blocks,
            block_tokens: dims.block_size,
            max_rows: settings.max_rows,
            max_sequences: settings.max_sequences,
        };
        let mut work = Workspace::new(device, config)?;
        let largest = Plan::new(config, settings.max_rows, settings.max_rows, Keep::Nothing);
        work.reserve(device, &largest, 0)?;
        Ok(Self {
            policy,
            settings,
            key: Key::new(settings.seed),
            scheduler: Scheduler::new(capacity),
            caches,
            work,
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

    /// One forward pass: every running sequence gets a token, or a further piece of its prompt into the cache.
    pub fn step(&mut self, mut on_event: impl FnMut(Event<'_>)) -> Result<(), OutOfMemory> {
        let step = self.scheduler.plan();
        for (from, to) in &step.copies {
            for cache in &mut self.caches {
                cache.copy_block(from.0 as usize, to.0 as usize);
            }
        }
        let rows = StepRows::new(&step, self.scheduler.running(), self.caches[0].dims().block_size);
        let samples = self.sample(&rows)?;
        let mut samples = samples.into_iter();
        for run in step.runs {
            if self.scheduler.advance(run) {
                let sampled = samples.next().expect("one for each sequence that wants a token");
                let sequence = self.scheduler.running_mut(run.slot);
                on_event(Event::Token {
                    ticket: sequence.ticket,
                    sample: sequence.sample,
                    sampled: &sampled,
                });
                sequence.tokens.push(sampled.token);
                sequence.sampled.push(sampled);
            }
        }
        for (sequence, finish) in self.scheduler.retire(finish) {
            let Sequence { ticket, sample, sampled: tokens, .. } = sequence;
            on_event(Event::Finished(Response { ticket, sample, tokens, finish }));
        }
        Ok(())
    }

    /// Runs the rows through the model and draws a token for each sequence that wants one, in order.
    fn sample(&mut self, step: &StepRows) -> Result<Vec<Sampled>, OutOfMemory> {
        let (policy, device, config) = (self.policy, self.policy.device(), self.policy.config());
        let (n_rows, n_sampled) = (step.tokens.len(), step.sampled_rows.len());
        let plan = Plan::new(config, n_rows, n_sampled, Keep::Nothing);
        self.work.reserve(device, &plan, step.n_positions)?;
        let (tokens, positions) = (device.upload(&step.tokens)?, device.upload(&step.positions)?);
        let (slots, offsets) = (device.upload(&step.slots)?, device.upload(&step.offsets)?);
        let (contexts, tables) = (device.upload(&step.contexts)?, device.upload(&step.tables)?);
        let sampled_rows = device.upload(&step.sampled_rows)?;
        let heads = heads(config);
        let dims = paged::Dims {
            tokens: n_rows,
            sequences: step.contexts.len(),
            heads,
            table_width: step.table_width,
        };
        let sequences =
            paged::Sequences { offsets: offsets.view(), contexts: contexts.view(), tables: tables.view() };
        let rows = Rows { n_tokens: n_rows, positions: positions.view(), table: &self.work.table };
        let (arena, caches) = (&mut self.work.arena, &mut self.caches);
        forward(policy, &plan, arena, &rows, tokens.view(), sampled_rows.view(), |layer, qkv, out, _| {
            let cache = &mut caches[layer];
            if dims.tokens == dims.sequences {
                paged::decode(device, dims, qkv, slots.view(), cache, sequences, out);
            } else {
                paged::store(device, n_rows, heads, qkv, slots.view(), cache);
                paged::forward(device, dims, qkv, cache, sequences, out);
            }
        });
        self.draw(&plan, step)
    }

    fn draw(&self, plan: &Plan, step: &StepRows) -> Result<Vec<Sampled>, OutOfMemory> {
        let (device, n_drawn, n) = (self.policy.device(), plan.n_scored, self.settings.n_alternatives);
        let place = |&(ticket, sample, position): &(Ticket, u32, u32)| {
            self.key.uniform(self.scheduler.request(ticket).problem, sample, position)
        };
        let uniforms = device.upload(&step.sampled_places.iter().map(place).collect::<Vec<f64>>())?;
        let (mut ids, mut logp, mut entropy) =
            (device.zeros::<u32>(n_drawn)?, device.zeros::<f32>(n_drawn)?, device.zeros::<f32>(n_drawn)?);
        let (mut best_ids, mut best_logp) = (device.zeros(n_drawn * n)?, device.zeros(n_drawn * n)?);
        let best = lm_head::Alternatives { n, ids: best_ids.view_mut(), logp: best_logp.view_mut() };
        sampling::forward(
            device,
            n_drawn,
            self.settings.rule,
            self.work.arena.compute.range(plan.head.norm.clone()),
            self.policy.matrix(self.policy.layout.head),
            uniforms.view(),
            sampling::Drawn { ids: ids.view_mut(), logp: logp.view_mut(), entropy: entropy.view_mut() },
            (n > 0).then_some(best),
        );
        let mut best = alternatives(n, &best_ids, &best_logp).into_iter();
        let numbers = ids.view().to_vec().into_iter().zip(logp.view().to_vec()).zip(entropy.view().to_vec());
        Ok(numbers
            .map(|((token, logp), entropy)| {
                let alternatives = best.next().unwrap_or_default().into_iter();
                let alternatives = alternatives.map(|(token, logp)| Alternative { token, logp }).collect();
                Sampled { token, logp, entropy, alternatives }
            })
            .collect())
    }

    /// How often a sequence had to give its memory back and start over.
    pub fn n_preemptions(&self) -> u64 {
        self.scheduler.n_preemptions()
    }
}

/// A step's rows as the ops take them, sequence after sequence.
#[derive(Debug, Default)]
struct StepRows {
    /// `[T]` each: token, position, and place in the cache.
    tokens: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    /// `[S + 1]`, `[S]`, `[S, table_width]`: see `paged::Sequences`.
    offsets: Vec<u32>,
    contexts: Vec<u32>,
    tables: Vec<u32>,
    table_width: usize,
    /// One more than the largest position.
    n_positions: usize,
    /// The rows that predict a token to sample, and the place it will take: its request, sample, and position in the
    /// response.
    sampled_rows: Vec<u32>,
    sampled_places: Vec<(Ticket, u32, u32)>,
}

impl StepRows {
    fn new(step: &Step, running: &[Sequence], block_tokens: usize) -> Self {
        let blocks_of = |run: &Run| running[run.slot].blocks.len();
        let table_width = step.runs.iter().map(blocks_of).max().unwrap_or(0);
        let mut rows = Self { offsets: vec![0], table_width, ..Self::default() };
        for run in &step.runs {
            rows.push(&running[run.slot], run.n_rows, block_tokens);
        }
        rows
    }

    fn push(&mut self, sequence: &Sequence, n_rows: usize, block_tokens: usize) {
        let context = sequence.n_cached + n_rows;
        for position in sequence.n_cached..context {
            let block = sequence.blocks[position / block_tokens].0 as usize;
            self.slots.push((block * block_tokens + position % block_tokens) as u32);
            self.positions.push(position as u32);
        }
        self.tokens.extend_from_slice(&sequence.tokens[sequence.n_cached..context]);
        self.offsets.push(self.tokens.len() as u32);
        self.contexts.push(context as u32);
        self.n_positions = self.n_positions.max(context);
        self.tables.extend(sequence.blocks.iter().map(|block| block.0));
        self.tables.resize(self.contexts.len() * self.table_width, 0);
        if context == sequence.tokens.len() {
            self.sampled_rows.push(self.tokens.len() as u32 - 1);
            self.sampled_places.push((sequence.ticket, sequence.sample, sequence.sampled.len() as u32));
        }
    }
}

fn finish(sequence: &Sequence, request: &Request) -> Option<Finish> {
    let last = sequence.sampled.last()?.token;
    if request.stops.contains(&last) {
        Some(Finish::Stop(last))
    } else {
        (sequence.sampled.len() >= request.max_tokens).then_some(Finish::LengthLimit)
    }
}
