//! The parts of a model beyond those of Llama, for people to read, and what a GPU does not compute.

use super::{
    AttentionBiases, AttentionSpec, DeltaNetSpec, EmbeddingScale, FeedForward, LayerSpec, ModelConfig,
    NormPlacement, QkNorm, RopeScaling,
};
use crate::error::{Error, Result};
use stapo_ops::Device;
use stapo_ops::attention::ScoreRule;
use stapo_ops::swiglu::Gate;
use std::fmt;

/// The most bytes of one head's state on a GPU, where a block of threads holds it.
const MAX_GPU_STATE: usize = 128 * 128 * size_of::<f32>();
/// The widest norm of all query heads on a GPU.
const MAX_GPU_NORM: usize = 8192;

/// A part that some families have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    HeadNorms,
    ProjectionNorms,
    NormsAfter,
    NormsAround,
    /// The files have the weights of norms less 1.
    NormsLessOne,
    QueryKeyValueBiases,
    Biases,
    FeedForwardBiases,
    /// The files have q, k and v as one matrix, and gate and up as one.
    JoinedProjections,
    /// Keys of the window, and layers that have it.
    Window {
        keys: usize,
        n_layers: usize,
    },
    ScoreScale,
    ScoreSoftcap,
    Sinks,
    /// Layers without positions.
    NoRope {
        n_layers: usize,
    },
    PartialRope {
        dims: usize,
    },
    LongRope,
    /// Layers with a window have another rope than those without.
    RopeByKind,
    /// Layers of gated DeltaNet.
    DeltaNet {
        n_layers: usize,
    },
    OutputGate,
    TanhGelu,
    EmbeddingScale,
    ResidualScale,
    LogitDivisor,
    LogitSoftcap,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HeadNorms => f.write_str("norm of each query and key head"),
            Self::ProjectionNorms => f.write_str("norm of all query heads and of all key heads"),
            Self::NormsAfter => f.write_str("norms after attention and feed-forward"),
            Self::NormsAround => f.write_str("norms before and after attention and feed-forward"),
            Self::NormsLessOne => f.write_str("norms stored less 1"),
            Self::QueryKeyValueBiases => f.write_str("biases on q, k and v"),
            Self::Biases => f.write_str("biases on all attention projections"),
            Self::FeedForwardBiases => f.write_str("biases on the feed-forward"),
            Self::JoinedProjections => f.write_str("joined projections"),
            Self::Window { keys, n_layers } => write!(f, "window of {keys} keys in {}", layers(*n_layers)),
            Self::ScoreScale => f.write_str("scale of attention scores"),
            Self::Sinks => f.write_str("learned sinks of attention"),
            Self::ScoreSoftcap => f.write_str("softcap of attention scores"),
            Self::NoRope { n_layers } => write!(f, "no positions in {}", layers(*n_layers)),
            Self::PartialRope { dims } => write!(f, "rope on {dims} dimensions of a head"),
            Self::LongRope => f.write_str("LongRoPE"),
            Self::RopeByKind => f.write_str("another rope in layers with a window"),
            Self::DeltaNet { n_layers } => write!(f, "gated DeltaNet in {}", layers(*n_layers)),
            Self::OutputGate => f.write_str("gate on attention's outputs"),
            Self::TanhGelu => f.write_str("tanh-GELU"),
            Self::EmbeddingScale => f.write_str("scaled embeddings"),
            Self::ResidualScale => f.write_str("scaled results of attention and feed-forward"),
            Self::LogitDivisor => f.write_str("divided logits"),
            Self::LogitSoftcap => f.write_str("softcap of logits"),
        }
    }
}

fn layers(n_layers: usize) -> String {
    if n_layers == 1 { "1 layer".into() } else { format!("{n_layers} layers") }
}

impl ModelConfig {
    /// The parts that the model has beyond those of Llama.
    pub fn parts(&self) -> Vec<Part> {
        let count_layers =
            |has: &dyn Fn(&LayerSpec) -> bool| self.layers.iter().filter(|layer| has(layer)).count();
        let any_layer = |has: &dyn Fn(&LayerSpec) -> bool| count_layers(has) > 0;
        let count = |has: &dyn Fn(&AttentionSpec) -> bool| {
            self.attentions().filter(|attention| has(attention)).count()
        };
        let any = |has: &dyn Fn(&AttentionSpec) -> bool| count(has) > 0;
        let n_without_rope = count(&|attention| attention.rotary_dim == 0);
        let window = self.attentions().find_map(|attention| attention.rule.window);
        let n_windows = count(&|attention| attention.rule.window.is_some());
        let n_delta_nets = count_layers(&|layer| layer.delta_net().is_some());
        let partial = self
            .attentions()
            .find(|attention| attention.rotary_dim > 0 && attention.rotary_dim < attention.heads.dim);
        let mut full = self.attentions().filter(|attention| attention.rule.window.is_none());
        let other_rope = |sliding: &AttentionSpec| full.any(|full| full.rope != sliding.rope);
        let has_ropes_by_kind =
            self.attentions().find(|attention| attention.rule.window.is_some()).is_some_and(other_rope);
        let plain_scale =
            |attention: &AttentionSpec| attention.rule.scale == ScoreRule::plain(attention.heads.dim).scale;
        let has_biases = |layer: &LayerSpec| {
            let FeedForward::Gated { has_biases, .. } = layer.feed_forward;
            has_biases
        };
        let found = [
            (n_delta_nets > 0).then_some(Part::DeltaNet { n_layers: n_delta_nets }),
            any(&|attention| attention.has_output_gate).then_some(Part::OutputGate),
            any(&|attention| attention.qk_norm == QkNorm::PerHead).then_some(Part::HeadNorms),
            any(&|attention| attention.qk_norm == QkNorm::PerProjection).then_some(Part::ProjectionNorms),
            any_layer(&|layer| layer.norms == NormPlacement::After).then_some(Part::NormsAfter),
            any_layer(&|layer| layer.norms == NormPlacement::Both).then_some(Part::NormsAround),
            self.family.norms_less_one().then_some(Part::NormsLessOne),
            any(&|attention| attention.biases == AttentionBiases::QueryKeyValue)
                .then_some(Part::QueryKeyValueBiases),
            any(&|attention| attention.biases == AttentionBiases::All).then_some(Part::Biases),
            any_layer(&has_biases).then_some(Part::FeedForwardBiases),
            self.family.joins_projections().then_some(Part::JoinedProjections),
            window.map(|keys| Part::Window { keys, n_layers: n_windows }),
            any(&|attention| !plain_scale(attention)).then_some(Part::ScoreScale),
            any(&|attention| attention.rule.softcap.is_some()).then_some(Part::ScoreSoftcap),
            any(&|attention| attention.has_sinks).then_some(Part::Sinks),
            (n_without_rope > 0).then_some(Part::NoRope { n_layers: n_without_rope }),
            partial.map(|attention| Part::PartialRope { dims: attention.rotary_dim }),
            any(&|attention| matches!(attention.rope.scaling, RopeScaling::Long { .. }))
                .then_some(Part::LongRope),
            has_ropes_by_kind.then_some(Part::RopeByKind),
            any_layer(&|layer| layer.gate() == Gate::GeluTanh).then_some(Part::TanhGelu),
            (self.embedding_scale != EmbeddingScale::One).then_some(Part::EmbeddingScale),
            any_layer(&|layer| layer.residual_scale != 1.0).then_some(Part::ResidualScale),
            (self.logits.divisor != 1.0).then_some(Part::LogitDivisor),
            self.logits.softcap.map(|_| Part::LogitSoftcap),
        ];
        found.into_iter().flatten().collect()
    }

    /// Refuses a model with a part or a size of heads that the device does not compute, before any weight is read.
    pub fn check_device(&self, device: &Device) -> Result<()> {
        device.max_head_dim().map_or(Ok(()), |max_dim| self.check_gpu(max_dim))
    }

    fn check_gpu(&self, max_dim: usize) -> Result<()> {
        self.check_head_dim(max_dim)?;
        let refuse = |problem: String| self.refuse_on_gpu(problem);
        for DeltaNetSpec { heads, .. } in self.layers.iter().filter_map(LayerSpec::delta_net) {
            let (key, value) = (heads.key_dim, heads.value_dim);
            if key * value * size_of::<f32>() > MAX_GPU_STATE {
                return refuse(format!("a GPU computes states of at most 128 by 128, not {key} by {value}"));
            }
        }
        for attention in self.attentions() {
            let columns = attention.heads.out_width();
            if attention.qk_norm == QkNorm::PerProjection && columns > MAX_GPU_NORM {
                let part = Part::ProjectionNorms;
                return refuse(format!(
                    "a GPU computes at most {MAX_GPU_NORM} columns, not {columns}: {part}"
                ));
            }
        }
        Ok(())
    }

    /// Refuses a model with wider heads than a GPU computes.
    pub fn check_head_dim(&self, max_dim: usize) -> Result<()> {
        let widest = self.attentions().map(|attention| attention.heads.dim).max().unwrap_or(0);
        if widest <= max_dim {
            return Ok(());
        }
        self.refuse_on_gpu(format!("this GPU computes heads of at most {max_dim}, not {widest}"))
    }

    fn refuse_on_gpu(&self, problem: String) -> Result<()> {
        Err(Error::unsupported(self.family.architecture(), problem, "use --device cpu"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pretrained;
    use crate::config::{Family, Mixer};
    use crate::testing::tiny_config;
    use std::path::Path;

    fn parts_of(golden: &str) -> Vec<String> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(golden);
        Pretrained::read_config(&folder).unwrap().parts().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_model_has_the_parts_that_its_config_switches_on() {
        let all = "biases on all attention projections";
        let head_norms = "norm of each query and key head";
        let projection_norms = "norm of all query heads and of all key heads";
        let around = "norms before and after attention and feed-forward";
        let after = "norms after attention and feed-forward";
        let feed_forward = "biases on the feed-forward";
        let (less_one, two_ropes) = ("norms stored less 1", "another rope in layers with a window");
        for (golden, expected) in [
            ("llama3-untied-gqa1", &[][..]),
            ("llama-biased", &[all, feed_forward]),
            ("qwen3-biased", &[head_norms, all]),
            ("qwen2-tied-gqa7", &["biases on q, k and v"]),
            ("smollm3-tied", &["no positions in 1 layer"]),
            ("smollm3-biased", &[all, feed_forward]),
            ("mistral-window", &["window of 7 keys in 2 layers"]),
            ("olmo2-untied", &[projection_norms, after]),
            ("olmo3-windows", &[projection_norms, after, "window of 6 keys in 2 layers", two_ropes]),
            (
                "gemma2-softcaps",
                &[
                    around,
                    less_one,
                    "window of 8 keys in 1 layer",
                    "scale of attention scores",
                    "softcap of attention scores",
                    "tanh-GELU",
                    "scaled embeddings",
                    "softcap of logits",
                ],
            ),
            ("phi3-joined", &["joined projections", "window of 30 keys in 2 layers"]),
            ("phi3-longrope", &["joined projections", "rope on 6 dimensions of a head", "LongRoPE"]),
            (
                "granite-scaled",
                &[
                    "scale of attention scores",
                    "scaled embeddings",
                    "scaled results of attention and feed-forward",
                    "divided logits",
                ],
            ),
            (
                "qwen35-hybrid",
                &[
                    "gated DeltaNet in 2 layers",
                    "gate on attention's outputs",
                    head_norms,
                    less_one,
                    "rope on 4 dimensions of a head",
                ],
            ),
            ("gpt-oss-attention", &[all, "window of 6 keys in 2 layers", "learned sinks of attention"]),
        ] {
            assert_eq!(parts_of(golden), expected, "{golden}");
        }
    }

    #[test]
    fn what_a_gpu_does_not_compute_is_refused_with_its_size() {
        let refused =
            |config: &ModelConfig, max_dim: usize| config.check_gpu(max_dim).unwrap_err().to_string();
        let gemma = tiny_config(Family::Gemma3);
        gemma.check_gpu(6).unwrap();
        let said = refused(&gemma, 4);
        assert_eq!(
            said,
            "Gemma3ForCausalLM: this GPU computes heads of at most 4, not 6\nhint: use --device cpu"
        );
        let mut olmo = tiny_config(Family::Olmo2);
        let heads = |olmo: &mut ModelConfig, n| {
            olmo.attentions_mut().for_each(|attention| {
                attention.heads.query = n;
                attention.heads.dim = 128;
            });
        };
        heads(&mut olmo, 64);
        olmo.check_gpu(128).unwrap();
        heads(&mut olmo, 65);
        let said = refused(&olmo, 128);
        assert!(
            said.contains("a GPU computes at most 8192 columns, not 8320: norm of all query heads"),
            "{said}"
        );
        let mut qwen = tiny_config(Family::Qwen35);
        let state = |qwen: &mut ModelConfig, key_dim, value_dim| {
            for layer in &mut qwen.layers {
                if let Mixer::DeltaNet(spec) = &mut layer.mixer {
                    (spec.heads.key_dim, spec.heads.value_dim) = (key_dim, value_dim);
                }
            }
        };
        state(&mut qwen, 256, 64);
        qwen.check_gpu(256).unwrap();
        state(&mut qwen, 129, 128);
        let said = refused(&qwen, 256);
        assert!(said.contains("a GPU computes states of at most 128 by 128, not 129 by 128"), "{said}");
    }
}
