//! Judges countdown: the box is parsed as an expression and evaluated exactly. No code is executed.

use crate::reward::judged::Judged;
use crate::reward::spec::{CountdownRule, NumberUse};
use crate::tasks::arithmetic::Operator;
use crate::tasks::countdown::Puzzle;
use stapo_core::Verdict;
use stapo_verify::{Fallback, Order, extract};

/// The longest expression that is parsed, in bytes.
const MAX_EXPRESSION_BYTES: usize = 1024;
/// The deepest nesting of parentheses and signs.
const MAX_DEPTH: usize = 32;

/// The verdict on a response to the problem in `reference`.
pub(super) fn judge(response: &str, reference: &str, rule: CountdownRule) -> Judged {
    let Some(puzzle) = Puzzle::parse(reference) else {
        let reason = format!("reference {reference:?} does not read like 2,3,5,7:24");
        return Judged::new(Verdict::Unparsable, None, reason);
    };
    let boxed = response.contains("\\boxed") || response.contains("\\fbox");
    let Some(answer) = extract(response, Order::BoxFirst, Fallback::Nothing).filter(|_| boxed) else {
        return Judged::new(Verdict::NoAnswer, None, "no closed \\boxed{}".into());
    };
    let shown = Some(answer.chars().take(MAX_EXPRESSION_BYTES).collect());
    let (verdict, reason) = match compute(answer) {
        Err(NoValue::Unreadable(why)) => (Verdict::Unparsable, why),
        Err(NoValue::DividesByZero) => (Verdict::Wrong, "divides by zero".into()),
        Err(NoValue::TooLarge) => (Verdict::OverBudget, "a number on the way does not fit".into()),
        Ok(computed) => compare(&puzzle, &computed, rule),
    };
    Judged::new(verdict, shown, reason)
}

fn compare(puzzle: &Puzzle, computed: &Computed, rule: CountdownRule) -> (Verdict, String) {
    let mut unused = puzzle.numbers.clone();
    for number in &computed.numbers {
        match unused.iter().position(|given| given == number) {
            Some(idx) => drop(unused.swap_remove(idx)),
            None => return (Verdict::Wrong, format!("uses {number}, which is not given or already used")),
        }
    }
    if let (NumberUse::ExactlyOnce, Some(number)) = (rule.number_use, unused.first()) {
        return (Verdict::Wrong, format!("does not use {number}"));
    }
    let Fraction { over, under } = computed.value;
    let value = if under == 1 { over.to_string() } else { format!("{over}/{under}") };
    if over == i128::from(puzzle.target) && under == 1 {
        (Verdict::Right, format!("reaches {value}"))
    } else {
        (Verdict::Wrong, format!("gives {value}, not {}", puzzle.target))
    }
}

/// Why an expression has no value.
enum NoValue {
    Unreadable(String),
    DividesByZero,
    TooLarge,
}

struct Computed {
    value: Fraction,
    /// The numbers of the expression, in order.
    numbers: Vec<i64>,
}

fn compute(text: &str) -> Result<Computed, NoValue> {
    if text.len() > MAX_EXPRESSION_BYTES {
        return Err(NoValue::Unreadable(format!("longer than {MAX_EXPRESSION_BYTES} bytes")));
    }
    let plain = [
        ("\\times", "*"),
        ("\\cdot", "*"),
        ("\\div", "/"),
        ("\\left", ""),
        ("\\right", ""),
        ("×", "*"),
        ("÷", "/"),
        ("−", "-"),
    ]
    .iter()
    .fold(text.to_string(), |text, (from, to)| text.replace(from, to));
    let symbols: Vec<char> = plain.chars().filter(|symbol| !symbol.is_whitespace()).collect();
    let mut reader = Reader { symbols: &symbols, at: 0, numbers: Vec::new() };
    let value = reader.sum(0)?;
    match reader.peek() {
        None => Ok(Computed { value, numbers: reader.numbers }),
        Some(symbol) => Err(reader.unexpected(symbol)),
    }
}

struct Reader<'a> {
    symbols: &'a [char],
    at: usize,
    numbers: Vec<i64>,
}

impl Reader<'_> {
    fn peek(&self) -> Option<char> {
        self.symbols.get(self.at).copied()
    }

    fn unexpected(&self, symbol: char) -> NoValue {
        NoValue::Unreadable(format!(
            "unexpected {symbol:?} at character {}; numbers, + - * / and parentheses",
            self.at + 1
        ))
    }

    fn sum(&mut self, depth: usize) -> Result<Fraction, NoValue> {
        let mut value = self.product(depth)?;
        while let Some(operator) = self.operator(1) {
            value = value.apply(operator, self.product(depth)?)?;
        }
        Ok(value)
    }

    fn product(&mut self, depth: usize) -> Result<Fraction, NoValue> {
        let mut value = self.operand(depth)?;
        while let Some(operator) = self.operator(2) {
            value = value.apply(operator, self.operand(depth)?)?;
        }
        Ok(value)
    }

    fn operator(&mut self, precedence: u8) -> Option<Operator> {
        let operator = Operator::from_symbol(self.peek()?)?;
        if operator.precedence() != precedence {
            return None;
        }
        self.at += 1;
        Some(operator)
    }

    fn operand(&mut self, depth: usize) -> Result<Fraction, NoValue> {
        if depth > MAX_DEPTH {
            return Err(NoValue::Unreadable(format!("more than {MAX_DEPTH} parentheses within each other")));
        }
        match self.peek() {
            Some('(') => {
                self.at += 1;
                let value = self.sum(depth + 1)?;
                match self.peek() {
                    Some(')') => self.at += 1,
                    _ => return Err(NoValue::Unreadable("a parenthesis is never closed".into())),
                }
                Ok(value)
            }
            Some('-') => {
                self.at += 1;
                let value = self.operand(depth + 1)?;
                Ok(Fraction { over: -value.over, under: value.under })
            }
            Some(digit) if digit.is_ascii_digit() => self.number(),
            Some(symbol) => Err(self.unexpected(symbol)),
            None => Err(NoValue::Unreadable("ends where a number should come".into())),
        }
    }

    fn number(&mut self) -> Result<Fraction, NoValue> {
        let digits: String =
            self.symbols[self.at..].iter().take_while(|symbol| symbol.is_ascii_digit()).collect();
        self.at += digits.len();
        let number: i64 = digits.parse().map_err(|_| NoValue::TooLarge)?;
        self.numbers.push(number);
        Ok(Fraction { over: i128::from(number), under: 1 })
    }
}

/// A fraction in lowest terms. Law: `under` is above 0.
#[derive(Debug, Clone, Copy)]
struct Fraction {
    over: i128,
    under: i128,
}

impl Fraction {
    fn apply(self, operator: Operator, other: Self) -> Result<Self, NoValue> {
        let pair = match operator {
            Operator::Add | Operator::Subtract => {
                let sign = if operator == Operator::Add { 1 } else { -1 };
                product(self.over, other.under)
                    .zip(product(sign * other.over, self.under))
                    .and_then(|(left, right)| left.checked_add(right))
                    .zip(product(self.under, other.under))
            }
            Operator::Multiply => product(self.over, other.over).zip(product(self.under, other.under)),
            Operator::Divide if other.over == 0 => return Err(NoValue::DividesByZero),
            Operator::Divide => product(self.over, other.under).zip(product(self.under, other.over)),
        };
        pair.map(|(over, under)| Self::reduced(over, under)).ok_or(NoValue::TooLarge)
    }

    fn reduced(over: i128, under: i128) -> Self {
        let divisor = greatest_common_divisor(over.abs(), under.abs()) * under.signum();
        Self { over: over / divisor, under: under / divisor }
    }
}

/// The product; `None` above 2^120. The distance to the limit of `i128` makes negations and sums safe.
fn product(left: i128, right: i128) -> Option<i128> {
    left.checked_mul(right).filter(|product| product.unsigned_abs() < 1 << 120)
}

fn greatest_common_divisor(mut a: i128, mut b: i128) -> i128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}
