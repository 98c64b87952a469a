//! Sums of integers, as scripts write them: `(max_prompt_length + 1024) * 2`.

/// Whether a text is a name, as shells and Python have them.
pub fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic())
        && text.chars().all(|c| c == '_' || c.is_ascii_alphanumeric())
}

/// The value of a sum whose names `integer` knows; `None` where it is none, is too large or has a division with a rest.
pub fn value(text: &str, integer: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
    let mut reader = Reader { rest: text.trim(), integer, depth: 0 };
    let value = reader.sum()?;
    reader.rest.is_empty().then_some(value)
}

/// Signs and brackets inside one another, beyond which a text is no sum.
const MAX_DEPTH: usize = 50;

struct Reader<'a> {
    rest: &'a str,
    depth: usize,
    integer: &'a dyn Fn(&str) -> Option<i64>,
}

impl Reader<'_> {
    fn take(&mut self, sign: &str) -> bool {
        let Some(rest) = self.rest.strip_prefix(sign) else { return false };
        self.rest = rest.trim_start();
        true
    }

    fn sum(&mut self) -> Option<i64> {
        let mut value = self.product()?;
        loop {
            value = match () {
                () if self.take("+") => value.checked_add(self.product()?)?,
                () if self.take("-") => value.checked_sub(self.product()?)?,
                () => return Some(value),
            };
        }
    }

    fn product(&mut self) -> Option<i64> {
        let mut value = self.factor()?;
        loop {
            value = match () {
                () if self.take("*") => value.checked_mul(self.factor()?)?,
                () if self.take("//") || self.take("/") => {
                    let by = self.factor()?;
                    (value.checked_rem(by)? == 0).then(|| value / by)?
                }
                () => return Some(value),
            };
        }
    }

    fn factor(&mut self) -> Option<i64> {
        if self.depth == MAX_DEPTH {
            return None;
        }
        self.depth += 1;
        let value = self.term();
        self.depth -= 1;
        value
    }

    /// A number, a name, or what stands behind a sign or in brackets.
    fn term(&mut self) -> Option<i64> {
        if self.take("-") {
            return self.factor()?.checked_neg();
        }
        if self.take("(") {
            let value = self.sum()?;
            return self.take(")").then_some(value);
        }
        // In a shell a name may have its sign.
        let text = self.rest.strip_prefix('$').unwrap_or(self.rest);
        let end = text.find(|c: char| c != '_' && !c.is_ascii_alphanumeric()).unwrap_or(text.len());
        let (word, rest) = text.split_at(end);
        self.rest = rest.trim_start();
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return word.replace('_', "").parse().ok();
        }
        (self.integer)(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_integers() {
        let integer = |name: &str| (name == "n").then_some(6);
        for (text, expected) in [
            ("1024 * 4", Some(4096)),
            ("(n + 1_000) * 2 - -3", Some(2015)),
            ("$n/3//2", Some(1)),
            ("2 + n*n", Some(38)),
            (" 7 ", Some(7)),
            ("n / 4", None),
            ("n / 0", None),
            ("n / (n - 6)", None),
            ("m + 1", None),
            ("2 ** 3", None),
            ("9223372036854775807 + 1", None),
            ("9223372036854775807 * n", None),
            ("(2", None),
            ("2)", None),
            ("1.5", None),
            ("", None),
        ] {
            assert_eq!(value(text, &integer), expected, "{text}");
        }
        assert_eq!(value(&("n+".repeat(100) + "1"), &integer), Some(601));
        let nested = |n: usize| value(&format!("{}1{}", "(".repeat(n), ")".repeat(n)), &integer);
        assert_eq!((nested(49), nested(50), nested(100_000)), (Some(1), None, None));
    }
}
