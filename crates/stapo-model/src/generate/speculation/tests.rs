use super::*;
use crate::generate::FinishReason;
use crate::generate::scheduler::{Capacity, Windows};
use std::cell::RefCell;
use std::rc::Rc;

use Speculation::{Always, Auto, Off};

fn outcomes(n: u64, drafted: u64, accepted: u64) -> Outcomes {
    Outcomes { drafts: n, drafted: n * drafted, accepted: n * accepted / 100 }
}

#[test]
fn drafts_pay_where_they_are_right_and_few_sequences_run() {
    // Tokens of a draft that are right, in hundredths.
    let pays = |n, drafted, accepted| outcomes(100, drafted, accepted).pays(StepCost::GPU, n);
    assert!(pays(1, 7, 60) && pays(4, 7, 60) && pays(1, 3, 20));
    assert!(!pays(1, 7, 10) && !pays(1, 0, 0), "a step that waits for its tokens takes longer");
    assert!(pays(32, 1, 60) && !pays(32, 1, 20), "many rows need more right drafts");
    assert!(!outcomes(15, 7, 700).pays(StepCost::GPU, 1), "too few are known");
    assert!(outcomes(100, 3, 150).pays(StepCost::CPU, 1) && !outcomes(100, 7, 60).pays(StepCost::CPU, 4));
}

#[test]
fn outcomes_of_long_ago_are_forgotten() {
    let mut outcomes = Outcomes::default();
    (0..1000).for_each(|_| outcomes.add(7, 7));
    assert!(outcomes.pays(StepCost::GPU, 1));
    (0..600).for_each(|_| outcomes.add(7, 0));
    assert!(!outcomes.pays(StepCost::GPU, 1), "{outcomes:?}");
    (0..60).for_each(|_| outcomes.add(7, 4));
    assert!(outcomes.pays(StepCost::GPU, 1), "{outcomes:?}");
}

#[test]
fn drafts_pay_above_what_they_cost() {
    // A row costs 5, and with a drafted one and the wait for its token 7: 20 drafts must be right 8 times to cost no more.
    let outcomes = |drafts, accepted| Outcomes { drafts, drafted: drafts, accepted };
    assert!(!outcomes(20, 8).pays(StepCost::CPU, 1) && outcomes(20, 9).pays(StepCost::CPU, 1));
    assert!(outcomes(16, 16).pays(StepCost::CPU, 1), "sixteen outcomes are enough");
    let mut outcomes = Outcomes::default();
    (0..127).for_each(|_| outcomes.add(4, 2));
    assert_eq!((outcomes.drafts, outcomes.drafted, outcomes.accepted), (127, 508, 254));
    outcomes.add(4, 2);
    assert_eq!((outcomes.drafts, outcomes.drafted, outcomes.accepted), (64, 256, 128));
}

#[test]
fn a_row_needs_the_chance_that_it_pays_at() {
    let auto = Speculator::new(Auto, StepCost::GPU);
    assert_eq!([1, 32, 2000].map(|n| auto.least_chance(n)), [1.0 / 129.0, 32.0 / 160.0, 0.9]);
    assert_eq!(Speculator::new(Always, StepCost::CPU).least_chance(32), 0.01);
}

fn sampled(token: u32) -> SampledToken {
    SampledToken { token, logp: 0.0, entropy: 0.0, alternatives: vec![], kept: vec![] }
}

#[test]
fn texts_of_other_prompts_are_kept_up_to_a_number_of_tokens() {
    let finish = FinishReason::LengthLimit;
    let mut speculator = Speculator::new(Auto, StepCost::GPU);
    for (sample, n, n_kept) in [
        (0, MOST_COMMON_TOKENS - 1, MOST_COMMON_TOKENS - 1),
        (1, 1, MOST_COMMON_TOKENS),
        (2, 1, MOST_COMMON_TOKENS),
    ] {
        speculator.keep(&Completion { ticket: Ticket(0), sample, tokens: vec![sampled(1); n], finish });
        assert_eq!(speculator.common.n_tokens(), n_kept);
    }
    let mut off = Speculator::new(Off, StepCost::GPU);
    off.keep(&Completion { ticket: Ticket(0), sample: 0, tokens: vec![sampled(1)], finish });
    assert_eq!(off.common.n_tokens(), 0);
}

/// The token of a sample at a position: a text of period 11 that all samples share, but for every `odd`th token.
fn token(sample: u32, position: u32, odd: u32) -> u32 {
    if (position + sample) % odd == odd - 1 { 100 + 7 * sample + position } else { position % 11 }
}

/// A model that drafts two right tokens and two wrong ones, with the numbers of sequences that it was asked for.
struct HalfRight {
    odd: u32,
    drafts: HashMap<(Ticket, u32), Vec<u32>>,
    asked: Rc<RefCell<Vec<usize>>>,
}

impl ModelDrafts for HalfRight {
    fn n_parameters(&self) -> u64 {
        30
    }

    fn draft(&mut self, sequences: &[(&Sequence, &Request)]) -> Result<(), OutOfMemory> {
        self.asked.borrow_mut().push(sequences.len());
        for (sequence, request) in sequences {
            let (sample, next) = (sequence.sample, sequence.next_unread());
            assert_eq!(request.n_samples, 3);
            let drafted = [token(sample, next, self.odd), token(sample, next + 1, self.odd), 999, 999];
            self.drafts.insert((sequence.ticket, sample), drafted.to_vec());
        }
        Ok(())
    }

    fn take(&mut self, ticket: Ticket, sample: u32) -> Vec<u32> {
        self.drafts.remove(&(ticket, sample)).unwrap_or_default()
    }

    fn end(&mut self, ticket: Ticket, sample: u32) {
        self.drafts.insert((ticket, sample), vec![]);
    }
}

/// Runs requests of three samples as an engine does, with tokens that do not depend on a model.
fn play(
    mode: Speculation,
    cost: StepCost,
    (odd, n_requests): (u32, u64),
    has_model: bool,
) -> (StepCounts, usize) {
    let capacity = Capacity {
        n_blocks: 400,
        n_states: None,
        block_tokens: 4,
        max_rows: 64,
        max_sequences: 64,
        max_draws: 64,
    };
    let windows = Windows { of_sets: vec![None], n_before: 0, n_rewound: 0 };
    let mut scheduler = Scheduler::new(capacity, windows);
    let mut speculator = Speculator::new(mode, cost);
    let asked = Rc::new(RefCell::new(vec![]));
    if has_model {
        speculator.draft_with(HalfRight { odd, drafts: HashMap::new(), asked: Rc::clone(&asked) }, 400);
        assert_eq!(speculator.model.is_some(), mode != Off);
        // Four steps that read 30 of 400 parameters each.
        let more = if mode == Off { 0 } else { (cost.weights * 4 * 30).div_ceil(400) };
        assert_eq!(speculator.cost.drafting, cost.drafting + more);
    }
    for ticket in 0..n_requests {
        let prompt = (0..9).map(|i| i % 4).collect();
        let request = Request { problem: 0, prompt, n_samples: 3, max_tokens: 90, stops: vec![] };
        scheduler.submit(Ticket(ticket), request, |sample| 90 - 5 * sample as usize - ticket as usize);
    }
    while !scheduler.is_idle() {
        let is_drafting = speculator.drafts_next(&scheduler);
        let mut step = scheduler.plan();
        if is_drafting {
            speculator.add_drafts(&mut scheduler, &mut step).unwrap();
        }
        speculator.counts.n_steps += 1;
        let mut outcomes = vec![];
        let mut finished = vec![];
        for unread in scheduler.advance(&step.rows) {
            let UnreadToken { ticket, sample, position, draft } = unread;
            let counts = match draft {
                None => scheduler.expects(unread),
                Some(draft) => scheduler.confirm(unread, draft),
            };
            outcomes.push((unread, counts));
            if counts {
                let token = token(sample, position, odd);
                speculator.try_token(ticket, sample, token);
                let finish = |s: &Sequence, _: &Request| {
                    (s.sampled.len() >= s.max_tokens).then_some(FinishReason::LengthLimit)
                };
                finished.extend(scheduler.receive(unread, sampled(token), finish));
            }
        }
        if outcomes.iter().any(|(unread, _)| unread.draft.is_some()) {
            speculator.count(&outcomes);
            for (unread, _) in &outcomes {
                scheduler.release_unused_blocks(unread.ticket, unread.sample);
            }
        }
        for completion in finished {
            let expected = (0..completion.tokens.len() as u32).map(|i| token(completion.sample, i, odd));
            assert!(completion.tokens.iter().map(|sampled| sampled.token).eq(expected));
            speculator.keep(&completion);
            if !scheduler.has_request(completion.ticket) {
                speculator.forget(completion.ticket);
            }
        }
        if !is_drafting {
            speculator.begin_trials(&scheduler);
        }
    }
    assert!(speculator.groups.is_empty() && speculator.trials.is_empty());
    let asked = asked.borrow().iter().sum();
    (speculator.counts, asked)
}

/// Steps, steps with drafts, drafted and accepted tokens, and sequences that a model was asked to draft for.
#[test]
fn steps_and_drafts_of_a_text_are_counted() {
    let counts = |mode, cost, texts, has_model| {
        let (StepCounts { n_steps, n_drafting_steps, n_drafted, n_accepted }, asked) =
            play(mode, cost, texts, has_model);
        [n_steps, n_drafting_steps, n_drafted, n_accepted, asked as u64]
    };
    let (often, seldom) = ((5, 2), (40, 2));
    for (found, expected) in [
        (counts(Off, StepCost::CPU, seldom, true), [90, 0, 0, 0, 0]),
        (counts(Auto, StepCost::CPU, seldom, false), [55, 32, 188, 184, 0]),
        (counts(Auto, StepCost::CPU, often, false), [85, 5, 15, 15, 0]),
        (counts(Auto, StepCost::CPU, seldom, true), [67, 19, 123, 111, 12]),
        (counts(Auto, StepCost::CPU, (3, 3), true), [83, 5, 30, 27, 27]),
        (counts(Auto, StepCost::GPU, often, false), [61, 34, 397, 147, 0]),
        (counts(Auto, StepCost::GPU, (40, 9), true), [62, 31, 826, 800, 135]),
        (counts(Auto, StepCost::GPU, (40, 12), false), [106, 4, 129, 128, 0]),
        (counts(Always, StepCost::CPU, often, false), [59, 37, 671, 159, 0]),
        (counts(Always, StepCost::CPU, (3, 20), true), [117, 41, 1065, 860, 383]),
    ] {
        assert_eq!(found, expected);
    }
}
