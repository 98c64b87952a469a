"""Times gated DeltaNet through PyTorch at the shapes of `bench_gpu_ops deltanet`: two JSON lines for each.

The recurrence is flash-linear-attention's where it can be imported, else the torch form of transformers. Where the former refuses its
backward (it does with some versions of Triton), its torch form follows at 2,048 tokens. "mixer" has the convolution and
the norms around it, as the op of this project has; "recurrence" is the kernel alone. Triton tries up to CONFIGS (default 4) of the
library's configurations of each kernel, spread over its list, and compiles them at the same time: all of them would take minutes.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from timing import seconds

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, naive_chunk_gated_delta_rule
except ImportError:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    chunk_gated_delta_rule = None

DIM, KERNEL = 128, 4
CONFIGS = int(os.environ.get("CONFIGS", 4))


def compile_together(tuner, configs, options):
    """Compiles the configurations of a kernel in threads, where this triton can; else they are compiled one by one as they are tried."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode

        with ThreadPoolExecutor() as pool, AsyncCompileMode(pool):
            for config in configs:
                tuner.fn.run(*tuner.nargs.values(), **(options | {"warmup": True}), **config.all_kwargs())
    except Exception as failure:
        print(json.dumps({"compiled one by one": repr(failure)[:200]}), flush=True)


def try_fewer_configs():
    from triton.runtime.autotuner import Autotuner

    all_configs = Autotuner.prune_configs

    def some_configs(self, options):
        configs = all_configs(self, options)
        configs = configs[:: -(-len(configs) // CONFIGS)]
        compile_together(self, configs, options)
        return configs

    Autotuner.prune_configs = some_configs


def both(call, inputs):
    """Seconds of forward and of backward; instead of the latter, why the library refuses it."""
    with torch.no_grad():
        forward = seconds(call)
    out = call()
    d_out = torch.randn_like(out)
    try:
        return forward, seconds(lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True))
    except RuntimeError as refusal:
        return forward, str(refusal)[:160]


def tensor(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def by_kernels(q, k, v, g, beta):
    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def by_torch(q, k, v, g, beta):
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q, k))
    if chunk_gated_delta_rule is None:
        return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
    q, k = (F.normalize(x.float(), dim=-1) for x in (q, k))
    return naive_chunk_gated_delta_rule(q, k, v, g, beta)[0].to(v.dtype)


def mixer(recurrence, qkv, z, b, a, conv, a_log, dt_bias, norm, key, value):
    batch, length, width = qkv.shape
    mixed = F.silu(F.conv1d(F.pad(qkv.transpose(1, 2), (KERNEL - 1, 0)), conv, groups=width)).transpose(1, 2)
    q, k, v = mixed.split([key * DIM, key * DIM, value * DIM], dim=2)
    q, k = (x.reshape(batch, length, key, DIM).contiguous() for x in (q, k))
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias)
    out = recurrence(q, k, v.reshape(batch, length, value, DIM).contiguous(), g, b.sigmoid())
    out = out.float() * torch.rsqrt(out.float().square().mean(-1, keepdim=True) + 1e-6)
    return (norm * out.to(torch.bfloat16) * F.silu(z.reshape(out.shape).float()).to(torch.bfloat16)).reshape(z.shape)


def show(recurrence, key, value, sequences, length):
    """Prints the rows of a shape. Gives whether backward ran."""
    rows = (sequences, length)
    name = "flash-linear-attention" if recurrence is by_kernels else "torch"
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
        forward, backward = both(call, leaves)
        has_backward = not isinstance(backward, str)
        times = {"forward_us": forward * 1e6, "backward_us": backward * 1e6 if has_backward else backward}
        print(json.dumps(line | {"part": part} | times), flush=True)
    return has_backward


def main():
    recurrence = by_torch if chunk_gated_delta_rule is None else by_kernels
    if recurrence is by_kernels:
        try_fewer_configs()
    for key, value in [(16, 16), (16, 32)]:
        for sequences, length in [(4, 2048), (1, 16384)]:
            has_backward = show(recurrence, key, value, sequences, length)
            if not has_backward and length == 2048:
                show(by_torch, key, value, sequences, length)


main()
