//! Values of command-line options, checked as they are read.

use crate::shared::units::parse_size;
use anyhow::{Context, Result};
use stapo_rl::inference::SamplingRule;

/// Memory for keys and values.
#[derive(clap::Args)]
pub struct KvMemory {
    /// Memory for keys and values, such as 512M or 4G.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    kv_memory: u64,

    /// The same in MiB, under the name of the config's key.
    #[arg(long, value_name = "MIB", hide = true, conflicts_with = "kv_memory", value_parser = positive)]
    kv_mib: Option<usize>,
}

impl KvMemory {
    pub fn bytes(&self) -> Result<usize> {
        let mib = |mib: usize| mib.checked_mul(1 << 20);
        let bytes = self.kv_mib.map_or(usize::try_from(self.kv_memory).ok(), mib);
        bytes.context("--kv-memory: more than this machine can address")
    }

    /// In MiB, rounded up.
    pub fn mib(&self) -> Result<usize> {
        Ok(self.bytes()?.div_ceil(1 << 20))
    }
}

/// A temperature of a command that has --greedy.
pub fn temperature_or_greedy(text: &str) -> std::result::Result<f64, String> {
    match number(text)? {
        0.0 => Err("0 would divide by nothing; the likeliest token each time is --greedy".into()),
        _ => temperature(text),
    }
}

/// A number by which logits can be divided.
pub fn temperature(text: &str) -> std::result::Result<f64, String> {
    let (value, range) = (number(text)?, SamplingRule::TEMPERATURES);
    let problem = || format!("{value} is not from {:e} to {:e}", range.start(), range.end());
    if range.contains(&value) { Ok(value) } else { Err(problem()) }
}

/// Above 0, at most 1.
pub fn fraction(text: &str) -> std::result::Result<f64, String> {
    let value = number(text)?;
    if value > 0.0 && value <= 1.0 { Ok(value) } else { Err(format!("{value} is not above 0 and at most 1")) }
}

/// From 0 to 1.
pub fn share(text: &str) -> std::result::Result<f64, String> {
    let value = number(text)?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err(format!("{value} is not from 0 to 1")) }
}

/// At least 1.
pub fn positive(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err(format!("{text:?} is not a whole number of at least 1")),
        Ok(value) => Ok(value),
    }
}

/// From 1 to 1024.
pub fn threads(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(value @ 1..=1024) => Ok(value),
        _ => Err(format!("{text:?} is not a number of threads from 1 to 1024")),
    }
}

/// A name without the blanks around it, as in a list whose commas are followed by blanks.
pub fn trimmed(text: &str) -> std::result::Result<String, String> {
    match text.trim() {
        "" => Err("a name is empty: write NAME,NAME or NAME NAME".to_string()),
        name => Ok(name.to_string()),
    }
}

fn number(text: &str) -> std::result::Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    if value.is_finite() { Ok(value) } else { Err(format!("{text} is not finite")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_stay_in_their_bounds() {
        assert_eq!(fraction("0.5"), Ok(0.5));
        assert!(fraction("0").is_err() && fraction("1.01").is_err() && fraction("nan").is_err());
        assert!(share("0").is_ok() && share("-0.1").is_err());
        assert!(temperature_or_greedy("0").is_err_and(|e| e.contains("--greedy")));
        assert!(temperature("0").is_err_and(|e| e == "0 is not from 1e-6 to 1e6"));
        assert!(temperature("inf").is_err() && temperature("1e-300").is_err() && temperature("1e7").is_err());
        assert_eq!((temperature("1e-6"), temperature_or_greedy("0.7")), (Ok(1e-6), Ok(0.7)));
    }

    #[test]
    fn counts_begin_at_one_and_threads_end_at_1024() {
        assert_eq!((positive("1"), threads("1"), threads("1024")), (Ok(1), Ok(1), Ok(1024)));
        for text in ["0", "-1", "1.5", "", "x"] {
            assert!(positive(text).is_err() && threads(text).is_err(), "{text}");
        }
        assert!(threads("1025").is_err() && positive("1025").is_ok());
        assert_eq!(trimmed(" aime24 "), Ok("aime24".to_string()));
        assert!(trimmed("").is_err() && trimmed("  ").is_err());
        assert!(fraction("1").is_ok() && share("1").is_ok() && share("1.01").is_err());
    }

    #[test]
    fn memory_is_given_as_a_size_or_in_mebibytes() {
        let bytes = |kv_memory, kv_mib| KvMemory { kv_memory, kv_mib };
        assert_eq!(bytes(5, None).bytes().unwrap(), 5);
        assert_eq!(bytes(5, Some(3)).bytes().unwrap(), 3 << 20);
        assert!(bytes(5, Some(usize::MAX)).bytes().is_err());
        assert_eq!([1 << 20, (1 << 20) + 1].map(|n| bytes(n, None).mib().unwrap()), [1, 2]);
    }
}
