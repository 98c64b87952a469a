"""Writes steps.json: two training steps on rollouts.jsonl, and two that choose their groups from the draws of draws.jsonl,
computed in f64 apart from the program.

Usage: python make_steps.py   (needs numpy and autograd; reads models/base and the rollouts, writes beside itself)

The settings are those of loops/golden_steps.rs. Nothing is sampled. The model is Qwen3 (RMSNorm, rotary positions in
halves, norms of queries and keys, grouped heads, SwiGLU, tied embedding).
"""

import json
import pathlib
from importlib.metadata import version

import autograd
import autograd.numpy as np
import numpy

HERE = pathlib.Path(__file__).parent
BASE = HERE.parents[3] / "models" / "base"
CONFIG = json.loads((BASE / "config.json").read_text())
N_HEADS, N_KV, DIM = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]

PROBLEMS, MAX_REDRAWS, PER_MINIBATCH, USES = 4, 2, 2, 2
TAU_P, Q, BETA, LOW, HIGH = 0.3, 0.5, 0.1, 0.2, 0.28
RATE, WARMUP, BETA1, BETA2, EPS, DECAY, MAX_NORM = 2e-5, 3, 0.9, 0.99, 1e-5, 0.01, 0.5


def read_weights():
    """bf16 is the upper half of f32."""
    raw = (BASE / "model.safetensors").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    weights = {}
    for name, tensor in json.loads(raw[8 : 8 + n]).items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            bits = numpy.frombuffer(raw[8 + n + start : 8 + n + end], dtype="<u2").astype("<u4") << 16
            weights[name] = bits.view("<f4").astype(float).reshape(tensor["shape"])
    return weights


def norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x):
    """Shapes: x [tokens, heads, dim]."""
    half = DIM // 2
    angles = numpy.outer(numpy.arange(len(x)), CONFIG["rope_theta"] ** (-numpy.arange(half) / half))[:, None, :]
    a, b = x[..., :half], x[..., half:]
    cos, sin = numpy.cos(angles), numpy.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def log_softmax(x):
    shifted = x - np.max(x, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def forward(w, tokens, n_prompt):
    """Log-probs and entropies of the response's tokens."""
    n = len(tokens)
    hidden = w["model.embed_tokens.weight"][tokens]
    future = numpy.triu(numpy.full((n, n), -numpy.inf), 1)
    for layer in range(CONFIG["num_hidden_layers"]):
        p = lambda name: w[f"model.layers.{layer}.{name}.weight"]
        x = norm(hidden, p("input_layernorm"))
        heads = lambda name, k: np.reshape(x @ p(f"self_attn.{name}").T, (n, k, DIM))
        q = rotate(norm(heads("q_proj", N_HEADS), p("self_attn.q_norm")))
        k = rotate(norm(heads("k_proj", N_KV), p("self_attn.k_norm")))
        v = heads("v_proj", N_KV)
        out = []
        for head in range(N_HEADS):
            kv = head // (N_HEADS // N_KV)
            scores = q[:, head] @ k[:, kv].T / numpy.sqrt(DIM) + future
            out.append(np.exp(log_softmax(scores)) @ v[:, kv])
        hidden = hidden + np.concatenate(out, axis=-1) @ p("self_attn.o_proj").T
        x = norm(hidden, p("post_attention_layernorm"))
        gate = x @ p("mlp.gate_proj").T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (x @ p("mlp.up_proj").T)) @ p("mlp.down_proj").T
    logits = norm(hidden, w["model.norm.weight"])[n_prompt - 1 : -1] @ w["model.embed_tokens.weight"].T
    logp = log_softmax(logits)
    sampled = numpy.array(tokens[n_prompt:])
    return logp[numpy.arange(len(sampled)), sampled], -np.sum(np.exp(logp) * logp, axis=-1)


def score(w, responses):
    return [forward(w, r["prompt_tokens"] + r["tokens"], len(r["prompt_tokens"])) for r in responses]


def redrawn(responses, size):
    """The groups of a step: a group of equal rewards is replaced by one of the next draw, but not after the last draw."""
    kept = []
    for draw in range(MAX_REDRAWS + 1):
        drawn = [r for r in responses if r["draw"] == draw]
        groups = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        assert len(groups) == PROBLEMS - len(kept)
        kept += [group for group in groups if draw == MAX_REDRAWS or len({r["reward"] for r in group}) > 1]
    return [r for group in kept for r in group]


def advantages(responses, size):
    rewards = numpy.array([r["reward"] for r in responses]).reshape(-1, size)
    spread = rewards.std(axis=1, ddof=1, keepdims=True)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return numpy.where(spread > 0, centred / numpy.where(spread > 0, spread, 1), 0).ravel()


def kept_tokens(scores, advantage):
    """S2T: rewarded, improbable tokens whose entropy is below the quantile of all such tokens are silenced. Equal beginnings
    have equal entropies, which rounding must not tell apart."""
    scores = [(logp, numpy.round(entropy, 9)) for logp, entropy in scores]
    candidates = [(a > 0) & (numpy.exp(logp) < TAU_P) for (logp, _), a in zip(scores, advantage)]
    entropies = numpy.concatenate([entropy[c] for (_, entropy), c in zip(scores, candidates)])
    tau_h = numpy.quantile(entropies, Q)
    return [~(c & (entropy < tau_h)) for (_, entropy), c in zip(scores, candidates)], sum(c.sum() for c in candidates), tau_h


def loss(w, responses, advantage, behavior, reference, kept):
    """Also the ratios of kept tokens, and k3 sums for both divergences."""
    total, ratios, kl = 0.0, [], []
    for r, a, old, ref, keep in zip(responses, advantage, behavior, reference, kept):
        logp, _ = forward(w, r["prompt_tokens"] + r["tokens"], len(r["prompt_tokens"]))
        ratio = np.exp(logp - old)
        surrogate = np.minimum(ratio * a, np.clip(ratio, 1 - LOW, 1 + HIGH) * a)
        d = ref - logp
        total = total + np.sum(keep * (-surrogate + BETA * (np.exp(d) - 1 - d)))
        ratios.append(ratio)
        kl.append(np.exp(d) - 1 - d)
    return total / sum(k.sum() for k in kept), (ratios, kl)


class AdamW:
    def __init__(self, w):
        self.n = 0
        self.m = {name: numpy.zeros_like(x) for name, x in w.items()}
        self.v = {name: numpy.zeros_like(x) for name, x in w.items()}

    def step(self, w, gradient):
        length = numpy.sqrt(sum((g * g).sum() for g in gradient.values()))
        scale = min(1.0, MAX_NORM / length)
        self.n += 1
        rate = RATE * min(1.0, self.n / WARMUP)
        for name, g in gradient.items():
            g = g * scale
            self.m[name] = BETA1 * self.m[name] + (1 - BETA1) * g
            self.v[name] = BETA2 * self.v[name] + (1 - BETA2) * g * g
            m, v = self.m[name] / (1 - BETA1**self.n), self.v[name] / (1 - BETA2**self.n)
            decay = DECAY if w[name].ndim == 2 else 0.0
            w[name] = w[name] - rate * (m / (numpy.sqrt(v) + EPS) + decay * w[name])
        return length, rate


def step(number, w, start, optimizer, drawn, size):
    """`size` is that of a group."""
    responses = redrawn(drawn, size) if "draw" in drawn[0] else drawn
    advantage = advantages(responses, size)
    scored = score(w, responses)
    behavior, reference = [logp for logp, _ in scored], [logp for logp, _ in score(start, responses)]
    entropies = numpy.concatenate([entropy for _, entropy in scored])
    n = PER_MINIBATCH * size
    updates, ratios, kl = [], [], []
    for cut in [slice(i, i + n) for i in range(0, len(responses), n)] * USES:
        part = (responses[cut], advantage[cut], behavior[cut], reference[cut])
        kept, n_candidates, tau_h = kept_tokens(score(w, part[0]), part[1])
        value, (r, k) = loss(w, *part, kept)
        gradient = autograd.grad(lambda w: loss(w, *part, kept)[0])(w)
        length, rate = optimizer.step(w, gradient)
        updates.append((float(value), length, rate, n_candidates, sum(x.sum() for x in kept), sum(x.size for x in kept), tau_h))
        ratios += [x[keep] for x, keep in zip(r, kept)]
        kl += [x[keep] for x, keep in zip(k, kept)]
    losses, lengths, rates, candidates, n_kept, n_tokens, tau_h = zip(*updates)
    ratios = numpy.concatenate(ratios)
    groups = [responses[i : i + size] for i in range(0, len(responses), size)]
    metrics = {
        "step": number,
        "n_responses": len(drawn),
        "n_sampled": sum(len(r["tokens"]) for r in drawn),
        "equal_rewards_share": float(numpy.mean([len({r["reward"] for r in group}) == 1 for group in groups])),
        "reward_mean": float(numpy.mean([r["reward"] for r in responses])),
        "entropy_mean": float(entropies.mean()),
        "n_tokens": int(sum(n_tokens)),
        "n_candidates": int(sum(candidates)),
        "n_kept": int(sum(n_kept)),
        "n_silenced": int(sum(n_tokens) - sum(n_kept)),
        "tau_h": float(tau_h[0]),
        "loss": float(numpy.mean(losses)),
        "gradient_norm": float(numpy.mean(lengths)),
        "learning_rate": float(rates[-1]),
        "ratio_min": float(ratios.min()),
        "ratio_max": float(ratios.max()),
        "kl_behavior": float(numpy.mean(ratios - 1 - numpy.log(ratios))),
        "kl_reference": float(numpy.mean(numpy.concatenate(kl))),
    }
    return {"metrics": metrics, "problems": [r["id"] for r in responses]}


def read(name):
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def steps(batches, size):
    weights = read_weights()
    start, optimizer = dict(weights), AdamW(weights)
    return [step(i + 1, weights, start, optimizer, drawn, size) for i, drawn in enumerate(batches)]


recorded, draws = read("rollouts.jsonl"), read("draws.jsonl")
golden = {
    "made_with": f"numpy {numpy.__version__}, autograd {version('autograd')}",
    "recorded": steps([recorded[:16], recorded[16:]], 4),
    "redrawn": steps([[r for r in draws if r["step"] == number] for number in (1, 2)], 2),
}
(HERE / "steps.json").write_text(json.dumps(golden, indent=1) + "\n")
print(json.dumps(golden, indent=1))
