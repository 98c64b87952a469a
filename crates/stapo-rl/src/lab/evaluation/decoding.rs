//! Sampling rules by name.

use stapo_model::generate::{Filter, SamplingRule};

/// A sampling rule with the name that records use.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoding {
    pub name: String,
    pub rule: SamplingRule,
}

impl Decoding {
    /// Reads `greedy`, `TEMPERATURE`, `TEMPERATURE:TOP_P`, or `paper` for the two decodings of the paper, 1:1 and
    /// 0.7:0.9.
    pub fn parse(text: &str) -> Result<Vec<Self>, String> {
        match text {
            "paper" => Ok(vec![Self::drawn(1.0, 1.0), Self::drawn(0.7, 0.9)]),
            "greedy" => Ok(vec![Self { name: "greedy".into(), rule: SamplingRule::Greedy }]),
            _ => {
                let (temperature, top_p) = text.split_once(':').unwrap_or((text, "1"));
                let number = |text: &str| text.parse::<f64>().ok();
                let temperature = number(temperature).filter(|t| SamplingRule::TEMPERATURES.contains(t));
                let top_p = number(top_p).filter(|p| *p > 0.0 && *p <= 1.0);
                let drawn = temperature.zip(top_p).map(|(t, p)| vec![Self::drawn(t, p)]);
                drawn.ok_or_else(|| {
                    format!("decoding {text:?}: expected paper, greedy, or TEMPERATURE:TOP_P such as 0.7:0.9")
                })
            }
        }
    }

    pub(super) fn drawn(temperature: f64, top_p: f64) -> Self {
        let rule = SamplingRule::Draw { temperature, filter: Filter { top_p, ..Filter::NONE } };
        Self { name: format!("T={temperature:?} p={top_p:?}"), rule }
    }
}
