//! A step's rows as the ops take them, and the buffers that hold them.

#[cfg(test)]
mod tests;

use super::running::RunningSequences;
use super::scheduler::{ScheduledRows, ScheduledStep};
use super::sequence::Sequence;
use super::table::BlockTable;
use super::{Alternative, SampledToken, Ticket};
use crate::config::{Heads, ModelConfig};
use crate::decoder::alternatives;
use crate::decoder::context::PagedSet;
use stapo_ops::attention::paged::{self, GROUPED_KEYS, GROUPED_ROWS, Groups, Partials, Prefill, SPLIT_KEYS};
use stapo_ops::{Buffer, Device, OutOfMemory, PendingDownload, View};

/// Rows of a step, sequence after sequence.
#[derive(Debug, Default)]
pub struct StepRows {
    /// `[T]` each: token (or the number of its draw, see `sampling::drawn`) and position.
    tokens: Vec<u32>,
    positions: Vec<u32>,
    /// `[S + 1]`, `[S]`: see `paged::Sequences`.
    offsets: Vec<u32>,
    contexts: Vec<u32>,
    /// One for each set of layers.
    sets: Vec<SetRows>,
    /// `[n, 4]` and `[S]` in a decode step: see `paged::Groups`.
    groups: Vec<u32>,
    first_partials: Vec<u32>,
    /// `[S]` where layers keep states, else empty: the slot of each sequence's state.
    state_slots: Vec<u32>,
    max_members: usize,
    /// Splits of all sequences that have several.
    pub n_partials: usize,
    /// `[R]`: the rows that predict a token to draw. A row that completes a prompt is listed once for each sample.
    drawing: Vec<u32>,
    /// `[R]`: the request, the sample and the position in the response of each token to draw.
    pub draws: Vec<(Ticket, u32, u32)>,
    table_width: usize,
    has_drafts: bool,
    prefill: Option<Prefill>,
    /// One more than the largest position.
    pub n_positions: usize,
    /// Positions in a block of the cache.
    block_tokens: usize,
}

/// Where the keys and values of a step's rows lie in the caches of one set of layers.
#[derive(Debug, Default)]
struct SetRows {
    /// `[T]`
    slots: Vec<u32>,
    /// `[S, table_width]`: see `paged::Sequences`.
    tables: Vec<u32>,
}

/// The sizes that decide where the numbers of a step lie: two steps of one shape can share a recorded CUDA graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepShape {
    pub rows: usize,
    pub sequences: usize,
    pub table_width: usize,
    pub groups: usize,
    /// The most sequences in one group.
    pub max_members: usize,
    /// Whether a sequence has several splits, whose results are combined.
    pub has_splits: bool,
    /// Whether layers keep states of sequences.
    pub has_states: bool,
    pub drawn: usize,
    /// Whether rows of one sequence are separate sequences, which read each other's keys.
    pub has_drafts: bool,
    /// The sequences with many rows, which come last.
    pub prefill: Option<Prefill>,
}

/// The last block of each cache and the last state, which padding rows write to where a device pads steps.
#[derive(Debug, Clone, Copy)]
pub struct Spare {
    pub block: usize,
    pub state: usize,
}

/// The most sequences that decode attention takes together: see [`StepRows::group`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLimits {
    pub whole_splits: usize,
    pub split_parts: usize,
}

impl GroupLimits {
    /// Larger groups read less. A group of whole splits takes no longer than one of its sequences alone. Where the rest of
    /// a split follows sequence by sequence it does, and there are fewer groups: with fewer blocks than a GPU's
    /// multiprocessors hold at once, not all would be busy.
    pub fn new(config: &ModelConfig, n_sequences: usize) -> Self {
        let heads = || config.attentions().map(|attention| attention.heads);
        let queries_per_key = heads().map(Heads::group).max().unwrap_or(1);
        let kv_heads = heads().map(|heads| heads.kv).min().unwrap_or(1);
        let [most, half] = [GROUPED_ROWS, GROUPED_ROWS / 2].map(|rows| (rows / queries_per_key).max(1));
        // Four blocks of narrow heads fit on a multiprocessor, fewer with the kernel for all rows; of wide heads two in any case.
        let is_wide = heads().any(|heads| heads.dim > 128);
        let (busy_blocks, most_parts) = if is_wide { (256, most) } else { (512, half) };
        let split_parts = (n_sequences * kv_heads / busy_blocks).clamp(1, most_parts);
        GroupLimits { whole_splits: most, split_parts }
    }
}

/// Puts the sequences last for whose rows a GPU has the kernel of prefill, and returns their number.
pub fn put_prefill_last(step: &mut ScheduledStep, running: &RunningSequences) -> usize {
    let is_prefill = |scheduled: &ScheduledRows| {
        Prefill::suits(scheduled.n_rows, running[scheduled.running_idx].n_cached + scheduled.n_rows)
    };
    step.rows.sort_by_key(is_prefill);
    step.rows.iter().filter(|scheduled| is_prefill(scheduled)).count()
}

impl StepRows {
    /// The last `n_prefill` sequences are those of [`put_prefill_last`].
    pub fn new(
        step: &ScheduledStep,
        running: &RunningSequences,
        block_tokens: usize,
        n_prefill: usize,
    ) -> Self {
        let tables = |scheduled: &ScheduledRows| &running[scheduled.running_idx].tables;
        let n_blocks = |scheduled: &ScheduledRows| tables(scheduled).first().map_or(0, BlockTable::len);
        let table_width = step.rows.iter().map(n_blocks).max().unwrap_or(0);
        let mut rows = Self { offsets: vec![0], table_width, block_tokens, ..Self::default() };
        let n_sets = step.rows.first().map_or(0, |scheduled| tables(scheduled).len());
        rows.sets.resize_with(n_sets, SetRows::default);
        let (others, prefill) = step.rows.split_at(step.rows.len() - n_prefill);
        for scheduled in others {
            rows.push(&running[scheduled.running_idx], scheduled);
        }
        let (n_sequences_before, n_tokens_before) = (rows.contexts.len(), rows.tokens.len());
        for scheduled in prefill {
            rows.push(&running[scheduled.running_idx], scheduled);
        }
        let contexts = rows.offsets.windows(2).zip(&rows.contexts).skip(n_sequences_before);
        let n_keys: usize = contexts.map(|(rows, n)| (rows[1] - rows[0]) as usize * *n as usize).sum();
        let mean_keys = n_keys / (rows.tokens.len() - n_tokens_before).max(1);
        rows.prefill = (n_prefill > 0).then_some(Prefill { n_sequences_before, n_tokens_before, mean_keys });
        rows
    }

    fn push(&mut self, sequence: &Sequence, scheduled: &ScheduledRows) {
        let context = sequence.n_cached + scheduled.n_rows;
        self.push_rows(sequence, sequence.n_cached, &sequence.tokens[sequence.n_cached..context]);
        self.state_slots.extend(sequence.state.map(|slot| slot.0));
        let row = self.tokens.len() as u32 - 1;
        if scheduled.draws {
            self.drawing.push(row);
            self.draws.push((sequence.ticket, sequence.sample, sequence.next_position()));
        }
        self.drawing.extend(scheduled.siblings.iter().map(|_| row));
        self.draws.extend(scheduled.siblings.iter().map(|sample| (sequence.ticket, *sample, 0)));
        // A drafted row is a separate sequence, on the same blocks: a step of single rows is a decode step.
        for (draft, position) in scheduled.drafts.iter().zip(context..) {
            self.push_rows(sequence, position, &[*draft]);
            self.drawing.push(self.tokens.len() as u32 - 1);
            let after = (position + 1 - context) as u32;
            self.draws.push((sequence.ticket, sequence.sample, sequence.next_position() + after));
            self.has_drafts = true;
        }
    }

    /// Rows of `tokens` at positions from `first` on.
    fn push_rows(&mut self, sequence: &Sequence, first: usize, tokens: &[u32]) {
        let context = first + tokens.len();
        self.positions.extend((first..context).map(|position| position as u32));
        self.tokens.extend_from_slice(tokens);
        self.offsets.push(self.tokens.len() as u32);
        self.contexts.push(context as u32);
        self.n_positions = self.n_positions.max(context);
        for (set, table) in self.sets.iter_mut().zip(&sequence.tables) {
            let blocks = table.blocks();
            set.slots.extend((first..context).map(|position| {
                let block = blocks[position / self.block_tokens].0 as usize;
                (block * self.block_tokens + position % self.block_tokens) as u32
            }));
            set.tables.extend(blocks.iter().map(|block| block.0));
            set.tables.resize(self.contexts.len() * self.table_width, 0);
        }
    }

    pub fn shape(&self) -> StepShape {
        StepShape {
            rows: self.tokens.len(),
            sequences: self.contexts.len(),
            table_width: self.table_width,
            groups: self.groups.len() / 4,
            max_members: self.max_members,
            has_splits: self.n_partials > 0,
            has_states: !self.state_slots.is_empty(),
            drawn: self.drawing.len(),
            has_drafts: self.has_drafts,
            prefill: self.prefill,
        }
    }

    /// Whether every sequence has one row and draws one token.
    pub fn is_decode(&self) -> bool {
        let StepShape { rows, sequences, drawn, .. } = self.shape();
        rows > 0 && rows == sequences && rows == drawn
    }

    /// Cuts the attention of a decode step into groups: see `paged::Groups`. A split of the keys that neighbouring sequences
    /// have in common as a whole is read once for up to `limits.whole_splits` of them; a split that they have in common in
    /// part, of which the rest follows sequence by sequence, for up to `limits.split_parts`.
    pub fn group(&mut self, limits: GroupLimits) {
        assert!(self.is_decode(), "group");
        // Keys that a sequence has in common with the next, in all layers. Rows of one sequence have all blocks in common, and the
        // keys of the shorter one.
        let n_common = |s: usize| {
            let in_set = |set: &SetRows| {
                let (table, next) = set.tables[s * self.table_width..].split_at(self.table_width);
                table.iter().zip(next).take_while(|(a, b)| a == b).count()
            };
            let in_blocks = self.sets.iter().map(in_set).min().unwrap_or(0) * self.block_tokens;
            in_blocks.min(self.contexts[s].min(self.contexts[s + 1]) as usize)
        };
        let shared: Vec<usize> =
            (1..self.contexts.len()).map(|s| n_common(s - 1) / GROUPED_KEYS * GROUPED_KEYS).collect();
        let longest = self.contexts.iter().copied().max().unwrap_or(0) as usize;
        for first_key in (0..longest).step_by(SPLIT_KEYS) {
            let has_keys = |s: usize| self.contexts.get(s).is_some_and(|n| *n as usize > first_key);
            let mut start = 0;
            while start < self.contexts.len() {
                if !has_keys(start) {
                    start += 1;
                    continue;
                }
                let mut count = 1;
                let mut common = usize::MAX;
                while has_keys(start + count) {
                    let with_next = common.min(shared[start + count - 1]);
                    let is_whole = with_next >= first_key + SPLIT_KEYS;
                    let most = if is_whole { limits.whole_splits } else { limits.split_parts };
                    // Adding a sequence with a shorter common prefix would shrink the prefix the whole group shares.
                    let shrinks = count > 1 && with_next < common.min(first_key + SPLIT_KEYS);
                    if count >= most || with_next <= first_key || shrinks {
                        break;
                    }
                    count += 1;
                    common = with_next;
                }
                let common = if count > 1 { common / GROUPED_KEYS } else { 0 };
                self.groups.extend([start, count, common, first_key / SPLIT_KEYS].map(|x| x as u32));
                self.max_members = self.max_members.max(count);
                start += count;
            }
        }
        for context in &self.contexts {
            self.first_partials.push(self.n_partials as u32);
            let n_splits = (*context as usize).div_ceil(SPLIT_KEYS);
            self.n_partials += if n_splits > 1 { n_splits } else { 0 };
        }
    }

    /// Pads a decode step to `n_rows` rows, `n_groups` groups and tables of `table_width`, so that steps of about the
    /// same size have the same shape. A padding row is a sequence of one token in the spare block and state; its result is never read.
    pub fn pad(&mut self, n_rows: usize, n_groups: usize, table_width: usize, spare: Spare) {
        assert!(self.is_decode() && n_rows >= self.tokens.len() && table_width >= self.table_width, "pad");
        for set in &mut self.sets {
            let rows = std::mem::take(&mut set.tables);
            for row in rows.chunks_exact(self.table_width) {
                set.tables.extend_from_slice(row);
                set.tables.resize(set.tables.len() + table_width - self.table_width, 0);
            }
            set.tables.resize(n_rows * table_width, spare.block as u32);
            set.slots.resize(n_rows, (spare.block * self.block_tokens) as u32);
        }
        self.table_width = table_width;
        self.groups.resize(4 * n_groups, 0);
        self.first_partials.resize(n_rows, 0);
        self.tokens.resize(n_rows, 0);
        self.positions.resize(n_rows, 0);
        self.contexts.resize(n_rows, 1);
        if !self.state_slots.is_empty() {
            self.state_slots.resize(n_rows, spare.state as u32);
        }
        self.offsets = (0..=n_rows as u32).collect();
        self.drawing = (0..n_rows as u32).collect();
    }

    /// In the order of [`StepInputs::new`]. The groups come first: a kernel reads 16 bytes of them at once.
    fn parts(&self) -> Vec<&[u32]> {
        let Self { groups, tokens, positions, offsets, contexts, .. } = self;
        let Self { first_partials, state_slots, drawing, .. } = self;
        let of_all = [groups, tokens, positions, offsets, contexts, first_partials, state_slots, drawing];
        let of_sets = self.sets.iter().flat_map(|set| [&set.slots, &set.tables]);
        of_all.into_iter().chain(of_sets).map(Vec::as_slice).collect()
    }
}

/// What a step reads and writes besides activations and caches, at addresses that stay.
#[derive(Debug)]
pub struct StepBuffers {
    /// All of [`StepRows`], one after another: see [`StepInputs::new`].
    pub inputs: Buffer<u32>,
    pub partials: Partials,
    pub uniforms: Buffer<f64>,
    /// `[T]`: the rows' tokens, numbers of draws replaced by the tokens drawn.
    pub tokens: Buffer<u32>,
    /// `[R]` each: the tokens drawn by the last step and their numbers.
    pub ids: Buffer<u32>,
    pub logp: Buffer<f32>,
    pub entropy: Buffer<f32>,
    /// `[R, n_alternatives]` each
    pub best_ids: Buffer<u32>,
    pub best_logp: Buffer<f32>,
    /// `[R, n_kept]`
    pub kept: Buffer<u32>,
}

/// The tokens that a step draws and their numbers, on their way to the host.
#[derive(Debug)]
pub struct PendingTokens {
    ids: PendingDownload<u32>,
    logp: PendingDownload<f32>,
    entropy: PendingDownload<f32>,
    best_ids: PendingDownload<u32>,
    best_logp: PendingDownload<f32>,
    kept: PendingDownload<u32>,
}

impl PendingTokens {
    /// Waits for the tokens.
    pub fn wait(self, n_alternatives: usize, n_kept: usize) -> impl Iterator<Item = SampledToken> {
        let kept = self.kept.wait();
        let kept_of = move |row: usize| {
            let ids = kept[row * n_kept..(row + 1) * n_kept].iter();
            ids.copied().take_while(|id| *id != u32::MAX).collect()
        };
        let ids = self.ids.wait();
        let logp = self.logp.wait();
        let entropy = self.entropy.wait();
        let mut best =
            alternatives(n_alternatives, &self.best_ids.wait(), &self.best_logp.wait()).into_iter();
        ids.into_iter().zip(logp).zip(entropy).enumerate().map(move |(row, ((token, logp), entropy))| {
            let alternatives = best.next().unwrap_or_default().into_iter();
            let alternatives = alternatives.map(|(token, logp)| Alternative { token, logp }).collect();
            SampledToken { token, logp, entropy, alternatives, kept: kept_of(row) }
        })
    }
}

/// [`StepRows`] on the device.
pub struct StepInputs<'a> {
    pub tokens: View<'a, u32>,
    pub positions: View<'a, u32>,
    /// One for each set of layers.
    pub sets: Vec<PagedSet<'a>>,
    pub state_slots: View<'a, u32>,
    pub drawing: View<'a, u32>,
}

impl<'a> StepInputs<'a> {
    /// The rows that were written to `buffer` by a step of this shape, of a model with `n_sets` sets of layers.
    pub fn new(buffer: &'a Buffer<u32>, partials: &'a Partials, shape: StepShape, n_sets: usize) -> Self {
        let StepShape { rows, sequences, table_width, groups, drawn, .. } = shape;
        let n_firsts = if groups > 0 { sequences } else { 0 };
        let table = sequences * table_width;
        let n_states = if shape.has_states { sequences } else { 0 };
        let mut start = 0;
        let mut take = |len: usize| {
            start += len;
            buffer.range(start - len..start)
        };
        let lens = [4 * groups, rows, rows, sequences + 1, sequences, n_firsts, n_states, drawn];
        let [list, tokens, positions, offsets, contexts, parts @ ..] = lens.map(&mut take);
        let [first_partials, state_slots, drawing] = parts;
        let partials = shape.has_splits.then_some(partials);
        let (max_members, reads_new_keys) = (shape.max_members, shape.has_drafts);
        let groups = Groups { list, max_members, first_partials, partials, reads_new_keys };
        let groups = (list.len() > 0).then_some(groups);
        let sets = (0..n_sets).map(|_| {
            let (slots, tables) = (take(rows), take(table));
            PagedSet {
                slots,
                sequences: paged::Sequences { offsets, contexts, tables, groups, prefill: shape.prefill },
            }
        });
        StepInputs { tokens, positions, sets: sets.collect(), state_slots, drawing }
    }
}

impl StepBuffers {
    pub fn new(
        device: &Device,
        config: &ModelConfig,
        (max_rows, max_drawn): (usize, usize),
        (n_alternatives, n_kept): (usize, usize),
    ) -> Result<Self, OutOfMemory> {
        Ok(Self {
            inputs: device.zeros(0)?,
            partials: partials(device, config, 0)?,
            uniforms: device.zeros(max_drawn)?,
            tokens: device.zeros(max_rows)?,
            ids: device.zeros(max_drawn)?,
            logp: device.zeros(max_drawn)?,
            entropy: device.zeros(max_drawn)?,
            best_ids: device.zeros(max_drawn * n_alternatives)?,
            best_logp: device.zeros(max_drawn * n_alternatives)?,
            kept: device.zeros(max_drawn * n_kept)?,
        })
    }

    /// Writes the rows; true if a buffer had to grow and has moved.
    pub fn write(
        &mut self,
        device: &Device,
        config: &ModelConfig,
        rows: &StepRows,
        uniforms: &[f64],
    ) -> Result<bool, OutOfMemory> {
        let inputs = rows.parts().concat();
        let mut moves = false;
        if inputs.len() > self.inputs.len() {
            self.inputs = device.zeros(inputs.len().next_power_of_two())?;
            moves = true;
        }
        if rows.n_partials > self.partials.capacity() {
            self.partials = partials(device, config, rows.n_partials.next_power_of_two())?;
            moves = true;
        }
        self.inputs.range_mut(0..inputs.len()).write(&inputs);
        self.uniforms.range_mut(0..uniforms.len()).write(uniforms);
        Ok(moves)
    }

    /// Starts the download of the first `n` tokens drawn.
    pub fn fetch(&self, n: usize, (n_alternatives, n_kept): (usize, usize)) -> PendingTokens {
        let n_best = n * n_alternatives;
        PendingTokens {
            ids: self.ids.range(0..n).fetch(),
            logp: self.logp.range(0..n).fetch(),
            entropy: self.entropy.range(0..n).fetch(),
            best_ids: self.best_ids.range(0..n_best).fetch(),
            best_logp: self.best_logp.range(0..n_best).fetch(),
            kept: self.kept.range(0..n * n_kept).fetch(),
        }
    }
}

/// Room for the results of `n` splits in the layer that needs the most.
fn partials(device: &Device, config: &ModelConfig, n: usize) -> Result<Partials, OutOfMemory> {
    let heads = config.attentions().map(|attention| attention.heads);
    let largest = heads.max_by_key(|heads| Partials::split_len(*heads)).expect("a model has attention");
    Partials::new(device, largest, n)
}
