mod advantages;
mod calibration;
mod control;
mod deferral;
mod effects;
mod finite_differences;
mod goldens;
mod invariance;
mod limits;
mod naive;
mod spec;
mod values;

use super::*;
use crate::random::Key;

/// The signals of one response, owned.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub advantage: Advantages,
    pub logp: Vec<f64>,
    pub behavior_logp: Vec<f64>,
    pub entropy: Vec<f64>,
    pub behavior_entropy: Vec<f64>,
    pub reference_logp: Vec<f64>,
    pub sampler_logp: Vec<f64>,
    pub collision: Vec<f64>,
}

impl Sample {
    pub fn on_policy(advantage: f64, logp: &[f64], entropy: &[f64]) -> Self {
        Sample {
            advantage: Advantages::Response(advantage),
            collision: entropy.iter().map(|h| (-h).exp()).collect(),
            logp: logp.to_vec(),
            behavior_logp: logp.to_vec(),
            entropy: entropy.to_vec(),
            behavior_entropy: entropy.to_vec(),
            reference_logp: logp.to_vec(),
            sampler_logp: logp.to_vec(),
        }
    }

    pub fn response(&self) -> ResponseSignals<'_> {
        ResponseSignals {
            advantage: self.advantage.view(),
            logp: &self.logp,
            behavior_logp: &self.behavior_logp,
            entropy: &self.entropy,
            behavior_entropy: Some(&self.behavior_entropy),
            reference_logp: Some(&self.reference_logp),
            sampler_logp: Some(&self.sampler_logp),
            collision: Some(&self.collision),
        }
    }

    /// The advantage of a token.
    pub fn a(&self, t: usize) -> f64 {
        self.advantage.view().at(t)
    }
}

pub(crate) fn bits(key: u64, counter: &[u64]) -> u64 {
    counter.iter().fold(Key::new(key), |key, &word| key.with(word)).bits()
}

pub(crate) fn uniform(key: u64, counter: &[u64]) -> f64 {
    counter.iter().fold(Key::new(key), |key, &word| key.with(word)).uniform()
}

/// A mini-batch of 3 groups of 4 responses of 1 to 12 tokens. About a third of the tokens are improbable; log-ratios
/// are spread over `-drift..drift`.
pub(crate) fn random_minibatch(spec: &ObjectiveSpec, case: u64, drift: f64) -> Vec<Sample> {
    let mut samples = Vec::new();
    let mut rewards = Vec::new();
    let mut teachers = Vec::new();
    for (group, i) in (0..3u64).flat_map(|group| (0..4u64).map(move |i| (group, i))) {
        let n = 1 + bits(11, &[case, group, i]) % 12;
        let column = |key: u64, low: f64, high: f64| -> Vec<f64> {
            (0..n).map(|t| low + (high - low) * uniform(key, &[case, group, i, t])).collect()
        };
        let logp: Vec<f64> =
            (0..n).map(|t| -9.0 * uniform(12, &[case, group, i, t]).powi(2) - 0.01).collect();
        let apart = |key| -> Vec<f64> {
            logp.iter().zip(column(key, -drift, drift)).map(|(l, d)| (l + d).min(0.0)).collect()
        };
        rewards.push(f64::from(uniform(10, &[case, group, i]) < 0.5));
        teachers.push(apart(18));
        samples.push(Sample {
            advantage: Advantages::Response(0.0),
            behavior_logp: apart(13),
            entropy: column(14, 0.0, 3.0),
            behavior_entropy: column(15, 0.0, 3.0),
            reference_logp: apart(16),
            sampler_logp: apart(17),
            collision: column(19, 0.5, 1.0),
            logp,
        });
    }
    let scored: Vec<ScoredResponse> = samples
        .iter()
        .enumerate()
        .map(|(i, sample)| ScoredResponse {
            behavior_logp: Some(&sample.behavior_logp),
            behavior_entropy: Some(&sample.behavior_entropy),
            reference_logp: Some(&sample.reference_logp),
            teacher_logp: Some(&teachers[i]),
            ..ScoredResponse::new(i / 4, &rewards[i..=i], sample.logp.len())
        })
        .collect();
    let advantages = spec.advantages(&scored, &[1.0]).unwrap();
    samples.iter_mut().zip(advantages).for_each(|(sample, own)| sample.advantage = own);
    samples
}

/// Calibrates and evaluates a mini-batch; effects are scaled by 1/N, as `stapo objective` prints them.
pub(crate) fn run(
    spec: &ObjectiveSpec,
    samples: &[Sample],
    update: UpdateKey,
) -> Result<(Tally, Vec<Vec<TokenEffect>>), ObjectiveError> {
    let responses: Vec<ResponseSignals> = samples.iter().map(Sample::response).collect();
    let calibration = spec.calibrate(&responses, update)?;
    let mut tallies = Vec::new();
    let mut effects = Vec::new();
    for (idx, response) in responses.iter().enumerate() {
        let mut effects_of_response = vec![TokenEffect::default(); response.logp.len()];
        tallies.push(spec.evaluate(&calibration, idx, response, &mut effects_of_response)?);
        effects.push(effects_of_response);
    }
    let tally = spec.total(&tallies);
    for own in &mut effects {
        tally.scale_effects(own);
    }
    Ok((tally, effects))
}

/// Every preset, and every preset without S2T with S2T added.
pub(crate) fn all_specs() -> Vec<(String, ObjectiveSpec)> {
    let plain = presets().into_iter().map(|preset| (preset.name.to_string(), preset.objective));
    let has_s2t = |spec: &ObjectiveSpec| spec.masks.iter().any(|mask| mask.kind() == MaskKind::Spurious);
    let others = presets().into_iter().filter(|preset| !has_s2t(&preset.objective));
    let with_s2t = others.map(|preset| {
        let name = format!("{}+spurious", preset.name);
        let spec = ObjectiveSpec::from_preset(&name).unwrap();
        (name, spec)
    });
    plain.chain(with_s2t).collect()
}
