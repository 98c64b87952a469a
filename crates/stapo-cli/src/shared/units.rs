//! Formatting of numbers for people, and parsing of sizes.

use anyhow::{Context, Result, bail};
use stapo_core::stats::Estimate;

/// 1234567 as `1,234,567`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// 494032768 as `494.0M`.
pub fn short(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1}k", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1}M", n as f64 / 1e6),
        _ => format!("{:.2}B", n as f64 / 1e9),
    }
}

/// Bytes in the binary unit that fits.
pub fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// A size in bytes: `5GB` counts in powers of 1000, `4GiB` and `4G` in powers of 1024, a plain number in bytes.
pub fn parse_size(text: &str) -> Result<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        other => bail!("unit {other:?}, expected B, KB, MB, GB, TB, KiB, MiB, GiB, TiB or K, M, G, T"),
    };
    let number: u64 = number.parse().context("expected a number and a unit, such as 5GB")?;
    number.checked_mul(unit).filter(|&bytes| bytes > 0).context("expected a size above 0 that fits 64 bits")
}

/// A small number with two digits: `2.4e-7`, and 0 as `0`.
pub fn scientific(value: f64) -> String {
    if value == 0.0 { "0".to_string() } else { format!("{value:.1e}") }
}

/// A p value: `0.0312`, and `<0.0001` below what four digits hold.
pub fn p_value(p: f64) -> String {
    if p < 1e-4 { "<0.0001".to_string() } else { format!("{p:.4}") }
}

/// A share with its interval, as `36.9 [30.1, 43.6]`.
pub fn percent(estimate: &Estimate) -> String {
    let value = format!("{:.1}", 100.0 * estimate.value);
    estimate.interval.map_or(value.clone(), |interval| {
        let interval = interval.within(0.0, 1.0);
        format!("{value} [{:.1}, {:.1}]", 100.0 * interval.low, 100.0 * interval.high)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_people_write_them() {
        assert_eq!([0.0, 2.4e-7].map(scientific), ["0", "2.4e-7"]);
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([999, 1000, 1_500_000, 1 << 30].map(short), ["999", "1.0k", "1.5M", "1.07B"]);
        assert_eq!([1023, 1024, 3 << 29, 1 << 50].map(size), ["1023 B", "1.0 KiB", "1.5 GiB", "1024.0 TiB"]);
        assert_eq!([0.03123, 1e-4, 9.9e-5, 0.0].map(p_value), ["0.0312", "0.0001", "<0.0001", "<0.0001"]);
    }

    #[test]
    fn a_size_means_the_same_in_every_option() {
        let sizes = [
            ("7", 7),
            ("7B", 7),
            ("2kb", 2000),
            ("5GB", 5_000_000_000),
            ("512M", 512 << 20),
            ("4G", 4 << 30),
            ("4GiB", 4 << 30),
            ("1T", 1 << 40),
            ("3MB", 3_000_000),
            ("2tb", 2_000_000_000_000),
            ("1k", 1 << 10),
            ("3 KiB", 3 << 10),
            ("1mib", 1 << 20),
            ("2TiB", 2 << 40),
        ];
        for (text, bytes) in sizes {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for bad in ["", "M", "1.5G", "-1G", "0", "9X", "99999999999T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
