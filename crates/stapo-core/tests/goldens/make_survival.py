"""Writes survival.json: the answers of SciPy, lifelines and statsmodels to survival curves, log-rank tests and Spearman's
correlation.

Usage: python make_survival.py   (needs lifelines, numpy, scipy, statsmodels; writes beside itself)
"""

import json
import pathlib

import lifelines
import numpy as np
import scipy
import statsmodels
from lifelines.statistics import multivariate_logrank_test
from scipy import stats
from statsmodels.duration.survfunc import survdiff

rng = np.random.default_rng(7)


def curves():
    """Times, events, and of each time with an event S and the ends of its interval (null where there is none)."""
    cases = [
        ([6, 6, 6, 7, 10, 13, 16, 22, 23, 6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35], [1] * 9 + [0] * 12),
        ([3, 5, 5, 8, 8], [1, 1, 0, 1, 1]),
        ([375, 375], [0, 0]),
        (rng.integers(1, 40, size=30).tolist(), rng.integers(0, 2, size=30).tolist()),
    ]
    out = []
    for times, events in cases:
        fit = lifelines.KaplanMeierFitter(alpha=0.05).fit(times, events)
        steps = []
        for time in sorted({t for t, e in zip(times, events) if e}):
            low, high = (float(v) for v in fit.confidence_interval_.loc[time])
            s = float(fit.survival_function_.loc[time].iloc[0])
            inside = 0 < s < 1
            steps.append([time, s, low if inside else None, high if inside else None])
        if any(events):
            # The second implementation, for the curve alone.
            data = stats.CensoredData(
                uncensored=[t for t, e in zip(times, events) if e], right=[t for t, e in zip(times, events) if not e]
            )
            sf = stats.ecdf(data).sf
            for time, s, *_ in steps:
                assert abs(float(sf.evaluate(time)) - s) < 1e-12
        out.append({"times": times, "events": events, "steps": steps})
    return out


def log_rank():
    """Two and more groups by lifelines, strata by statsmodels."""
    out = []
    for n_groups, n, n_strata in ((2, 21, 1), (3, 30, 1), (4, 50, 1), (2, 30, 3), (3, 60, 4)):
        times = rng.integers(1, 15, size=n)
        events = rng.integers(0, 3, size=n) > 0
        groups = np.arange(n) % n_groups
        strata = (np.arange(n) // n_groups) % n_strata
        if n_strata == 1:
            test = multivariate_logrank_test(times, groups, events)
            statistic, p = test.test_statistic, test.p_value
            check, _ = survdiff(times, events.astype(int), groups)
            assert abs(check - statistic) < 1e-9
        else:
            statistic, p = survdiff(times, events.astype(int), groups, strata=strata)
        columns = (times, events.astype(int), groups, strata)
        out.append({"subjects": [list(map(int, row)) for row in zip(*columns)], "test": [float(statistic), float(p)]})
    return out


def chi_squared():
    return [[x, f, float(stats.chi2.sf(x, f))] for f in (1, 2, 3, 7, 30) for x in (1e-6, 0.1, 1.0, 3.84, 10.0, 45.0, 300.0)]


def spearman():
    cases = [
        (rng.normal(size=12), rng.normal(size=12)),
        (rng.integers(0, 4, size=25), rng.integers(0, 4, size=25)),
        (np.arange(6.0), np.arange(6.0) ** 3),
    ]
    return [[list(map(float, x)), list(map(float, y)), float(stats.spearmanr(x, y).statistic)] for x, y in cases]


versions = f"scipy {scipy.__version__}, lifelines {lifelines.__version__}, statsmodels {statsmodels.__version__}"
goldens = {
    "made_with": versions,
    "curves": curves(),
    "log_rank": log_rank(),
    "chi_squared": chi_squared(),
    "spearman": spearman(),
}
path = pathlib.Path(__file__).with_name("survival.json")
path.write_text(json.dumps(goldens) + "\n")
print(f"{path.name}: {path.stat().st_size} bytes")
