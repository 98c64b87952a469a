"""Writes stats.json: inputs and the answers of SciPy, mpmath, statsmodels and direct enumeration.

Usage: python make_stats.py   (needs mpmath, numpy, scipy, statsmodels; writes beside itself)
"""

import itertools
import json
import math
import pathlib
from fractions import Fraction

import mpmath
import numpy as np
import scipy
import statsmodels
import statsmodels.api as sm
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

rng = np.random.default_rng(20240607)


def normal():
    x = [-38.0, -37.0, -10.0, -8.0, -5.0, -3.0, -1.96, -0.5, -1e-8, 0.0, 0.3, 1.0, 2.0, 6.0]
    p = [1e-300, 1e-20, 1e-10, 1e-5, 0.01, 0.025, 0.2499, 0.3, 0.49999, 0.5, 0.7, 0.975, 0.999999, 1 - 1e-12]
    return {
        "cdf": [[v, stats.norm.cdf(v)] for v in x],
        "quantile": [[v, stats.norm.ppf(v)] for v in p],
    }


def student():
    """By mpmath, because SciPy rounds t = -1e-9 to p = 0.5."""

    def cdf(t, freedom):
        t, v = mpmath.mpf(t), mpmath.mpf(freedom)
        # Half the incomplete beta, as the series that converges for every v: P(0 < T < t) = t f(0) 2F1.
        density = mpmath.exp(mpmath.loggamma((v + 1) / 2) - mpmath.loggamma(v / 2)) / mpmath.sqrt(v * mpmath.pi)
        return mpmath.mpf(1) / 2 + t * density * mpmath.hyp2f1(0.5, (v + 1) / 2, 1.5, -t * t / v)

    def quantile(p, freedom):
        guess = mpmath.mpf(stats.t.ppf(p, freedom))
        return mpmath.findroot(lambda t: cdf(t, freedom) - mpmath.mpf(p), (guess, guess * (1 + mpmath.mpf(10) ** -6)))

    mpmath.mp.dps = 60
    freedoms = [0.5, 1, 2, 3, 5, 23, 24, 29, 499, 1e4, 1e6, 9e7, 2e8, 1e12]
    t = [-100.0, -30.0, -5.0, -2.0, -1.0, -1e-3, -1e-9, 0.5, 3.0]
    p = [1e-10, 1e-4, 0.025, 0.2, 0.3, 0.49999, 0.8, 0.975, 0.9999]
    return {
        "cdf": [[v, f, float(cdf(v, f))] for f in freedoms for v in t if v > -10 or f < 30],
        "quantile": [[v, f, float(quantile(v, f))] for f in freedoms for v in p],
    }


def quantiles():
    values = [round(float(v), 3) for v in rng.normal(size=11)]
    q = [0.0, 0.025, 0.1, 0.333, 0.5, 0.8, 0.999, 1.0]
    return {"values": values, "quantile": [[v, float(np.quantile(values, v))] for v in q]}


def wilson():
    cases = [(0, 30), (1, 30), (15, 30), (30, 30), (271, 500), (1, 1)]
    out = []
    for success, trials in cases:
        for level in (0.9, 0.95):
            ci = stats.binomtest(success, trials).proportion_ci(level, method="wilson")
            out.append([success, trials, level, ci.low, ci.high])
    return out


def pass_at_k():
    """Enumeration of all k-subsets."""
    out = []
    for n, c in [(1, 0), (1, 1), (4, 1), (6, 2), (8, 3), (8, 8), (10, 1)]:
        samples = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            hits = sum(any(s) for s in itertools.combinations(samples, k))
            out.append([n, c, k, hits / math.comb(n, k)])
    for n, c, k in [(200, 3, 64), (1000, 500, 10), (1000, 1, 999), (4096, 40, 100)]:
        out.append([n, c, k, float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))])
    return out


def maj_at_k():
    """Enumeration of all k-subsets, exact fractions. Answers are [votes, correct]."""
    cases = [
        ([[3, 3], [2, 0]], 0),
        ([[2, 2], [2, 0], [1, 0]], 1),
        ([[1, 1], [1, 0], [1, 0], [1, 0], [1, 0]], 3),
        ([[4, 4], [3, 0], [2, 2], [1, 0]], 2),
        ([[3, 1], [3, 0]], 2),
        ([[5, 0], [1, 0]], 3),
        ([], 4),
        ([[6, 6]], 4),
        ([[2, 2], [2, 2], [4, 0]], 2),
    ]
    out = []
    for answers, silent in cases:
        samples = [g for g, (votes, _) in enumerate(answers) for _ in range(votes)] + [None] * silent
        for k in range(1, len(samples) + 1):
            total, n = Fraction(0), 0
            for subset in itertools.combinations(samples, k):
                n += 1
                counts = [subset.count(g) for g in range(len(answers))]
                most = max(counts, default=0)
                if most > 0:
                    tied = [g for g, c in enumerate(counts) if c == most]
                    total += sum(Fraction(answers[g][1], answers[g][0]) for g in tied) / len(tied)
            out.append({"answers": answers, "silent": silent, "k": k, "value": float(total / n)})
    return out


def clustered():
    """Standard errors of a constant: pooled by OLS, mean of question means by WLS with weights 1 / n_q; CR1."""
    out = []
    for sizes in ([4] * 7, [1, 3, 8, 2, 5, 4], [1, 9]):
        questions = [[round(float(v), 3) for v in rng.normal(rng.normal(), 1.0, size=n)] for n in sizes]
        y = np.concatenate(questions)
        groups = np.repeat(np.arange(len(sizes)), sizes)
        ones = np.ones(len(y))
        fits = {
            "pooled": sm.OLS(y, ones),
            "clustered": sm.WLS(y, ones, weights=1.0 / np.repeat(sizes, sizes)),
        }
        case = {"questions": questions}
        for name, model in fits.items():
            by_question = {"groups": groups, "use_correction": True, "df_correction": True}
            fit = model.fit(cov_type="cluster", cov_kwds=by_question, use_t=True)
            low, high = fit.conf_int(0.05)[0]
            case[name] = [float(fit.params[0]), float(fit.bse[0]), float(low), float(high)]
        out.append(case)
    return out


def bca():
    """SciPy's intervals, and the replicates that they were computed from."""
    out = []
    for values in (rng.exponential(size=15), rng.normal(size=8), rng.integers(0, 2, size=20)):
        values = [round(float(v), 3) for v in values]
        result = stats.bootstrap((values,), np.mean, n_resamples=150, method="BCa", rng=5, vectorized=True)
        replicates = result.bootstrap_distribution
        percentile = stats.bootstrap(
            (values,), np.mean, n_resamples=0, method="percentile", bootstrap_result=result
        ).confidence_interval
        long = stats.bootstrap((values,), np.mean, n_resamples=99999, method="BCa", rng=6).confidence_interval
        out.append(
            {
                "values": values,
                "replicates": [float(r) for r in replicates],
                "bca": list(map(float, result.confidence_interval)),
                "percentile": list(map(float, percentile)),
                "bca_long": list(map(float, long)),
            }
        )
    return out


def paired():
    """Differences: continuous, on a lattice with ties and zeros, and long ones for the normal approximation."""
    series = {
        "continuous": rng.normal(0.3, 1.0, size=9),
        "eighths": rng.integers(-4, 6, size=10) / 8,
        "thirds_and_fifths": np.array([1 / 3, -1 / 5, 2 / 3, 1 / 3 - 1 / 5, -1 / 3, 0.0, 3 / 5, 1 / 5, 1 / 3, 2 / 5]),
        "same_sign": np.array([0.1, 0.2, 0.3, 0.4, 0.7, 0.5]),
        "long_continuous": rng.normal(0.1, 1.0, size=60),
        "long_ties": rng.integers(-5, 7, size=80) / 4,
    }
    out = []
    for name, d in series.items():
        nonzero = d[d != 0]
        t = stats.ttest_rel(d, np.zeros(len(d)))
        case = {"name": name, "differences": d.tolist(), "t": [float(t.statistic), float(t.pvalue)]}
        if len(d) <= 10:
            everything = stats.PermutationMethod(n_resamples=np.inf)
            sign_flips = stats.permutation_test(
                (d, np.zeros(len(d))),
                lambda x, y, axis: np.mean(x - y, axis=axis),
                permutation_type="samples",
                vectorized=True,
                n_resamples=np.inf,
            )
            case["permutation"] = float(sign_flips.pvalue)
            # Rounding makes equal fractions equal numbers.
            w = stats.wilcoxon(np.round(nonzero, 12), method=everything)
            case["wilcoxon"] = [float(w.statistic), float(w.pvalue)]
        elif len(nonzero) > 50:
            w = stats.wilcoxon(d, method="asymptotic", correction=True, zero_method="wilcox")
            case["wilcoxon"] = [float(w.statistic), float(w.pvalue)]
        out.append(case)
    # Without ties SciPy has the exact distribution at any length.
    d = rng.normal(0.25, 1.0, size=40)
    w = stats.wilcoxon(d, method="exact")
    out.append({"name": "forty", "differences": d.tolist(), "wilcoxon": [float(w.statistic), float(w.pvalue)]})
    return out


def holm():
    cases = [[0.01, 0.04, 0.03, 0.005], [0.5, 0.5], [0.2], [0.001, 0.9, 0.02, 0.02, 1.0, 0.0]]
    return [[p, multipletests(p, method="holm")[1].tolist()] for p in cases]


def power():
    """Smallest effect, in standard deviations of a difference, by the non-central t."""
    out = []
    for n in (10, 30, 40, 500):
        for alpha, level in ((0.05, 0.8), (0.01, 0.9)):
            effect = TTestPower().solve_power(nobs=n, alpha=alpha, power=level, alternative="two-sided")
            out.append([n, alpha, level, float(np.squeeze(effect))])
    return out


goldens = {
    "made_with": f"scipy {scipy.__version__}, statsmodels {statsmodels.__version__}, numpy {np.__version__}",
    "normal": normal(),
    "student": student(),
    "quantiles": quantiles(),
    "wilson": wilson(),
    "pass_at_k": pass_at_k(),
    "maj_at_k": maj_at_k(),
    "clustered": clustered(),
    "bca": bca(),
    "paired": paired(),
    "holm": holm(),
    "power": power(),
}
lines = []
for key, value in goldens.items():
    if isinstance(value, list):
        value = "[\n    " + ",\n    ".join(json.dumps(v) for v in value) + "\n  ]"
    else:
        value = json.dumps(value)
    lines.append(f"  {json.dumps(key)}: {value}")
path = pathlib.Path(__file__).with_name("stats.json")
path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
print(f"{path.name}: {path.stat().st_size} bytes")
