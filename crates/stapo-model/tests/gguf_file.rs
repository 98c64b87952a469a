//! GGUF files in any encoding, for tests and benchmarks: with given numbers, or with random blocks that repeat.

#![allow(dead_code, reason = "every program that includes this file uses a part of it")]

use half::f16;
use stapo_model::config::AttentionSpec;
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
pub fn write_random(
    path: &Path,
    config: &ModelConfig,
    deviation: f32,
    encoding: impl Fn(&str) -> Encoding,
) -> Result<()> {
    let drawn = Encoding::ALL.map(|encoding| (encoding, blocks(encoding, deviation)));
    let ones: Vec<u8> = (0..DRAWN).flat_map(|i| (0.9 + (i % 7) as f32 / 30.0).to_le_bytes()).collect();
    let mut place = 0;
    write(path, config, &[], encoding, |spec, encoding, file| {
        let pattern = &drawn.iter().find(|(drawn, _)| *drawn == encoding).expect("every encoding").1;
        let pattern = if spec.shape.len() == 2 { pattern } else { &ones };
        let size = encoding.block().1;
        let mut left = n_bytes(spec, encoding);
        // Tensors begin at different blocks of the pattern.
        let mut from = place * 101 % (pattern.len() / size) * size;
        place += 1;
        while left > 0 {
            let n = left.min(pattern.len() - from);
            file.write_all(&pattern[from..from + n])?;
            (left, from) = (left - n, 0);
        }
        Ok(())
    })
}

/// Writes a model of this shape. `more` are further fields of the header; `numbers` writes the bytes of a tensor.
pub fn write(
    path: &Path,
    config: &ModelConfig,
    more: &[Vec<u8>],
    encoding: impl Fn(&str) -> Encoding,
    mut numbers: impl FnMut(&TensorSpec, Encoding, &mut BufWriter<File>) -> Result<()>,
) -> Result<()> {
    let encoded = |spec: TensorSpec| {
        let encoding = if spec.shape.len() == 2 { encoding(&spec.name) } else { Encoding::F32 };
        (spec, encoding)
    };
    let tensors: Vec<(TensorSpec, Encoding)> = config.tensors().into_iter().map(encoded).collect();
    let mut file = BufWriter::new(File::create(path)?);
    let head = header(config, more, &tensors);
    file.write_all(&head)?;
    let pad = |n: usize| vec![0; n.next_multiple_of(ALIGNMENT) - n];
    file.write_all(&pad(head.len()))?;
    for (spec, encoding) in &tensors {
        numbers(spec, *encoding, &mut file)?;
        file.write_all(&pad(n_bytes(spec, *encoding)))?;
    }
    file.flush()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A field of a whole number.
pub fn whole(key: &str, value: usize) -> Vec<u8> {
    [text(key), 4u32.to_le_bytes().to_vec(), (value as u32).to_le_bytes().to_vec()].concat()
}

/// A field of a text.
pub fn word(key: &str, value: &str) -> Vec<u8> {
    [text(key), 8u32.to_le_bytes().to_vec(), text(value)].concat()
}

/// A field of several texts.
pub fn words(key: &str, values: &[String]) -> Vec<u8> {
    let head = [text(key), 9u32.to_le_bytes().to_vec(), 8u32.to_le_bytes().to_vec()].concat();
    let values: Vec<u8> = (values.len() as u64)
        .to_le_bytes()
        .into_iter()
        .chain(values.iter().flat_map(|value| text(value)))
        .collect();
    [head, values].concat()
}

/// The Q8_0 blocks of some numbers: every block's scale is its largest magnitude over 127.
pub fn q8_0(numbers: &[f32]) -> Vec<u8> {
    let block = |block: &[f32]| {
        let most = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let d = f16::from_f32(most / 127.0);
        let q = |x: &f32| if most == 0.0 { 0 } else { (x / d.to_f32()).round().clamp(-127.0, 127.0) as i8 };
        d.to_le_bytes()
            .into_iter()
            .chain(block.iter().map(move |x| q(x).cast_unsigned()))
            .collect::<Vec<u8>>()
    };
    numbers.chunks(32).flat_map(block).collect()
}

fn n_bytes(spec: &TensorSpec, encoding: Encoding) -> usize {
    let (numbers, bytes) = encoding.block();
    spec.shape.iter().product::<usize>() / numbers * bytes
}

fn header(config: &ModelConfig, more: &[Vec<u8>], tensors: &[(TensorSpec, Encoding)]) -> Vec<u8> {
    let family = match config.family {
        Family::Qwen3 => "qwen3",
        Family::Qwen2 => "qwen2",
        Family::Llama => "llama",
        other => panic!("no GGUF file of {other:?} is written"),
    };
    let of_family = |name: &str, value: usize| whole(&format!("{family}.{name}"), value);
    let real = |name: &str, value: f32| {
        let key = text(&format!("{family}.{name}"));
        [key, 6u32.to_le_bytes().to_vec(), value.to_le_bytes().to_vec()].concat()
    };
    let layer = config.uniform_layer().expect("GGUF has one size for all layers");
    let AttentionSpec { heads, rope, .. } = layer.attention().expect("a layer with attention");
    let own = [
        word("general.architecture", family),
        of_family("block_count", config.layers.len()),
        of_family("context_length", config.max_positions),
        of_family("embedding_length", config.width),
        of_family("feed_forward_length", layer.ffn_width()),
        of_family("attention.head_count", heads.query),
        of_family("attention.head_count_kv", heads.kv),
        of_family("attention.key_length", heads.dim),
        real("attention.layer_norm_rms_epsilon", config.norm_eps),
        real("rope.freq_base", rope.theta as f32),
    ];
    let fields = [&own, more].concat();
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
