//! A decoder's parameters as a tree of named parts. The tree is walked in one place, and loading, saving, gradients and
//! the optimizer all go through that walk.

mod specs;

use super::lora::{LoraSpec, SECOND};
use crate::config::{LinearRole, TensorSpec};
use stapo_ops::Shape;
use stapo_ops::lora::{Band, Module, pitch};
use std::convert::Infallible;
use std::ops::Range;

/// One value of type `P` for every parameter of a decoder: the [`Parameter`](super::parameter::Parameter) itself, its gradient, its optimizer state.
#[derive(Debug)]
pub struct DecoderWeights<P> {
    /// `[vocabulary, D]`
    pub embedding: P,
    pub layers: Vec<LayerWeights<P>>,
    /// `[D]`
    pub final_norm: P,
    /// `[vocabulary, D]`, or `[1, D]` of a reward model; `None` if the embedding is the head too ("tied").
    pub head: Option<P>,
}

/// The parameters of one layer. D width, Q query width, W = Q + 2 KV fused width.
#[derive(Debug)]
pub struct LayerWeights<P> {
    /// `[D]`: in front of attention, where the layer has this norm.
    pub attention_norm: Option<P>,
    /// `[W, D]`: queries, keys and values stacked; in DeltaNet also z, b and a.
    pub qkv: Linear<P>,
    /// In layers of DeltaNet.
    pub delta_net: Option<DeltaNet<P>>,
    /// Present in families that norm queries and keys.
    pub head_norms: Option<HeadNorms<P>>,
    /// `[query heads]`: the learned logits that join the softmax's denominators, in families that have them.
    pub sinks: Option<P>,
    /// `[D, Q]`
    pub output: Linear<P>,
    /// `[D]`: of what attention adds to the residual stream.
    pub attended_norm: Option<P>,
    /// `[D]`: in front of the feed-forward.
    pub ffn_norm: Option<P>,
    pub ffn: Ffn<P>,
    /// `[D]`: of what the feed-forward adds to the residual stream.
    pub fed_norm: Option<P>,
}

/// A linear layer: `y = x W^T + b`, and the terms of its adapters. Every product of a layer goes through its methods, see `linear.rs`.
#[derive(Debug)]
pub struct Linear<P> {
    /// `[outputs, inputs]`
    pub weight: P,
    /// `[outputs]`
    pub bias: Option<P>,
    pub adapter: Option<Adapter<P>>,
}

/// The low-rank adapters of a linear layer's modules (Hu et al., 2021): each adds `s (x A^T) B^T` to its outputs.
#[derive(Debug)]
pub struct Adapter<P> {
    /// `[n rank, inputs]`: the first factors of n modules, one below the other.
    pub a: P,
    /// `[outputs of the module, rank]` each: the second factors.
    pub b: Vec<P>,
    /// One for each of the second factors.
    pub modules: Vec<Module>,
}

/// `[head_dim]` each, or of the widths of all query heads and of all key heads.
#[derive(Debug)]
pub struct HeadNorms<P> {
    pub query: P,
    pub key: P,
}

/// What DeltaNet has besides its projections: see `stapo_ops::deltanet::Parameters`.
#[derive(Debug)]
pub struct DeltaNet<P> {
    pub conv: P,
    pub a_log: P,
    pub dt_bias: P,
    pub norm: P,
}

/// The feed-forward half of a layer.
#[derive(Debug)]
pub enum Ffn<P> {
    SwiGlu(SwiGlu<P>),
}

/// `down(activation(gate(x)) * up(x))`. F feed-forward width.
#[derive(Debug)]
pub struct SwiGlu<P> {
    /// `[2 F, D]`: gate and up stacked.
    pub gate_up: Linear<P>,
    /// `[D, F]`
    pub down: Linear<P>,
}

impl<P> DecoderWeights<P> {
    /// The tree of what `f` makes of every parameter, taken in the order in which checkpoints list them.
    pub fn try_map<'a, Q, E>(
        &'a self,
        f: &mut impl FnMut(&'a P) -> Result<Q, E>,
    ) -> Result<DecoderWeights<Q>, E> {
        Ok(DecoderWeights {
            embedding: f(&self.embedding)?,
            layers: self.layers.iter().map(|layer| layer.try_map(f)).collect::<Result<_, _>>()?,
            final_norm: f(&self.final_norm)?,
            head: self.head.as_ref().map(f).transpose()?,
        })
    }

    /// Every parameter, in the order of [`DecoderWeights::try_map`].
    pub fn all(&self) -> Vec<&P> {
        let mut all = Vec::new();
        let Ok(_) = self.try_map(&mut |parameter| {
            all.push(parameter);
            Ok::<_, Infallible>(())
        });
        all
    }

    /// Calls `f` with every parameter, in the order of [`DecoderWeights::try_map`].
    pub fn visit_mut<'a>(&'a mut self, f: &mut impl FnMut(&'a mut P)) {
        f(&mut self.embedding);
        self.layers.iter_mut().for_each(|layer| layer.visit_mut(f));
        f(&mut self.final_norm);
        self.head.iter_mut().for_each(f);
    }

    /// Every parameter, in the order of [`DecoderWeights::try_map`].
    pub fn all_mut(&mut self) -> Vec<&mut P> {
        let mut all = Vec::new();
        self.visit_mut(&mut |parameter| all.push(parameter));
        all
    }

    /// The parameter that multiplies the last hidden state: the head's own or the tied embedding's.
    pub fn head(&self) -> &P {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    pub fn head_mut(&mut self) -> &mut P {
        self.head.as_mut().unwrap_or(&mut self.embedding)
    }
}

impl<P> LayerWeights<P> {
    /// The layer's linear layers, in the order of checkpoints.
    pub fn linears(&self) -> impl Iterator<Item = (LinearRole, &Linear<P>)> {
        let attention = [(LinearRole::QueryKeyValue, &self.qkv), (LinearRole::AttentionOutput, &self.output)];
        let ffn = match &self.ffn {
            Ffn::SwiGlu(ffn) => [(LinearRole::GateUp, &ffn.gate_up), (LinearRole::Down, &ffn.down)],
        };
        attention.into_iter().chain(ffn)
    }

    pub fn linears_mut(&mut self) -> impl Iterator<Item = (LinearRole, &mut Linear<P>)> {
        let attention =
            [(LinearRole::QueryKeyValue, &mut self.qkv), (LinearRole::AttentionOutput, &mut self.output)];
        let ffn = match &mut self.ffn {
            Ffn::SwiGlu(ffn) => [(LinearRole::GateUp, &mut ffn.gate_up), (LinearRole::Down, &mut ffn.down)],
        };
        attention.into_iter().chain(ffn)
    }

    /// Every parameter of the layer, in the order of [`DecoderWeights::try_map`].
    pub fn all(&self) -> Vec<&P> {
        let mut all = Vec::new();
        let Ok(_) = self.try_map(&mut |parameter| {
            all.push(parameter);
            Ok::<_, Infallible>(())
        });
        all
    }

    pub fn try_map<'a, Q, E>(
        &'a self,
        f: &mut impl FnMut(&'a P) -> Result<Q, E>,
    ) -> Result<LayerWeights<Q>, E> {
        Ok(LayerWeights {
            attention_norm: self.attention_norm.as_ref().map(&mut *f).transpose()?,
            qkv: self.qkv.try_map(f)?,
            delta_net: match &self.delta_net {
                Some(DeltaNet { conv, a_log, dt_bias, norm }) => {
                    Some(DeltaNet { conv: f(conv)?, a_log: f(a_log)?, dt_bias: f(dt_bias)?, norm: f(norm)? })
                }
                None => None,
            },
            head_norms: match &self.head_norms {
                Some(norms) => Some(HeadNorms { query: f(&norms.query)?, key: f(&norms.key)? }),
                None => None,
            },
            sinks: self.sinks.as_ref().map(&mut *f).transpose()?,
            output: self.output.try_map(f)?,
            attended_norm: self.attended_norm.as_ref().map(&mut *f).transpose()?,
            ffn_norm: self.ffn_norm.as_ref().map(&mut *f).transpose()?,
            ffn: match &self.ffn {
                Ffn::SwiGlu(ffn) => {
                    Ffn::SwiGlu(SwiGlu { gate_up: ffn.gate_up.try_map(f)?, down: ffn.down.try_map(f)? })
                }
            },
            fed_norm: self.fed_norm.as_ref().map(f).transpose()?,
        })
    }

    pub fn visit_mut<'a>(&'a mut self, f: &mut impl FnMut(&'a mut P)) {
        self.attention_norm.iter_mut().for_each(&mut *f);
        self.qkv.visit_mut(f);
        if let Some(DeltaNet { conv, a_log, dt_bias, norm }) = &mut self.delta_net {
            [conv, a_log, dt_bias, norm].into_iter().for_each(&mut *f);
        }
        if let Some(norms) = &mut self.head_norms {
            f(&mut norms.query);
            f(&mut norms.key);
        }
        self.sinks.iter_mut().for_each(&mut *f);
        self.output.visit_mut(f);
        self.attended_norm.iter_mut().for_each(&mut *f);
        self.ffn_norm.iter_mut().for_each(&mut *f);
        match &mut self.ffn {
            Ffn::SwiGlu(ffn) => {
                ffn.gate_up.visit_mut(f);
                ffn.down.visit_mut(f);
            }
        }
        self.fed_norm.iter_mut().for_each(f);
    }
}

impl<P> Ffn<P> {
    /// The one product with which the feed-forward ends; `None` if it does not end with a single product.
    #[allow(clippy::unnecessary_wraps, reason = "a mixture of experts does not end with a single product")]
    pub fn down(&self) -> Option<&Linear<P>> {
        match self {
            Self::SwiGlu(ffn) => Some(&ffn.down),
        }
    }
}

impl<P> Linear<P> {
    fn try_map<'a, Q, E>(&'a self, f: &mut impl FnMut(&'a P) -> Result<Q, E>) -> Result<Linear<Q>, E> {
        Ok(Linear {
            weight: f(&self.weight)?,
            bias: self.bias.as_ref().map(&mut *f).transpose()?,
            adapter: match &self.adapter {
                Some(Adapter { a, b, modules }) => Some(Adapter {
                    a: f(a)?,
                    b: b.iter().map(f).collect::<Result<_, _>>()?,
                    modules: modules.clone(),
                }),
                None => None,
            },
        })
    }

    fn visit_mut<'a>(&'a mut self, f: &mut impl FnMut(&'a mut P)) {
        f(&mut self.weight);
        self.bias.iter_mut().for_each(&mut *f);
        if let Some(Adapter { a, b, .. }) = &mut self.adapter {
            f(a);
            b.iter_mut().for_each(f);
        }
    }
}

impl Adapter<ParameterSpec> {
    /// The adapters of a linear layer whose `weight` is one tensor or several stacked; `None` if no module of it is a
    /// target.
    fn for_weight(lora: &LoraSpec, weight: &ParameterSpec) -> Option<Self> {
        let outputs = weight.parts.iter().map(|part| part.shape[0]).sum();
        let (mut a, mut b, mut bands) = (Vec::new(), Vec::new(), Vec::new());
        let mut start = 0;
        for part in &weight.parts {
            if let Some([first, second]) = lora.factors(part) {
                a.push(first);
                b.push(ParameterSpec::stacked(vec![second], Role::Adapter));
                bands.push(Band { start, len: part.shape[0], of: outputs });
            }
            start += part.shape[0];
        }
        let pitch = pitch(bands.len(), lora.rank);
        let module = |(idx, outputs): (usize, Band)| Module {
            scale: lora.factor(),
            hidden: Band { start: idx * lora.rank, len: lora.rank, of: pitch },
            outputs,
        };
        let modules = bands.into_iter().enumerate().map(module).collect();
        (!a.is_empty()).then(|| Self { a: ParameterSpec::stacked(a, Role::Adapter), b, modules })
    }
}

/// Modules whose tensors are stacked in one parameter.
const QKV: [&str; 3] = ["q_proj", "k_proj", "v_proj"];
const GATE_UP: [&str; 2] = ["gate_proj", "up_proj"];
const DELTA_NET: [&str; 4] = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"];

/// A name that all tensors of one parameter share and that the parameters before and after it do not have, so that a list
/// of trained tensors in their order can be divided into parameters without a model's configuration.
pub fn parameter_of(tensor: &str) -> String {
    // Of adapters, the first factors are stacked and the second are not.
    let is_stacked = |name: &&&str| !tensor.ends_with(SECOND) && tensor.contains(&format!(".{name}."));
    match QKV.iter().chain(&GATE_UP).chain(&DELTA_NET).find(is_stacked) {
        Some(name) if QKV.contains(name) => tensor.replace(name, "qkv"),
        Some(name) if DELTA_NET.contains(name) => tensor.replace(name, "in_proj"),
        Some(name) => tensor.replace(name, "gate_up"),
        None => tensor.to_string(),
    }
}

/// Which tensors of a model's files make up one parameter.
#[derive(Debug, Clone)]
pub struct ParameterSpec {
    /// The tensors by their Hugging Face names, one below the other.
    pub parts: Vec<TensorSpec>,
    /// Of all parts together. A matrix multiplies and is subject to weight decay; a norm's weight and a bias are vectors
    /// and are not.
    pub kind: ParameterKind,
    pub role: Role,
    /// Columns for adapters after the rows of a frozen matrix, on a device that joins them.
    pub n_joined: usize,
}

/// What training does with a parameter. Gradients, optimizer state and checkpoints have trained parameters alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Trained, of a model without adapters.
    Trained,
    /// Of a model whose adapters are trained in its place.
    Frozen,
    /// A factor of an adapter, trained.
    Adapter,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterKind {
    Matrix(Shape),
    Vector { len: usize },
}

impl ParameterSpec {
    fn stacked(parts: Vec<TensorSpec>, role: Role) -> Self {
        let kind = match parts[0].shape[..] {
            [_, inputs] => {
                let outputs = parts.iter().map(|part| part.shape[0]).sum();
                ParameterKind::Matrix(Shape { outputs, inputs })
            }
            // The weight of a depthwise convolution multiplies number by number, as a norm's does.
            _ => ParameterKind::Vector { len: parts.iter().map(TensorSpec::n_elements).sum() },
        };
        Self { parts, kind, role, n_joined: 0 }
    }

    pub fn n_elements(&self) -> usize {
        match self.kind {
            ParameterKind::Matrix(shape) => shape.len(),
            ParameterKind::Vector { len } => len,
        }
    }

    pub fn is_matrix(&self) -> bool {
        matches!(self.kind, ParameterKind::Matrix(_))
    }

    pub fn is_trained(&self) -> bool {
        self.role != Role::Frozen
    }

    /// Every tensor with the range of elements that it takes up in the parameter.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, Range<usize>)> {
        let mut end = 0;
        self.parts.iter().map(move |spec| {
            let start = end;
            end += spec.n_elements();
            (spec, start..end)
        })
    }
}
