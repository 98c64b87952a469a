//! TensorBoard event files: protocol-buffer events in TFRecord framing with masked CRC-32C, written by hand.

use crate::shared::study::table::slug;
use crate::shared::study::{RunData, Study};
use anyhow::{Context, Result};
use stapo_core::record::Metrics;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// One folder per run, so that TensorBoard shows each as a run of its own.
pub fn write(folder: &Path, study: &Study) -> Result<()> {
    for (arm, run) in study.runs() {
        let own = folder.join(format!("{}-seed{}", slug(&arm.name), run.seed));
        std::fs::create_dir_all(&own).with_context(|| format!("folder {}", own.display()))?;
        let path = own.join(format!("events.out.tfevents.{:010}.stapo", end_of(run) as u64));
        std::fs::write(&path, events(run)).with_context(|| format!("file {}", path.display()))?;
    }
    Ok(())
}

/// When `metrics.jsonl` was last written, in seconds since 1970.
fn end_of(run: &RunData) -> f64 {
    let modified = std::fs::metadata(run.folder.join("metrics.jsonl")).and_then(|m| m.modified());
    let since = modified.ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    since.map_or(0.0, |time| time.as_secs_f64().floor())
}

/// Seconds of a step, derived from its token rates: runs record no times.
fn seconds(metrics: &Metrics) -> f64 {
    let n = metrics.n_tokens as f64;
    n / metrics.tokens_per_second.rollout.max(1.0) + n / metrics.tokens_per_second.update.max(1.0)
}

fn events(run: &RunData) -> Vec<u8> {
    let mut at = end_of(run) - run.metrics.iter().map(seconds).sum::<f64>();
    let mut out = framed(&version_event(at));
    if let Some(before) = run.metrics.first().and_then(|m| m.eval_accuracy_before) {
        out.extend(framed(&scalar_event(at, 0, &[("accuracy/held_out", before)])));
    }
    for metrics in &run.metrics {
        at += seconds(metrics);
        let mut all = scalars(metrics);
        let named: Vec<(String, f64)> =
            metrics.rewards.iter().map(|(name, mean)| (format!("reward/{name}"), *mean)).collect();
        all.extend(named.iter().map(|(tag, mean)| (tag.as_str(), *mean)));
        out.extend(framed(&scalar_event(at, metrics.step, &all)));
    }
    out
}

fn scalars(m: &Metrics) -> Vec<(&str, f64)> {
    let share = |n: usize| n as f64 / m.n_tokens.max(1) as f64;
    let mut scalars = vec![
        ("accuracy/training", m.accuracy),
        ("reward/mean", m.reward_mean),
        ("response/tokens_mean", m.response_tokens_mean),
        ("response/truncated_share", m.truncated_share),
        ("entropy/mean", m.entropy_mean),
        ("entropy/q05", m.entropy_quantiles.q05),
        ("entropy/q25", m.entropy_quantiles.q25),
        ("entropy/q50", m.entropy_quantiles.q50),
        ("entropy/q75", m.entropy_quantiles.q75),
        ("entropy/q95", m.entropy_quantiles.q95),
        ("silencing/share", share(m.n_silenced)),
        ("silencing/candidate_share", share(m.n_candidates)),
        ("silencing/gradient_share", m.silenced_gradient_share),
        ("update/loss", m.loss),
        ("update/gradient_norm", m.gradient_norm),
        ("update/learning_rate", m.learning_rate),
        ("update/clip_fraction", m.clip_fraction),
        ("update/ratio_max", m.ratio_max),
        ("speed/rollout_tokens_per_second", m.tokens_per_second.rollout),
        ("speed/update_tokens_per_second", m.tokens_per_second.update),
    ];
    scalars.extend(m.eval_accuracy.map(|accuracy| ("accuracy/held_out", accuracy)));
    scalars.extend(m.tau_h.map(|tau_h| ("silencing/tau_h", tau_h)));
    scalars.extend(m.entropy_coefficient.map(|coefficient| ("entropy/coefficient", coefficient)));
    scalars.extend(m.reuse.as_ref().map(|reuse| ("update/uses", reuse.n_uses as f64)));
    scalars
}

/// `Event { double wall_time = 1; string file_version = 3; }`
fn version_event(at: f64) -> Vec<u8> {
    let mut event = double_field(1, at);
    event.extend(bytes_field(3, b"brain.Event:2"));
    event
}

/// `Event { double wall_time = 1; int64 step = 2; Summary summary = 5; }`,
/// `Summary { repeated Value value = 1; }`, `Value { string tag = 1; float simple_value = 2; }`
fn scalar_event(at: f64, step: u64, scalars: &[(&str, f64)]) -> Vec<u8> {
    let mut event = double_field(1, at);
    event.push(2 << 3);
    event.extend(varint(step));
    let mut summary = Vec::new();
    for (tag, value) in scalars {
        let mut own = bytes_field(1, tag.as_bytes());
        own.push(2 << 3 | 5);
        own.extend((*value as f32).to_le_bytes());
        summary.extend(bytes_field(1, &own));
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
        let record = framed(&scalar_event(1.5, 300, &[("entropy/mean", 0.25), ("b", -1.0)]));
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
}
