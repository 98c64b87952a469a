"""How the PyTorch benchmarks of this folder measure a call on a GPU, as bench_gpu_ops does."""

import time

import torch


def seconds(call, batches=5):
    """Seconds that a call takes, in the best of several batches of ten calls after a pause. Three calls before them compile kernels."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    time.sleep(1)
    times = []
    for _ in range(batches):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e4)
    return min(times)
