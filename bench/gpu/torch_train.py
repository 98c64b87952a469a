"""The training step of `bench_gpu train` in PyTorch and transformers.

Qwen3-1.7B shape, 8 x 2048 tokens in two micro-batches. A step computes log-prob and entropy of every token (the head in
chunks, recomputed in backward) and the clipped surrogate without spurious tokens, clips the gradient, and applies fused AdamW
with f32 master weights and states. `--lora RANK` trains adapters of PEFT on all linear modules in place of the weights; the
first factors' gradients are 0 in the first step, as in `bench_gpu train --lora=RANK` they are not, which costs no time.
"""

import argparse
import json
import math
import time

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

SEQUENCES, LENGTH, MICRO, CHUNK = 8, 2048, 4, 2048


def numbers(hidden, weight, targets):
    logits = (hidden @ weight.t()).float()
    logp = torch.log_softmax(logits, -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def objective(logp, entropy, sampled, advantage):
    """Sum of the clipped surrogate over tokens that are not improbable, of low entropy and rewarded."""
    ratio = (logp - sampled).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    with torch.no_grad():
        candidates = (advantage > 0) & (logp < math.log(0.002))
        found = entropy[candidates]
        limit = found.quantile(0.75) if found.numel() else torch.inf
        silenced = candidates & (entropy < limit)
    return (surrogate * ~silenced).sum()


def adapted(model, rank):
    """The model with adapters in bf16, and nothing else trained."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(model, settings, autocast_adapter_dtype=False).get_base_model()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lora", type=int, default=0)
    rank = parser.parse_args().lora
    config = Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, rope_theta=1e6, max_position_embeddings=40960,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).bfloat16()
    if rank:
        model = adapted(model, rank)
    weights = [w for w in model.parameters() if w.requires_grad]
    masters = [w.detach().float().clone() for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, weight_decay=0.01, fused=True)
    tokens = torch.randint(0, 151936, (SEQUENCES, LENGTH), device="cuda")
    n = SEQUENCES * (LENGTH - 1)
    advantage = torch.tensor([1.0, -1.0], device="cuda").repeat(MICRO // 2).repeat_interleave(LENGTH - 1)
    sampled = {}  # the log-probs of each micro-batch in the first step
    best = float("inf")
    for step in range(4):
        torch.cuda.synchronize()
        start = time.time()
        for m in masters:
            if m.grad is not None:
                m.grad.zero_()
        for place, part in enumerate(tokens.split(MICRO)):
            hidden = model.model(input_ids=part, use_cache=False).last_hidden_state[:, :-1].reshape(-1, 2048)
            targets = part[:, 1:].reshape(-1)
            pairs = [
                checkpoint(numbers, h, model.lm_head.weight, t, use_reentrant=False)
                for h, t in zip(hidden.split(CHUNK), targets.split(CHUNK))
            ]
            logp, entropy = (torch.cat(x) for x in zip(*pairs))
            sampled.setdefault(place, logp.detach())
            (-objective(logp, entropy.detach(), sampled[place], advantage) / n).backward()
            for m, w in zip(masters, weights):
                m.grad = w.grad.float() if m.grad is None else m.grad.add_(w.grad)
                w.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        torch.cuda.synchronize()
        seconds = time.time() - start
        print(f"step {step}: {seconds:.4f} s")
        if step:
            best = min(best, seconds)
    gib = torch.cuda.max_memory_reserved() / 2**30
    print(json.dumps({"task": "torch", "lora": rank, "tokens_per_s": round(SEQUENCES * LENGTH / best), "gib": round(gib, 1)}))


main()
