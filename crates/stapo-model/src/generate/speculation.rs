//! Whether and what to draft. Draws are keyed by their position, so a draft is right exactly if it is the token that is
//! drawn in its place anyway: drafts change how many steps there are, and nothing else. Every decision follows from counts.

use super::drafts::{DraftTexts, draft};
use super::scheduler::{ScheduledStep, Scheduler};
use super::sequence::{Sequence, UnreadToken};
use super::{Completion, Request, SampledToken, Ticket};
use stapo_ops::OutOfMemory;
use std::collections::{BTreeMap, HashMap};

/// When tokens are drafted. Responses do not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Speculation {
    Off,
    /// Where few sequences run and drafts are right often enough to pay for their rows.
    #[default]
    Auto,
    /// Wherever there is a draft, for tests.
    Always,
}

/// Steps of an engine, and the tokens drafted and accepted in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepCounts {
    pub n_steps: u64,
    /// Steps with drafted rows.
    pub n_drafting_steps: u64,
    pub n_drafted: u64,
    pub n_accepted: u64,
}

/// What steps cost by their rows, in a unit that only ratios depend on.
#[derive(Debug, Clone, Copy)]
pub struct StepCost {
    /// Of reading the weights, however many rows there are.
    pub weights: u64,
    pub row: u64,
    /// Of a drafting step: the host reads tokens before it plans, and keys are stored by separate kernels.
    pub drafting: u64,
    /// Rows that a drafting step has at most; all of them read the weights once.
    pub max_rows: usize,
}

impl StepCost {
    /// Steps of a GPU: 64 rows take 1.3 times as long as two (docs/performance.md).
    pub const GPU: StepCost = StepCost { weights: 128, row: 1, drafting: 16, max_rows: 64 };
    /// Steps of a CPU: 4 rows take 1.4 to 1.6 times as long as one, 16 rows 2.3 times and more.
    pub const CPU: StepCost = StepCost { weights: 4, row: 1, drafting: 1, max_rows: 16 };

    fn of_rows(self, n_rows: u64) -> u64 {
        self.weights + self.row * n_rows
    }
}

/// A model that drafts.
pub trait ModelDrafts {
    /// The parameters of the model, which its steps read.
    fn n_parameters(&self) -> u64;
    /// Drafts [`MODEL_DRAFT`] tokens for all sequences at once; [`ModelDrafts::take`] has the results.
    fn draft(&mut self, sequences: &[(&Sequence, &Request)]) -> Result<(), OutOfMemory>;
    fn take(&mut self, ticket: Ticket, sample: u32) -> Vec<u32>;
    /// Forgets a sequence that has ended.
    fn end(&mut self, ticket: Ticket, sample: u32);
}

/// Tokens that a model drafts at once.
pub const MODEL_DRAFT: usize = 4;

/// Drafts of which it is known how many tokens were right, lately.
#[derive(Debug, Default)]
struct Outcomes {
    drafts: u64,
    /// Tokens of them.
    drafted: u64,
    accepted: u64,
}

/// Outcomes that are waited for before the first decision, and at which all counts are halved.
const FEWEST_OUTCOMES: u64 = 16;
const MOST_OUTCOMES: u64 = 128;
/// Longest draft of a sequence.
const MAX_DRAFT: usize = 15;
/// Tokens made findable after a step, which takes less time than the step.
const INDEXED_AT_ONCE: usize = 2048;
/// Tokens of finished responses to other prompts that are kept.
const MOST_COMMON_TOKENS: usize = 1 << 17;

impl Outcomes {
    fn add(&mut self, n_drafted: usize, n_accepted: usize) {
        self.drafts += 1;
        self.drafted += n_drafted as u64;
        self.accepted += n_accepted as u64;
        if self.drafts >= MOST_OUTCOMES {
            self.drafts /= 2;
            self.drafted /= 2;
            self.accepted /= 2;
        }
    }

    /// Whether steps that draft for `n` sequences cost less than steps that do not, per token.
    fn pays(&self, cost: StepCost, n: u64) -> bool {
        let Self { drafts, drafted, accepted } = *self;
        if drafts < FEWEST_OUTCOMES {
            return false;
        }
        let plain = cost.of_rows(n) * (drafts + accepted);
        let drafting = cost.of_rows(n + n * drafted / drafts) + cost.drafting;
        plain > drafting * drafts
    }
}

/// The texts of one request: its prompt and its responses so far.
#[derive(Debug, Default)]
struct GroupTexts {
    texts: DraftTexts,
    /// By sample: the number of its text, and how many tokens of the current turn the text has.
    samples: HashMap<u32, (usize, usize)>,
    has_prompt: bool,
}

/// A draft that no row was run for, to learn how often drafts are right.
#[derive(Debug)]
struct TrialDraft {
    tokens: Vec<u32>,
    n_right: usize,
}

pub struct Speculator<'a> {
    mode: Speculation,
    cost: StepCost,
    groups: BTreeMap<Ticket, GroupTexts>,
    /// Finished responses to any prompt.
    common: DraftTexts,
    model: Option<Box<dyn ModelDrafts + 'a>>,
    trials: BTreeMap<(Ticket, u32), TrialDraft>,
    outcomes: Outcomes,
    pub counts: StepCounts,
}

impl<'a> Speculator<'a> {
    pub fn new(mode: Speculation, cost: StepCost) -> Self {
        let max_rows = if mode == Speculation::Always { StepCost::GPU.max_rows } else { cost.max_rows };
        Self {
            mode,
            cost: StepCost { max_rows, ..cost },
            groups: BTreeMap::new(),
            common: DraftTexts::default(),
            model: None,
            trials: BTreeMap::new(),
            outcomes: Outcomes::default(),
            counts: StepCounts::default(),
        }
    }

    /// Lets a model draft where no text does. Its steps read its parameters, a share of those of the policy.
    pub fn draft_with(&mut self, model: impl ModelDrafts + 'a, n_parameters: u64) {
        if self.mode != Speculation::Off {
            let steps = self.cost.weights * MODEL_DRAFT as u64;
            self.cost.drafting += (steps * model.n_parameters()).div_ceil(n_parameters);
            self.model = Some(Box::new(model));
        }
    }

    /// Whether the next step may have drafts. The tokens of all steps are read before it is planned then.
    pub fn drafts_next(&self, scheduler: &Scheduler) -> bool {
        match self.mode {
            Speculation::Off => false,
            Speculation::Auto => {
                let n_running = scheduler.running().len() as u64;
                // What a model drafts is known only where it does.
                let is_trial = self.model.is_some() && self.outcomes.drafts < FEWEST_OUTCOMES;
                self.is_near_end(scheduler) && (is_trial || self.outcomes.pays(self.cost, n_running))
            }
            Speculation::Always => true,
        }
    }

    /// Whether few enough sequences are left that each may have a drafted row.
    fn is_near_end(&self, scheduler: &Scheduler) -> bool {
        scheduler.is_tail(self.cost.max_rows / 2)
    }

    /// Adds drafts to a planned step.
    pub fn add_drafts(
        &mut self,
        scheduler: &mut Scheduler,
        step: &mut ScheduledStep,
    ) -> Result<(), OutOfMemory> {
        self.learn(scheduler);
        self.trials.clear();
        let n_left = self.cost.max_rows.saturating_sub(step.rows.len());
        let n_each = (n_left / step.rows.len().max(1)).min(MAX_DRAFT);
        let least_chance = self.least_chance(step.rows.len());
        let decoding: Vec<&Sequence> = step.decoding(scheduler.running()).collect();
        let Self { groups, common, model, .. } = self;
        let draft = |sequence: &Sequence| next_tokens(groups, common, sequence, n_each, least_chance);
        let mut drafts: Vec<Vec<u32>> = decoding.iter().map(|sequence| draft(sequence)).collect();
        if let Some(model) = model {
            let lacking = decoding.iter().zip(&drafts).filter(|(_, draft)| draft.is_empty() && n_each > 0);
            let request = |sequence: &Sequence| scheduler.request(sequence.ticket);
            let lacking: Vec<_> = lacking.map(|(sequence, _)| (*sequence, request(sequence))).collect();
            model.draft(&lacking)?;
            for (sequence, draft) in decoding.iter().zip(&mut drafts).filter(|(_, draft)| draft.is_empty()) {
                *draft = model.take(sequence.ticket, sequence.sample);
                draft.truncate(n_each);
            }
        }
        let n_drafted = scheduler.add_drafts(step, n_left, drafts);
        self.counts.n_drafted += n_drafted as u64;
        self.counts.n_drafting_steps += u64::from(n_drafted > 0);
        Ok(())
    }

    /// The chance of being right above which a row pays: a token more for one of `n` sequences against the cost of a row.
    fn least_chance(&self, n: usize) -> f64 {
        if self.mode == Speculation::Always {
            return 0.01;
        }
        (n as f64 * self.cost.row as f64 / self.cost.of_rows(n as u64) as f64).min(0.9)
    }

    /// Takes in what became of the drafts of a step, whose draws are given with whether each counts.
    pub fn count(&mut self, drawn: &[(UnreadToken, bool)]) {
        let mut rest = drawn;
        while let Some(((_, counts), after)) = rest.split_first() {
            let n_drafted = after.iter().take_while(|(token, _)| token.draft.is_some()).count();
            let (drafts, others) = after.split_at(n_drafted);
            let n_accepted = drafts.iter().filter(|(_, counts)| *counts).count();
            self.counts.n_accepted += n_accepted as u64;
            if *counts {
                self.outcomes.add(n_drafted, n_accepted);
            }
            rest = others;
        }
    }

    /// Near the end and while nothing is drafted: compares a token with what would have been drafted.
    pub fn try_token(&mut self, ticket: Ticket, sample: u32, token: u32) {
        let Some(trial) = self.trials.get_mut(&(ticket, sample)) else { return };
        if trial.tokens.get(trial.n_right) == Some(&token) {
            trial.n_right += 1;
            return;
        }
        self.outcomes.add(trial.tokens.len(), trial.n_right);
        self.trials.remove(&(ticket, sample));
    }

    /// Begins trial drafts where sequences have none.
    pub fn begin_trials(&mut self, scheduler: &Scheduler) {
        if self.mode != Speculation::Auto || !self.is_near_end(scheduler) {
            return;
        }
        self.learn(scheduler);
        let n_running = scheduler.running().len();
        let n_most = (self.cost.max_rows / n_running.max(1)).saturating_sub(1).min(MAX_DRAFT);
        let least_chance = self.least_chance(n_running);
        let Self { groups, common, trials, .. } = self;
        for sequence in scheduler.running().iter().filter(|sequence| !sequence.sampled.is_empty()) {
            trials.entry((sequence.ticket, sequence.sample)).or_insert_with(|| TrialDraft {
                tokens: next_tokens(groups, common, sequence, n_most, least_chance),
                n_right: 0,
            });
        }
    }

    /// Brings the texts of running sequences up to what they have sampled.
    fn learn(&mut self, scheduler: &Scheduler) {
        let mut budget = INDEXED_AT_ONCE;
        for sequence in scheduler.running().iter() {
            let group = self.groups.entry(sequence.ticket).or_default();
            group.extend(sequence.sample, &sequence.sampled);
            if !std::mem::replace(&mut group.has_prompt, true) {
                group.texts.begin(&sequence.tokens[..sequence.n_prompt]);
            }
            group.texts.index(&mut budget);
        }
        self.common.index(&mut budget);
    }

    /// Keeps a finished turn as a text to copy from.
    pub fn keep(&mut self, completion: &Completion) {
        if self.mode == Speculation::Off {
            return;
        }
        let Completion { ticket, sample, tokens, .. } = completion;
        self.trials.remove(&(*ticket, *sample));
        if let Some(model) = &mut self.model {
            model.end(*ticket, *sample);
        }
        let group = self.groups.entry(*ticket).or_default();
        group.extend(*sample, tokens);
        if let Some((_, n_turn)) = group.samples.get_mut(sample) {
            *n_turn = 0;
        }
        if self.common.n_tokens() < MOST_COMMON_TOKENS {
            let text = self.common.begin(&[]);
            self.common.extend(text, tokens.iter().map(|sampled| sampled.token));
        }
    }

    /// Drops the texts of a request none of whose responses continues.
    pub fn forget(&mut self, ticket: Ticket) {
        self.groups.remove(&ticket);
    }
}

impl GroupTexts {
    /// Appends what the text of a sample lacks of the tokens of its current turn.
    fn extend(&mut self, sample: u32, turn: &[SampledToken]) {
        let Self { texts, samples, .. } = self;
        let (text, n_known) = samples.entry(sample).or_insert_with(|| (texts.begin(&[]), 0));
        texts.extend(*text, turn[*n_known..].iter().map(|sampled| sampled.token));
        *n_known = turn.len();
    }
}

/// A draft of the next tokens of a sequence.
fn next_tokens(
    groups: &BTreeMap<Ticket, GroupTexts>,
    common: &DraftTexts,
    sequence: &Sequence,
    n_most: usize,
    least_chance: f64,
) -> Vec<u32> {
    let n_known = sequence.tokens.len().min(sequence.turn_start + sequence.sampled.len());
    let past = &sequence.tokens[..n_known];
    let mut sources = vec![common];
    sources.extend(groups.get(&sequence.ticket).map(|group| &group.texts));
    draft(&sources, past, n_most, least_chance)
}

#[cfg(test)]
mod tests;
