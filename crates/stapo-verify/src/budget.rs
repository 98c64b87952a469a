//! The limits that make grading total: how much text, how deep, how many steps, how large a number.

/// Longest text that is graded at all; a longer text is over budget.
pub const MAX_INPUT_BYTES: usize = 1 << 20;
/// Longest answer that is read as mathematics; a longer answer is only compared as digits or as text.
pub(crate) const MAX_ANSWER_BYTES: usize = 1 << 14;
/// Deepest nesting of groups, powers and calls.
pub(crate) const MAX_DEPTH: usize = 96;
/// Most bits of one exact integer (about 20,000 decimal digits).
pub(crate) const MAX_BITS: usize = 1 << 16;
/// Most terms of one expanded polynomial.
pub(crate) const MAX_TERMS: usize = 400;
/// Most elements compared pairwise in an unordered collection.
pub(crate) const MAX_ELEMENTS: usize = 256;
/// Steps that one grading may spend; a step is about twenty nanoseconds of work.
const MAX_STEPS: u64 = 300_000;
/// Steps that writing the canonical forms and the reason may spend in addition; a form that would cost more is shown as
/// it was written.
const MAX_SHOWING_STEPS: u64 = 60_000;

/// Why a reading or an evaluation ended early.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stop {
    /// A limit of this module was reached.
    OverBudget(&'static str),
    /// The text is not mathematics that this crate reads.
    Unreadable(String),
    /// The expression has no value: a division by zero, a factorial of one half.
    Undefined(&'static str),
}

/// The result of work under a budget: a value, or why the work ended early.
pub(crate) type Bounded<T> = Result<T, Stop>;

/// The steps that one grading may still spend.
#[derive(Debug)]
pub(crate) struct Budget {
    steps_left: u64,
}

impl Budget {
    pub(crate) fn new() -> Self {
        Self { steps_left: MAX_STEPS }
    }

    pub(crate) fn for_showing() -> Self {
        Self { steps_left: MAX_SHOWING_STEPS }
    }

    /// Spends `steps`, or all that are left.
    pub(crate) fn spend(&mut self, steps: u64) -> Bounded<()> {
        let left = self.steps_left.checked_sub(steps);
        self.steps_left = left.unwrap_or(0);
        if left.is_some() { Ok(()) } else { Err(Stop::OverBudget("the steps ran out")) }
    }

    /// Runs `work` with a quarter of the steps left, so that a failed attempt leaves steps for another method.
    pub(crate) fn attempt<T>(&mut self, work: impl FnOnce(&mut Self) -> Bounded<T>) -> Bounded<T> {
        let mut part = Self { steps_left: self.steps_left / 4 };
        let result = work(&mut part);
        self.steps_left -= self.steps_left / 4 - part.steps_left;
        result
    }

    /// Spends the cost of one multiplication or division of numbers with these lengths.
    pub(crate) fn spend_product(&mut self, bits_a: usize, bits_b: usize) -> Bounded<()> {
        if bits_a.max(bits_b) > MAX_BITS {
            return Err(Stop::OverBudget("a number grows past 20,000 digits"));
        }
        let words_a = bits_a as u64 / 64 + 1;
        let words_b = bits_b as u64 / 64 + 1;
        self.spend(2 + words_a + words_b + words_a * words_b / 4)
    }
}

pub(crate) fn unreadable<T>(why: impl Into<String>) -> Bounded<T> {
    Err(Stop::Unreadable(why.into()))
}
