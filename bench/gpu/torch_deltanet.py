"""Times gated DeltaNet through PyTorch at the shapes of `bench_gpu_ops deltanet`: one JSON line for each.

The recurrence is flash-linear-attention's where it can be imported, else the torch form of transformers. "mixer" has the convolution and
the norms around it, as the op of this project has; "recurrence" is the kernel alone.
"""

import json

import torch
import torch.nn.functional as F
from timing import seconds

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    NAME = "flash-linear-attention"
except ImportError:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as chunk_gated_delta_rule

    NAME = "transformers"

DIM, KERNEL = 128, 4


def both(call, inputs):
    """Seconds of forward and of backward."""
    with torch.no_grad():
        forward = seconds(call)
    out = call()
    d_out = torch.randn_like(out)
    return forward, seconds(lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True))


def tensor(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def recurrence(q, k, v, g, beta):
    if NAME == "transformers" and v.shape[2] != q.shape[2]:
        q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q, k))
    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def mixer(qkv, z, b, a, conv, a_log, dt_bias, norm, key, value):
    batch, length, width = qkv.shape
    mixed = F.silu(F.conv1d(F.pad(qkv.transpose(1, 2), (KERNEL - 1, 0)), conv, groups=width)).transpose(1, 2)
    q, k, v = mixed.split([key * DIM, key * DIM, value * DIM], dim=2)
    q, k = (x.reshape(batch, length, key, DIM).contiguous() for x in (q, k))
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias)
    out = recurrence(q, k, v.reshape(batch, length, value, DIM).contiguous(), g, b.sigmoid())
    out = out.float() * torch.rsqrt(out.float().square().mean(-1, keepdim=True) + 1e-6)
    return (norm * out.to(torch.bfloat16) * F.silu(z.reshape(out.shape).float()).to(torch.bfloat16)).reshape(z.shape)


def main():
    for key, value in [(16, 16), (16, 32)]:
        for sequences, length in [(4, 2048), (1, 16384)]:
            rows = (sequences, length)
            q, k = (tensor(*rows, key, DIM) for _ in range(2))
            v, beta = tensor(*rows, value, DIM), torch.rand(*rows, value, device="cuda", dtype=torch.bfloat16)
            g = -torch.rand(*rows, value, device="cuda")
            alone = both(lambda: recurrence(q, k, v, g, beta), (q, k, v))
            width = (2 * key + value) * DIM
            inputs = [tensor(*rows, width), tensor(*rows, value * DIM), tensor(*rows, value), tensor(*rows, value)]
            weights = [tensor(width, 1, KERNEL), tensor(value), tensor(value), tensor(DIM)]
            whole = both(lambda: mixer(*inputs, *weights, key, value), inputs + weights)
            line = {"task": "deltanet", "by": NAME, "heads": [key, value], "sequences": sequences, "length": length}
            for name, (forward, backward) in [("mixer", whole), ("recurrence", alone)]:
                line |= {f"{name}_forward_us": forward * 1e6, f"{name}_backward_us": backward * 1e6}
            print(json.dumps(line), flush=True)


main()
