"""Runs the arms of planted.toml over seeds and prints what the policies learned.

    python bench/preferences/run.py STAPO OUT SEEDS [ARM ..]

Every run is `stapo prefer` on bench/preferences/planted.toml, followed by `stapo eval` on held-out problems. A word is
misspelled where it is none of the eight words of the built-in task. Runs that are there already are kept.
"""

import json
import math
import pathlib
import re
import subprocess
import sys

ARMS = {
    "plain": ["preference.masks=[]"],
    "s2t": ['preference.masks=[{kind="spurious"}]'],
    "random": ['preference.masks=[{kind="random_tokens"}]'],
    "all-candidates": ['preference.masks=[{kind="spurious",select="full"}]'],
    "no-typos": ["preference.masks=[]", "data.chosen.typo_share=0.0"],
}
WORDS = {"so", "now", "then", "next", "thus", "and", "get", "or"}
# Two-sided 97.5 % quantiles of Student's t by degrees of freedom.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def run(stapo, out, arm, seed):
    folder, samples = out / f"{arm}-{seed}", out / f"eval-{arm}-{seed}"
    config = pathlib.Path(__file__).with_name("planted.toml")
    if not samples.exists():
        sets = ARMS[arm] + [f"seed={seed}", f"data.chosen.seed={seed}", f"data.rejected.seed={seed}"]
        sets = [word for text in sets for word in ("--set", text)]
        subprocess.run([stapo, "-q", "prefer", config, "--out", folder, "--threads", "1", *sets], check=True)
        evaluate = ["--benchmarks", "arithmetic", "--limit", "500", "--samples", "4", "--max-tokens", "96", "--threads", "1"]
        subprocess.run([stapo, "-q", "eval", "--model", folder / "model", *evaluate, "--out", samples], check=True,
                       stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in open(samples / "samples.jsonl")]
    words = [word for row in rows for word in re.findall(r"(?<![\\a-z])[a-z]+", row["text"])]
    last = json.loads(open(folder / "metrics.jsonl").readlines()[-1])["preference"]
    receipt = open(folder / "manifest.sha256").read()[:12]
    return {
        "accuracy": sum(row["verdict"] == "right" for row in rows) / len(rows),
        "misspelled": sum(word not in WORDS for word in words) / len(words),
        "pairs in order": last["eval_accuracy"], "silenced": last["n_silenced"] / last["n_chosen_tokens"],
        "receipt": receipt,
    }


def main():
    stapo, out = sys.argv[1], pathlib.Path(sys.argv[2])
    seeds, arms = range(int(sys.argv[3])), sys.argv[4:] or list(ARMS)
    out.mkdir(parents=True, exist_ok=True)
    found = {}
    for seed in seeds:
        for arm in arms:
            found[arm, seed] = run(stapo, out, arm, seed)
            print(arm, seed, json.dumps(found[arm, seed]), flush=True)
    print("\narm, then mean and difference to plain by seed with its 95 % interval, in percent")
    for arm in arms:
        line = f"{arm:15}"
        for key in ("accuracy", "misspelled", "pairs in order"):
            values = [100 * found[arm, seed][key] for seed in seeds]
            gaps = [value - 100 * found["plain", seed][key] for value, seed in zip(values, seeds)]
            mean, n = sum(gaps) / len(gaps), len(gaps)
            half = T[n - 1] * math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (n - 1) / n) if n > 1 else 0
            line += f"  {key} {sum(values) / n:6.2f} ({mean:+.2f} ± {half:.2f})"
        print(line)


main()
