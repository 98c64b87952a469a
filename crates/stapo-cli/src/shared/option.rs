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

/// From 1 to 1024.
pub fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(value @ 1..=1024) => Ok(value),
        _ => Err(format!("{text:?} is not a number of threads from 1 to 1024")),
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
    fn probabilities_stay_in_their_bounds() {
        assert_eq!(fraction("0.5"), Ok(0.5));
        assert!(fraction("0").is_err() && fraction("1.01").is_err() && fraction("nan").is_err());
        assert!(share("0").is_ok() && share("-0.1").is_err());
        assert!(temperature("0").is_err_and(|e| e.contains("--greedy")) && temperature("inf").is_err());
    }
}
