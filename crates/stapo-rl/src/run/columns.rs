//! The numbers of `metrics.jsonl` as columns. Every number of a line is a column under its path, as in
//! `entropy_quantiles.q05`, so that keys which this program does not know are shown too.

use serde::Deserializer;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// More columns than any run records; a file with more is not read further.
const MAX_COLUMNS: usize = 512;

/// The numbers of a run by step. A column has NaN where a line lacks its key.
#[derive(Debug, Default)]
pub struct Columns {
    steps: Vec<f64>,
    values: BTreeMap<String, Vec<f64>>,
    /// The first line that could not be read, with its number from 1 and the reason.
    pub problem: Option<String>,
    n_lines: usize,
}

/// What the x axis of a chart counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XAxis {
    Step,
    Updates,
    Tokens,
    Hours,
}

impl XAxis {
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "step" => XAxis::Step,
            "updates" => XAxis::Updates,
            "tokens" => XAxis::Tokens,
            "hours" => XAxis::Hours,
            _ => return None,
        })
    }
}

impl Columns {
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Adds a line. A step that was there before, as after a resume from an earlier checkpoint, replaces that step and all
    /// later ones.
    pub fn add(&mut self, line: &[u8]) {
        self.n_lines += 1;
        if line.iter().all(u8::is_ascii_whitespace) {
            return;
        }
        let mut row: Vec<(String, f64)> = Vec::new();
        let mut json = serde_json::Deserializer::from_slice(line);
        let mut path = String::new();
        let parsed =
            Numbers { path: &mut path, row: &mut row }.deserialize(&mut json).and_then(|()| json.end());
        let step = row.iter().find(|(key, _)| key == "step").map(|(_, step)| *step);
        let (Ok(()), Some(step)) = (&parsed, step) else {
            let reason = parsed.err().map_or("no step".to_string(), |error| error.to_string());
            let number = self.n_lines;
            self.problem.get_or_insert_with(|| format!("metrics.jsonl, line {number}: {reason}"));
            return;
        };
        let n_before = self.steps.partition_point(|&known| known < step);
        if n_before < self.steps.len() {
            self.steps.truncate(n_before);
            self.values.values_mut().for_each(|column| column.truncate(n_before));
        }
        self.steps.push(step);
        derive(&mut row);
        for (key, value) in row {
            if self.values.len() >= MAX_COLUMNS && !self.values.contains_key(&key) {
                continue;
            }
            let column = self.values.entry(key).or_default();
            column.resize(n_before, f64::NAN);
            column.push(value);
        }
    }

    pub fn steps(&self) -> &[f64] {
        &self.steps
    }

    /// The columns that have a number.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str).filter(|key| !matches!(*key, "schema" | "step"))
    }

    /// A column with one value per step.
    pub fn column(&self, key: &str) -> Vec<f64> {
        let mut column = self.values.get(key).cloned().unwrap_or_default();
        column.resize(self.steps.len(), f64::NAN);
        column
    }

    /// The points of a column over an axis: (step, x, value). Without the axis there are none.
    pub fn points(&self, key: &str, axis: XAxis) -> Vec<Point> {
        let Some(xs) = self.axis(axis) else { return Vec::new() };
        let Some(column) = self.values.get(key) else { return Vec::new() };
        let rows = self.steps.iter().zip(xs).zip(column);
        let point = |((&step, x), &y): ((&f64, f64), &f64)| {
            (x.is_finite() && y.is_finite()).then_some(Point { step, x, y })
        };
        let before = self.values.get("eval_accuracy_before").and_then(|column| column.first());
        let before = before.filter(|y| key == "eval_accuracy" && axis == XAxis::Step && y.is_finite());
        let before = before.map(|&y| Point { step: 0.0, x: 0.0, y });
        before.into_iter().chain(rows.filter_map(point)).collect()
    }

    /// The x of every step; `None` if the run does not record it.
    pub fn axis(&self, axis: XAxis) -> Option<Vec<f64>> {
        match axis {
            XAxis::Step => Some(self.steps.clone()),
            XAxis::Updates => self.full("n_updates"),
            XAxis::Tokens => {
                self.full("tokens_total").or_else(|| Some(running_sum(self.values.get("n_tokens")?)))
            }
            XAxis::Hours => {
                let seconds =
                    self.full("wall_seconds").or_else(|| Some(running_sum(self.values.get("seconds.step")?)));
                seconds.map(|seconds| seconds.into_iter().map(|s| s / 3600.0).collect())
            }
        }
    }

    fn full(&self, key: &str) -> Option<Vec<f64>> {
        self.values.get(key).cloned()
    }

    /// Bytes in memory.
    pub fn n_bytes(&self) -> usize {
        self.values.values().map(|column| 8 * column.capacity()).sum::<usize>() + 8 * self.steps.capacity()
    }
}

/// A value of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    pub step: f64,
    pub x: f64,
    pub y: f64,
}

fn running_sum(column: &[f64]) -> Vec<f64> {
    let mut sum = 0.0;
    column
        .iter()
        .map(|value| {
            if value.is_finite() {
                sum += value;
                sum
            } else {
                sum
            }
        })
        .collect()
}

/// Adds the numbers that follow from others: shares of tokens, and the seconds of a step where the run records rates only.
fn derive(row: &mut Vec<(String, f64)>) {
    let get = |key: &str| row.iter().find(|(known, _)| known == key).map(|(_, value)| *value);
    let share = |part: &str| Some(get(part)? / get("n_tokens").filter(|n| *n > 0.0)?);
    let rated = |n: Option<f64>, rate: &str| Some(n? / get(rate).filter(|rate| *rate > 0.0)?);
    let rollout = rated(get("n_sampled").or(get("n_tokens")), "tokens_per_second.rollout");
    let update = rated(get("n_tokens"), "tokens_per_second.update");
    let phases: Vec<f64> =
        row.iter().filter(|(key, _)| key.starts_with("seconds.")).map(|(_, value)| *value).collect();
    let step =
        if phases.is_empty() { rollout.zip(update).map(|(a, b)| a + b) } else { Some(phases.iter().sum()) };
    let derived = [
        ("silenced_share", get("silenced_share").is_none().then(|| share("n_silenced")).flatten()),
        ("candidate_share", share("n_candidates")),
        ("seconds.step", step),
        ("seconds.rollout", rollout.filter(|_| phases.is_empty())),
        ("seconds.update", update.filter(|_| phases.is_empty())),
    ];
    let derived: Vec<_> =
        derived.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?))).collect();
    row.extend(derived);
}

/// The row of a line, with derived numbers; empty if the line cannot be read.
pub fn row_of(line: &[u8]) -> Vec<(String, f64)> {
    let mut row = Vec::new();
    let mut json = serde_json::Deserializer::from_slice(line);
    if (Numbers { path: &mut String::new(), row: &mut row }).deserialize(&mut json).is_err() {
        return Vec::new();
    }
    derive(&mut row);
    row
}

/// The list of what ranks reported of a step, of which one number is a column for each of the first ranks.
const RANKS: &str = "ranks";
const IDLE: &str = "idle_share";
const MAX_RANKS: usize = 16;

/// Gathers every number inside an object with its path; texts, truth values and lists but that of ranks are passed over.
struct Numbers<'a> {
    path: &'a mut String,
    row: &'a mut Vec<(String, f64)>,
}

impl<'de> DeserializeSeed<'de> for Numbers<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Numbers<'_> {
    fn take(self, value: f64) {
        self.row.push((self.path.clone(), value));
    }
}

impl<'de> Visitor<'de> for Numbers<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let n = self.path.len();
        while let Some(key) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            if n > 0 {
                self.path.push('.');
            }
            self.path.push_str(&key);
            map.next_value_seed(Numbers { path: self.path, row: self.row })?;
            self.path.truncate(n);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        if self.path == RANKS {
            let (mut path, mut own) = (String::new(), Vec::new());
            for rank in 0..MAX_RANKS {
                own.clear();
                if list.next_element_seed(Numbers { path: &mut path, row: &mut own })?.is_none() {
                    break;
                }
                let idle = own.iter().find(|(key, _)| key == IDLE).map(|(_, value)| *value);
                self.row.extend(idle.map(|idle| (format!("{RANKS}.{rank}.{IDLE}"), idle)));
            }
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.take(value);
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.take(value as f64);
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.take(value as f64);
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(lines: &[&str]) -> Columns {
        let mut columns = Columns::default();
        for line in lines {
            columns.add(line.as_bytes());
        }
        columns
    }

    fn values(columns: &Columns, key: &str, axis: XAxis) -> Vec<(f64, f64)> {
        columns.points(key, axis).iter().map(|p| (p.x, p.y)).collect()
    }

    #[test]
    fn every_number_is_a_column_and_gaps_stay_gaps() {
        let found = columns(&[
            r#"{"step":1,"a":{"b":2,"c":{"d":-1.5}},"text":"x","list":[1,{"e":3}],"none":null,"is":true}"#,
            r#"{"step":2,"new":7}"#,
            r#"{"step":3,"a":{"b":4}}"#,
        ]);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["a.b", "a.c.d", "new"]);
        assert_eq!(values(&found, "a.b", XAxis::Step), [(1.0, 2.0), (3.0, 4.0)]);
        assert_eq!(values(&found, "new", XAxis::Step), [(2.0, 7.0)]);
        assert_eq!(found.problem, None);
    }

    #[test]
    fn the_waiting_of_each_rank_is_a_column() {
        let ranks = (0..20)
            .map(|rank| format!(r#"{{"rank":{rank},"seconds":{{"rollout":1}},"idle_share":0.{rank}}}"#));
        let many = format!(r#"{{"step":2,"ranks":[{}]}}"#, ranks.collect::<Vec<_>>().join(","));
        let odd = r#"{"step":1,"ranks":[{"idle_share":0.5},7,"x"],"a":1}"#;
        let found = columns(&[odd, &many]);
        assert_eq!(values(&found, "ranks.0.idle_share", XAxis::Step), [(1.0, 0.5), (2.0, 0.0)]);
        assert_eq!(values(&found, "ranks.3.idle_share", XAxis::Step), [(2.0, 0.3)]);
        assert_eq!(found.keys().filter(|key| key.starts_with("ranks.")).count(), 16);
        assert_eq!((values(&found, "a", XAxis::Step), &found.problem), (vec![(1.0, 1.0)], &None));
    }

    #[test]
    fn a_resumed_step_takes_the_place_of_what_came_after_its_checkpoint() {
        let found = columns(&[
            r#"{"step":1,"a":1}"#,
            r#"{"step":2,"a":2}"#,
            r#"{"step":3,"a":3}"#,
            r#"{"step":2,"a":20}"#,
        ]);
        assert_eq!(values(&found, "a", XAxis::Step), [(1.0, 1.0), (2.0, 20.0)]);
    }

    #[test]
    fn a_damaged_line_is_named_and_the_others_stay() {
        let found = columns(&[r#"{"step":1,"a":1}"#, "garbage", r#"{"a":1}"#, "", r#"{"step":2,"a":2}"#]);
        assert_eq!(found.steps(), [1.0, 2.0]);
        assert!(found.problem.unwrap().starts_with("metrics.jsonl, line 2: "));
    }

    #[test]
    fn axes_count_what_they_say() {
        let found = columns(&[
            r#"{"step":1,"n_tokens":100,"n_silenced":5,"eval_accuracy_before":0.1,"eval_accuracy":0.2,"tokens_per_second":{"rollout":10,"update":50}}"#,
            r#"{"step":2,"n_tokens":300,"n_silenced":0,"eval_accuracy":0.4,"tokens_per_second":{"rollout":10,"update":50}}"#,
        ]);
        assert_eq!(values(&found, "silenced_share", XAxis::Tokens), [(100.0, 0.05), (400.0, 0.0)]);
        assert_eq!(values(&found, "eval_accuracy", XAxis::Step), [(0.0, 0.1), (1.0, 0.2), (2.0, 0.4)]);
        let hours: Vec<f64> =
            found.axis(XAxis::Hours).unwrap().iter().map(|h| (h * 3600.0).round()).collect();
        assert_eq!(hours, [12.0, 48.0]);
        assert_eq!(found.axis(XAxis::Updates), None);
    }

    #[test]
    fn as_many_columns_as_the_limit_are_kept_and_known_ones_go_on() {
        let wide = |n: usize, step: usize| {
            let keys = (0..n).map(|idx| format!(r#","k{idx:05}":{step}"#)).collect::<Vec<_>>().concat();
            format!(r#"{{"step":{step}{keys}}}"#)
        };
        // The step is a column too.
        let found = columns(&[&wide(MAX_COLUMNS - 2, 1), &wide(MAX_COLUMNS - 1, 2), &wide(MAX_COLUMNS, 3)]);
        assert_eq!(found.values.len(), MAX_COLUMNS);
        assert_eq!(values(&found, "k00000", XAxis::Step), [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]);
        let last = format!("k{:05}", MAX_COLUMNS - 2);
        assert_eq!(values(&found, &last, XAxis::Step), [(2.0, 2.0), (3.0, 3.0)]);
        let n_numbers = 3 * (MAX_COLUMNS + 1);
        assert!((8 * n_numbers - 8..16 * n_numbers).contains(&found.n_bytes()), "{}", found.n_bytes());
    }

    #[test]
    fn only_the_accuracy_by_step_begins_before_the_first_step() {
        let found = columns(&[
            r#"{"step":1,"n_tokens":100,"eval_accuracy_before":0.1,"eval_accuracy":0.2,"a":1}"#,
            r#"{"step":2,"eval_accuracy_before":0.3}"#,
            r#"{"step":3,"n_tokens":50,"eval_accuracy":0.4}"#,
        ]);
        assert_eq!(values(&found, "eval_accuracy", XAxis::Step)[0], (0.0, 0.1));
        // A step without tokens adds none.
        assert_eq!(values(&found, "eval_accuracy", XAxis::Tokens), [(100.0, 0.2), (150.0, 0.4)]);
        assert_eq!(values(&found, "a", XAxis::Step), [(1.0, 1.0)]);
    }
}
