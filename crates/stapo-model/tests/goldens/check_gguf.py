"""Writes GGUF files of tiny random models by the rules of llama.cpp's convert_hf_to_gguf.py and compares log-probs.

    pip install torch transformers gguf
    python check_gguf.py STAPO

Of each model, `stapo score` of the file must agree with `stapo score` of the folder that transformers saved, and, where transformers
reads GGUF files of the family, with transformers' reading of the file.
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile

import gguf
import torch
from make_families import FULL, SLIDING, config_of
from make_models import randomise
from transformers import AutoModelForCausalLM
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

# Of the models of make_families.py, the fields that GGUF files have no keys for: the name in GGUF, and fields in their place.
CASES = {
    "smollm3-tied": ("smollm3", dict(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])),
    "smollm3-biased": ("smollm3", dict(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])),
    # The class of Mistral writes no key for its window.
    "mistral-window": ("llama", dict(sliding_window=None)),
    "olmo2-untied": ("olmo2", {}),
    "olmo3-windows": ("olmo2", {}),
    "gemma3-windows": (
        "gemma3",
        dict(
            query_pre_attn_scalar=10,
            num_hidden_layers=7,
            layer_types=[SLIDING] * 5 + [FULL, SLIDING],
        ),
    ),
    "gemma2-softcaps": ("gemma2", dict(query_pre_attn_scalar=6)),
    "phi3-joined": ("phi3", {}),
    "phi3-longrope": ("phi3", {}),
    "granite-scaled": ("granite", {}),
    "llama-biased": ("llama", {}),
}
PERMUTED = {"llama", "smollm3", "granite"}
# How the published files of the family name their pre-tokenizer.
PRE = {"smollm3": "smaug-bpe", "olmo2": "dbrx", "phi3": "gpt-4o", "granite": "refact"}
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(tensor, n_heads):
    """LlamaModel.permute: the halves of a head become neighbouring rows."""
    rows = tensor.shape[0] // n_heads // 2
    return tensor.reshape(n_heads, 2, rows, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def renamed(name, has_norms_after):
    stem, suffix = (name, "weight") if name.endswith("sinks") else name.rsplit(".", 1)
    if stem in TENSORS:
        return f"{TENSORS[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    if part == "post_attention_layernorm":
        part = "post_attention_norm" if has_norms_after else "ffn_norm"
    return f"blk.{layer}.{TENSORS.get(part, part)}.{suffix}"


def write(path, arch, model):
    config = model.config
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(config.num_hidden_layers)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch != "phi3":
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    ropes = config.rope_parameters
    rope = ropes.get(FULL, ropes)
    w.add_rope_freq_base(rope["rope_theta"])
    if arch == "llama" or arch == "smollm3" or arch == "granite":
        w.add_rope_dimension_count(head_dim)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch in ("gemma2", "gemma3", "phi3") and config.sliding_window:
        w.add_sliding_window(config.sliding_window)
    if arch == "olmo2" and getattr(config, "sliding_window", None):
        w.add_sliding_window(config.sliding_window)
        w.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
    if arch == "gemma2":
        w.add_attn_logit_softcapping(config.attn_logit_softcapping)
        w.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        w.add_attention_scale(config.attention_multiplier)
        w.add_embedding_scale(config.embedding_multiplier)
        w.add_residual_scale(config.residual_multiplier)
        w.add_logit_scale(config.logits_scaling)
    if arch == "phi3":
        factor = rope.get("partial_rotary_factor", 1.0)
        rotated = int(factor * config.hidden_size) // config.num_attention_heads
        w.add_rope_dimension_count(rotated)
        w.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        if kind == "longrope":
            scale = config.max_position_embeddings / config.original_max_position_embeddings
            w.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(scale) / math.log(config.original_max_position_embeddings))
            )
            for name in ("long", "short"):
                factors = torch.tensor(rope[f"{name}_factor"], dtype=torch.float32)
                w.add_tensor(f"rope_factors_{name}.weight", factors.numpy())
    add_tensors(w, arch, model)
    w.add_tokenizer_model("gpt2")
    if arch in PRE:
        w.add_tokenizer_pre(PRE[arch])
    w.add_token_list([chr(ord("!") + i) for i in range(config.vocab_size - 1)] + ['!"'])
    w.add_token_merges(['! "'])
    w.add_eos_token_id(0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def add_tensors(w, arch, model):
    config, state = model.config, model.state_dict()
    has_norms_after = any("post_feedforward" in name for name in state)
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch in PERMUTED and ".q_proj." in name:
            tensor = permute(tensor, config.num_attention_heads)
        if arch in PERMUTED and ".k_proj." in name:
            tensor = permute(tensor, config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        w.add_tensor(renamed(name, has_norms_after), tensor.float().contiguous().numpy())


def by_stapo(stapo, model, tokens):
    line = json.dumps({"tokens": tokens, "prompt_tokens": 1})
    command = [stapo, "score", "--model", str(model), "--input", "-"]
    run = subprocess.run(command, input=line, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return torch.tensor(json.loads(run.stdout)["logp"])


def by_transformers(model, tokens):
    ids = torch.tensor(tokens)
    with torch.no_grad():
        logp = model(ids[None]).logits[0].log_softmax(-1)
    return logp[:-1].gather(1, ids[1:, None])[:, 0]


def main(stapo, *only):
    torch.set_num_threads(1)
    for index, case in enumerate(CASES):
        if only and case not in only:
            continue
        generator = torch.Generator().manual_seed(3000 + index)
        with tempfile.TemporaryDirectory() as temporary:
            folder, file = pathlib.Path(temporary, "folder"), pathlib.Path(temporary, "model.gguf")
            model = AutoModelForCausalLM.from_config(config_of(case, **CASES[case][1]), attn_implementation="eager").float()
            model = randomise(model, generator).eval()
            model.save_pretrained(folder)
            arch = CASES[case][0]
            write(file, arch, model)
            tokens = torch.randint(0, model.config.vocab_size, (40,), generator=generator).tolist()
            expected = by_transformers(model, tokens)
            off = lambda logp: f"{(logp - expected).abs().max().item():.1e}"
            result = [f"folder {off(by_stapo(stapo, folder, tokens))}"]
            try:
                result.append(f"GGUF {off(by_stapo(stapo, file, tokens))}")
            except AssertionError as error:
                result.append(f"GGUF refused: {error}")
            if arch in GGUF_CONFIG_MAPPING:
                try:
                    args = dict(gguf_file=file.name, dtype=torch.float32, attn_implementation="eager")
                    theirs = AutoModelForCausalLM.from_pretrained(temporary, **args).eval()
                    result.append(f"transformers' reading of the GGUF {off(by_transformers(theirs, tokens))}")
                except Exception as error:  # what transformers does not read is no finding here
                    result.append(f"not read by transformers: {str(error)[:90]}")
            print(f"{case} as {arch}: {', '.join(result)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
