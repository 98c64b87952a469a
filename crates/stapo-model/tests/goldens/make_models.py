#!/usr/bin/env python3
"""Makes the golden models: tiny random decoders saved by transformers, with the numbers that transformers computes.

    python make_models.py [OUT]        # OUT: this script's folder unless given

Needs torch, transformers, tokenizers, safetensors. Each case becomes a folder as `save_pretrained` writes it
(config.json, model.safetensors, for some a tokenizer) plus golden.safetensors:

    tokens            i32 [T]      packed sequences, one after another
    lengths           i32 [S]      tokens of each sequence
    prompt_lengths    i32 [S]      its first tokens, which are not scored
    temperature       f32 [1]
    logits            f32 [S, V]   after the last token of each sequence, not divided by the temperature
    logp, entropy, collision  f32 [R]   of each response token, in order, at the temperature
    d_logp, d_entropy f32 [R]      random coefficients of the loss  sum d_logp * logp + d_entropy * entropy
    top_ids i32, top_logp f32 [R, 5]   the five likeliest tokens in each response token's place
    grad.<parameter>  f32          of that loss, by autograd

All in f32 on the CPU, one thread, eager attention.
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

# name: (config class, heads, key/value heads, head_dim, width, ffn, vocabulary, tied, rope, temperature, extra)
CASES = {
    "qwen3-tied-gqa2": (Qwen3Config, 4, 2, 8, 20, 28, 41, True, PLAIN, 1.0, {}),
    "qwen3-untied-gqa7": (Qwen3Config, 7, 1, 6, 16, 24, 37, False, PLAIN, 0.7, {}),
    "qwen3-yarn-gqa1": (Qwen3Config, 2, 2, 10, 18, 20, 33, True, YARN, 1.0, {}),
    "qwen2-tied-gqa7": (Qwen2Config, 7, 1, 4, 28, 20, 43, True, PLAIN, 1.3, {}),
    "qwen2-untied-gqa2": (Qwen2Config, 4, 2, 6, 24, 17, 31, False, PLAIN, 1.0, {}),
    "llama-tied-gqa3-bf16": (LlamaConfig, 3, 1, 8, 24, 23, 47, True, PLAIN, 1.0, {}),
    "llama3-untied-gqa1": (LlamaConfig, 2, 2, 12, 20, 30, 35, False, LLAMA3, 1.0, {}),
    "llama-yarn-gqa2": (LlamaConfig, 4, 2, 6, 24, 16, 29, False, YARN, 1.0, {"attention_bias": False}),
}
WITH_TOKENIZER = {"qwen3-tied-gqa2", "llama-tied-gqa3-bf16"}
LENGTHS = [(2, 1), (19, 6), (45, 13), (8, 2), (26, 17)]  # (tokens, of these prompt)
LETTERS = "etaoinshrdlucmfwypvbgkjqxz .\n=+0123456789"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def config_of(case):
    kind, heads, kv_heads, head_dim, width, ffn, vocab, tied, rope, _, extra = CASES[case]
    fields = dict(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope),
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        **extra,
    )
    if kind is not Qwen2Config:  # Qwen2 has no such field: width / heads
        fields["head_dim"] = head_dim
    return kind(**fields)


def randomise(model, generator):
    """Randomises every parameter, norms and biases included: a default of one or zero would hide a mistake."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("norm.weight"):
            p.data = 1.0 + 0.3 * noise
        elif name.endswith("bias"):
            p.data = 0.3 * noise
        elif name.endswith("A_log"):
            p.data = 0.5 * noise - 1.0
        elif name.endswith("sinks"):
            p.data = noise
        elif "embed_tokens" in name or "lm_head" in name:
            p.data = 0.4 * noise
        else:
            p.data = noise * 1.2 / p.shape[1] ** 0.5
    return model


def tokenizer_of(vocab):
    letters = ["<|end|>"] + list(LETTERS[: vocab - 1])
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[], fuse_unk=False))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def golden(model, vocab, temperature, generator, sequences=LENGTHS):
    lengths = [n for n, _ in sequences]
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=generator)
    n_response = sum(n - p for n, p in sequences)
    d_logp = torch.randn(n_response, generator=generator)
    d_entropy = 0.5 * torch.randn(n_response, generator=generator)

    last_logits, logp, entropy, collision, top_ids, top_logp = [], [], [], [], [], []
    start = 0
    for n, n_prompt in sequences:
        ids = tokens[start : start + n]
        start += n
        logits = model(ids[None]).logits[0]
        last_logits.append(logits[-1].detach())
        all_logp = torch.log_softmax(logits / temperature, -1)[n_prompt - 1 : -1]
        logp.append(all_logp.gather(1, ids[n_prompt:, None])[:, 0])
        entropy.append(-(all_logp.exp() * all_logp).sum(-1))
        collision.append((2 * all_logp).exp().sum(-1).detach())
        top = all_logp.detach().topk(5, -1)
        top_ids.append(top.indices)
        top_logp.append(top.values)
    logp, entropy = torch.cat(logp), torch.cat(entropy)
    (d_logp @ logp + d_entropy @ entropy).backward()

    out = {
        "tokens": tokens.int(),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "prompt_lengths": torch.tensor([p for _, p in sequences], dtype=torch.int32),
        "temperature": torch.tensor([temperature]),
        "logits": torch.stack(last_logits),
        "logp": logp.detach(),
        "entropy": entropy.detach(),
        "collision": torch.cat(collision),
        "d_logp": d_logp,
        "d_entropy": d_entropy,
        "top_ids": torch.cat(top_ids).int(),
        "top_logp": torch.cat(top_logp),
    }
    out.update({f"grad.{name}": p.grad for name, p in model.named_parameters()})
    return {name: t.contiguous() for name, t in out.items() if t is not None}


def main():
    torch.set_num_threads(1)
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    for index, case in enumerate(CASES):
        generator = torch.Generator().manual_seed(1000 + index)
        vocab, temperature = CASES[case][6], CASES[case][9]
        model = AutoModelForCausalLM.from_config(config_of(case), attn_implementation="eager")
        model = randomise(model.float(), generator)
        folder = out / case
        if case.endswith("bf16"):
            model.to(torch.bfloat16).save_pretrained(folder)
            # The same rounded weights, all arithmetic in f32; `.float()` would keep rope's rounded frequencies.
            load = dict(dtype=torch.float32, attn_implementation="eager")
            model = AutoModelForCausalLM.from_pretrained(folder, **load)
        else:
            model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if case in WITH_TOKENIZER:
            tokenizer_of(vocab).save_pretrained(folder)
        save_file(golden(model.eval(), vocab, temperature, generator), folder / "golden.safetensors")
        config = json.loads((folder / "config.json").read_text())
        print(case, config["model_type"], sum(p.numel() for p in model.parameters()), "parameters")


if __name__ == "__main__":
    main()
