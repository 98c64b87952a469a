//! Which kernels a GPU and the parts of a model use.

use super::kernel_cache::Target;
use super::kernels::{SOURCES, Scope, Source};

/// The width of a head that most models have.
pub(super) const LIKELY_HEAD_DIM: usize = 128;

/// A part of a model that has separate kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelUse {
    /// Layers with attention, and what all models with such layers use.
    Attention {
        head_dim: usize,
        /// Whether scores have a window, a softcap, sinks or a scale of their own.
        is_ruled: bool,
    },
    DeltaNet {
        head_dim: usize,
    },
    Adapters,
}

impl KernelUse {
    /// 0 for kernels that do not depend on it.
    fn head_dim(self) -> usize {
        match self {
            Self::Attention { head_dim, .. } | Self::DeltaNet { head_dim } => head_dim,
            Self::Adapters => 0,
        }
    }
}

/// The kernels of a GPU.
pub(super) struct KernelSet {
    /// As compilers name it.
    pub arch: String,
    /// Whether the GPU has Hopper's matrix instructions (wgmma) and copy engine (TMA).
    pub is_hopper: bool,
    /// Whether it stores f32.
    is_plain: bool,
}

impl KernelSet {
    pub fn new((major, minor): (u32, u32), is_plain: bool) -> Self {
        // Hopper's matrix instructions (wgmma) exist only in the architecture-specific target `sm_90a`.
        let arch = format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" });
        Self { is_hopper: arch == "sm_90a", arch, is_plain }
    }

    /// Those that every model uses.
    pub fn common(&self) -> impl Iterator<Item = Target> {
        let is_common = |source: &&&'static Source| {
            let is_once = source.scope == Scope::Once && !source.is_of_deltanet();
            is_once && source.is_of_precision(self.is_plain)
        };
        self.targets(SOURCES.iter().filter(is_common), 0)
    }

    /// Those that a part of a model uses from its first step on, in addition to those that every model uses.
    pub fn used_by(&self, part: KernelUse) -> impl Iterator<Item = Target> {
        let is_used = move |source: &&&'static Source| self.is_used(source, part);
        self.targets(SOURCES.iter().filter(is_used), part.head_dim())
    }

    fn targets<'a>(
        &self,
        sources: impl Iterator<Item = &'a &'static Source>,
        head_dim: usize,
    ) -> impl Iterator<Item = Target> {
        let target = move |source: &&'static Source| Target {
            source,
            arch: self.arch.clone(),
            head_dim: source.width(head_dim),
        };
        sources.map(target)
    }

    fn is_used(&self, source: &Source, part: KernelUse) -> bool {
        let is_hopper = self.is_hopper && !self.is_plain;
        let has_hopper_form = is_hopper && source.hopper_dims().contains(&part.head_dim());
        match (part, source.scope) {
            (KernelUse::Adapters, _) => source.is_of_adapters() && is_hopper,
            (KernelUse::DeltaNet { .. }, scope) => {
                source.is_of_deltanet() && (scope == Scope::Once || has_hopper_form)
            }
            (KernelUse::Attention { .. }, _) if source.is_of_adapters() || source.is_of_deltanet() => false,
            (KernelUse::Attention { is_ruled, .. }, _) if !source.suits_rule(is_ruled) => false,
            (_, Scope::Once | Scope::HopperOnDemand) => false,
            (_, Scope::Hopper | Scope::HopperRuled | Scope::HopperOnce) => has_hopper_form,
            (_, Scope::HeadDim | Scope::HeadDimRuled) => {
                source.is_of_precision(self.is_plain) && !(has_hopper_form && source.has_hopper_form())
            }
        }
    }
}
