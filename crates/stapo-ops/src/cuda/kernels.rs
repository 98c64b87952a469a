//! The CUDA sources. Their text is part of the program; NVRTC compiles it for the GPU at hand, and the machine code is kept
//! on disk under the hash of everything that the code depends on.

use std::ffi::{CStr, CString};

use cudarc::nvrtc::{result, sys};
use sha2::{Digest, Sha256};

use super::error::CudaError;

/// A file of kernels and the shared files in front of it, which NVRTC compiles as one text.
pub struct Source {
    pub name: &'static str,
    parts: &'static [&'static str],
    pub scope: Scope,
}

/// How often and for which GPUs a source is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Once,
    /// Once for each width of a head.
    HeadDim,
    /// Once for each width of a head, where layers have a rule of scores.
    HeadDimRuled,
    /// Once for each of [`Source::hopper_dims`], for `sm_90a` only.
    Hopper,
    /// The same, where layers have a rule of scores.
    HopperRuled,
    /// The same, when a layer first needs it.
    HopperOnDemand,
    /// Once, for `sm_90a` only.
    HopperOnce,
}

impl Scope {
    /// Whether a source is compiled for each width of a head.
    pub(super) fn has_width(self) -> bool {
        !matches!(self, Scope::Once | Scope::HopperOnce)
    }
}

const PRELUDE: &str = include_str!("prelude.cu");
const EIGHT: &str = include_str!("eight.cu");
const ROW_NORMS: &str = include_str!("../rmsnorm/rmsnorm.cu");
/// The kernels of rmsnorm.cu for rows in f32, instead of those for bf16.
const FLOAT_ROWS: &str = "#define FLOAT_ROWS\n";
const ROW: &str = include_str!("../lm_head/row.cu");
const HOPPER: &str = include_str!("../attention/hopper.cu");
const TILES: &str = include_str!("../attention/tiles.cu");
const SOFTMAX: &str = include_str!("../attention/softmax.cu");
const STREAMS: &str = include_str!("../attention/streams.cu");
const FEEDS: &str = include_str!("../attention/feeds.cu");
const RULE: &str = include_str!("../attention/rule.cu");
const FORWARD_FEED: &str = include_str!("../attention/forward_feed_hopper.cu");
const BACKWARD_FEED: &str = include_str!("../attention/backward_feed_hopper.cu");
/// Makes the kernels of a source take the rule of scores.
const TAKES_RULE: &str = "#define SCORE_RULE\n";
/// Few consumers, with more registers each: see forward_feed_hopper.cu.
const LONG: &str = "#define LONG_SEQUENCES\n";
/// Two heads at a time: see forward_feed_hopper.cu.
const SHORT: &str = "#define SHORT_SEQUENCES\n";
/// Keys and values of a paged cache: see forward_feed_hopper.cu.
const PAGED_KEYS: &str = "#define PAGED_KEYS\n";
/// Two blocks share keys and values: see forward_feed_hopper.cu.
const PAIRED: &str = "#define PAIRED_BLOCKS\n";
const PIPELINED_FORWARD: &str = include_str!("../attention/forward_pipelined_hopper.cu");
const DECODE_FEED: &str = include_str!("../attention/decode_feed.cu");
const MMA: &str = include_str!("../attention/mma.cu");
const WGMMA: &str = include_str!("wgmma.cu");
const WGMMA_SHARED: &str = include_str!("wgmma_shared.cu");
const TMA: &str = include_str!("tma.cu");
const CLUSTER: &str = include_str!("cluster.cu");
const RING: &str = include_str!("ring.cu");
const SMALL_M: &str = include_str!("../matmul/small_m.cu");
/// Leaves out the kernels of small_m.cu, whose functions other sources use.
const WITHOUT_SMALL_M_KERNELS: &str = "#define WITHOUT_SMALL_M_KERNELS\n";
const LARGE_M: &str = include_str!("../matmul/large_m.cu");
/// The kernels of large_m.cu for deep products, instead of those for gated ones.
const DEEP_PRODUCTS: &str = "#define DEEP_PRODUCTS\n";
const ADAPTERS: &str = include_str!("../lora/operands.cu");
const SIGNALS: &str = include_str!("../lora/signals.cu");
const GATE: &str = include_str!("../swiglu/gate.cu");
const HEAD: &str = include_str!("../rope/head.cu");
const FINISH: &str = include_str!("../rope/finish.cu");
const DELTANET: &str = include_str!("../deltanet/heads.cu");
const CONVOLUTION: &str = include_str!("../deltanet/convolution.cu");

macro_rules! sources {
    ($($id:ident = $name:literal, $scope:ident, [$($part:expr),*];)*) => {
        $(pub(crate) static $id: Source = Source { name: $name, parts: &[PRELUDE, $($part),*], scope: Scope::$scope };)*
        /// Every source.
        pub static SOURCES: &[&Source] = &[$(&$id),*];
    };
}

sources! {
    ELEMENTWISE = "elementwise", Once, [include_str!("elementwise.cu")];
    ADAMW = "adamw", Once, [include_str!("../adamw/adamw.cu"), include_str!("../adamw/adamw8.cu")];
    EMBEDDING = "embedding", Once, [include_str!("../embedding/embedding.cu")];
    QUANTISED = "quantised", Once, [include_str!("../quantised/unpack.cu")];
    RMSNORM = "rmsnorm", Once, [EIGHT, ROW_NORMS];
    RMSNORM_FLOAT = "rmsnorm_float", Once, [FLOAT_ROWS, EIGHT, ROW_NORMS];
    RMSNORM_WARPS = "rmsnorm_warps", Once, [include_str!("../rmsnorm/warps.cu")];
    ROPE = "rope", HeadDim, [HEAD, FINISH, include_str!("../rope/rope.cu")];
    ROPE_PARTS = "rope_parts", Once, [EIGHT, include_str!("../rope/parts.cu")];
    SHA256 = "sha256", Once, [include_str!("../sha256/sha256.cu")];
    SWIGLU = "swiglu", Once, [GATE, include_str!("../swiglu/swiglu.cu")];
    LM_HEAD = "lm_head", Once, [ROW, include_str!("../lm_head/lm_head.cu")];
    SAMPLING = "sampling", Once, [ROW, include_str!("../sampling/sampling.cu")];
    ATTENTION = "attention", HeadDim, [TILES, SOFTMAX, RULE, MMA, FEEDS, include_str!("../attention/forward.cu")];
    ATTENTION_PAGED = "attention_paged", HeadDim, [TILES, SOFTMAX, RULE, MMA, FEEDS, include_str!("../attention/paged.cu")];
    ATTENTION_DELTA = "attention_delta", HeadDim, [include_str!("../attention/delta.cu")];
    ATTENTION_BACKWARD = "attention_backward", HeadDim,
        [TILES, SOFTMAX, RULE, MMA, STREAMS, include_str!("../attention/backward.cu")];
    ATTENTION_RULED = "attention_ruled", HeadDimRuled,
        [TAKES_RULE, TILES, SOFTMAX, RULE, MMA, FEEDS, include_str!("../attention/forward.cu")];
    ATTENTION_PAGED_RULED = "attention_paged_ruled", HeadDimRuled,
        [TAKES_RULE, TILES, SOFTMAX, RULE, MMA, FEEDS, include_str!("../attention/paged.cu")];
    ATTENTION_BACKWARD_RULED = "attention_backward_ruled", HeadDimRuled,
        [TAKES_RULE, TILES, SOFTMAX, RULE, MMA, STREAMS, include_str!("../attention/backward.cu")];
    ATTENTION_HOPPER = "attention_hopper", Hopper,
        [TILES, SOFTMAX, RULE, WGMMA, HOPPER, FEEDS, include_str!("../attention/forward_hopper.cu")];
    ATTENTION_HOPPER_RULED = "attention_hopper_ruled", HopperRuled,
        [TAKES_RULE, TILES, SOFTMAX, RULE, WGMMA, HOPPER, FEEDS, include_str!("../attention/forward_hopper.cu")];
    ATTENTION_PIPELINED_HOPPER = "attention_pipelined_hopper", Hopper,
        [TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_PIPELINED_HOPPER_RULED = "attention_pipelined_hopper_ruled", HopperRuled,
        [TAKES_RULE, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_LONG_HOPPER = "attention_long_hopper", Hopper,
        [LONG, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_LONG_PAIRED_HOPPER = "attention_long_paired_hopper", HopperOnDemand,
        [LONG, PAIRED, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, CLUSTER, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_LONG_HOPPER_RULED = "attention_long_hopper_ruled", HopperRuled,
        [TAKES_RULE, LONG, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_SHORT_HOPPER = "attention_short_hopper", Hopper,
        [SHORT, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_SHORT_HOPPER_RULED = "attention_short_hopper_ruled", HopperOnDemand,
        [TAKES_RULE, SHORT, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_PREFILL_HOPPER = "attention_prefill_hopper", Hopper,
        [PAGED_KEYS, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_PREFILL_HOPPER_RULED = "attention_prefill_hopper_ruled", HopperRuled,
        [TAKES_RULE, PAGED_KEYS, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_LONG_PREFILL_HOPPER = "attention_long_prefill_hopper", HopperOnDemand,
        [LONG, PAGED_KEYS, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_LONG_PAIRED_PREFILL_HOPPER = "attention_long_paired_prefill_hopper", HopperOnDemand,
        [LONG, PAIRED, PAGED_KEYS, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, CLUSTER, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_LONG_PREFILL_HOPPER_RULED = "attention_long_prefill_hopper_ruled", HopperOnDemand,
        [TAKES_RULE, LONG, PAGED_KEYS, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, FORWARD_FEED, PIPELINED_FORWARD];
    ATTENTION_DECODE_HOPPER = "attention_decode_hopper", Hopper,
        [HEAD, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, DECODE_FEED, include_str!("../attention/decode_hopper.cu")];
    ATTENTION_DECODE_HOPPER_RULED = "attention_decode_hopper_ruled", HopperRuled,
        [TAKES_RULE, HEAD, TILES, SOFTMAX, RULE, WGMMA, HOPPER, TMA, DECODE_FEED, include_str!("../attention/decode_hopper.cu")];
    ATTENTION_BACKWARD_PIPELINED_HOPPER = "attention_backward_pipelined_hopper", Hopper,
        [TILES, SOFTMAX, RULE, WGMMA, HOPPER, STREAMS, TMA, BACKWARD_FEED, include_str!("../attention/backward_pipelined_hopper.cu")];
    ATTENTION_BACKWARD_PIPELINED_HOPPER_RULED = "attention_backward_pipelined_hopper_ruled", HopperRuled,
        [TAKES_RULE, TILES, SOFTMAX, RULE, WGMMA, HOPPER, STREAMS, TMA, BACKWARD_FEED, include_str!("../attention/backward_pipelined_hopper.cu")];
    ATTENTION_BACKWARD_WIDE_HOPPER = "attention_backward_wide_hopper", Hopper,
        [TILES, SOFTMAX, RULE, WGMMA, HOPPER, STREAMS, TMA, BACKWARD_FEED, include_str!("../attention/backward_wide_hopper.cu")];
    ATTENTION_BACKWARD_WIDE_HOPPER_RULED = "attention_backward_wide_hopper_ruled", HopperRuled,
        [TAKES_RULE, TILES, SOFTMAX, RULE, WGMMA, HOPPER, STREAMS, TMA, BACKWARD_FEED, include_str!("../attention/backward_wide_hopper.cu")];
    MATMUL_SMALL_M = "matmul_small_m", HopperOnce, [GATE, WGMMA, TMA, RING, SMALL_M];
    MATMUL_FEW_ROWS = "matmul_few_rows", HopperOnce,
        [WITHOUT_SMALL_M_KERNELS, GATE, WGMMA, TMA, RING, SMALL_M, include_str!("../matmul/few_rows.cu")];
    MATMUL_GATED_LARGE_M = "matmul_gated_large_m", HopperOnce, [GATE, WGMMA, TMA, CLUSTER, WGMMA_SHARED, LARGE_M];
    MATMUL_DEEP_LARGE_M = "matmul_deep_large_m", HopperOnce,
        [DEEP_PRODUCTS, GATE, WGMMA, TMA, CLUSTER, WGMMA_SHARED, LARGE_M];
    MATMUL_HEADS_LARGE_M = "matmul_heads_large_m", Hopper,
        [GATE, WGMMA, TMA, CLUSTER, WGMMA_SHARED, FINISH, LARGE_M, include_str!("../matmul/heads_large_m.cu")];
    LORA = "lora", HopperOnce, [WGMMA, TMA, RING, CLUSTER, WGMMA_SHARED, ADAPTERS, SIGNALS, include_str!("../lora/forward.cu")];
    LORA_BACKWARD = "lora_backward", HopperOnce,
        [WGMMA, TMA, RING, CLUSTER, WGMMA_SHARED, ADAPTERS, include_str!("../lora/backward.cu"), include_str!("../lora/backward_swiglu.cu")];
    LORA_SMALL_M = "lora_small_m", HopperOnce,
        [WITHOUT_SMALL_M_KERNELS, GATE, WGMMA, TMA, RING, SMALL_M, SIGNALS, include_str!("../lora/small_m.cu")];
    LORA_MIDDLE_M = "lora_middle_m", HopperOnce, [WGMMA, TMA, RING, CLUSTER, WGMMA_SHARED, ADAPTERS, SIGNALS, include_str!("../lora/middle_m.cu")];
    DELTANET_ROWS = "deltanet_rows", Once, [DELTANET, include_str!("../deltanet/rows.cu")];
    DELTANET_PLAIN = "deltanet_plain", Once, [DELTANET, include_str!("../deltanet/plain.cu")];
    DELTANET_CHUNKS = "deltanet_chunks", HopperOnDemand,
        [TILES, MMA, DELTANET, CONVOLUTION, include_str!("../deltanet/chunk.cu"), include_str!("../deltanet/prepare.cu"),
            include_str!("../deltanet/tile.cu"), include_str!("../deltanet/decode.cu"), include_str!("../deltanet/tile_backward.cu")];
    DELTANET_TILE_ROWS = "deltanet_tile_rows", HopperOnDemand,
        [TILES, DELTANET, CONVOLUTION, include_str!("../deltanet/rows_tile.cu")];
    OUTPUT_GATE = "output_gate", Once, [include_str!("../output_gate/output_gate.cu")];
    ATTENTION_PLAIN = "attention_plain", HeadDim, [include_str!("../attention/plain.cu")];
}

/// What the first update of most models uses, in the order in which it is compiled.
static FIRST: [&Source; 18] = [
    &ELEMENTWISE,
    &ATTENTION_BACKWARD_WIDE_HOPPER,
    &ATTENTION_PIPELINED_HOPPER,
    &ATTENTION_BACKWARD_PIPELINED_HOPPER,
    &MATMUL_GATED_LARGE_M,
    &RMSNORM,
    &EMBEDDING,
    &MATMUL_DEEP_LARGE_M,
    &ROPE,
    &RMSNORM_WARPS,
    &LM_HEAD,
    &SWIGLU,
    &ATTENTION_DELTA,
    &ADAMW,
    &LORA,
    &LORA_BACKWARD,
    &ATTENTION,
    &ATTENTION_BACKWARD,
];

impl Source {
    /// The width of a head that the source is compiled for: 0 where it does not depend on one.
    pub(super) fn width(&self, head_dim: usize) -> usize {
        if self.scope.has_width() { head_dim } else { 0 }
    }

    /// Whether only policies with adapters use the kernels.
    pub(super) fn is_of_adapters(&self) -> bool {
        [&LORA, &LORA_BACKWARD, &LORA_SMALL_M, &LORA_MIDDLE_M].iter().any(|own| own.name == self.name)
    }

    /// Whether only models with layers of gated DeltaNet use the kernels.
    pub(super) fn is_of_deltanet(&self) -> bool {
        self.name.starts_with("deltanet")
    }

    /// Whether a GPU that stores f32 (`is_plain`) or bf16 uses the kernels, of those that depend on the width of heads or are of norms.
    pub(super) fn is_of_precision(&self, is_plain: bool) -> bool {
        let is_of_both =
            self.name == ROPE.name || (self.scope == Scope::Once && !self.name.starts_with("rmsnorm"));
        is_of_both || [&ATTENTION_PLAIN, &RMSNORM_FLOAT].iter().any(|own| own.name == self.name) == is_plain
    }

    /// The place of the source among those that are compiled: first what the first update of most models waits for, and of this
    /// what opens the GPU, then what takes longest.
    pub(super) fn turn(&self) -> usize {
        FIRST.iter().position(|source| source.name == self.plain_name()).unwrap_or(FIRST.len())
    }

    /// Whether the first update of most models does without the kernels.
    pub(super) fn comes_later(&self) -> bool {
        self.turn() == FIRST.len()
    }

    /// The name of the source whose kernels do the same without a rule of scores: its own where they take none.
    fn plain_name(&self) -> &'static str {
        self.name.strip_suffix("_ruled").unwrap_or(self.name)
    }

    /// Whether layers with a rule of scores, or those without, use the kernels.
    pub(super) fn suits_rule(&self, is_ruled: bool) -> bool {
        let is_ruled_form_of = |other: &&Source| other.name != self.name && other.plain_name() == self.name;
        let takes_rule = self.plain_name() != self.name;
        if takes_rule {
            is_ruled
        } else {
            !(is_ruled && SOURCES.iter().copied().any(|other| is_ruled_form_of(&other)))
        }
    }

    /// Widths of heads that have kernels with Hopper's matrix instruction.
    pub(super) fn hopper_dims(&self) -> &'static [usize] {
        let is_of = |part: &str| self.name.contains(part);
        match self.scope {
            _ if is_of("deltanet") => &[64, 128],
            _ if is_of("heads_large_m") => &[128],
            _ if is_of("backward_wide") => &[256],
            // Tiles of two parts, one for each block.
            _ if is_of("paired") => &[96, 128],
            // What wide heads would need more registers or shared memory for.
            _ if is_of("long") || is_of("backward_pipelined") => &[64, 96, 128],
            _ => &[64, 96, 128, 256],
        }
    }

    /// Whether Hopper GPUs use other kernels for the same.
    pub(super) fn has_hopper_form(&self) -> bool {
        [&ATTENTION, &ATTENTION_PAGED, &ATTENTION_BACKWARD].iter().any(|own| own.name == self.plain_name())
    }
}

/// Machine code of `source` for `arch`, such as `sm_90a`.
pub fn compile(source: &Source, arch: &str, head_dim: usize) -> Result<Vec<u8>, CudaError> {
    let failed = |log: String| CudaError::Compile { name: source.name.into(), arch: arch.into(), log };
    let text = CString::new(source.parts.concat()).map_err(|e| failed(e.to_string()))?;
    let name = CString::new(format!("{}.cu", source.name)).map_err(|e| failed(e.to_string()))?;
    let program = result::create_program(&text, Some(&name)).map_err(|e| failed(e.to_string()))?;
    // SAFETY: the program was just made and is destroyed once, below.
    let compiled = unsafe { result::compile_program(program, &options(source, arch, head_dim)) };
    let code = match compiled {
        Ok(()) => machine_code(program).map_err(|e| failed(e.to_string())),
        Err(error) => Err(failed(format!("{error}\n{}", log(program)))),
    };
    // SAFETY: the program is destroyed here only. A failure to destroy leaks a little memory.
    let _ = unsafe { result::destroy_program(program) };
    code
}

fn options(source: &Source, arch: &str, head_dim: usize) -> Vec<String> {
    let mut options = vec![format!("--gpu-architecture={arch}")];
    options.extend(["--std=c++17", "--fmad=false", "-default-device"].map(String::from));
    // Leaves out what no kernel uses of the language, and with it a tenth of the time to compile.
    if version() >= (12, 4) {
        options.push("-minimal".into());
    }
    if source.scope.has_width() {
        options.push(format!("-DHEAD_DIM={head_dim}"));
    }
    options
}

/// NVRTC's version, such as (13, 0).
fn version() -> (i32, i32) {
    let mut major = 0;
    let mut minor = 0;
    // SAFETY: both numbers are written to live integers. Where the call fails, they stay 0.
    let _ = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    (major, minor)
}

fn log(program: sys::nvrtcProgram) -> String {
    // SAFETY: the program lives; the log is a string that ends in 0.
    let Ok(log) = (unsafe { result::get_program_log(program) }) else { return String::new() };
    let bytes: Vec<u8> = log.iter().map(|&c| c as u8).collect();
    CStr::from_bytes_until_nul(&bytes)
        .map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
}

fn machine_code(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut n_bytes = 0;
    // SAFETY: the program is compiled for a real architecture; the buffer is as long as NVRTC says.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &raw mut n_bytes).result()?;
        let mut code = vec![0u8; n_bytes];
        sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result()?;
        Ok(code)
    }
}

/// The name of the file that keeps the machine code: by the hash of everything that the code depends on.
pub(super) fn file_name(source: &Source, arch: &str, head_dim: usize) -> String {
    let mut hash = Sha256::new();
    let (major, minor) = version();
    hash.update(format!("{major}.{minor} {:?}", options(source, arch, head_dim)));
    source.parts.iter().for_each(|part| hash.update(part));
    let hash = hash.finalize().iter().take(16).fold(0u128, |bits, byte| bits << 8 | u128::from(*byte));
    format!("{}-{arch}-{hash:032x}.cubin", source.name)
}
