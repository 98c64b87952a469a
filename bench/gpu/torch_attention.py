"""Times causal attention of cuDNN through PyTorch at the shapes of bench_gpu_ops: one JSON line for each."""

import json

import torch
from timing import seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

QUERY_HEADS, KV_HEADS, DIM = 16, 8, 128


def tensor(sequences, heads, length):
    shape = (sequences, length, heads, DIM)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()


def main():
    for sequences, length in [(4, 2048), (2, 8192), (2, 16384), (64, 256)]:
        q, k, v = (tensor(sequences, heads, length) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS))

        def attend():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            with torch.no_grad():
                forward = seconds(attend)
            out = attend()
            d_out = torch.randn_like(out)
            backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True))
        # One product of a causal forward pass, in TFLOP.
        product = 2e-12 * (sequences * length * length / 2) * QUERY_HEADS * DIM
        rates = {"forward_tflops": 2 * product / forward, "backward_tflops": 5 * product / backward}
        print(json.dumps({"task": "attention", "sequences": sequences, "length": length, **rates}))


main()
