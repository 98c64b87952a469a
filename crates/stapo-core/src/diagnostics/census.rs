//! The tokens of a batch by quadrant, with their gradient norms.

use super::theory::{Quadrant, Thresholds, gradient_norm_squared};
use crate::objective::TokenEffect;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the census reads of one token.
#[derive(Debug, Clone, Copy)]
pub struct Observed {
    pub logp: f64,
    pub entropy: f64,
    /// Sum of squared probabilities at the position.
    pub collision: f64,
    pub effect: TokenEffect,
}

impl Observed {
    /// Squared gradient norm at the logits, without masks.
    pub fn gradient_norm_squared(&self) -> f64 {
        gradient_norm_squared(libm::exp(self.logp), self.collision, self.effect.weight)
    }
}

/// Counts and gradient norms of a batch by quadrant. The sums are floating-point, so the order of [`Census::add`] calls
/// must be fixed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Census {
    pub thresholds: Thresholds,
    /// In the order of [`Quadrant::ALL`].
    quadrants: [Sums; 4],
    silenced: Sums,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Sums {
    n_tokens: usize,
    norm: f64,
    norm_squared: f64,
}

impl Sums {
    fn add(&mut self, norm_squared: f64) {
        self.n_tokens += 1;
        self.norm += norm_squared.sqrt();
        self.norm_squared += norm_squared;
    }
}

/// One row of the census.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QuadrantCensus {
    pub quadrant: Quadrant,
    pub n_tokens: usize,
    /// 0 where there are no tokens.
    pub mean_gradient_norm: f64,
    /// Share of the batch's summed squared norm.
    pub gradient_share: f64,
}

impl Census {
    pub fn new(thresholds: Thresholds) -> Self {
        Census { thresholds, quadrants: [Sums::default(); 4], silenced: Sums::default() }
    }

    pub fn add(&mut self, token: &Observed) {
        let norm_squared = token.gradient_norm_squared();
        let quadrant = Quadrant::at(token.logp, token.entropy, self.thresholds);
        self.quadrants[quadrant as usize].add(norm_squared);
        if !token.effect.kept {
            self.silenced.add(norm_squared);
        }
    }

    pub fn n_tokens(&self) -> usize {
        self.quadrants.iter().map(|sums| sums.n_tokens).sum()
    }

    pub fn rows(&self) -> [QuadrantCensus; 4] {
        Quadrant::ALL.map(|quadrant| {
            let sums = self.quadrants[quadrant as usize];
            QuadrantCensus {
                quadrant,
                n_tokens: sums.n_tokens,
                mean_gradient_norm: ratio(sums.norm, sums.n_tokens as f64),
                gradient_share: ratio(sums.norm_squared, self.norm_squared()),
            }
        })
    }

    /// Silenced tokens as a share of all tokens.
    pub fn silenced_share(&self) -> f64 {
        ratio(self.silenced.n_tokens as f64, self.n_tokens() as f64)
    }

    /// The silenced tokens' share of the summed squared norm, without masks.
    pub fn silenced_gradient_share(&self) -> f64 {
        ratio(self.silenced.norm_squared, self.norm_squared())
    }

    fn norm_squared(&self) -> f64 {
        self.quadrants.iter().map(|sums| sums.norm_squared).sum()
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
