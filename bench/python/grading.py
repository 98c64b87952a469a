"""Grading 10,000 responses from Python, beside math-verify in the same run.

    pip install . math-verify==0.9.0
    python bench/python/grading.py --data ../shared/data

The pairs are those of bench/verify/differential.py, whose truth is known by construction, each answer at the end of some
reasoning. math-verify works on one core; it grades the first `--theirs` of the responses.
"""

import argparse
import itertools
import logging
import random
import sys
import time
import warnings
from pathlib import Path

import stapo
from math_verify import parse, verify

sys.path.insert(0, str(Path(__file__).parent.parent / "verify"))
from pairs import bare, pairs  # noqa: E402


def theirs(response, reference):
    try:
        gold = parse("$" + bare(reference) + "$", raise_on_error=False)
        return bool(verify(gold, parse(response, raise_on_error=False), raise_on_error=False))
    except Exception:  # noqa: BLE001 - an exception in math-verify counts as its verdict "wrong"
        return False


def timed(name, n, work):
    start = time.perf_counter(), time.process_time()
    found = work()
    wall, processor = time.perf_counter() - start[0], time.process_time() - start[1]
    each = 1e6 * processor / n
    print(f"{name:<28} {n:>6} responses {wall:8.2f} s, {each:8.1f} microseconds of processor time each")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--theirs", type=int, default=10_000)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    rows = list(dict.fromkeys(pairs(args.data, 2000)))
    random.Random(0).shuffle(rows)
    rows = list(itertools.islice(itertools.cycle(rows), args.n))
    reasoning = "Let us think step by step. We have $x + 1 = 2$ and so on. " * 40
    responses = [f"{reasoning} So the answer is \\boxed{{{bare(answer)}}}." for _, _, answer, _, _ in rows]
    references = [bare(reference) for *_, reference, _ in rows]
    truth = [bool(row[-1]) for row in rows]
    one_by_one = timed(
        "stapo.grade, one by one",
        len(rows),
        lambda: [stapo.grade(*pair) for pair in zip(responses, references)],
    )
    timed("stapo.grade_batch, 1 thread", len(rows), lambda: stapo.grade_batch(responses, references, threads=1))
    batch = timed("stapo.grade_batch, all cores", len(rows), lambda: stapo.grade_batch(responses, references))
    assert batch == one_by_one
    verify(parse("$1$"), parse("$1$"))  # imports what it needs at the first call
    some = list(zip(responses, references))[: args.theirs]
    found = timed("math-verify", len(some), lambda: [theirs(*pair) for pair in some])
    for name, verdicts in (("stapo", [bool(v) for v in batch[: args.theirs]]), ("math-verify", found)):
        n_true = sum(verdict == is_right for verdict, is_right in zip(verdicts, truth))
        print(f"{name}: {100 * n_true / len(verdicts):.2f} % agree with the constructed truth")


if __name__ == "__main__":
    main()
