"""pool.py FILE ...: pools what `stapo counterfactual --out FILE` wrote for several parts or runs, and prints its table.

The problem of a step of a file is the unit of chance: its tokens are averaged, the difference is paired, the interval is
Student's t, and p is from 20,000 random exchanges of signs. With --gradient the files are those of `counterfactual
--gradient`; steps are the unit."""
import argparse
import json
import math
import random
from collections import defaultdict

from scipy.stats import t as student

KINDS = {"silenced": "silenced", "kept_candidate": "candidate, kept", "random": "random, same responses", "punished": "A < 0, same probability"}


def estimate(values):
    """Mean and the ends of its 95 % interval."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = student.ppf(0.975, len(values) - 1) * deviation / math.sqrt(len(values))
    return mean, mean - half, mean + half


def permutation(values, n=20000):
    chance, extreme = random.Random(0), abs(sum(values)) - 1e-12
    return (1 + sum(abs(sum(v if chance.random() < 0.5 else -v for v in values)) >= extreme for _ in range(n))) / (n + 1)


def tokens(rows):
    for kind, words in KINDS.items():
        problems = defaultdict(list)
        for part, row in rows:
            if row["kind"] == kind:
                problems[part, row["step"], row["problem_id"]].append(row)
        if not problems:
            continue
        rate = lambda own, key: sum(row[key] for row in own) / sum(row["n_samples"] for row in own)
        sampled = [rate(own, "n_right_sampled") for own in problems.values()]
        preferred = [rate(own, "n_right_preferred") for own in problems.values()]
        differences = [a - b for a, b in zip(sampled, preferred)]
        mean, low, high = (100 * value for value in estimate(differences))
        print(f"{words:24} {sum(map(len, problems.values())):5} tokens {len(problems):5} problems  sampled {100 * estimate(sampled)[0]:5.1f}  preferred {100 * estimate(preferred)[0]:5.1f}  difference {mean:+.1f} ({low:+.1f} to {high:+.1f}), p = {permutation(differences):.3f}")


def gradients(rows):
    rows = [row for _, row in rows if row["n_silenced"]]
    print(f"{len(rows)} steps, {sum(row['n_silenced'] for row in rows)} silenced of {sum(row['n_tokens'] for row in rows)} tokens")
    for key in ("silenced_share", "cosine_with_kept", "answers_by_silenced", "answers_by_kept", "answers_cosine_silenced", "answers_cosine_kept"):
        values = [row[key] for row in rows if row[key] is not None]
        mean, low, high = estimate(values)
        print(f"{key:26} {mean:+.3e} ({low:+.3e} to {high:+.3e})")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("files", nargs="+")
    arguments.add_argument("--gradient", action="store_true")
    args = arguments.parse_args()
    rows = [(name, json.loads(line)) for name in args.files for line in open(name)]
    (gradients if args.gradient else tokens)(rows)
