//! TensorBoard event files: protocol-buffer events in TFRecord framing with masked CRC-32C, written by hand.

use anyhow::Result;
use stapo_core::record::catalogue::{ALL, EVAL_ACCURACY, Metric};
use stapo_core::record::{BenchmarkScore, Metrics};
use stapo_rl::run::disk::{Appended, create_folder, write_whole};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The name of an event file; TensorBoard reads files with `tfevents` in their names.
pub const FILE: &str = "events.out.tfevents.stapo";

/// The event file of a run in progress: `tensorboard/` in the run folder. The file is derived from `metrics.jsonl`, so a
/// start or resume writes it anew up to the step of the run, and no step is there twice.
pub struct EventFile {
    file: Appended,
}

impl EventFile {
    /// Where the event file of a run is.
    pub fn path(run: &Path) -> PathBuf {
        run.join("tensorboard").join(FILE)
    }

    /// The file with the steps that the run has made.
    pub fn begin(run: &Path, history: &[Metrics]) -> Result<Self> {
        let path = Self::path(run);
        create_folder(&run.join("tensorboard"))?;
        write_whole(&path, &events(history, seconds_since_1970()))?;
        Ok(Self { file: Appended::open(&path)? })
    }

    /// Adds a step.
    pub fn add(&mut self, metrics: &Metrics) -> Result<()> {
        let mut bytes = Vec::new();
        push_step(&mut bytes, seconds_since_1970(), metrics);
        Ok(self.file.add(&bytes)?)
    }
}

fn seconds_since_1970() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// The event file of steps whose last ended at `end`, in seconds since 1970. Earlier steps lie before it by the seconds
/// that each step took.
pub fn events(history: &[Metrics], end: f64) -> Vec<u8> {
    let mut at = end - history.iter().map(seconds).sum::<f64>();
    let mut out = framed(&version_event(at));
    for metrics in history {
        at += seconds(metrics);
        push_step(&mut out, at, metrics);
    }
    out
}

/// Seconds of a step, from its token rates in files that record no times.
fn seconds(metrics: &Metrics) -> f64 {
    metrics.seconds.map(|seconds| seconds.total()).or(metrics.working_seconds()).unwrap_or(0.0)
}

fn push_step(out: &mut Vec<u8>, at: f64, metrics: &Metrics) {
    let before = EVAL_ACCURACY.tag.map(String::from).zip(metrics.eval_accuracy_before);
    let benchmarks = |scores: &BTreeMap<String, BenchmarkScore>| -> Vec<(String, f64)> {
        scores.iter().map(|(name, score)| (format!("accuracy/{name}"), score.accuracy)).collect()
    };
    let before: Vec<(String, f64)> =
        before.into_iter().chain(benchmarks(&metrics.benchmarks_before)).collect();
    if !before.is_empty() {
        out.extend(framed(&scalar_event(at - seconds(metrics), 0, &before)));
    }
    let number = |metric: &Metric| Some((metric.tag?.to_string(), (metric.value)(metrics)?));
    let mut all: Vec<(String, f64)> = ALL.iter().filter_map(number).collect();
    all.extend(metrics.rewards.iter().map(|(name, mean)| (format!("reward/{name}"), *mean)));
    all.extend(benchmarks(&metrics.benchmarks));
    out.extend(framed(&scalar_event(at, metrics.step, &all)));
}

/// `Event { double wall_time = 1; string file_version = 3; }`
fn version_event(at: f64) -> Vec<u8> {
    let mut event = double_field(1, at);
    event.extend(bytes_field(3, b"brain.Event:2"));
    event
}

/// `Event { double wall_time = 1; int64 step = 2; Summary summary = 5; }`,
/// `Summary { repeated Value value = 1; }`, `Value { string tag = 1; float simple_value = 2; }`
fn scalar_event(at: f64, step: u64, scalars: &[(String, f64)]) -> Vec<u8> {
    let mut event = double_field(1, at);
    event.push(2 << 3);
    event.extend(varint(step));
    let mut summary = Vec::new();
    for (tag, value) in scalars {
        let mut scalar = bytes_field(1, tag.as_bytes());
        scalar.push(2 << 3 | 5);
        scalar.extend((*value as f32).to_le_bytes());
        summary.extend(bytes_field(1, &scalar));
    }
    event.extend(bytes_field(5, &summary));
    event
}

fn double_field(number: u8, value: f64) -> Vec<u8> {
    let mut field = vec![number << 3 | 1];
    field.extend(value.to_le_bytes());
    field
}

fn bytes_field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    field.extend(varint(bytes.len() as u64));
    field.extend(bytes);
    field
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// TFRecord: length, its checksum, the bytes, their checksum.
fn framed(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let mut out = length.to_vec();
    out.extend(masked(crc32c(&length)).to_le_bytes());
    out.extend(bytes);
    out.extend(masked(crc32c(bytes)).to_le_bytes());
    out
}

/// TFRecord's masked checksum, for data that contains checksums itself.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), reflected, bit by bit: event files are small.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_rfc_3720() {
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&ascending), 0x46dd_794e);
    }

    /// Fields of a message: number, wire type, and the bytes or the number.
    fn fields(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
        let mut found = Vec::new();
        let varint = |bytes: &mut &[u8]| {
            let mut value = 0u64;
            let mut shift = 0;
            loop {
                let byte = bytes[0];
                *bytes = &bytes[1..];
                value |= u64::from(byte & 0x7f) << shift;
                shift += 7;
                if byte < 0x80 {
                    return value;
                }
            }
        };
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let n = match key & 7 {
                0 => {
                    let value = varint(&mut bytes);
                    found.push(((key >> 3) as u8, value.to_le_bytes().to_vec()));
                    continue;
                }
                1 => 8,
                2 => varint(&mut bytes) as usize,
                5 => 4,
                other => panic!("wire type {other}"),
            };
            found.push(((key >> 3) as u8, bytes[..n].to_vec()));
            bytes = &bytes[n..];
        }
        found
    }

    #[test]
    fn an_event_reads_back() {
        let record = framed(&scalar_event(1.5, 300, &[("entropy/mean".into(), 0.25), ("b".into(), -1.0)]));
        let n = u64::from_le_bytes(record[..8].try_into().unwrap()) as usize;
        assert_eq!(record.len(), 8 + 4 + n + 4);
        assert_eq!(record[8..12], masked(crc32c(&record[..8])).to_le_bytes());
        assert_eq!(record[12 + n..], masked(crc32c(&record[12..12 + n])).to_le_bytes());
        let event = fields(&record[12..12 + n]);
        assert_eq!(event[0], (1, 1.5f64.to_le_bytes().to_vec()));
        assert_eq!(event[1], (2, 300u64.to_le_bytes().to_vec()));
        let summary = fields(&event[2].1);
        let first = fields(&summary[0].1);
        assert_eq!((summary.len(), event[2].0), (2, 5));
        assert_eq!(first, [(1, b"entropy/mean".to_vec()), (2, 0.25f32.to_le_bytes().to_vec())]);
    }

    /// The time, the step and the numbers by tag of each event of a file.
    fn read(mut file: &[u8]) -> Vec<(f64, u64, BTreeMap<String, f32>)> {
        let mut found = Vec::new();
        while !file.is_empty() {
            let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            let event = fields(&file[12..12 + n]);
            file = &file[16 + n..];
            let field =
                |number: u8| event.iter().find(|(known, _)| *known == number).map(|(_, bytes)| bytes.clone());
            let time = f64::from_le_bytes(field(1).unwrap().try_into().unwrap());
            let step = field(2).map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
            let scalar = |(_, bytes): &(u8, Vec<u8>)| {
                let parts = fields(bytes);
                let tag = String::from_utf8(parts[0].1.clone()).unwrap();
                (tag, f32::from_le_bytes(parts[1].1.clone().try_into().unwrap()))
            };
            found.push((
                time,
                step,
                field(5).map_or(BTreeMap::new(), |all| fields(&all).iter().map(scalar).collect()),
            ));
        }
        found
    }

    /// Two steps of 3 s and 5 s that ended at 100 s, and an evaluation before the first.
    #[test]
    fn steps_lie_before_the_end_by_the_seconds_that_they_took() {
        use crate::shared::study::tests::metrics;
        use serde_json::json;
        let seconds = |rollout: f64, update: f64| json!({"rollout": rollout, "grade": 0.0, "update": update, "record": 0.0, "evaluate": 0.0, "checkpoint": 0.0});
        let score = json!({"accuracy": 0.75, "n_questions": 4, "n_samples": 1});
        let history = [
            metrics(
                1,
                &json!({"seconds": seconds(2.0, 1.0), "eval_accuracy_before": 0.25, "accuracy": 0.5,
                "benchmarks_before": {"gsm8k": score}}),
            ),
            metrics(
                2,
                &json!({"seconds": seconds(4.0, 1.0), "eval_accuracy": 0.375, "rewards": {"format": 0.5}, "accuracy": 1.0}),
            ),
        ];
        let events = read(&events(&history, 100.0));
        let places: Vec<(f64, u64)> = events.iter().map(|(time, step, _)| (*time, *step)).collect();
        assert_eq!(places, [(92.0, 0), (92.0, 0), (95.0, 1), (100.0, 2)]);
        let held_out = EVAL_ACCURACY.tag.unwrap();
        assert_eq!((events[1].2[held_out], events[1].2["accuracy/gsm8k"]), (0.25, 0.75));
        assert_eq!(events[1].2.len(), 2);
        assert_eq!((events[3].2[held_out], events[3].2["reward/format"]), (0.375, 0.5));
        assert!(!events[2].2.contains_key(held_out));
        let accuracy = stapo_core::record::catalogue::ACCURACY.tag.unwrap();
        assert_eq!([events[2].2[accuracy], events[3].2[accuracy]], [0.5, 1.0]);
    }
}
