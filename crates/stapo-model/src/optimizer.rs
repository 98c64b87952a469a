//! `AdamW` over a policy's parameters.

mod state;
#[cfg(test)]
mod tests;

pub use state::{FileRanges, OwnedPiece, PIECE_BYTES, TensorState};

use crate::config::TensorSpec;
use crate::decoder::parameter::Parameter;
use crate::decoder::sums::overlap;
use crate::decoder::{GradientSums, Gradients, Policy};
use crate::ranks::{RankError, Ranks, Share, Solo};
pub use stapo_ops::Moment;
use stapo_ops::{Buffer, Device, Float, Form, Mark, OutOfMemory, Stored, View, ViewMut, adamw, reduce};

/// What stays the same from step to step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// Decoupled; pulls on matrices (embeddings and head included), never on norm weights and biases.
    pub weight_decay: f64,
}

impl Default for AdamWSettings {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }
}

/// What is decided again for each step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    pub lr: f64,
    /// The gradients' common factor, usually 1 / tokens: they are sums until now.
    pub scale: f64,
    /// Longest gradient, over all parameters, after scaling; infinite for no limit.
    pub max_norm: f64,
}

/// The gradients of a step cannot be used; parameters and state are as before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GradientError {
    #[error("gradient of {tensor}: element {element} is not a finite number")]
    NotFinite { tensor: String, element: usize },
    #[error("gradients are finite, but too large for their norm to be")]
    TooLarge,
}

/// An optimizer step over several ranks that was not made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Gradient(#[from] GradientError),
    #[error(transparent)]
    Rank(#[from] RankError),
}

/// `AdamW` with its two moments per parameter. Of several ranks, each holds the moments of the elements that it owns.
pub struct Optimizer<T: Float = f32> {
    settings: AdamWSettings,
    n_steps: u64,
    /// One for each trained parameter, in the order of the policy's weights.
    moments: Vec<Moments<T>>,
    ranks: Ranks,
    /// Before and after each parameter's weights were sent to all, and their bytes.
    sent: (Vec<[Mark; 2]>, u64),
}

/// Running averages of one parameter's gradient and of its square, for the elements that this rank owns.
#[derive(Debug)]
struct Moments<T: Float> {
    share: Share,
    first: Buffer<T>,
    second: Buffer<T>,
}

impl<T: Float> Optimizer<T> {
    pub fn new(policy: &Policy<T>, settings: AdamWSettings) -> Result<Self, OutOfMemory> {
        Self::on_ranks(policy, settings, Solo::ranks())
    }

    /// As [`Optimizer::new`], for one of several ranks.
    pub fn on_ranks(policy: &Policy<T>, settings: AdamWSettings, ranks: Ranks) -> Result<Self, OutOfMemory> {
        let device = policy.device();
        let moments = policy.weights.trained().enumerate().map(|(parameter_idx, parameter)| {
            let share = Share { len: parameter.spec.n_elements(), parameter_idx, world: ranks.world() };
            let len = share.owned_by(ranks.rank()).len();
            Ok(Moments {
                share,
                first: device.moment_zeros(len, Moment::First)?,
                second: device.moment_zeros(len, Moment::Second)?,
            })
        });
        let moments = moments.collect::<Result<_, OutOfMemory>>()?;
        Ok(Self { settings, n_steps: 0, moments, ranks, sent: Default::default() })
    }

    /// One update with the gradients, which are then zero again. Returns their norm after scaling, before clipping.
    ///
    /// # Panics
    /// If the optimizer is one of several ranks'.
    pub fn step(
        &mut self,
        policy: &mut Policy<T>,
        gradients: &mut Gradients<T>,
        update: Update,
    ) -> Result<f64, GradientError> {
        assert_eq!(self.ranks.world(), 1, "step: several ranks take sums over micro-batches");
        gradients.join();
        let norm = gradients.sum_squares().sqrt() * update.scale.abs();
        if !norm.is_finite() {
            return Err(not_finite(gradients.first_non_finite()));
        }
        let device = policy.device().clone();
        let rules = self.rules(update, norm);
        let parameters: Vec<_> = policy.weights.trained_mut().collect();
        let parameter_rules: Vec<_> = parameters.iter().map(|parameter| rules.rule(parameter, 0)).collect();
        Parameter::update_all(&device, parameters, |values| {
            let parts = values.into_iter().zip(gradients.sums()).zip(&mut self.moments).zip(parameter_rules);
            let tensors = parts.map(|(((param, grad), moments), rule)| moments.tensor(rule, param, grad));
            adamw::step(&device, rules.scale, tensors.collect());
        });
        policy.finish_update();
        gradients.clear();
        Ok(norm)
    }

    /// Counts a step, and says how it goes.
    fn rules(&mut self, update: Update, norm: f64) -> Rules {
        self.n_steps += 1;
        let scale = update.scale * adamw::clip_factor(norm, update.max_norm);
        Rules { settings: self.settings, lr: update.lr, scale, step: self.n_steps }
    }

    pub fn n_steps(&self) -> u64 {
        self.n_steps
    }
}

/// What one step does to every parameter.
struct Rules {
    settings: AdamWSettings,
    lr: f64,
    /// The factor of all gradients.
    scale: f64,
    step: u64,
}

impl Rules {
    /// The rule for the elements of a parameter from `first` on.
    fn rule<T: Float>(&self, parameter: &Parameter<T>, first: usize) -> adamw::AdamW {
        let AdamWSettings { beta1, beta2, eps, weight_decay } = self.settings;
        let weight_decay = if parameter.spec.is_matrix() { weight_decay } else { 0.0 };
        adamw::AdamW { lr: self.lr, beta1, beta2, eps, weight_decay, first: first as u64, step: self.step }
    }
}

fn not_finite(found: Option<(&TensorSpec, usize)>) -> GradientError {
    let named = |(spec, element): (&TensorSpec, usize)| GradientError::NotFinite {
        tensor: spec.name.clone(),
        element,
    };
    found.map_or(GradientError::TooLarge, named)
}

impl Optimizer<f32> {
    /// One update with the sums of all ranks, which are then forgotten: each rank updates the elements that it owns, and
    /// the ranks send each other the weights. Returns the norm of the gradients after scaling, before clipping.
    pub fn step_sums(
        &mut self,
        policy: &mut Policy,
        sums: &mut GradientSums,
        update: Update,
    ) -> Result<f64, StepError> {
        sums.join();
        let norm = sums.sum_squares()?.sqrt() * update.scale.abs();
        if !norm.is_finite() {
            return Err(not_finite(sums.first_non_finite()?).into());
        }
        sums.read_times();
        let device = policy.device().clone();
        let rules = self.rules(update, norm);
        let owned: Vec<(Share, View<'_, f32>)> = sums.owned().collect();
        let mut parameters = policy.weights.trained_mut().zip(owned).zip(&mut self.moments).peekable();
        while parameters.peek().is_some() {
            let (mut group, mut parts, mut n_elements) = (Vec::new(), Vec::new(), 0);
            while let Some(((parameter, (share, gradient)), moments)) = parameters
                .next_if(|((_, (share, _)), _)| n_elements == 0 || n_elements + share.len <= SENT_AT_ONCE)
            {
                n_elements += share.len;
                parts.push((
                    rules.rule(parameter, share.owned_by(self.ranks.rank()).start),
                    share,
                    gradient,
                    moments,
                ));
                group.push(parameter);
            }
            let (ranks, (times, n_bytes)) = (&self.ranks, &mut self.sent);
            Parameter::update_all(&device, group, |mut values| {
                let owned = values.iter_mut().zip(&mut parts).filter_map(|(values, part)| {
                    let (rule, share, gradient, moments) = part;
                    let owned = share.owned_by(ranks.rank());
                    let is_there = !owned.is_empty();
                    is_there.then(|| moments.tensor(*rule, values.reborrow().into_range(owned), *gradient))
                });
                adamw::step(&device, rules.scale, owned.collect());
                let before = device.mark();
                let shared = values.into_iter().zip(parts.iter().map(|(_, share, _, _)| *share));
                *n_bytes += spread(ranks, &device, shared)?;
                times.push([before, device.mark()]);
                Ok::<_, RankError>(())
            })?;
        }
        drop(parameters);
        policy.finish_update();
        sums.clear();
        Ok(norm)
    }

    /// Seconds and bytes of the weights that this rank has sent to others since the last call. Waits for the device.
    pub fn take_sent(&mut self) -> (f64, u64) {
        let (times, n_bytes) = std::mem::take(&mut self.sent);
        (times.iter().map(|[before, after]| before.seconds_until(after)).sum(), n_bytes)
    }

    /// How a tensor's moments are stored.
    pub fn form(&self, moment: Moment) -> Form {
        self.moments.first().map_or(Form::F32, |moments| moments.view(moment).form())
    }

    /// The tensor, the moment and the place of the first moment of this rank that is not a finite number.
    pub fn first_non_finite<'a>(&'a self, policy: &'a Policy) -> Option<(&'a TensorSpec, Moment, usize)> {
        let rank = self.ranks.rank();
        let device = policy.device();
        let all =
            self.moments.iter().flat_map(|moments| [Moment::First, Moment::Second].map(|m| moments.view(m)));
        if reduce::are_finite(device, all) {
            return None;
        }
        policy.weights.trained().zip(&self.moments).find_map(|(parameter, moments)| {
            let owned = moments.share.owned_by(rank);
            parameter.spec.tensors().find_map(|(spec, range)| {
                let common = overlap(&range, &owned);
                [Moment::First, Moment::Second].into_iter().filter(|_| !common.is_empty()).find_map(
                    |moment| {
                        let start = common.start - owned.start;
                        let values = moments.view(moment).range(start..start + common.len());
                        let idx = reduce::first_non_finite(device, values)?;
                        Some((spec, moment, common.start - range.start + idx))
                    },
                )
            })
        })
    }

    /// Takes the state of a checkpoint back: `read` gives a tensor's moment, of which this rank keeps what it owns.
    pub fn restore<E>(
        &mut self,
        policy: &Policy,
        n_steps: u64,
        mut read: impl FnMut(&TensorSpec, Moment) -> Result<Stored, E>,
    ) -> Result<(), E> {
        let rank = self.ranks.rank();
        for (parameter, moments) in policy.weights.trained().zip(&mut self.moments) {
            let owned = moments.share.owned_by(rank);
            for (spec, range) in parameter.spec.tensors() {
                let common = overlap(&range, &owned);
                for moment in [Moment::First, Moment::Second] {
                    let stored = read(spec, moment)?;
                    if !common.is_empty() {
                        let start = common.start - owned.start;
                        let mut to = moments.view_mut(moment).into_range(start..start + common.len());
                        to.write_stored(&stored.range(common.start - range.start..common.end - range.start));
                    }
                }
            }
        }
        self.n_steps = n_steps;
        Ok(())
    }
}

impl<T: Float> Moments<T> {
    /// What an update of the elements that this rank owns reads and writes.
    fn tensor<'a>(
        &'a mut self,
        rule: adamw::AdamW,
        param: ViewMut<'a, T>,
        grad: View<'a, T>,
    ) -> adamw::Tensor<'a, T> {
        adamw::Tensor { rule, param, grad, m: self.first.view_mut(), v: self.second.view_mut() }
    }
}

impl Moments<f32> {
    fn view(&self, moment: Moment) -> View<'_, f32> {
        match moment {
            Moment::First => self.first.view(),
            Moment::Second => self.second.view(),
        }
    }

    fn view_mut(&mut self, moment: Moment) -> ViewMut<'_, f32> {
        match moment {
            Moment::First => self.first.view_mut(),
            Moment::Second => self.second.view_mut(),
        }
    }
}

/// Elements of parameters that are sent to all at once, unless a single parameter has more.
const SENT_AT_ONCE: usize = 1 << 26;

/// Sends the elements of parameters that this rank owns to all others, and takes over theirs. Returns the bytes sent.
fn spread<'a>(
    ranks: &Ranks,
    device: &Device,
    parameters: impl Iterator<Item = (ViewMut<'a, f32>, Share)>,
) -> Result<u64, RankError> {
    let rank = ranks.rank();
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for (values, share) in parameters {
        let mut rest = values;
        for owner in share.in_order() {
            let (part, after) = rest.split_at(share.owned_by(owner).len());
            rest = after;
            if part.len() == 0 {
                continue;
            }
            if owner == rank {
                let owned = part.into_view();
                sends.extend((0..ranks.world()).filter(|&other| other != rank).map(|other| (other, owned)));
            } else {
                receives.push((owner, part));
            }
        }
    }
    // A transport that queues moves what ops read, one that goes through the host moves what is stored.
    let n_bytes = |view: &View<'_, f32>| {
        if ranks.is_queued() { device.compute_bytes() } else { view.form().n_bytes() }
    };
    let n_sent = sends.iter().map(|(_, view)| view.len() * n_bytes(view)).sum::<usize>();
    ranks.exchange(device, sends, receives)?;
    Ok(n_sent as u64)
}
