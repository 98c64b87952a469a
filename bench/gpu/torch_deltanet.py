"""Times gated DeltaNet through PyTorch at the shapes of `bench_gpu_ops deltanet`: a JSON line for each time, as soon as it is known.

The chunks in plain PyTorch come first, then flash-linear-attention where it can be imported. "mixer" has the convolution and the norms
around the recurrence, as the op of this project has. Triton tries up to CONFIGS (default 2) of the library's configurations of each
kernel, spread over its list: all of them would take minutes. With some versions of Triton the library refuses its backward.
"""

import json
import os
import sys

import torch
import torch.nn.functional as F
from timing import seconds

DIM, KERNEL, CHUNK = 128, 4, 64
# Two batches of ten calls: with plain PyTorch alone all times are known within a minute.
BATCHES = 2
CONFIGS = int(os.environ.get("CONFIGS", 2))


def tensor(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def by_torch(q, k, v, g, beta):
    """The equations of deltanet/chunk.cu in f32. Lengths are multiples of CHUNK."""
    group = v.shape[2] // q.shape[2]
    q, k = (F.normalize(x.float(), dim=-1).repeat_interleave(group, dim=2) for x in (q, k))
    # [batch, heads, chunks, rows of a chunk, ..]
    q, k, v, g, beta = (x.float().transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q / DIM**0.5, k, v, g, beta))
    c, beta = g.cumsum(-1).unsqueeze(-1), beta.unsqueeze(-1)
    is_seen = torch.ones(CHUNK, CHUNK, device=q.device, dtype=torch.bool).tril()
    decay = (c - c.transpose(-1, -2)).masked_fill(~is_seen, float("-inf")).exp()
    system = (beta * decay * (k @ k.transpose(-1, -2))).tril(-1)
    sides = torch.cat([beta * v, beta * c.exp() * k], dim=-1)
    values, keys = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(DIM, dim=-1)
    weights, last = decay * (q @ k.transpose(-1, -2)), c[..., -1:, :]
    factors = (q * c.exp(), keys, values, weights, last.exp(), (k * (last - c).exp()).transpose(-1, -2))
    state, outputs = q.new_zeros(*q.shape[:2], DIM, DIM), []
    for query, key, value, weight, kept, rest in zip(*(x.unbind(2) for x in factors)):
        corrected = value - key @ state
        outputs.append(query @ state + weight @ corrected)
        state = kept * state + rest @ corrected
    return torch.stack(outputs, dim=2).flatten(2, 3).transpose(1, 2).to(torch.bfloat16)


def by_library():
    """flash-linear-attention's recurrence."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from triton.runtime.autotuner import Autotuner

    all_configs = Autotuner.prune_configs

    def some_configs(self, options):
        configs = all_configs(self, options)
        return configs[:: -(-len(configs) // CONFIGS)]

    Autotuner.prune_configs = some_configs
    return lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def mixer(recurrence, qkv, z, b, a, conv, a_log, dt_bias, norm, key, value):
    batch, length, width = qkv.shape
    mixed = F.silu(F.conv1d(F.pad(qkv.transpose(1, 2), (KERNEL - 1, 0)), conv, groups=width)).transpose(1, 2)
    q, k, v = mixed.split([key * DIM, key * DIM, value * DIM], dim=2)
    q, k = (x.reshape(batch, length, key, DIM).contiguous() for x in (q, k))
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias)
    out = recurrence(q, k, v.reshape(batch, length, value, DIM).contiguous(), g, b.sigmoid())
    out = out.float() * torch.rsqrt(out.float().square().mean(-1, keepdim=True) + 1e-6)
    return (norm * out.to(torch.bfloat16) * F.silu(z.reshape(out.shape).float()).to(torch.bfloat16)).reshape(z.shape)


def show(name, recurrence, key, value, sequences, length):
    rows = (sequences, length)
    line = {"task": "deltanet", "by": name, "heads": [key, value], "sequences": sequences, "length": length}
    q, k = (tensor(*rows, key, DIM) for _ in range(2))
    v, beta = tensor(*rows, value, DIM), torch.rand(*rows, value, device="cuda", dtype=torch.bfloat16)
    g = -torch.rand(*rows, value, device="cuda")
    width = (2 * key + value) * DIM
    inputs = [tensor(*rows, width), tensor(*rows, value * DIM), tensor(*rows, value), tensor(*rows, value)]
    weights = [tensor(width, 1, KERNEL), tensor(value), tensor(value), tensor(DIM)]
    parts = [
        ("recurrence", lambda: recurrence(q, k, v, g, beta), (q, k, v)),
        ("mixer", lambda: mixer(recurrence, *inputs, *weights, key, value), inputs + weights),
    ]
    for part, call, leaves in parts:
        with torch.no_grad():
            print(json.dumps(line | {"part": part, "forward_us": seconds(call, BATCHES) * 1e6}), flush=True)
        out = call()
        d_out = torch.randn_like(out)
        try:
            backward = seconds(lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True), BATCHES) * 1e6
        except RuntimeError as refusal:
            backward = str(refusal)[:160]
        print(json.dumps(line | {"part": part, "backward_us": backward}), flush=True)


def main():
    heads = [(16, 16), (16, 32)]
    for key, value in heads:
        show("torch", by_torch, key, value, 4, 2048)
    try:
        recurrence = by_library()
    except ImportError as missing:
        print(f"flash-linear-attention: {missing}", file=sys.stderr)
        return
    for sequences, length in [(4, 2048), (1, 16384)]:
        for key, value in heads:
            show("flash-linear-attention", recurrence, key, value, sequences, length)


if __name__ == "__main__":
    main()
