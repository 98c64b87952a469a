#!/usr/bin/env python3
"""Scaling over GPUs, simulated by `stapo plan --gpus`: the tables of dev/scaling.md and the figure of docs/scaling.md.

    cargo build --release && python3 bench/scaling.py --stapo target/release/stapo --svg docs/images/scaling.svg

No GPU is needed. Lengths are the paper's: log-normal, mean 4,000 before the cut at 15,360 tokens, 0.8 in the logarithm.
"""

import argparse
import json
import subprocess

CONFIGS = ["1.7b", "8b", "14b"]
LENGTHS = ["--set", "rollout.lengths={ mean = 4000.0, sigma = 0.8 }", "--mean-prompt", "200"]
GPUS = [8, 16, 32, 64, 128, 256, 512]
COLORS = {"1.7b": "#4269d0", "8b": "#d65f2b", "14b": "#3a8a5f"}


def plan(stapo, size, *args):
    command = [stapo, "plan", f"configs/qwen3-{size}.toml", "--machine", "h200", "--json", *LENGTHS, *args]
    # Status 1 is a plan that does not fit.
    planned = subprocess.run(command, check=False, capture_output=True, text=True)
    if planned.returncode not in (0, 1):
        raise SystemExit(planned.stderr)
    return json.loads(planned.stdout)


def batch(factor):
    """A rollout batch and mini-batch of `factor` times as many problems."""
    return ["--set", f"rollout.problems_per_step={256 * factor}", "--set", f"update.problems_per_minibatch={64 * factor}"]


def row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def seconds(value):
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"


def percent(value):
    return f"{100 * value:.0f} %"


def phases(stapo, gpus, nodes):
    """Memory and seconds of the three recipes."""
    row("model", "GPUs", "memory a rank", "rollout", "update", "exchange", "other", "a step", "exchange's share", "efficiency")
    row(*["---"] * 10)
    for size in CONFIGS:
        for n in [1, *gpus]:
            planned = plan(stapo, size, *(["--gpus", str(n), *nodes.get(n, [])] if n > 1 else []))
            time = planned["time"]["phases"]
            total = planned["time"]["seconds_per_step"]
            update = time["update"] + time["calibrate"]
            rest = total - update - time["rollout"] - time["exchange"]
            ranks = planned["ranks"] or {"efficiency": 1.0}
            memory = f"{planned['memory_bytes_total'] / 2**30:.1f} GiB"
            row(f"Qwen3-{size.upper()}", n, memory if planned["fits"] else memory + ", does not fit",
                seconds(time["rollout"]), seconds(update), seconds(time["exchange"]), seconds(rest), seconds(total),
                percent(time["exchange"] / total), percent(ranks["efficiency"]))


def memory(stapo):
    """GiB of each part on a rank."""
    parts = ["weights", "optimizer", "gradients", "activations", "keys, values"]
    row("model", "GPUs", *parts)
    row(*["---"] * (2 + len(parts)))
    for size in CONFIGS:
        for n in (1, 8, 64):
            held = plan(stapo, size, *(["--gpus", str(n)] if n > 1 else []))["memory_bytes"]
            row(f"Qwen3-{size.upper()}", n, *(f"{held[part] / 2**30:.1f}" for part in parts))


def efficiencies(stapo, size):
    """Efficiency by links, for the recipe as it is and for a batch that grows with the GPUs."""
    row("GPUs", "links", "batch", "rollout: slowest rank (mean)", "update", "exchange (with what backward hides)", "waiting", "efficiency")
    row(*["---"] * 8)
    for factor_of in (lambda n: 1, lambda n: n // 8):
        for n in (8, 64, 512):
            if n == 8 and factor_of(64) != 1:
                continue
            factor = factor_of(n)
            one = plan(stapo, size, *batch(factor))["time"]["seconds_per_step"]
            for link in (50, 400):
                planned = plan(stapo, size, *batch(factor), "--gpus", str(n), "--link", str(link))
                time, ranks = planned["time"]["phases"], planned["ranks"]
                total = planned["time"]["seconds_per_step"]
                parts = ranks["exchange_seconds"]
                whole = time["exchange"] - parts["exposed"] + parts["gradients"] + parts["fold"]
                row(n, f"{link} GB/s", f"{256 * factor:,} problems",
                    f"{seconds(time['rollout'])} ({seconds(ranks['rollout_seconds_mean'])})",
                    seconds(time["update"] + time["calibrate"]),
                    f"{seconds(time['exchange'])} ({seconds(whole)})",
                    percent(ranks["idle_share"]), percent(one / total / n))


def figure(stapo, path):
    """Efficiency by GPUs: solid for a batch that grows with them, dashed for the recipe as it is."""
    curves = []
    for size in CONFIGS:
        for link in (50, 400):
            for grows in (False, True):
                points = []
                for n in GPUS:
                    args = batch(n // 8 if grows else 1)
                    one = plan(stapo, size, *args)["time"]["seconds_per_step"]
                    many = plan(stapo, size, *args, "--gpus", str(n), "--link", str(link))
                    points.append((n, one / many["time"]["seconds_per_step"] / n))
                curves.append((size, link, grows, points))
    with open(path, "w") as out:
        out.write(svg(curves))


def svg(curves):
    panel, height, left, top, gap = 330, 260, 56, 46, 44
    top_share = 1.0
    width = left + 2 * panel + gap + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + height + 74}" font-family="sans-serif" font-size="12">',
        "<title>Simulated scaling efficiency by the number of GPUs</title>",
        "<style>.ground{fill:#ffffff}text{fill:#1b2430}line{stroke:#dddddd}"
        "@media (prefers-color-scheme: dark){.ground{fill:#0f141b}text{fill:#e8edf5}line{stroke:#313c4c}}</style>",
        f'<rect class="ground" width="{width}" height="{top + height + 74}"/>',
        f'<text x="{left}" y="18" font-size="14" font-weight="bold">Simulated scaling efficiency, H200, responses to 15,360 tokens</text>',
    ]
    for at, link in enumerate((50, 400)):
        x0 = left + at * (panel + gap)

        def x(n):
            return x0 + panel * (GPUS.index(n)) / (len(GPUS) - 1)

        def y(share):
            return top + height * (1 - share / top_share)

        parts.append(f'<text x="{x0}" y="{top - 8}">{link} GB/s from each GPU</text>')
        for quarter in range(5):
            share = quarter / 4
            parts.append(f'<line x1="{x0}" x2="{x0 + panel}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>')
            if at == 0:
                parts.append(f'<text x="{x0 - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>')
        for n in GPUS:
            parts.append(f'<text x="{x(n):.1f}" y="{top + height + 18}" text-anchor="middle">{n}</text>')
        parts.append(f'<text x="{x0 + panel / 2}" y="{top + height + 36}" text-anchor="middle">GPUs</text>')
        for size, rate, grows, points in curves:
            if rate != link:
                continue
            line = " ".join(f"{x(n):.1f},{y(min(share, top_share)):.1f}" for n, share in points)
            dash = "" if grows else ' stroke-dasharray="5 4"'
            parts.append(f'<polyline points="{line}" fill="none" stroke="{COLORS[size]}" stroke-width="2"{dash}/>')
    for idx, size in enumerate(CONFIGS):
        at = left + 96 * idx
        parts.append(f'<rect x="{at}" y="{top + height + 50}" width="18" height="4" fill="{COLORS[size]}"/>')
        parts.append(f'<text x="{at + 24}" y="{top + height + 57}">{size.upper()}</text>')
    note = "solid: the batch grows with the GPUs; dashed: 256 problems"
    parts.append(f'<text x="{width - 16}" y="{top + height + 57}" text-anchor="end">{note}</text>')
    return "\n".join(parts) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stapo", default="stapo")
    parser.add_argument("--svg", help="where to write the figure")
    args = parser.parse_args()
    memory(args.stapo)
    print()
    phases(args.stapo, [8, 16], {16: ["--nodes", "2"]})
    for size in CONFIGS:
        print(f"\n{size.upper()}\n")
        efficiencies(args.stapo, size)
    if args.svg:
        figure(args.stapo, args.svg)


if __name__ == "__main__":
    main()
