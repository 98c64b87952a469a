//! The CPU kernels of both element types.
//!
//! A generic function is compiled again in every crate that calls it. The ops are generic and have callers in three
//! crates, so they reach their kernels through this trait, and the kernels are compiled once, in this crate.

#![allow(
    private_interfaces,
    reason = "other crates cannot name the trait, so only this crate calls its methods"
)]

use crate::adamw::{self, AdamW};
use crate::attention::cpu_rows::HostInputs;
use crate::attention::key_copies::HostCopies;
use crate::attention::sequences::HostSequences;
use crate::attention::{self, cpu_backward, cpu_decode, cpu_forward, cpu_paged, key_copies, paged, sinks};
use crate::cpu::Cpu;
use crate::cpu::gemm::pack_panels;
use crate::heads::Heads;
use crate::sampling::{self, SamplingRule};
use crate::{
    Float, Shape, Weight, Write, deltanet, embedding, lm_head, lora, matmul, output_gate, reduce, residual,
    rmsnorm, rope, swiglu,
};

macro_rules! kernels {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $kernel:path;)*) => {
        /// One method for each CPU kernel that an op calls.
        pub trait Kernels: Sized {
            $(fn $name($($argument: $type),*) $(-> $result)? where Self: Float;)*
        }

        impl Kernels for f32 {
            $(fn $name($($argument: $type),*) $(-> $result)? {
                $kernel($($argument),*)
            })*
        }

        impl Kernels for f64 {
            $(fn $name($($argument: $type),*) $(-> $result)? {
                $kernel($($argument),*)
            })*
        }
    };
}

kernels! {
    fn adamw_step(
        cpu: &Cpu,
        rule: AdamW,
        grad_scale: f64,
        param: &mut [Self],
        grad: &[Self],
        m: &mut [Self],
        v: &mut [Self],
    ) = adamw::cpu::step;

    fn attention_forward(
        cpu: &Cpu,
        dims: attention::Dims,
        inputs: HostInputs<'_, Self>,
        sequences: HostSequences<'_, Self>,
        out: &mut [Self],
        lse: &mut [Self],
    ) = cpu_forward::forward;

    fn attention_backward(
        cpu: &Cpu,
        dims: attention::Dims,
        saved: attention::Saved<'_, Self>,
        sequences: HostSequences<'_, Self>,
        d_out: &[Self],
        to: (&mut [Self], Option<&mut [Self]>),
    ) = cpu_backward::backward;

    fn attention_backward_sinks(cpu: &Cpu, inputs: sinks::Inputs<'_, Self>, d_sinks: &mut [Self])
        = sinks::backward_cpu;

    fn key_copies_forward(cpu: &Cpu, heads: Heads, copies: HostCopies<'_>, qkv: &[Self], keys: &mut [Self])
        = key_copies::forward_cpu;

    fn key_copies_backward(cpu: &Cpu, heads: Heads, copies: HostCopies<'_>, d_keys: &[Self], d_qkv: &mut [Self])
        = key_copies::backward_cpu;

    fn paged_store(
        cpu: &Cpu,
        heads: Heads,
        dims: paged::CacheDims,
        qkv: &[Self],
        slots: &[u32],
        keys: &mut [Self],
        values: &mut [Self],
    ) = cpu_paged::store;

    fn paged_forward(
        cpu: &Cpu,
        dims: paged::Dims,
        inputs: HostInputs<'_, Self>,
        cache: &paged::Cache<Self>,
        host: cpu_paged::HostSequences<'_>,
        out: &mut [Self],
    ) = cpu_paged::forward;

    fn paged_decode(cpu: &Cpu, decode: &cpu_decode::Decode<'_, Self>) = cpu_decode::run;

    fn deltanet_forward(
        cpu: &Cpu,
        dims: deltanet::Dims,
        parameters: deltanet::Parameters<'_, Self>,
        raw: &[Self],
        sequences: deltanet::cpu::HostSequences<'_, Self>,
        to: deltanet::Out<'_, Self>,
    ) = deltanet::cpu::forward;

    fn deltanet_backward(
        cpu: &Cpu,
        dims: deltanet::Dims,
        from: (deltanet::Parameters<'_, Self>, deltanet::Saved<'_, Self>),
        offsets: &[u32],
        d_out: &[Self],
        to: deltanet::cpu_backward::Gradients<'_, Self>,
    ) = deltanet::cpu_backward::backward;

    fn embedding_forward(cpu: &Cpu, dims: embedding::Dims, ids: &[u32], table: &[Self], out: &mut [Self])
        = embedding::cpu::forward;

    fn embedding_backward(cpu: &Cpu, dims: embedding::Dims, ids: &[u32], d_out: &[Self], d_table: &mut [Self])
        = embedding::cpu::backward;

    fn lm_head_forward(
        cpu: &Cpu,
        dims: lm_head::Dims,
        hidden: &[Self],
        weight: &Weight<Self>,
        targets: lm_head::Targets<'_>,
        scores: lm_head::HeadScores<'_, Self>,
        alternatives: Option<lm_head::Alternatives<'_, Self>>,
    ) = lm_head::cpu::forward;

    fn lm_head_scale_rows(cpu: &Cpu, by: &[Self], rows: &mut [Self]) = lm_head::cpu::scale_rows;

    fn lm_head_backward(
        cpu: &Cpu,
        dims: lm_head::Dims,
        hidden: &[Self],
        weight: &Weight<Self>,
        grads: lm_head::ScoreGrads<'_, Self>,
        to: lm_head::HeadGrads<'_, Self>,
    ) = lm_head::cpu::backward;

    fn lora_project(
        cpu: &Cpu,
        from: (usize, &Weight<Self>),
        x: &[Self],
        of: (f64, usize),
        hidden: &mut [Self],
    ) = lora::cpu::project;

    fn lora_expand(
        cpu: &Cpu,
        at: (usize, lora::Module),
        hidden: &[Self],
        b: &Weight<Self>,
        y: &mut [Self],
    ) = lora::cpu::expand;

    fn lora_backward_hidden(
        cpu: &Cpu,
        at: (usize, lora::Module),
        d_y: &[Self],
        b: &Weight<Self>,
        d_hidden: &mut [Self],
    ) = lora::cpu::backward_hidden;

    fn lora_backward_b(
        cpu: &Cpu,
        at: (usize, lora::Module),
        d_y: &[Self],
        hidden: &[Self],
        d_b: &mut [Self],
    ) = lora::cpu::backward_b;

    fn lora_backward_a(
        cpu: &Cpu,
        of: (usize, Shape, usize),
        x: &[Self],
        d_hidden: &[Self],
        d_a: &mut [Self],
    ) = lora::cpu::backward_a;

    fn lora_backward_input(
        cpu: &Cpu,
        of: (usize, usize),
        d_hidden: &[Self],
        a: &Weight<Self>,
        d_x: &mut [Self],
    ) = lora::cpu::backward_input;

    fn matmul_forward(
        cpu: &Cpu,
        dims: matmul::Dims,
        x: &[Self],
        panels: &[Self],
        bias: Option<&[Self]>,
        y: &mut [Self],
    ) = matmul::cpu::forward;

    fn matmul_backward_input(
        cpu: &Cpu,
        dims: matmul::Dims,
        d_y: &[Self],
        weight: &[Self],
        write: Write,
        d_x: &mut [Self],
    ) = matmul::cpu::backward_input;

    fn matmul_backward_weight(cpu: &Cpu, dims: matmul::Dims, x: &[Self], d_y: &[Self], d_weight: &mut [Self])
        = matmul::cpu::backward_weight;

    fn matmul_backward_bias(cpu: &Cpu, outputs: usize, d_y: &[Self], d_bias: &mut [Self])
        = matmul::cpu::backward_bias;

    fn output_gate_divide(
        cpu: &Cpu,
        dims: output_gate::Dims,
        projected: &[Self],
        qkv: &mut [Self],
        gate: &mut [Self],
    ) = output_gate::cpu::divide;

    fn output_gate_join(
        cpu: &Cpu,
        dims: output_gate::Dims,
        qkv: &[Self],
        gate: &[Self],
        projected: &mut [Self],
    ) = output_gate::cpu::join;

    fn output_gate_forward(cpu: &Cpu, attended: &[Self], gate: &[Self], out: &mut [Self])
        = output_gate::cpu::forward;

    fn output_gate_backward(
        cpu: &Cpu,
        saved: (&[Self], &[Self]),
        d_out: &[Self],
        to: (&mut [Self], &mut [Self]),
    ) = output_gate::cpu::backward;

    fn pack_panels(cpu: &Cpu, weight: &[Self], columns: usize, depth: usize, panels: &mut [Self]) = pack_panels;

    fn square_parts(cpu: &Cpu, x: &[Self]) -> Vec<f64> = reduce::cpu::square_parts;

    fn first_non_finite(cpu: &Cpu, x: &[Self]) -> Option<usize> = reduce::cpu::first_non_finite;

    fn residual_scale(cpu: &Cpu, x: &mut [Self], factor: f64) = residual::scale_cpu;

    fn residual_add(cpu: &Cpu, x: &mut [Self], addend: &[Self]) = residual::add_cpu;

    fn rmsnorm_forward(
        cpu: &Cpu,
        dims: rmsnorm::Dims,
        x: &[Self],
        add: Option<(&[Self], &mut [Self])>,
        weight: &[Self],
        to: rmsnorm::Out<'_, Self>,
    ) = rmsnorm::cpu::forward;

    fn rmsnorm_backward_input(
        cpu: &Cpu,
        dims: rmsnorm::Dims,
        saved: rmsnorm::Saved<'_, Self>,
        d_out: &[Self],
        write: Write,
        d_x: &mut [Self],
    ) = rmsnorm::cpu::backward_input;

    fn rmsnorm_backward_weight(
        cpu: &Cpu,
        dims: rmsnorm::Dims,
        saved: rmsnorm::Saved<'_, Self>,
        d_out: &[Self],
        d_weight: &mut [Self],
    ) = rmsnorm::cpu::backward_weight;

    fn rope_forward(
        cpu: &Cpu,
        dims: rope::Dims,
        table: &rope::Table<Self>,
        positions: &[u32],
        norm: Option<(rope::HeadNorm<'_, Self>, &mut [Self])>,
        raw: &[Self],
        out: &mut [Self],
    ) = rope::cpu::forward;

    fn rope_backward(
        cpu: &Cpu,
        dims: rope::Dims,
        table: &rope::Table<Self>,
        positions: &[u32],
        norm: Option<rope::HeadNormGrad<'_, Self>>,
        d_out: &[Self],
        d_raw: &mut [Self],
    ) = rope::cpu::backward;

    fn sampling_forward(
        cpu: &Cpu,
        rule: SamplingRule,
        from: sampling::Inputs<'_, Self>,
        drawn: sampling::Drawn<'_, Self>,
    ) = sampling::cpu::forward;

    fn swiglu_forward(cpu: &Cpu, dims: swiglu::Dims, gate_up: &[Self], out: &mut [Self]) = swiglu::cpu::forward;

    fn swiglu_backward(
        cpu: &Cpu,
        dims: swiglu::Dims,
        gate_up: &[Self],
        d_out: &[Self],
        d_gate_up: &mut [Self],
    ) = swiglu::cpu::backward;
}
