//! A model's parameters on a device.

use super::lora::{HiddenColumns, HiddenLayout, LoraSpec, weight_of_first_factor};
use super::parameter::Parameter;
use super::weights::{DecoderWeights, LayerWeights, Linear, Role};
use crate::config::{AttentionSpec, LayerSpec, Mixer, ModelConfig, SCORE, TensorSpec};
use crate::error::{Error, Result};
use crate::ranks::{Share, Transport};
use crate::weights::Weights;
use stapo_ops::cuda::KernelUse;
use stapo_ops::rng::RngKey;
use stapo_ops::{Device, Float, HostBuffer, OutOfMemory, View, ViewMut, WeightRows, lora, noise, reduce};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The parameters of one model. Generating and scoring take `&Policy`, the optimizer `&mut Policy`: half-updated
/// weights cannot be read. `T` is `f64` in gradient checks only.
pub struct Policy<T: Float = f32> {
    id: PolicyId,
    device: Device,
    config: ModelConfig,
    lora: Option<LoraSpec>,
    pub(crate) weights: DecoderWeights<Parameter<T>>,
    hidden: Option<HiddenLayout>,
    /// Of every trained parameter the elements whose f32 masters this rank has; `None` if it has all.
    owned: Option<Vec<Range<usize>>>,
    n_updates: u64,
}

/// Tells the policies of a process apart: a recorded CUDA graph holds the addresses of one policy's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyId(u64);

impl PolicyId {
    fn next() -> Self {
        static N_POLICIES: AtomicU64 = AtomicU64::new(0);
        Self(N_POLICIES.fetch_add(1, Ordering::Relaxed))
    }
}

/// What the parameters of a policy are: all of them trained, or frozen with adapters that are trained in their place.
#[derive(Debug, Clone, Copy)]
pub struct PolicySpec<'a> {
    pub config: &'a ModelConfig,
    pub lora: Option<&'a LoraSpec>,
}

impl<'a> From<&'a ModelConfig> for PolicySpec<'a> {
    fn from(config: &'a ModelConfig) -> Self {
        Self { config, lora: None }
    }
}

impl Policy<f32> {
    /// Reads every weight of the configuration; the files were checked against it when they were opened. Adapters are
    /// zero, and so is the new head of a reward model that starts from a language model; see [`Policy::start_score`].
    pub fn load<'a>(device: &Device, spec: impl Into<PolicySpec<'a>>, weights: &Weights) -> Result<Self> {
        let mut policy = Self::zeros(device, spec).map_err(Error::OutOfMemory)?;
        policy.try_fill(|spec, values| read_tensor(weights, spec, values))?;
        Ok(policy)
    }
}

impl<T: Float> Policy<T> {
    /// Zeros. The parameters of a policy that is not trained are in the region of the device, if it has one.
    pub fn zeros<'a>(
        device: &Device,
        spec: impl Into<PolicySpec<'a>>,
    ) -> std::result::Result<Self, OutOfMemory> {
        let spec = spec.into();
        let specs = DecoderWeights::specs(spec.config, spec.lora);
        let weights = specs.try_map(&mut |spec| Parameter::zeros(device, spec))?;
        Ok(Self::of_parameters(device, spec, weights))
    }

    pub(super) fn of_parameters(
        device: &Device,
        PolicySpec { config, lora }: PolicySpec<'_>,
        weights: DecoderWeights<Parameter<T>>,
    ) -> Self {
        device.prepare(&kernel_uses(config, lora));
        Self {
            id: PolicyId::next(),
            // What is made besides the parameters, such as tables, outlives the turns of a region.
            device: device.outside_regions(),
            config: config.clone(),
            lora: lora.cloned(),
            hidden: lora.map(|_| hidden_layout(&weights)),
            weights,
            owned: None,
            n_updates: 0,
        }
    }

    /// Normal weights of standard deviation `deviation` (divided by sqrt(2 layers) where a matrix writes to the residual
    /// stream), norms one, biases zero, adapters zero; convolutions and decays of DeltaNet as flash-linear-attention draws
    /// them. A tensor depends on `seed` and its name only.
    pub fn random<'a>(
        device: &Device,
        spec: impl Into<PolicySpec<'a>>,
        seed: u64,
        deviation: f64,
    ) -> std::result::Result<Self, OutOfMemory> {
        let spec = spec.into();
        let config = spec.config;
        let mut policy = Self::zeros(device, spec)?;
        let residual_deviation = deviation / (2.0 * config.layers.len() as f64).sqrt();
        policy.fill(|spec, values| {
            let key = key_of(seed, &spec.name);
            let writes_residual = ["o_proj.weight", "out_proj.weight", "down_proj.weight"]
                .iter()
                .any(|suffix| spec.name.ends_with(suffix));
            let deviation = if writes_residual { residual_deviation } else { deviation };
            for (idx, value) in values.iter_mut().enumerate() {
                *value = match spec.shape[..] {
                    [_, _] => T::from_f64(key.normal(idx as u64) * deviation),
                    [_, _, kernel] => {
                        T::from_f64((2.0 * key.uniform(idx as u64, 0, 0) - 1.0) / (kernel as f64).sqrt())
                    }
                    _ if spec.name.ends_with("A_log") => {
                        T::from_f64((0.01 + 15.99 * key.uniform(idx as u64, 0, 0)).ln())
                    }
                    _ if spec.name.ends_with("dt_bias") => {
                        T::from_f64(bias_of_step(key.uniform(idx as u64, 0, 0)))
                    }
                    _ if spec.name.ends_with("bias") => T::from_f64(0.0),
                    _ => T::from_f64(1.0),
                };
            }
        });
        Ok(policy)
    }

    /// Random weights that are drawn where they lie, for models of any size: matrices of standard deviation `deviation`,
    /// norms one, biases zero, adapters zero. A parameter depends on `seed` and the name of its first tensor only.
    pub fn noise<'a>(
        device: &Device,
        spec: impl Into<PolicySpec<'a>>,
        seed: u64,
        deviation: f64,
    ) -> std::result::Result<Self, OutOfMemory> {
        let mut policy = Self::zeros(device, spec)?;
        for parameter in policy.base_mut() {
            let name = parameter.spec.parts[0].name.clone();
            let key = key_of(seed, &name);
            let is_matrix = parameter.spec.is_matrix();
            parameter.update(device, |mut values| {
                if is_matrix {
                    noise::fill(device, key.bits(), deviation, values);
                } else if !name.ends_with("bias") {
                    let ones = vec![T::from_f64(1.0); values.len()];
                    values.write(&ones);
                }
            });
        }
        Ok(policy)
    }

    /// Sets the adapters as they are before the first step: the second factors zero, so that the policy is its base model
    /// exactly; the first factors uniform in +-1/sqrt(inputs), the range of PEFT. A tensor depends on `seed` and its name
    /// only.
    pub fn start_adapters(&mut self, seed: u64) {
        let Ok(()) = self.try_fill_adapters(|spec, values| {
            let key = key_of(seed, &spec.name);
            let bound = 1.0 / (spec.shape[1] as f64).sqrt();
            let is_first = weight_of_first_factor(&spec.name).is_some();
            for (idx, value) in values.iter_mut().enumerate().filter(|_| is_first) {
                *value = T::from_f64((2.0 * key.uniform(idx as u64, 0, 0) - 1.0) * bound);
            }
            Ok::<_, std::convert::Infallible>(())
        });
    }

    /// Draws the head of a reward model, normal of standard deviation `deviation`.
    ///
    /// # Panics
    /// If the policy is a language model.
    pub fn start_score(&mut self, seed: u64, deviation: f64) {
        assert!(self.config.score.is_some(), "start_score: the model has no score head");
        let key = key_of(seed, SCORE);
        let values: Vec<T> =
            (0..self.config.width).map(|idx| T::from_f64(key.normal(idx as u64) * deviation)).collect();
        self.weights.head_mut().update(&self.device, |mut weight| weight.write(&values));
    }

    /// Lets `write` set every tensor of the model without its adapters, one after another, in the Hugging Face layout;
    /// `write` is given zeros.
    pub fn fill(&mut self, mut write: impl FnMut(&TensorSpec, &mut [T])) {
        let Ok(()) = self.try_fill(|spec, values| {
            write(spec, values);
            Ok::<_, std::convert::Infallible>(())
        });
    }

    fn try_fill<E>(
        &mut self,
        mut write: impl FnMut(&TensorSpec, &mut [T]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let device = self.device.clone();
        self.base_mut().try_for_each(|parameter| parameter.try_fill(&device, &mut write))
    }

    /// As [`Policy::fill`], for the tensors of the adapters.
    pub fn try_fill_adapters<E>(
        &mut self,
        mut write: impl FnMut(&TensorSpec, &mut [T]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let device = self.device.clone();
        let adapters =
            self.weights.all_mut().into_iter().filter(|parameter| parameter.spec.role == Role::Adapter);
        adapters.into_iter().try_for_each(|parameter| parameter.try_fill(&device, &mut write))?;
        self.join_adapters();
        Ok(())
    }

    /// Copies the factors of adapters to the weights that they are joined to; follows every change of the adapters.
    fn join_adapters(&mut self) {
        let linears = self.weights.layers.iter_mut().flat_map(LayerWeights::linears_mut);
        let joined = linears.filter_map(|(_, Linear { weight, adapter, .. })| {
            // A quantised weight is given the factors whenever it is unpacked.
            let adapter = adapter.as_ref().filter(|_| !weight.is_quantised())?;
            let (a, b) = (adapter.a.matrix(), adapter.b.iter().map(Parameter::matrix).collect());
            Some(lora::Join { weight: weight.matrix_mut(), a, b, modules: &adapter.modules })
        });
        lora::join(&self.device, &joined.collect::<Vec<_>>());
    }
}

impl Policy<f32> {
    /// Copies the parameters, as they are stored, one after another to host memory.
    pub fn copy_to_host(&self) -> HostBuffer {
        let views = || self.weights.all().into_iter().map(Parameter::view);
        let n_bytes = views().map(|view| view.n_stored_bytes().0).sum();
        let mut buffer = HostBuffer::new(&self.device, n_bytes);
        let mut rest = &mut buffer[..];
        for view in views() {
            let (now, later) = rest.split_at_mut(view.n_stored_bytes().0);
            view.copy_stored(now, &mut []);
            rest = later;
        }
        buffer
    }

    /// Overwrites the parameters of a policy that is not trained with what [`Policy::copy_to_host`] gave.
    pub fn copy_from_host(&mut self, buffer: &HostBuffer) {
        let mut rest = &buffer[..];
        for parameter in self.weights.all_mut() {
            parameter.update(&self.device, |mut values| {
                let (now, later) = rest.split_at(values.view().n_stored_bytes().0);
                values.copy_from_stored(now);
                rest = later;
            });
        }
    }
}

impl<T: Float> Policy<T> {
    /// Chooses the factors of `LongRoPE` for a run whose sequences have at most `longest` tokens; before the first pass.
    pub fn fit_longest(&mut self, longest: usize) {
        self.config.fit_longest(longest);
    }

    /// Where `x A^T` of the policy's adapters lies; `None` without adapters.
    pub fn hidden_layout(&self) -> Option<&HiddenLayout> {
        self.hidden.as_ref()
    }

    /// Lets `write` overwrite every trained tensor where it lies, one after another.
    pub fn try_write<E>(
        &mut self,
        mut write: impl FnMut(&TensorSpec, ViewMut<'_, T>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let device = self.device.clone();
        self.weights.trained_mut().try_for_each(|parameter| parameter.try_write(&device, &mut write))?;
        self.join_adapters();
        Ok(())
    }

    /// As [`Policy::try_write`], for every tensor that is no adapter's.
    pub fn try_write_base<E>(
        &mut self,
        mut write: impl FnMut(&TensorSpec, ViewMut<'_, T>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let device = self.device.clone();
        self.base_mut().try_for_each(|parameter| parameter.try_write(&device, &mut write))
    }

    /// Of several ranks, each keeps the f32 masters of the weights that it owns. Nothing where the weights have none.
    pub fn share_masters(&mut self, ranks: &dyn Transport) -> std::result::Result<(), OutOfMemory> {
        let is_whole = ranks.world() == 1 || !self.device.has_masters();
        if is_whole {
            return Ok(());
        }
        let mut owned = Vec::new();
        for (parameter_idx, parameter) in self.weights.trained_mut().enumerate() {
            let share = Share { len: parameter.spec.n_elements(), parameter_idx, world: ranks.world() };
            parameter.keep_masters(share.owned_by(ranks.rank()))?;
            owned.push(share.owned_by(ranks.rank()));
        }
        self.owned = Some(owned);
        Ok(())
    }

    /// Whether other ranks have masters that this one has not.
    pub(crate) fn has_foreign_masters(&self) -> bool {
        self.owned.is_some()
    }

    /// A hash of all trained weights whose exact values this rank has, by which a change is found; 0 and -0 are the same
    /// weight.
    pub fn fingerprint(&self) -> u64 {
        let views = self.weights.trained().enumerate().map(|(parameter_idx, parameter)| match &self.owned {
            Some(owned) => parameter.view().range(owned[parameter_idx].clone()),
            None => parameter.view(),
        });
        reduce::fingerprint(&self.device, views)
    }

    /// The tensor and the place in it of the first weight that is not a finite number.
    pub fn first_non_finite(&self) -> Option<(&TensorSpec, usize)> {
        let plain = self.weights.all().into_iter().filter(|parameter| !parameter.is_quantised());
        let are_finite = reduce::are_finite(&self.device, plain.map(Parameter::view));
        let is_doubtful = |parameter: &&Parameter<T>| {
            if !parameter.is_quantised() {
                return !are_finite;
            }
            lora::unpack(&self.device, parameter.matrix(), None);
            !reduce::are_finite(&self.device, [parameter.view()])
        };
        let doubtful = self.weights.all().into_iter().filter(is_doubtful);
        doubtful
            .flat_map(|parameter| parameter.tensors(&self.device))
            .find_map(|(spec, values)| Some((spec, reduce::first_non_finite(&self.device, values.view())?)))
    }

    pub fn id(&self) -> PolicyId {
        self.id
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The policy's adapters; `None` if all weights are trained.
    pub fn lora(&self) -> Option<&LoraSpec> {
        self.lora.as_ref()
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Optimizer steps since the parameters were made or loaded.
    pub fn n_updates(&self) -> u64 {
        self.n_updates
    }

    /// Follows every step of the optimizer.
    pub(crate) fn finish_update(&mut self) {
        self.join_adapters();
        self.n_updates += 1;
    }

    /// Every tensor under its Hugging Face name, adapters included.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, WeightRows<'_, T>)> {
        self.weights.all().into_iter().flat_map(|parameter| parameter.tensors(&self.device))
    }

    /// The tensors that training changes: all of them, or those of the adapters.
    pub fn trained_tensors(&self) -> impl Iterator<Item = (&TensorSpec, View<'_, T>)> {
        self.weights.trained().flat_map(Parameter::views)
    }

    /// The first trained tensor that begins inside its parameter, at an element that is no multiple of `multiple`.
    pub fn first_unaligned_tensor(&self, multiple: usize) -> Option<(&TensorSpec, usize)> {
        let tensors = self.weights.trained().flat_map(|parameter| parameter.spec.tensors());
        let mut starts = tensors.map(|(spec, range)| (spec, range.start));
        starts.find(|(_, start)| !start.is_multiple_of(multiple))
    }

    /// Every tensor of a model without adapters that computes the same, one after another: the weight of an adapted module
    /// is `W + s B A`, computed in f64 and rounded once.
    pub fn merged_tensors(&self) -> impl Iterator<Item = (&TensorSpec, Vec<T>)> {
        let linears = || self.weights.layers.iter().flat_map(LayerWeights::linears);
        let base = self.weights.all().into_iter().filter(|parameter| parameter.spec.role != Role::Adapter);
        base.flat_map(|parameter| parameter.tensors(&self.device)).map(move |(spec, values)| {
            let mut values = values.to_vec();
            for (_, linear) in linears().filter(|(_, linear)| linear.adapter.is_some()) {
                linear.merge_into(&spec.name, &mut values);
            }
            (spec, values)
        })
    }

    /// The first factors of adapters whose second factor is zero: nothing that the policy computes depends on them.
    pub(super) fn idle_factors(&self) -> Vec<String> {
        let linears = self.weights.layers.iter().flat_map(LayerWeights::linears);
        let adapters = linears.filter_map(|(_, linear)| linear.adapter.as_ref());
        let pairs = adapters.flat_map(|adapter| adapter.a.spec.parts.iter().zip(&adapter.b));
        let idle = pairs.filter(|(_, b)| reduce::is_zero(&self.device, b.view()));
        idle.map(|(a, _)| a.name.clone()).collect()
    }

    /// The parameters that are no adapter's.
    pub(super) fn base_mut(&mut self) -> impl Iterator<Item = &mut Parameter<T>> {
        self.weights.all_mut().into_iter().filter(|parameter| parameter.spec.role != Role::Adapter)
    }
}

/// The parts of a model that have separate kernels.
fn kernel_uses(config: &ModelConfig, lora: Option<&LoraSpec>) -> Vec<KernelUse> {
    let of_layer = |layer: &LayerSpec| match &layer.mixer {
        Mixer::Attention(AttentionSpec { heads, rule, has_sinks, .. }) => {
            KernelUse::Attention { head_dim: heads.dim, is_ruled: *has_sinks || !rule.is_plain(heads.dim) }
        }
        Mixer::DeltaNet(spec) => KernelUse::DeltaNet { head_dim: spec.heads.key_dim },
    };
    config.layers.iter().map(of_layer).chain(lora.map(|_| KernelUse::Adapters)).collect()
}

/// Where `x A^T` of the adapters lies, layer by layer.
fn hidden_layout<T: Float>(weights: &DecoderWeights<Parameter<T>>) -> HiddenLayout {
    let layer = |layer: &LayerWeights<Parameter<T>>| {
        let adapted = layer.linears().filter_map(|(role, linear)| {
            let (adapter, weight) = (linear.adapter.as_ref()?, linear.weight.matrix());
            let columns = HiddenColumns {
                pitch: adapter.modules[0].hidden.of,
                is_joined: weight.is_joined(),
                joins_gradients: weight.joins_gradients(),
            };
            Some((role, columns))
        });
        adapted.collect()
    };
    HiddenLayout::new(weights.layers.iter().map(layer).collect())
}

/// Reads a tensor. The score of a reward model that starts from a language model is left as it is: only a config that was given a
/// new head gets past the check of the files without one.
pub(super) fn read_tensor(weights: &Weights, spec: &TensorSpec, values: &mut [f32]) -> Result<()> {
    if spec.name == SCORE && !weights.contains(SCORE) {
        return Ok(());
    }
    weights.read_f32(&spec.name, &spec.shape, values)
}

/// The key of a tensor's random numbers.
fn key_of(seed: u64, name: &str) -> RngKey {
    name.bytes().fold(RngKey::new(seed), |key, byte| key.derive(byte.into()))
}

/// The bias whose softplus is a step of DeltaNet's decay, log-uniform in 0.001 to 0.1 for a uniform number. `transformers`
/// starts at a bias of one, which multiplies most states by less than 0.01 per token: such heads keep nothing, have hardly
/// a gradient and do not learn to keep anything.
fn bias_of_step(uniform: f64) -> f64 {
    let (shortest, longest) = (0.001_f64, 0.1_f64);
    let step = (shortest.ln() + uniform * (longest / shortest).ln()).exp();
    step + (-(-step).exp_m1()).ln()
}
