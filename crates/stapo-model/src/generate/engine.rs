//! Runs scheduled sequences through the model.

use super::block::independent_runs;
use super::memory::{Allocated, EngineMemory, MemorySize, divide_memory};
use super::scheduler::{Capacity, ScheduledStep, Scheduler, Windows};
use super::sequence::{Sequence, UnreadToken};
use super::speculation::{Speculation, Speculator, StepCost, StepCounts};
use super::step::{
    GroupLimits, PendingTokens, StepBuffers, StepInputs, StepRows, StepShape, put_prefill_last,
};
use super::stop_texts::finish_reason;
use super::{Completion, Event, Request, RequestError, SamplingRule, StopTexts, Ticket};
use crate::decoder::context::{Context, Paged};
use crate::decoder::layer::Rows;
use crate::decoder::stack::Stack;
use crate::decoder::workspace::Workspace;
use crate::decoder::{ArenaLayout, Policy, Purpose};
use stapo_ops::attention::paged::CacheDims;
use stapo_ops::rng::RngKey;
use stapo_ops::{OutOfMemory, Recording, lm_head, sampling};

/// How responses are drawn, and in how much memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineSettings {
    pub seed: u64,
    pub rule: SamplingRule,
    /// Likeliest tokens to list with each sampled one.
    pub n_alternatives: usize,
    /// Where above 0, the most tokens that the filter keeps: they are listed with each sampled one, whose numbers are then
    /// those of the distribution over these. On a CPU only.
    pub n_kept: usize,
    /// Bytes for keys and values.
    pub kv_bytes: usize,
    /// Rows in one step; longer prompts are cut into chunks.
    pub max_rows: usize,
    /// Sequences that run at once.
    pub max_sequences: usize,
    pub speculation: Speculation,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            seed: 0,
            rule: SamplingRule::Draw { temperature: 1.0, filter: sampling::Filter::NONE },
            n_alternatives: 0,
            n_kept: 0,
            kv_bytes: 1 << 30,
            max_rows: 1024,
            max_sequences: 1024,
            speculation: Speculation::Auto,
        }
    }
}

/// Generates from one policy, which cannot change meanwhile, in memory that the caller owns.
pub struct Engine<'a> {
    pub(super) policy: &'a Policy,
    pub(super) settings: EngineSettings,
    key: RngKey,
    pub(super) scheduler: Scheduler,
    memory: &'a mut Allocated,
    plans_ahead: bool,
    puts_prefill_last: bool,
    pub(super) speculator: Speculator<'a>,
    stop_texts: Option<StopTexts<'a>>,
    queued: Option<QueuedStep>,
    n_submitted: u64,
}

/// A step that the device was asked for and whose tokens are not yet read.
struct QueuedStep {
    drawn: Vec<UnreadToken>,
    tokens: PendingTokens,
}

impl<'a> Engine<'a> {
    pub fn new(
        policy: &'a Policy,
        memory: &'a mut EngineMemory,
        mut settings: EngineSettings,
    ) -> Result<Self, OutOfMemory> {
        let device = policy.device();
        let config = policy.config();
        settings.n_alternatives = settings.n_alternatives.min(config.vocabulary);
        settings.n_kept = settings.n_kept.min(config.vocabulary);
        let (n_blocks, n_states) = divide_memory(device, config, settings.kv_bytes, settings.max_sequences);
        // A state that rejected drafts have moved cannot be moved back, so a model with states samples without drafts.
        if n_states.is_some() {
            settings.speculation = Speculation::Off;
        }
        let block_tokens = CacheDims::best_block_size(device);
        let cost = if device.is_async() { StepCost::GPU } else { StepCost::CPU };
        let capacity = Capacity {
            n_blocks,
            n_states,
            block_tokens,
            max_rows: settings.max_rows,
            max_sequences: settings.max_sequences,
            max_draws: settings.max_rows.min(settings.max_sequences.max(cost.max_rows)).max(1),
        };
        let max_drawn = padded_rows(capacity.max_draws);
        let max_rows = settings.max_rows.max(max_drawn);
        let size = MemorySize {
            // On a device that records there is one block more than the scheduler knows of, for padding rows.
            n_blocks: n_blocks + usize::from(device.is_async()),
            block_tokens,
            n_states: n_states.map_or(0, |n| n + usize::from(device.is_async())),
            max_rows,
            max_drawn,
            n_alternatives: settings.n_alternatives,
            n_kept: settings.n_kept,
        };
        Ok(Self {
            policy,
            settings,
            key: RngKey::new(settings.seed),
            scheduler: Scheduler::new(capacity, Windows::new(config)),
            memory: memory.fit(policy, size, settings.rule)?,
            plans_ahead: device.is_async(),
            puts_prefill_last: device.is_async(),
            speculator: Speculator::new(settings.speculation, cost),
            stop_texts: None,
            queued: None,
            n_submitted: 0,
        })
    }

    /// Takes a request, to be worked on by [`Engine::step`].
    pub fn submit(&mut self, request: Request) -> Result<Ticket, RequestError> {
        self.accept(request, |_| usize::MAX)
    }

    /// As [`Engine::submit`], with the length of each sample, for benchmarks. Only the request's longest response cuts a
    /// sample short: stop tokens have no effect.
    ///
    /// # Panics
    /// Unless there is one length for each sample.
    pub fn submit_with_lengths(
        &mut self,
        mut request: Request,
        lengths: &[usize],
    ) -> Result<Ticket, RequestError> {
        assert_eq!(lengths.len(), request.n_samples as usize, "submit_with_lengths: lengths against samples");
        request.stops.clear();
        self.accept(request, |sample| lengths[sample as usize])
    }

    /// `limit` gives the longest response of each sample, besides that of the request.
    fn accept(&mut self, mut request: Request, limit: impl Fn(u32) -> usize) -> Result<Ticket, RequestError> {
        let Request { n_samples, max_tokens, .. } = request;
        if n_samples == 0 {
            return Err(RequestError::NothingAsked { n_samples, max_tokens });
        }
        request.max_tokens = self.fit(request.prompt.len(), &request.prompt, max_tokens)?;
        let ticket = Ticket(self.n_submitted);
        self.n_submitted += 1;
        let longest = request.max_tokens;
        self.scheduler.submit(ticket, request, |sample| limit(sample).min(longest));
        Ok(ticket)
    }

    /// The most tokens, up to `max_tokens`, that can be sampled after `n_before` tokens, of which the last, `given`, are new.
    fn fit(&self, n_before: usize, given: &[u32], max_tokens: usize) -> Result<usize, RequestError> {
        let config = self.policy.config();
        if given.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        if max_tokens == 0 {
            return Err(RequestError::NothingAsked { n_samples: 1, max_tokens });
        }
        if let Some(&token) = given.iter().find(|&&token| token as usize >= config.vocabulary) {
            return Err(RequestError::UnknownToken { token, vocabulary: config.vocabulary });
        }
        let max_positions = config.position_limit();
        if n_before >= max_positions {
            return Err(RequestError::PromptTooLong { n_prompt: n_before, max_positions });
        }
        let max_tokens = max_tokens.min(max_positions - n_before);
        // The last token sampled is never run.
        let n_tokens = n_before + max_tokens - 1;
        let n_cache_tokens = self.scheduler.max_sequence_tokens();
        if n_tokens > n_cache_tokens {
            return Err(RequestError::CacheTooSmall { n_tokens, n_cache_tokens });
        }
        Ok(max_tokens)
    }

    /// Keeps every finished turn, with its keys and values while memory suffices, until [`Engine::extend`] or
    /// [`Engine::release`]. A completion then is a turn.
    pub fn park_turns(&mut self) {
        self.scheduler.park_turns();
    }

    /// Continues a finished turn: the policy is given `tokens`, at least one, and samples a turn of at most `max_tokens`,
    /// on the keys and values of what came before. Draws are keyed by the position in the whole response, given tokens
    /// included.
    ///
    /// # Panics
    /// Unless the sample's turn has finished and is parked.
    pub fn extend(
        &mut self,
        (ticket, sample): (Ticket, u32),
        tokens: &[u32],
        max_tokens: usize,
    ) -> Result<(), RequestError> {
        let past = self.scheduler.parked_tokens(ticket, sample).expect("extend of a turn that is not parked");
        let max_tokens = self.fit(past.len() + tokens.len(), tokens, max_tokens)?;
        self.scheduler.extend(ticket, sample, tokens, max_tokens);
        Ok(())
    }

    /// Ends a response whose last turn is parked.
    ///
    /// # Panics
    /// Unless the sample's turn has finished and is parked.
    pub fn release(&mut self, ticket: Ticket, sample: u32) {
        self.scheduler.release(ticket, sample);
    }

    /// Whether no sequence is left to run; parked turns may be left.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Works until every response is finished or `on_event` returns false.
    pub fn run(&mut self, mut on_event: impl FnMut(Event<'_>) -> bool) -> Result<(), OutOfMemory> {
        while !self.is_idle() {
            let mut goes_on = true;
            self.step(|event| goes_on &= on_event(event))?;
            if !goes_on {
                break;
            }
        }
        Ok(())
    }

    /// Works until every response is finished and returns them, ordered by ticket and sample.
    pub fn generate(&mut self) -> Result<Vec<Completion>, OutOfMemory> {
        let mut completions = Vec::new();
        self.run(|event| {
            if let Event::Finished(completion) = event {
                completions.push(completion);
            }
            true
        })?;
        completions.sort_by_key(|completion| (completion.ticket, completion.sample));
        Ok(completions)
    }

    /// One forward pass: every running sequence gets a token, several where drafts are right, or a further chunk of its
    /// prompt into the cache. Where the engine plans ahead, the events of a step are delivered one step later.
    pub fn step(&mut self, mut on_event: impl FnMut(Event<'_>)) -> Result<(), OutOfMemory> {
        let before = self.queued.take();
        if self.speculator.drafts_next(&self.scheduler) {
            // Drafts continue tokens that were read.
            if let Some(step) = before {
                self.deliver(step, &mut on_event);
            }
            if let Some(step) = self.queue(Speculator::add_drafts)? {
                self.deliver(step, &mut on_event);
            }
            return Ok(());
        }
        self.queued = self.queue(|_, _, _| Ok(()))?;
        let current = if self.plans_ahead { None } else { self.queued.take() };
        for step in before.into_iter().chain(current) {
            self.deliver(step, &mut on_event);
            self.speculator.begin_trials(&self.scheduler);
        }
        Ok(())
    }

    /// Ends every response at these texts too.
    pub fn stop_at(&mut self, texts: StopTexts<'a>) {
        self.stop_texts = Some(texts);
    }

    /// Whether a step is queued before the tokens of the last one are read, which changes no result. The default is yes
    /// on an asynchronous device, which then never waits for the host.
    pub fn plan_ahead(&mut self, is_on: bool) {
        self.plans_ahead = is_on;
    }

    /// Whether prompts are attended to by the kernel of prefill, which changes no result. The default is yes on a GPU; without
    /// it, all rows of a step go through one kernel.
    pub fn use_prefill_kernel(&mut self, is_on: bool) {
        self.puts_prefill_last = is_on;
    }

    /// Waits for a step's tokens and hands them out.
    fn deliver(&mut self, step: QueuedStep, on_event: &mut impl FnMut(Event<'_>)) {
        let mut finished = Vec::new();
        let sampled = step.tokens.wait(self.settings.n_alternatives, self.settings.n_kept);
        let mut outcomes = Vec::with_capacity(step.drawn.len());
        for (unread, sampled) in step.drawn.into_iter().zip(sampled) {
            let UnreadToken { ticket, sample, draft, .. } = unread;
            let counts = match draft {
                None => self.scheduler.expects(unread),
                Some(draft) => self.scheduler.confirm(unread, draft),
            };
            outcomes.push((unread, counts));
            if counts {
                self.speculator.try_token(ticket, sample, sampled.token);
                on_event(Event::Token { ticket, sample, sampled: &sampled });
                let finish = |sequence: &Sequence, request: &Request| {
                    finish_reason(sequence, request, self.stop_texts.as_ref())
                };
                finished.extend(self.scheduler.receive(unread, sampled, finish));
            }
        }
        if outcomes.iter().any(|(unread, _)| unread.draft.is_some()) {
            self.settle_drafts(&outcomes);
        }
        for completion in finished {
            self.speculator.keep(&completion);
            if !self.scheduler.has_request(completion.ticket) {
                self.speculator.forget(completion.ticket);
            }
            on_event(Event::Finished(completion));
        }
    }

    /// Counts drafts that were right, and gives back what was taken for the others.
    fn settle_drafts(&mut self, outcomes: &[(UnreadToken, bool)]) {
        self.speculator.count(outcomes);
        for (unread, _) in outcomes.iter().filter(|(unread, _)| unread.draft.is_some()) {
            self.scheduler.release_unused_blocks(unread.ticket, unread.sample);
        }
    }

    /// Asks the device for a step; `None` when there is nothing to run before tokens are read. `add_drafts` may add to the
    /// step that was planned.
    fn queue(
        &mut self,
        add_drafts: impl FnOnce(
            &mut Speculator<'a>,
            &mut Scheduler,
            &mut ScheduledStep,
        ) -> Result<(), OutOfMemory>,
    ) -> Result<Option<QueuedStep>, OutOfMemory> {
        let mut step = self.scheduler.plan();
        add_drafts(&mut self.speculator, &mut self.scheduler, &mut step)?;
        self.speculator.counts.n_steps += u64::from(!step.rows.is_empty());
        self.copy_blocks_and_states(&step)?;
        if step.rows.is_empty() {
            return Ok(None);
        }
        let cache = self.memory.caches[0].dims();
        let running = self.scheduler.running();
        let n_prefill = if self.puts_prefill_last { put_prefill_last(&mut step, running) } else { 0 };
        let mut rows = StepRows::new(&step, running, cache.block_size, n_prefill);
        let is_recorded = self.policy.device().is_async() && rows.is_decode();
        if is_recorded {
            rows.group(GroupLimits::new(self.policy.config(), rows.shape().rows));
            let StepShape { rows: n, groups, table_width, .. } = rows.shape();
            let table_width = table_width.next_power_of_two().max(8);
            rows.pad(padded_rows(n), padded_rows(groups), table_width, self.memory.size.spare());
        }
        self.write_inputs(&rows)?;
        if is_recorded {
            self.replay(rows.shape());
        } else {
            self.launch_step(rows.shape());
        }
        let drawn = self.scheduler.advance(&step.rows);
        let tokens =
            self.memory.buffers.fetch(drawn.len(), (self.settings.n_alternatives, self.settings.n_kept));
        Ok(Some(QueuedStep { drawn, tokens }))
    }

    /// Copies shared blocks for the sequences that are about to write into them, and the states of prompts for those that go on after them.
    fn copy_blocks_and_states(&mut self, step: &ScheduledStep) -> Result<(), OutOfMemory> {
        let device = self.policy.device();
        for pairs in independent_runs(step.copies.iter().map(|(from, to)| [from.0, to.0])) {
            let pairs = device.upload(&pairs)?;
            self.memory.caches.iter_mut().for_each(|cache| cache.copy_blocks(device, pairs.view()));
        }
        for pairs in independent_runs(step.state_copies.iter().map(|(from, to)| [from.0, to.0])) {
            let pairs = device.upload(&pairs)?;
            self.memory
                .states
                .iter_mut()
                .flatten()
                .for_each(|states| states.copy_slots(device, pairs.view()));
        }
        Ok(())
    }

    /// Writes the step's rows to the device. Recorded steps are dropped if a buffer had to move.
    fn write_inputs(&mut self, rows: &StepRows) -> Result<(), OutOfMemory> {
        let device = self.policy.device();
        let uniform = |&(ticket, sample, position): &(Ticket, u32, u32)| {
            self.key.uniform(self.scheduler.request(ticket).problem, sample, position)
        };
        let uniforms: Vec<f64> = rows.draws.iter().map(uniform).collect();
        let layout = self.layout(rows.shape());
        let memory = &mut *self.memory;
        let arena_moved = memory.workspace.reserve(device, &layout, rows.n_positions)?;
        let inputs_moved = memory.buffers.write(device, self.policy.config(), rows, &uniforms)?;
        if arena_moved || inputs_moved {
            memory.recordings.clear();
        }
        Ok(())
    }

    fn layout(&self, shape: StepShape) -> ArenaLayout {
        let (rows, adapters) = ((shape.rows, shape.drawn), self.policy.hidden_layout());
        ArenaLayout::new(self.policy.config(), rows, Purpose::Inference, adapters)
    }

    /// As [`Engine::launch_step`], for a step of a shape that will come again: the first time the ops are launched one by
    /// one, the second time they are recorded as a CUDA graph, and from then on the graph is replayed.
    fn replay(&mut self, shape: StepShape) {
        match self.memory.recordings.remove(&shape) {
            None => {
                self.launch_step(shape);
                self.memory.recordings.insert(shape, None);
            }
            Some(recorded) => {
                let device = self.policy.device();
                let recorded = recorded.or_else(|| device.record(|| self.launch_step(shape)));
                recorded.iter().for_each(Recording::replay);
                self.memory.recordings.insert(shape, recorded);
            }
        }
    }

    /// Asks the device to run the rows through the model and to draw a token for each drawing row, in order.
    fn launch_step(&mut self, shape: StepShape) {
        let policy = self.policy;
        let device = policy.device();
        let layout = self.layout(shape);
        let Allocated { layer_sets, caches, states, workspace, buffers, .. } = &mut *self.memory;
        let Workspace { arena, tables, .. } = workspace;
        let inputs = StepInputs::new(&buffers.inputs, &buffers.partials, shape, layer_sets.windows.len());
        sampling::look_up(device, inputs.tokens, buffers.ids.view(), buffers.tokens.range_mut(0..shape.rows));
        let mut context = Context::Paged(Paged {
            n_sequences: shape.sequences,
            table_width: shape.table_width,
            layer_sets,
            sets: inputs.sets,
            caches,
            state_slots: inputs.state_slots,
            states,
        });
        let rows = Rows { n_tokens: shape.rows, positions: inputs.positions, tables };
        let stack = Stack::new(policy, &layout, rows);
        let tokens = buffers.tokens.range(0..shape.rows);
        stack.forward(arena, tokens, inputs.drawing, &mut context);
        self.draw(&layout);
    }

    fn draw(&mut self, layout: &ArenaLayout) {
        let n_drawn = layout.n_scored;
        let EngineSettings { n_alternatives: n, n_kept, .. } = self.settings;
        let Allocated { workspace, buffers, logits, .. } = &mut *self.memory;
        let StepBuffers { uniforms, ids, logp, entropy, best_ids, best_logp, kept, .. } = buffers;
        let best = lm_head::Alternatives {
            n,
            ids: best_ids.range_mut(0..n_drawn * n),
            logp: best_logp.range_mut(0..n_drawn * n),
        };
        let from = sampling::Inputs {
            rule: self.policy.config().logits,
            hidden: workspace.arena.hidden(layout),
            head: self.policy.weights.head().matrix(),
            uniforms: uniforms.range(0..n_drawn),
        };
        let drawn = sampling::Drawn {
            ids: ids.range_mut(0..n_drawn),
            logp: logp.range_mut(0..n_drawn),
            entropy: entropy.range_mut(0..n_drawn),
            alternatives: (n > 0).then_some(best),
            kept: (n_kept > 0)
                .then(|| sampling::KeptTokens { n: n_kept, ids: kept.range_mut(0..n_drawn * n_kept) }),
        };
        sampling::forward(self.policy.device(), self.settings.rule, from, drawn, logits);
    }

    /// Steps so far, and the tokens drafted and accepted in them.
    pub fn step_counts(&self) -> StepCounts {
        self.speculator.counts
    }

    /// How often a sequence had to give its blocks back and start over.
    pub fn n_preemptions(&self) -> u64 {
        self.scheduler.n_preemptions()
    }
}

/// Rows that a recorded step of `n_rows` is padded to: few different sizes, and little of a step wasted.
pub(super) fn padded_rows(n_rows: usize) -> usize {
    if n_rows <= 8 {
        return n_rows.next_power_of_two();
    }
    n_rows.next_multiple_of((n_rows.next_power_of_two() / 16).clamp(8, 64))
}
