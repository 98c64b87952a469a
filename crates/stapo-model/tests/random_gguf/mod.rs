//! GGUF files with random weights in any encoding, for tests and benchmarks: no tokenizer, and blocks whose numbers repeat.

use half::f16;
use stapo_model::{Encoding, Family, ModelConfig, TensorSpec};
use std::fs::File;
use std::io::{BufWriter, Result, Write};
use std::path::Path;

/// Where the numbers of tensors begin.
const ALIGNMENT: usize = 32;
/// Blocks that are drawn of each encoding; a tensor repeats them.
const DRAWN: usize = 4093;

/// Writes a model of this shape, whose matrices have the standard deviation `deviation`. `encoding` gives a matrix of that
/// Hugging Face name its storage; vectors are F32.
pub fn write(
    path: &Path,
    config: &ModelConfig,
    deviation: f32,
    encoding: impl Fn(&str) -> Encoding,
) -> Result<()> {
    let tensors: Vec<(TensorSpec, Encoding)> = config
        .tensors()
        .into_iter()
        .map(|spec| {
            let encoding = if spec.shape.len() == 2 { encoding(&spec.name) } else { Encoding::F32 };
            (spec, encoding)
        })
        .collect();
    let mut file = BufWriter::new(File::create(path)?);
    let head = header(config, &tensors);
    file.write_all(&head)?;
    file.write_all(&vec![0; head.len().next_multiple_of(ALIGNMENT) - head.len()])?;
    let drawn = Encoding::ALL.map(|encoding| (encoding, blocks(encoding, deviation)));
    let ones: Vec<u8> = (0..DRAWN).flat_map(|i| (0.9 + (i % 7) as f32 / 30.0).to_le_bytes()).collect();
    for (place, (spec, encoding)) in tensors.iter().enumerate() {
        let pattern = &drawn.iter().find(|(drawn, _)| drawn == encoding).expect("every encoding").1;
        let pattern = if spec.shape.len() == 2 { pattern } else { &ones };
        let (_, size) = encoding.block();
        let n_bytes = n_bytes(spec, *encoding);
        let mut left = n_bytes;
        // Tensors begin at different blocks of the pattern.
        let mut from = place * 101 % (pattern.len() / size) * size;
        while left > 0 {
            let n = left.min(pattern.len() - from);
            file.write_all(&pattern[from..from + n])?;
            (left, from) = (left - n, 0);
        }
        file.write_all(&vec![0; n_bytes.next_multiple_of(ALIGNMENT) - n_bytes])?;
    }
    file.flush()
}

fn n_bytes(spec: &TensorSpec, encoding: Encoding) -> usize {
    let (numbers, bytes) = encoding.block();
    spec.shape.iter().product::<usize>() / numbers * bytes
}

fn header(config: &ModelConfig, tensors: &[(TensorSpec, Encoding)]) -> Vec<u8> {
    let family = match config.family {
        Family::Qwen3 => "qwen3",
        Family::Qwen2 => "qwen2",
        Family::Llama => "llama",
    };
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let whole = |name: &str, value: usize| {
        let key = text(&format!("{family}.{name}"));
        [key, 4u32.to_le_bytes().to_vec(), (value as u32).to_le_bytes().to_vec()].concat()
    };
    let real = |name: &str, value: f32| {
        let key = text(&format!("{family}.{name}"));
        [key, 6u32.to_le_bytes().to_vec(), value.to_le_bytes().to_vec()].concat()
    };
    let fields = [
        [text("general.architecture"), 8u32.to_le_bytes().to_vec(), text(family)].concat(),
        whole("block_count", config.n_layers),
        whole("context_length", config.max_positions),
        whole("embedding_length", config.width),
        whole("feed_forward_length", config.ffn_width),
        whole("attention.head_count", config.n_heads),
        whole("attention.head_count_kv", config.n_kv_heads),
        whole("attention.key_length", config.head_dim),
        real("attention.layer_norm_rms_epsilon", config.norm_eps),
        real("rope.freq_base", config.rope.theta as f32),
    ];
    let mut out = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((fields.len() as u64).to_le_bytes());
    out.extend(fields.concat());
    let mut offset = 0;
    for (spec, encoding) in tensors {
        out.extend(text(&gguf_name(&spec.name)));
        out.extend((spec.shape.len() as u32).to_le_bytes());
        out.extend(spec.shape.iter().rev().flat_map(|dim| (*dim as u64).to_le_bytes()));
        out.extend(number(*encoding).to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += n_bytes(spec, *encoding).next_multiple_of(ALIGNMENT);
    }
    out
}

/// A tensor's name in GGUF.
fn gguf_name(name: &str) -> String {
    let parts = [
        ("model.layers.", "blk."),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    parts.iter().fold(name.to_owned(), |name, (long, short)| name.replace(long, short))
}

/// GGUF's number of an encoding.
fn number(encoding: Encoding) -> u32 {
    match encoding {
        Encoding::F32 => 0,
        Encoding::F16 => 1,
        Encoding::Q4_0 => 2,
        Encoding::Q4_1 => 3,
        Encoding::Q5_0 => 6,
        Encoding::Q5_1 => 7,
        Encoding::Q8_0 => 8,
        Encoding::Q4_K => 12,
        Encoding::Q5_K => 13,
        Encoding::Q6_K => 14,
        Encoding::Bf16 => 30,
    }
}

/// Random blocks: every bit is drawn but those of the f16 scales, which give the numbers their deviation.
fn blocks(encoding: Encoding, deviation: f32) -> Vec<u8> {
    let (_, size) = encoding.block();
    let mut state = 0x9e37_79b9_7f4a_7c15u64 ^ number(encoding) as u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    // Where a block has its scales, and their values in units of the deviation: with uniform integers the numbers then have
    // about that deviation, and a mean of 0.
    let scales: &[(usize, f32)] = match encoding {
        Encoding::F32 | Encoding::F16 | Encoding::Bf16 => &[],
        Encoding::Q8_0 => &[(0, 1.0 / 74.0)],
        Encoding::Q4_0 => &[(0, 1.0 / 4.6)],
        Encoding::Q4_1 => &[(0, 1.0 / 4.6), (2, -7.5 / 4.6)],
        Encoding::Q5_0 => &[(0, 1.0 / 9.2)],
        Encoding::Q5_1 => &[(0, 1.0 / 9.2), (2, -15.5 / 9.2)],
        Encoding::Q4_K => &[(0, 1.0 / 257.0), (2, 7.5 / 257.0)],
        Encoding::Q5_K => &[(0, 1.0 / 530.0), (2, 15.5 / 530.0)],
        Encoding::Q6_K => &[(208, 1.0 / 1370.0)],
    };
    let mut out = Vec::with_capacity(DRAWN * size);
    for _ in 0..DRAWN {
        let uniform = (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        let value = uniform * 3f32.sqrt() * deviation;
        let mut block: Vec<u8> = match encoding {
            Encoding::F32 => value.to_le_bytes().to_vec(),
            Encoding::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            Encoding::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            _ => (0..size).map(|_| (next() >> 33) as u8).collect(),
        };
        for (at, scale) in scales {
            let scale = f16::from_f32(scale * deviation * (1.0 + uniform / 2.0));
            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        out.extend(block);
    }
    out
}
