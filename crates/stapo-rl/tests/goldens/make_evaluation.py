"""Writes evaluation.json: the samples of two evaluations and, by SciPy and enumeration, the tables they give.

Usage: python make_evaluation.py   (needs numpy, scipy, statsmodels; writes beside itself)
"""

import itertools
import json
import pathlib
from collections import Counter

import numpy as np
import scipy
from scipy import stats
from statsmodels.stats.multitest import multipletests

rng = np.random.default_rng(20261117)
REFERENCE = "7"
BENCHMARKS = {"long": 8, "short": 5, "equal": 6}
N_SAMPLES = 4


def sampled(rate):
    """One sample: an answer, or none; "7" is right."""
    if rng.random() < rate:
        return REFERENCE
    return [None, "3", "4", "5"][rng.integers(4)]


def evaluation(rates):
    return {
        name: [[sampled(rates[name]) for _ in range(N_SAMPLES)] for _ in range(n)] for name, n in BENCHMARKS.items()
    }


def estimate(values):
    """Mean over questions, its standard error and Student's interval, cut at 0 and 1."""
    n = len(values)
    error = float(np.std(values, ddof=1) / np.sqrt(n))
    low, high = stats.t.interval(0.95, n - 1, loc=np.mean(values), scale=error)
    return [float(np.mean(values)), error, max(float(low), 0.0), min(float(high), 1.0)]


def pass_at(samples, k):
    subsets = list(itertools.combinations(samples, k))
    return sum(REFERENCE in subset for subset in subsets) / len(subsets)


def majority(samples):
    """Ties are shared."""
    votes = Counter(answer for answer in samples if answer is not None)
    best = [answer for answer, n in votes.items() if n == max(votes.values())]
    return (REFERENCE in best) / len(best) if best else 0.0


def row(questions):
    return {
        "avg": estimate([samples.count(REFERENCE) / N_SAMPLES for samples in questions]),
        "pass": {k: estimate([pass_at(samples, k) for samples in questions]) for k in (1, 2, 4)},
        "maj": estimate([majority(samples) for samples in questions]),
        "no_answer_share": sum(samples.count(None) for samples in questions) / (N_SAMPLES * len(questions)),
    }


def compared(a, b):
    rows = {}
    for name in sorted(BENCHMARKS):
        x, y = ([samples.count(REFERENCE) / N_SAMPLES for samples in side[name]] for side in (a, b))
        d = np.array(y) - np.array(x)
        error = d.std(ddof=1) / np.sqrt(len(d))
        permuted = stats.permutation_test(
            (y, x), lambda y, x, axis: np.mean(y - x, axis=axis), permutation_type="samples", vectorized=True, n_resamples=np.inf
        )
        low, high = stats.t.interval(0.95, len(d) - 1, loc=d.mean(), scale=error)
        rows[name] = {"a": np.mean(x), "b": np.mean(y), "difference": d.mean(), "interval": [low, high], "p": permuted.pvalue}
    adjusted = multipletests([r["p"] for r in rows.values()], method="holm")[1]
    for r, p in zip(rows.values(), adjusted):
        r["p_adjusted"] = p
    return rows


a = evaluation({"long": 0.2, "short": 0.2, "equal": 0.5})
b = evaluation({"long": 0.8, "short": 0.8, "equal": 0.5})
golden = {
    "made_with": f"scipy {scipy.__version__}, numpy {np.__version__}",
    "a": a,
    "b": b,
    "rows": {name: row(questions) for name, questions in a.items()},
    "compared": compared(a, b),
}
path = pathlib.Path(__file__).with_name("evaluation.json")
path.write_text(json.dumps(golden, indent=1, default=float) + "\n")
print({name: (r["p"], r["p_adjusted"]) for name, r in golden["compared"].items()})
