use std::f64::consts::TAU;

use crate::{Buffer, Device, Float, OutOfMemory};

/// How the base frequencies are stretched to longer contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
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
}

/// The rotary frequencies of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Frequencies {
    pub head_dim: usize,
    pub theta: f64,
    pub scaling: Scaling,
}

impl Frequencies {
    /// Radians per position of each of the `head_dim / 2` pairs.
    pub fn per_pair(&self) -> Vec<f64> {
        let dim = self.head_dim as f64;
        let base = (0..self.head_dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / dim));
        match self.scaling {
            Scaling::None => base.collect(),
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
            Scaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}

/// cos and sin of every position and pair, computed in f64 and rounded once.
#[derive(Debug)]
pub struct Table<T: Float> {
    head_dim: usize,
    positions: usize,
    /// `[positions, head_dim / 2]`.
    pub(crate) cos: Buffer<T>,
    pub(crate) sin: Buffer<T>,
}

impl<T: Float> Table<T> {
    pub fn new(device: &Device, frequencies: &Frequencies, positions: usize) -> Result<Self, OutOfMemory> {
        let head_dim = frequencies.head_dim;
        assert!(head_dim.is_multiple_of(2), "rope::Table: head_dim {head_dim} is odd");
        let per_pair = frequencies.per_pair();
        let factor = frequencies.attention_factor();
        let mut cos = Vec::with_capacity(positions * per_pair.len());
        let mut sin = Vec::with_capacity(positions * per_pair.len());
        for position in 0..positions {
            for freq in &per_pair {
                let angle = position as f64 * freq;
                cos.push(T::from_f64(angle.cos() * factor));
                sin.push(T::from_f64(angle.sin() * factor));
            }
        }
        Ok(Table { head_dim, positions, cos: device.upload(&cos)?, sin: device.upload(&sin)? })
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// The number of positions.
    pub fn positions(&self) -> usize {
        self.positions
    }
}
