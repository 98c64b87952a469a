//! A few lines of a long file of metrics: enough for sparklines, without reading all of it.

use super::lines::open_plain;
use stapo_rl::run::columns::row_of;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Points of a sparkline.
pub const N_SPARKS: usize = 24;
/// Bytes read at the end of a file for its last lines.
const TAIL: u64 = 16 << 10;
/// Files up to this size are searched for evaluated steps as a whole.
const WHOLE: u64 = 4 << 20;
/// Bytes read at each sampled place of a file; the first whole line in them is taken.
const SAMPLE: u64 = 8 << 10;

/// Lines spread over a file, in order, with all lines of its last part: enough for sparklines without reading a long file.
pub fn sampled(path: &Path) -> io::Result<Vec<Vec<(String, f64)>>> {
    let mut file = match open_plain(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let len = file.metadata()?.len();
    let tail_from = len.saturating_sub(TAIL);
    let mut rows = Vec::new();
    for idx in 0..N_SPARKS as u64 {
        let from = tail_from * idx / N_SPARKS as u64;
        let bytes = part(&mut file, from, SAMPLE.min(tail_from - from))?;
        rows.extend(whole_lines(&bytes, from == 0).take(1).map(row_of));
    }
    let bytes = part(&mut file, tail_from, TAIL)?;
    let last: Vec<Vec<(String, f64)>> = whole_lines(&bytes, tail_from == 0).map(row_of).collect();
    if !last.is_empty() && last.iter().all(Vec::is_empty) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its last lines are no records"));
    }
    rows.extend(last);
    rows.retain(|row| !row.is_empty());
    Ok(rows)
}

/// The held-out accuracies of a run in the order of the steps. A file up to `WHOLE` is read; of a longer one the places where
/// the lines of evaluated steps must lie, as lines are about equally long.
pub fn evaluated_steps(path: &Path, every: u64, last_step: u64) -> io::Result<Vec<f64>> {
    let mut file = open_plain(path)?;
    let len = file.metadata()?.len();
    let parts = if len <= WHOLE { vec![(0, len)] } else { places(len, every, last_step) };
    let mut found: BTreeMap<u64, f64> = BTreeMap::new();
    for (from, n) in parts {
        let bytes = part(&mut file, from, n)?;
        for line in whole_lines(&bytes, from == 0) {
            if !std::str::from_utf8(line).is_ok_and(|text| text.contains("\"eval_accuracy")) {
                continue;
            }
            let row = row_of(line);
            let get = |key: &str| row.iter().find(|(known, _)| known == key).map(|(_, value)| *value);
            let step = get("step").unwrap_or(0.0) as u64;
            found.extend(get("eval_accuracy").map(|value| (step, value)));
            found.extend(get("eval_accuracy_before").filter(|_| step == 1).map(|value| (0, value)));
        }
    }
    Ok(found.into_values().collect())
}

/// The start of a long file and the places of evaluated steps in it, each with the bytes to read there.
fn places(len: u64, every: u64, last_step: u64) -> Vec<(u64, u64)> {
    let mut places = vec![(0, SAMPLE)];
    if every > 0 && last_step > 0 {
        let n = (last_step / every).min(N_SPARKS as u64);
        let steps = (1..=n).map(|idx| last_step / every * idx / n * every);
        let middle = |step: u64| len * step / last_step;
        places.extend(steps.map(|step| (middle(step).saturating_sub(SAMPLE), 2 * SAMPLE)));
    }
    places
}

fn part(file: &mut File, from: u64, n: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(from))?;
    file.take(n).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The lines of a part of a file that are whole; the part begins a line only at the start of the file.
fn whole_lines(bytes: &[u8], is_start: bool) -> impl Iterator<Item = &[u8]> {
    let end = bytes.iter().rposition(|&byte| byte == b'\n').unwrap_or(0);
    let lines = bytes[..end].split(|&byte| byte == b'\n');
    lines.skip(usize::from(!is_start)).filter(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of `n` steps that is evaluated before the first and after every fifth step, by lines of `width` bytes.
    fn metrics(n: u64, width: usize) -> tempfile::NamedTempFile {
        let line = |step: u64| {
            let before = if step == 1 { ", \"eval_accuracy_before\": 0.25" } else { "" };
            let evaluated = format!(", \"eval_accuracy\": {}", step as f64 / n as f64);
            let evaluated = if step.is_multiple_of(5) { evaluated } else { String::new() };
            let text = format!("{{\"schema\": 1, \"step\": {step}{before}{evaluated}, \"filler\": \"");
            format!("{text}{}\"}}\n", "x".repeat(width - text.len()))
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), (1..=n).map(line).collect::<String>()).unwrap();
        file
    }

    #[test]
    fn a_long_file_is_read_where_evaluated_steps_must_lie() {
        let [len, at] = [8_000_000, SAMPLE];
        let around = |middle: u64| (middle - at, 2 * at);
        let thousands = [2_000_000, 4_000_000, 6_000_000, 8_000_000].map(around);
        assert_eq!(places(len, 1000, 4000), [&[(0, at)], &thousands[..]].concat());
        assert_eq!(places(len, 1000, 4999)[4], around(len * 4000 / 4999));
        // Of more evaluations than a sparkline has points, as many as it has: 100 evaluations, of which the 4th is the first.
        let many = places(len, 10, 1000);
        assert_eq!((many.len(), many[1], many[24]), (1 + N_SPARKS, around(320_000), around(len)));
        for (every, last_step) in [(0, 4000), (5, 0), (0, 0), (5, 4)] {
            assert_eq!(places(len, every, last_step), [(0, at)]);
        }
        assert_eq!(places(8000, 1, 1), [(0, at), (0, 2 * at)]);
    }

    #[test]
    fn lines_are_taken_from_all_over_a_file_and_all_of_its_end() {
        let steps = |n: u64, width: usize| -> Vec<u64> {
            let rows = sampled(metrics(n, width).path()).unwrap();
            rows.iter().map(|row| row.iter().find(|(key, _)| key == "step").unwrap().1 as u64).collect()
        };
        assert_eq!(steps(20, 300), (1..=20).collect::<Vec<_>>(), "a short file is its end");
        // 400 lines of 200 bytes: the last 16384 bytes hold the last 81 lines, and 24 come from the 63616 bytes before.
        let long = steps(400, 197);
        assert_eq!(long[24..], (320..=400).collect::<Vec<_>>());
        assert_eq!(long[..4], [1, 15, 28, 41]);
        assert_eq!(long[23], 306);
        // Of lines of 6000 bytes, the one that reaches into the end is in neither part.
        assert_eq!(steps(10, 5997), [1, 2, 3, 4, 5, 5, 6, 7, 9, 10]);
    }

    #[test]
    fn a_file_that_ends_in_no_records_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            sampled(file.path()).map(|rows| rows.len()).map_err(|error| error.to_string())
        };
        assert_eq!(read(""), Ok(0));
        assert_eq!(read("no record\n{\"step\": 1}\n"), Ok(1));
        assert_eq!(read("no record\n"), Err("its last lines are no records".to_string()));
        assert_eq!(sampled(Path::new("/nowhere")).unwrap().len(), 0);
    }

    #[test]
    fn held_out_accuracies_are_those_of_evaluated_steps_from_the_start_on() {
        let short = evaluated_steps(metrics(20, 300).path(), 5, 20).unwrap();
        assert_eq!(short, [0.25, 0.25, 0.5, 0.75, 1.0]);
        let file = metrics(4000, 2000);
        assert!(file.path().metadata().unwrap().len() > WHOLE);
        let long = evaluated_steps(file.path(), 5, 4000).unwrap();
        assert!(long.len() > N_SPARKS && long[0] == 0.25 && long.last() == Some(&1.0), "{long:?}");
        assert!(long[1..].is_sorted());
        assert_eq!(evaluated_steps(file.path(), 0, 4000).unwrap(), [0.25]);
        // A file of exactly the limit is read as a whole: 4096 lines of 1024 bytes, of which every fifth has an evaluation.
        let file = metrics(4096, 1021);
        assert_eq!(file.path().metadata().unwrap().len(), WHOLE);
        assert_eq!(evaluated_steps(file.path(), 5, 4096).unwrap().len(), 1 + 4096 / 5);
    }
}
