//! The date that a template may ask for: one that the caller gives, never the clock's.

use super::meter::Meter;
use minijinja::value::Value;
use minijinja::{Error, ErrorKind};

/// The variable that gives the date. With it there is a function `strftime_now`.
pub(super) const TODAY: &str = "today";
pub(super) const FUNCTION: &str = "strftime_now";
pub(super) const HINT: &str = "add a date to the variables of the template, for example chat_arguments = { today = \"2026-11-18\" } in a config or --chat-arguments '{\"today\": \"2026-11-18\"}': the clock must not change a prompt";
pub(super) const LETTERS_HINT: &str =
    "known are %Y %y %m %d %e %j %B %b %A %a %%, and %H %M %S, which are 00; change the template";

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [(&str, u32); 12] = [
    ("January", 31),
    ("February", 28),
    ("March", 31),
    ("April", 30),
    ("May", 31),
    ("June", 30),
    ("July", 31),
    ("August", 31),
    ("September", 30),
    ("October", 31),
    ("November", 30),
    ("December", 31),
];
/// Most bytes that one byte of a pattern becomes.
const MAX_GROWTH: u64 = 5;

/// `strftime_now(pattern)` on the day `today`.
pub(super) fn formatted(today: &Value, meter: &Meter, operands: &[Value]) -> Result<Value, Error> {
    let refused = |problem: String| Error::new(ErrorKind::InvalidOperation, problem);
    let date = today.as_str().and_then(Date::parsed);
    let date =
        date.ok_or_else(|| refused(format!("{TODAY} is {today:?}, expected a date such as 2026-11-18")))?;
    let [pattern] = operands else { return Err(refused(format!("{FUNCTION} takes one pattern"))) };
    let Some(pattern) = pattern.as_str() else {
        return Err(refused(format!("{FUNCTION} takes a text, not {}", pattern.kind())));
    };
    meter.charge(MAX_GROWTH * pattern.len() as u64)?;
    let text = date.formatted(pattern).map_err(|letter| {
        refused(format!("{FUNCTION}({pattern:?}): {letter:?} is no letter that is known"))
    })?;
    Ok(Value::from(text))
}

#[derive(Clone, Copy)]
struct Date {
    year: u32,
    /// From 1.
    month: u32,
    day: u32,
}

impl Date {
    /// A date of the Gregorian calendar, written 2026-11-18.
    fn parsed(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let mut number = |n_digits: usize| {
            let part = parts.next()?;
            let is_number = part.len() == n_digits && part.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| part.parse().ok())?
        };
        let date = Self { year: number(4)?, month: number(2)?, day: number(2)? };
        let is_day = (1..=12).contains(&date.month) && (1..=date.month_days(date.month)).contains(&date.day);
        (is_day && parts.next().is_none()).then_some(date)
    }

    fn month_days(self, month: u32) -> u32 {
        let leaps = |n: u32| self.year.is_multiple_of(n);
        let is_leap_year = leaps(4) && (!leaps(100) || leaps(400));
        MONTHS[month as usize - 1].1 + u32::from(is_leap_year && month == 2)
    }

    /// The day of the year, from 1.
    fn of_year(self) -> u32 {
        (1..self.month).map(|month| self.month_days(month)).sum::<u32>() + self.day
    }

    fn weekday(self) -> &'static str {
        // The calendar repeats every 400 years, and its year 1 begins on a Monday.
        let before = self.year + 399;
        DAYS[((before + before / 4 - before / 100 + before / 400 + self.of_year()) % 7) as usize]
    }

    /// The pattern with strftime's letters replaced; the first letter that is not known, where there is one.
    fn formatted(self, pattern: &str) -> Result<String, String> {
        let mut out = String::with_capacity(2 * pattern.len());
        let mut characters = pattern.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let replacement: String = match characters.next() {
                Some('Y') => format!("{:04}", self.year),
                Some('y') => format!("{:02}", self.year % 100),
                Some('m') => format!("{:02}", self.month),
                Some('d') => format!("{:02}", self.day),
                Some('e') => format!("{:2}", self.day),
                Some('j') => format!("{:03}", self.of_year()),
                Some('B') => self.month_name().into(),
                Some('b') => self.month_name()[..3].into(),
                Some('A') => self.weekday().into(),
                Some('a') => self.weekday()[..3].into(),
                Some('H' | 'M' | 'S') => "00".into(),
                Some('%') => "%".into(),
                letter => return Err(format!("%{}", letter.map_or_else(String::new, String::from))),
            };
            out.push_str(&replacement);
        }
        Ok(out)
    }

    fn month_name(self) -> &'static str {
        MONTHS[self.month as usize - 1].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By Python's `datetime.date.strftime`.
    #[test]
    fn dates_are_written_as_by_strftime() {
        for (date, expected) in [
            ("2026-11-18", "18 18 Nov November 11 26 2026 322 Wed Wednesday"),
            ("2024-02-29", "29 29 Feb February 02 24 2024 060 Thu Thursday"),
            ("2024-12-31", "31 31 Dec December 12 24 2024 366 Tue Tuesday"),
            ("2100-03-01", " 1 01 Mar March 03 00 2100 060 Mon Monday"),
            ("2000-03-01", " 1 01 Mar March 03 00 2000 061 Wed Wednesday"),
            ("1999-01-03", " 3 03 Jan January 01 99 1999 003 Sun Sunday"),
        ] {
            let date = Date::parsed(date).unwrap();
            assert_eq!(date.formatted("%e %d %b %B %m %y %Y %j %a %A").unwrap(), expected);
        }
        let date = Date::parsed("2026-11-18").unwrap();
        assert_eq!(date.formatted("é %H:%M:%S 100 %%").unwrap(), "é 00:00:00 100 %");
        for pattern in ["%Q", "%", "a%-d"] {
            assert!(date.formatted(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn only_days_of_the_calendar_are_dates() {
        for text in ["2026-02-29", "1900-02-29", "2026-00-01", "2026-13-01", "2026-04-31", "2026-01-00"] {
            assert!(Date::parsed(text).is_none(), "{text}");
        }
        for text in ["", "2026", "2026-11-1", "18 November 2026", "2026-11-18-01", "26-11-018", "2026-1+-18"]
        {
            assert!(Date::parsed(text).is_none(), "{text}");
        }
    }
}
