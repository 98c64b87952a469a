//! Axes: the mapping from values to places, and the labels of ticks.

/// An axis from its lowest to its highest value.
#[derive(Debug, Clone, PartialEq)]
pub enum Scale {
    Linear {
        low: f64,
        high: f64,
    },
    /// Linear, with labels at whole numbers only.
    Whole {
        low: f64,
        high: f64,
    },
    /// Both ends positive.
    Log {
        low: f64,
        high: f64,
    },
    /// A logarithmic axis with a separate place for 0 and below at its low end.
    LogOrZero {
        low: f64,
        high: f64,
    },
}

/// A value of an axis with its label.
#[derive(Debug, Clone, PartialEq)]
pub struct Tick {
    pub value: f64,
    pub label: String,
}

/// The share of a [`Scale::LogOrZero`] axis that separates 0 from the lowest power of ten.
const ZERO_ROOM: f64 = 0.12;
/// Values whose spread is a smaller share of their size are the same for a reader: rounding makes such differences.
const CONSTANT: f64 = 1e-6;

impl Scale {
    /// A linear axis with round ends around the values. The axis includes 0 unless all values are far from 0 and differ
    /// from each other: values that are all the same are shown by their distance from 0.
    pub fn around(values: impl IntoIterator<Item = f64>) -> Self {
        let (mut low, mut high) = range(values).unwrap_or((0.0, 1.0));
        let is_constant = high - low <= CONSTANT * high.abs().max(low.abs());
        if low > 0.0 && (low < 0.6 * high || is_constant) {
            low = 0.0;
        } else if high < 0.0 && (high > 0.6 * low || is_constant) {
            high = 0.0;
        }
        if low == 0.0 && high == 0.0 {
            high = 1.0;
        }
        let step = nice_step((high - low) / 4.0);
        Scale::Linear { low: (low / step).floor() * step, high: (high / step).ceil() * step }
    }

    /// An axis of whole numbers with exactly these ends.
    pub fn whole(low: f64, high: f64) -> Self {
        if high > low { Scale::Whole { low, high } } else { Scale::Whole { low: low - 0.5, high: low + 0.5 } }
    }

    /// A linear axis with exactly these ends.
    pub fn exactly(low: f64, high: f64) -> Self {
        if high > low {
            Scale::Linear { low, high }
        } else {
            Scale::Linear { low: low - 0.5, high: low + 0.5 }
        }
    }

    /// Whole powers of ten around the positive values; `None` without a positive value.
    pub fn log_around(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let (low, high) = powers(values)?;
        Some(Scale::Log { low, high })
    }

    /// [`Self::log_around`] with a separate place for 0.
    pub fn log_or_zero(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let (low, high) = powers(values)?;
        Some(Scale::LogOrZero { low, high })
    }

    /// The place of a value, from 0 at the low end to 1 at the high end; values outside the axis land on the nearer
    /// end.
    pub fn fraction(&self, value: f64) -> f64 {
        match *self {
            Scale::Linear { low, high } | Scale::Whole { low, high } => {
                ((value - low) / (high - low)).clamp(0.0, 1.0)
            }
            Scale::Log { low, high } => log_place(value, low, high),
            Scale::LogOrZero { .. } if value <= 0.0 => 0.0,
            Scale::LogOrZero { low, high } => ZERO_ROOM + (1.0 - ZERO_ROOM) * log_place(value, low, high),
        }
    }

    pub fn ticks(&self, n_about: usize) -> Vec<Tick> {
        match *self {
            Scale::Linear { low, high } => even_ticks(low, high, nice_step((high - low) / n_about as f64)),
            Scale::Whole { low, high } => {
                even_ticks(low, high, nice_step((high - low) / n_about as f64).max(1.0))
            }
            Scale::Log { low, high } => powers_between(low, high),
            Scale::LogOrZero { low, high } => {
                let mut ticks = vec![Tick { value: 0.0, label: "0".to_string() }];
                ticks.extend(powers_between(low, high));
                ticks
            }
        }
    }
}

fn even_ticks(low: f64, high: f64, step: f64) -> Vec<Tick> {
    let first = (low / step - 1e-9).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    let decimals = (-step.log10().floor()).max(0.0) as usize;
    let tick = |value: f64| Tick { value, label: fixed(value, step, decimals) };
    (first..=last).map(|n| tick(n as f64 * step)).collect()
}

fn log_place(value: f64, low: f64, high: f64) -> f64 {
    ((value.max(low).ln() - low.ln()) / (high.ln() - low.ln())).clamp(0.0, 1.0)
}

fn range(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.into_iter().filter(|value| value.is_finite());
    finite.fold(None, |range, value| {
        let (low, high) = range.unwrap_or((value, value));
        Some((value.min(low), value.max(high)))
    })
}

fn powers(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let (low, high) = range(values.into_iter().filter(|value| *value > 0.0))?;
    let low = (low.log10() + 1e-9).floor();
    let high = (high.log10() - 1e-9).ceil().max(low + 1.0);
    Some((10f64.powf(low), 10f64.powf(high)))
}

/// Ticks at powers of ten; of more than about six powers only every n-th.
fn powers_between(low: f64, high: f64) -> Vec<Tick> {
    let (first, last) = (low.log10().ceil() as i32, high.log10().floor() as i32);
    let every = ((last - first) / 6 + 1) as usize;
    let tick = |power: i32| Tick { value: 10f64.powi(power), label: number(10f64.powi(power)) };
    (first..=last).rev().step_by(every).map(tick).collect()
}

/// The smallest 1, 2 or 5 times a power of ten that is not below `rough`.
fn nice_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.max(f64::MIN_POSITIVE).log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let factor = factors.into_iter().find(|factor| factor * power >= rough * (1.0 - 1e-9)).unwrap_or(10.0);
    factor * power
}

/// A tick's label with as many digits as its step needs, in the notation of [`number`] where the step is small.
fn fixed(value: f64, step: f64, decimals: usize) -> String {
    let value = if value.abs() < 1e-9 * step { 0.0 } else { value };
    if decimals > 3 || value.abs() >= 1e6 {
        let power = |x: f64| (x.max(f64::MIN_POSITIVE).log10() + 1e-9).floor();
        let digits = (power(value.abs()) - power(step)).max(0.0) as usize + 1;
        minus(&significant(value, digits))
    } else {
        minus(&format!("{value:.decimals$}"))
    }
}

/// Replaces a leading hyphen by the minus sign.
fn minus(text: &str) -> String {
    text.replacen('-', "−", usize::from(text.starts_with('-')))
}

/// Three significant digits without trailing zeros: `0.141`, `63.7`, `4769`, `1.6e-4`.
pub fn number(value: f64) -> String {
    significant(value, 3)
}

/// [`number`] with `digits` significant digits.
pub fn significant(value: f64, digits: usize) -> String {
    if value == 0.0 {
        return "0".to_string();
    }
    if !value.is_finite() {
        return value.to_string();
    }
    let power = value.abs().log10().floor() as i32;
    if !(-3..6).contains(&power) {
        let text = format!("{:.*e}", digits - 1, value);
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        return format!("{}e{exponent}", trimmed(mantissa));
    }
    let decimals = (digits as i32 - 1 - power).max(0) as usize;
    trimmed(&format!("{value:.decimals$}")).to_string()
}

fn trimmed(text: &str) -> &str {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text }
}
