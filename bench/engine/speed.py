#!/usr/bin/env python3
"""Training and generation speed on the CPU, ours beside PyTorch eager and transformers.generate, in one run.

    python bench/engine/speed.py [--shape small large] [--task train generate] [--rounds 3] [--threads 2] [--skip-peer]

Needs torch and transformers in the Python that runs this script, and a Rust toolchain. Both sides get the same shapes and
the same number of threads. They alternate round by round and the best round of each counts, so that other load on the
machine affects both alike. The peak is that of fused multiply-adds in registers with the same threads.

Rates count 6 (training) or 2 (generation) floating-point operations per parameter and token. Attention and recomputation
are not counted.
"""

import argparse
import json
import pathlib
import subprocess
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPES = {
    # vocabulary, width, layers, heads, key/value heads, head_dim, ffn; training: sequences x tokens
    "small": dict(vocab=256, width=256, layers=6, heads=8, kv_heads=4, head_dim=32, ffn=768, batch=64, length=96),
    "large": dict(vocab=32000, width=512, layers=8, heads=8, kv_heads=4, head_dim=64, ffn=1536, batch=8, length=256),
}
GENERATE = dict(prompts=32, samples=8, prompt=16)  # 256 sequences in groups of 8, as RL samples them
NEW_TOKENS = {"small": 80, "large": 48}
TRAIN_STEPS = {"small": 3, "large": 2}


def peer_model(shape):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["width"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["ffn"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).float()


def peer_train(shape, steps):
    """Seconds of one step: forward, log-prob and entropy of every next token, backward, clip, AdamW."""
    model = peer_model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    ids = torch.randint(0, shape["vocab"], (shape["batch"], shape["length"]))
    weights = torch.randn(shape["batch"], shape["length"] - 1)
    best = float("inf")
    for step in range(steps + 1):
        start = time.perf_counter()
        all_logp = torch.log_softmax(model(ids).logits[:, :-1], -1)
        logp = all_logp.gather(2, ids[:, 1:, None])[..., 0]
        entropy = -(all_logp.exp() * all_logp).sum(-1)
        (-(weights * logp).mean() - 0.01 * entropy.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step > 0:  # the first step allocates memory
            best = min(best, time.perf_counter() - start)
    return best


@torch.no_grad()
def peer_generate(shape, new_tokens):
    """Seconds for all sequences of `new_tokens` sampled tokens."""
    model = peer_model(shape).eval()
    ids = torch.randint(1, shape["vocab"], (GENERATE["prompts"], GENERATE["prompt"]))
    ids = ids.repeat_interleave(GENERATE["samples"], 0)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
    )
    seconds = time.perf_counter() - start
    assert out.shape[1] == GENERATE["prompt"] + new_tokens
    return seconds


def bench_engine(task, **options):
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    program = ROOT / "target/release/examples/bench_engine"
    done = subprocess.run([program, task, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def row(name, side, tokens, seconds, flops_per_token, peak):
    rate = tokens / seconds
    gflops = rate * flops_per_token / 1e9
    print(f"| {name} | {side} | {seconds * 1e3:.0f} | {rate:,.0f} | {gflops:.0f} | {gflops / peak:.0%} |", flush=True)
    return rate


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--task", nargs="+", choices=["train", "generate"], default=["train", "generate"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--skip-peer", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    subprocess.run(
        ["cargo", "build", "--release", "-q", "-p", "stapo-model", "--example", "bench_engine"], check=True, cwd=ROOT
    )
    peak = bench_engine("peak", threads=args.threads)["flops"] / 1e9
    print(f"torch {torch.__version__}, {args.threads} threads, measured f32 peak {peak:.0f} GFLOP/s\n")
    print("| what | side | ms | tokens/s | GFLOP/s | of peak |\n|---|---|---|---|---|---|")
    for task in args.task:
        for key in args.shape:
            compare(task, key, args, peak)


def compare(task, key, args, peak):
    shape = SHAPES[key]
    our_best = peer_best = float("inf")
    parameters = None
    for _ in range(args.rounds):
        if task == "train":
            result = bench_engine("train", **shape, threads=args.threads, steps=2 * TRAIN_STEPS[key])
            peer = (lambda: peer_train(shape, TRAIN_STEPS[key]))
        else:
            result = bench_engine("generate", **shape, threads=args.threads, **GENERATE, new_tokens=NEW_TOKENS[key])
            peer = (lambda: peer_generate(shape, NEW_TOKENS[key]))
        our_best = min(our_best, result["seconds"])
        parameters = result["parameters"]
        if not args.skip_peer:
            peer_best = min(peer_best, peer())
    name = f"{task} {parameters / 1e6:.1f}M"
    if task == "train":
        tokens, flops = shape["batch"] * shape["length"], 6 * parameters
    else:
        tokens, flops = GENERATE["prompts"] * GENERATE["samples"] * NEW_TOKENS[key], 2 * parameters
    mine = row(name, "stapo", tokens, our_best, flops, peak)
    if not args.skip_peer:
        theirs = row(name, "PyTorch", tokens, peer_best, flops, peak)
        print(f"| {name} | **{mine / theirs:.2f}x** | | | | |", flush=True)


if __name__ == "__main__":
    main()
