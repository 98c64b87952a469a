#!/usr/bin/env python3
"""Makes golden models of the families beyond Qwen and Llama, in the format of make_models.py.

    python make_families.py [OUT] [CASE ...]        # OUT: this script's folder unless given; all cases unless given
"""

import json
import pathlib
import sys

import torch
from make_models import LENGTHS, PLAIN, YARN, golden, randomise
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.llama.modeling_llama import LlamaMLP

SLIDING, FULL, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
# (tokens, of these prompt) on both sides of the borders of chunks of 64, in which transformers computes DeltaNet
CHUNKS = [(2, 1), (3, 1), (63, 60), (64, 1), (65, 60), (129, 120), (200, 9)]
# longer than the context that LongRoPE's factors for short sequences are for, by which transformers chooses
LONGER = [(17, 1), (19, 6), (45, 13), (33, 30), (61, 40)]
LINEAR = {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 4.0],
    "partial_rotary_factor": 0.75,
}


# name: (config class, vocabulary, temperature, other fields)
CASES = {
    "smollm3-tied": (SmolLM3Config, 37, 1.0, dict(no_rope_layers=[1, 0, 1], num_hidden_layers=3)),
    "smollm3-biased": (
        SmolLM3Config,
        33,
        1.0,
        dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    ),
    "mistral-window": (MistralConfig, 35, 1.0, dict(sliding_window=7, head_dim=10)),
    "olmo2-untied": (Olmo2Config, 31, 0.8, dict(head_dim=None)),
    "olmo3-windows": (
        Olmo3Config,
        36,
        1.0,
        dict(
            sliding_window=6,
            num_hidden_layers=3,
            layer_types=[SLIDING, FULL, SLIDING],
            rope_parameters={FULL: YARN, SLIDING: PLAIN},
            head_dim=None,
        ),
    ),
    "gemma3-windows": (
        Gemma3TextConfig,
        41,
        1.0,
        dict(
            sliding_window=9,
            num_hidden_layers=3,
            layer_types=[SLIDING, SLIDING, FULL],
            query_pre_attn_scalar=11,
            head_dim=10,
            rope_parameters={FULL: LINEAR, SLIDING: PLAIN},
        ),
    ),
    "gemma2-softcaps": (
        Gemma2Config,
        39,
        1.3,
        dict(
            sliding_window=8,
            layer_types=[SLIDING, FULL],
            query_pre_attn_scalar=13,
            head_dim=6,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=2.0,
        ),
    ),
    "phi3-joined": (Phi3Config, 34, 1.0, dict(head_dim=None, sliding_window=30)),
    "phi3-longrope": (
        Phi3Config,
        34,
        1.0,
        dict(head_dim=None, rope_parameters=LONG, original_max_position_embeddings=64, max_position_embeddings=256),
    ),
    "granite-scaled": (
        GraniteConfig,
        32,
        0.9,
        dict(
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.4,
            logits_scaling=1.7,
            head_dim=None,
            tie_word_embeddings=True,
        ),
    ),
    "qwen35-hybrid": (
        Qwen3_5TextConfig,
        38,
        1.0,
        dict(
            num_hidden_layers=3,
            layer_types=[RECURRENT, RECURRENT, FULL],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=6,
            linear_value_head_dim=5,
            tie_word_embeddings=True,
            max_position_embeddings=256,
            rope_parameters=dict(PLAIN, partial_rotary_factor=0.5),
        ),
    ),
    "qwen35-untied": (
        Qwen3_5TextConfig,
        36,
        0.8,
        dict(
            num_hidden_layers=2,
            layer_types=[FULL, RECURRENT],
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_key_head_dim=4,
            linear_value_head_dim=18,
            linear_conv_kernel_dim=3,
            max_position_embeddings=256,
            rope_parameters=dict(PLAIN, partial_rotary_factor=0.25),
        ),
    ),
    "gpt-oss-attention": (
        GptOssConfig,
        38,
        1.0,
        dict(
            sliding_window=6,
            num_hidden_layers=3,
            layer_types=[SLIDING, FULL, SLIDING],
            num_local_experts=2,
            rope_parameters=dict(YARN, truncate=False),
        ),
    ),
    "qwen3-biased": (Qwen3Config, 30, 1.0, dict(attention_bias=True)),
    "llama-biased": (LlamaConfig, 29, 0.9, dict(attention_bias=True, mlp_bias=True)),
    "phi3-longrope-long": (
        Phi3Config,
        34,
        1.0,
        dict(head_dim=None, rope_parameters=LONG, original_max_position_embeddings=16),
    ),
}


class DenseMLP(LlamaMLP):
    """In place of gpt-oss' experts, which return the router's scores too."""

    def forward(self, x):
        return super().forward(x), None


def config_of(case, **changes):
    kind, vocab, _, extra = CASES[case]
    fields = dict(
        vocab_size=vocab,
        hidden_size=24 if kind is not Phi3Config else 32,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters=dict(PLAIN),
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    fields.update(extra)
    fields.update(changes)
    if fields["head_dim"] is None:  # the hidden size divided by the heads
        del fields["head_dim"]
    return kind(**fields)


def split_gradients(numbers, config):
    """The gradients of joined projections under the names of their parts."""
    head = config.hidden_size // config.num_attention_heads
    kv = config.num_key_value_heads * head
    parts = {
        "qkv_proj": {"q_proj": config.hidden_size, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }
    split = {}
    for name, tensor in numbers.items():
        joined = next((joined for joined in parts if f".{joined}." in name), None)
        if joined is None:
            split[name] = tensor
            continue
        rows = tensor.split(list(parts[joined].values()))
        split.update({name.replace(joined, part): r.contiguous() for part, r in zip(parts[joined], rows)})
    return split


def main():
    torch.set_num_threads(1)
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    for index, case in enumerate(CASES):
        if len(sys.argv) > 2 and case not in sys.argv[2:]:
            continue
        generator = torch.Generator().manual_seed(2000 + index)
        _, vocab, temperature, _ = CASES[case]
        model = AutoModelForCausalLM.from_config(config_of(case), attn_implementation="eager").float()
        if isinstance(model.config, GptOssConfig):
            model.config.mlp_bias, model.config.num_local_experts = False, 0
            for layer in model.model.layers:
                layer.mlp = DenseMLP(model.config)
        model = randomise(model, generator)
        if case.startswith("qwen35"):
            # Norms multiply by 1 + w here, but for the one inside DeltaNet. With these factors transformers itself is within 1e-5 of
            # the recurrence in f64; a model that amplifies rounding more is not.
            for name, p in model.named_parameters():
                if name.endswith("norm.weight") and "linear_attn" not in name:
                    p.data -= 1.0
                elif "_proj" in name:
                    p.data *= 0.5
        folder = out / case
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        sequences = CHUNKS if case.startswith("qwen35") else LONGER if case.endswith("-long") else LENGTHS
        numbers = golden(model.eval(), vocab, temperature, generator, sequences)
        save_file(split_gradients(numbers, model.config), folder / "golden.safetensors")
        config = json.loads((folder / "config.json").read_text())
        print(case, config["model_type"], sum(p.numel() for p in model.parameters()), "parameters")


if __name__ == "__main__":
    main()
