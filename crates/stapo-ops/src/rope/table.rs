use std::f64::consts::TAU;
use std::sync::Arc;

use crate::{Buffer, Device, Float, OutOfMemory};

/// How the base frequencies are stretched to longer contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    None,
    /// Every frequency divided by `factor`.
    Linear {
        factor: f64,
    },
    /// With wavelength w and context C = `original_positions`: unchanged for w < C / `high_freq_factor`, divided by
    /// `factor` for w > C / `low_freq_factor`, and between the two mixed with weight
    /// s = (C / w - low) / (high - low): frequency * ((1 - s) / factor + s).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_positions: usize,
    },
    /// Peng et al., 2023. The dimension that turns r times over `original_positions` is
    /// d(r) = `head_dim` * ln(`original_positions` / (2 pi r)) / (2 ln theta). Below d(`beta_fast`) unchanged, above
    /// d(`beta_slow`) divided by `factor`, a linear ramp between; `truncate` rounds the two outwards to whole
    /// dimensions. cos and sin are multiplied by `attention_factor`.
    Yarn {
        factor: f64,
        original_positions: usize,
        beta_fast: f64,
        beta_slow: f64,
        attention_factor: f64,
        truncate: bool,
    },
    /// Ding et al., 2024. Every frequency divided by its entry of the list in use. cos and sin are multiplied by
    /// `attention_factor`.
    Long {
        short: Arc<[f64]>,
        long: Arc<[f64]>,
        used: LongFactors,
        original_positions: usize,
        attention_factor: f64,
    },
}

/// The list of factors that `LongRoPE` divides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LongFactors {
    /// For sequences of at most `original_positions`.
    Short,
    Long,
}

/// The rotary frequencies of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Frequencies {
    pub head_dim: usize,
    /// The first dimensions of a head, which are rotated; 0 if positions are not encoded.
    pub rotary_dim: usize,
    pub theta: f64,
    pub scaling: Scaling,
}

impl Frequencies {
    /// Radians per position of each of the `rotary_dim / 2` pairs.
    pub fn per_pair(&self) -> Vec<f64> {
        let dim = self.rotary_dim as f64;
        let base = (0..self.rotary_dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / dim));
        match self.scaling {
            Scaling::None => base.collect(),
            Scaling::Long { ref short, ref long, used, .. } => {
                let factors = if used == LongFactors::Long { long } else { short };
                base.zip(factors.iter()).map(|(freq, factor)| freq / factor).collect()
            }
            Scaling::Linear { factor } => base.map(|freq| freq / factor).collect(),
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => base
                .map(|freq| {
                    let turns = original_positions as f64 * freq / TAU;
                    if turns < low_freq_factor {
                        freq / factor
                    } else if turns > high_freq_factor {
                        freq
                    } else {
                        let keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        (1.0 - keep) * freq / factor + keep * freq
                    }
                })
                .collect(),
            Scaling::Yarn { factor, beta_fast, beta_slow, original_positions, truncate, .. } => {
                // The dimension that makes `turns` full turns over the trained length.
                let positions = original_positions as f64;
                let dim_of = |turns: f64| dim * (positions / (turns * TAU)).ln() / (2.0 * self.theta.ln());
                let (mut low, mut high) = (dim_of(beta_fast), dim_of(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim - 1.0));
                let width = if low == high { 0.001 } else { high - low };
                base.enumerate()
                    .map(|(i, freq)| {
                        let interpolate = ((i as f64 - low) / width).clamp(0.0, 1.0);
                        interpolate * freq / factor + (1.0 - interpolate) * freq
                    })
                    .collect()
            }
        }
    }

    /// The factor of cos and sin.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            Scaling::Yarn { attention_factor, .. } | Scaling::Long { attention_factor, .. } => {
                attention_factor
            }
            _ => 1.0,
        }
    }
}

/// cos and sin of every position and pair, computed in f64 and rounded once.
#[derive(Debug)]
pub struct Table<T: Float> {
    head_dim: usize,
    rotary_dim: usize,
    positions: usize,
    /// `[positions, rotary_dim / 2]`.
    pub(crate) cos: Buffer<T>,
    pub(crate) sin: Buffer<T>,
}

impl<T: Float> Table<T> {
    pub fn new(device: &Device, frequencies: &Frequencies, positions: usize) -> Result<Self, OutOfMemory> {
        let head_dim = frequencies.head_dim;
        assert!(head_dim.is_multiple_of(2), "rope::Table: head_dim {head_dim} is odd");
        // Without positions, the whole head is rotated by the angle 0.
        let (rotary_dim, per_pair, factor) = match frequencies.rotary_dim {
            0 => (head_dim, vec![0.0; head_dim / 2], 1.0),
            rotary_dim => (rotary_dim, frequencies.per_pair(), frequencies.attention_factor()),
        };
        let fits = rotary_dim.is_multiple_of(2) && rotary_dim <= head_dim;
        assert!(fits, "rope::Table: {rotary_dim} rotated dimensions of heads of {head_dim}");
        let mut cos = Vec::with_capacity(positions * per_pair.len());
        let mut sin = Vec::with_capacity(positions * per_pair.len());
        for position in 0..positions {
            for freq in &per_pair {
                let angle = position as f64 * freq;
                cos.push(T::from_f64(angle.cos() * factor));
                sin.push(T::from_f64(angle.sin() * factor));
            }
        }
        Ok(Table { head_dim, rotary_dim, positions, cos: device.upload(&cos)?, sin: device.upload(&sin)? })
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// The first dimensions of a head, which are rotated; the others pass through.
    pub(crate) fn rotary_dim(&self) -> usize {
        self.rotary_dim
    }

    /// The number of positions.
    pub fn positions(&self) -> usize {
        self.positions
    }
}
