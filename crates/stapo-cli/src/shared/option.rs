//! Values of command-line options, checked as they are read.

/// Above 0 and finite.
pub fn temperature(text: &str) -> Result<f64, String> {
    match number(text)? {
        0.0 => Err("0 would divide by nothing; the likeliest token each time is --greedy".into()),
        value if value > 0.0 => Ok(value),
        value => Err(format!("{value} is not above 0")),
    }
}

/// Above 0, at most 1.
pub fn fraction(text: &str) -> Result<f64, String> {
    let value = number(text)?;
    if value > 0.0 && value <= 1.0 { Ok(value) } else { Err(format!("{value} is not above 0 and at most 1")) }
}

/// From 0 to 1.
pub fn share(text: &str) -> Result<f64, String> {
    let value = number(text)?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err(format!("{value} is not from 0 to 1")) }
}

/// At least 1.
pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err(format!("{text:?} is not a whole number of at least 1")),
        Ok(value) => Ok(value),
    }
}

/// Bytes, with K, M, G or T for powers of 1024.
pub fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_uppercase().trim_end_matches("IB").trim_end_matches('B') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(format!("{text:?} is not a size such as 512M or 4G")),
    };
    let value: usize = digits.parse().map_err(|_| format!("{text:?} is not a size such as 512M or 4G"))?;
    match value.checked_mul(1 << shift) {
        Some(0) => Err("no memory at all".into()),
        Some(value) => Ok(value),
        None => Err(format!("{text} is more than can be addressed")),
    }
}

fn number(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    if value.is_finite() { Ok(value) } else { Err(format!("{text} is not finite")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(bytes("7"), Ok(7));
        assert_eq!(bytes("512M"), Ok(512 << 20));
        assert_eq!(bytes("4GiB"), Ok(4 << 30));
        assert_eq!(bytes("2kb"), Ok(2048));
        for bad in ["", "M", "1.5G", "-1G", "0", "9X", "99999999999T"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn probabilities_stay_in_their_bounds() {
        assert_eq!(fraction("0.5"), Ok(0.5));
        assert!(fraction("0").is_err() && fraction("1.01").is_err() && fraction("nan").is_err());
        assert!(share("0").is_ok() && share("-0.1").is_err());
        assert!(temperature("0").is_err_and(|e| e.contains("--greedy")) && temperature("inf").is_err());
    }
}
