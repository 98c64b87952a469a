"""Times matrix products in stapo-ops and in PyTorch on the same machine and threads, in one run.

    python bench/ops/compare.py [--threads N]

Builds and runs the `bench_ops` example, then times the same shapes with torch, and prints both side by side with the
share of the peak that `bench_ops` measured. Needs torch.
"""

import argparse
import os
import pathlib
import re
import subprocess
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINE = re.compile(r"matmul (\w+)\s+T=(\d+) (\d+)->(\d+)\s+([\d.]+)us")


def ours(threads):
    """{(pass, tokens, inputs, outputs): seconds} and the measured peak in FLOP/s."""
    command = ["cargo", "run", "-q", "--release", "-p", "stapo-ops", "--example", "bench_ops", "matmul"]
    env = dict(os.environ, STAPO_THREADS=str(threads))
    text = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout
    peak = float(re.search(r"peak (\d+) GFLOP/s", text)[1]) * 1e9
    times = {(m[1], int(m[2]), int(m[3]), int(m[4])): float(m[5]) * 1e-6 for m in map(LINE.match, text.splitlines()) if m}
    return times, peak


def best_time(body, clock, seconds=0.5):
    body()
    best, start, n = float("inf"), clock(), 0
    while clock() - start < seconds or n < 3:
        once = clock()
        body()
        best = min(best, clock() - once)
        n += 1
    return best


def torch_body(kind, tokens, inputs, outputs):
    x, w, y = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
    d_w = torch.zeros(outputs, inputs)
    if kind == "forward":
        return lambda: torch.matmul(x, w.T, out=y)
    if kind == "backward_input":
        return lambda: torch.matmul(y, w, out=x)
    return lambda: d_w.addmm_(y.T, x)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    # As in bench_ops, one thread is timed by its processor time, which other load on the machine does not change.
    clock = time.thread_time if threads == 1 else time.perf_counter
    times, peak = ours(threads)
    print(f"{threads} threads, measured peak {peak / 1e9:.0f} GFLOP/s, torch {torch.__version__}")
    print(f"{'product':<18} {'shape':<22} {'stapo':>9} {'torch':>9} {'stapo':>6} {'torch':>6}  ratio")
    print(f"{'':<18} {'':<22} {'GFLOP/s':>9} {'GFLOP/s':>9} {'peak':>6} {'peak':>6}")
    for (kind, tokens, inputs, outputs), mine in times.items():
        theirs = best_time(torch_body(kind, tokens, inputs, outputs), clock)
        flops = 2 * tokens * inputs * outputs
        shape = f"T={tokens} {inputs}->{outputs}"
        print(
            f"{kind:<18} {shape:<22} {flops / mine / 1e9:9.1f} {flops / theirs / 1e9:9.1f} "
            f"{100 * flops / mine / peak:5.0f}% {100 * flops / theirs / peak:5.0f}%  {theirs / mine:.2f}"
        )


if __name__ == "__main__":
    with torch.no_grad():
        main()
