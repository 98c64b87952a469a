"""Tokens per second of `Objective.evaluate` on one core, and what a call costs.

    pip install .
    python bench/python/objective.py

The mini-batch is that of bench/objective.rs: 512 responses of 2048 tokens, most of them likely.
"""

import time

import numpy
import stapo

N_RESPONSES, N_TOKENS, N_ROUNDS = 512, 2048, 7


def minibatch():
    draw = numpy.random.default_rng(1)
    n = N_RESPONSES * N_TOKENS
    logp = -12.0 * draw.random(n) ** 6
    drift = numpy.where(numpy.arange(n) % 2 == 0, 0.0, 0.1 * draw.random(n) - 0.05)
    return {
        "offsets": numpy.arange(0, n + 1, N_TOKENS),
        "advantage": numpy.where(numpy.arange(N_RESPONSES) % 2 == 0, 0.7, -0.7),
        "logp": logp,
        "behavior_logp": numpy.minimum(logp + drift, 0.0),
        "entropy": 2.0 * draw.random(n),
    }


def best(work, n_rounds=N_ROUNDS):
    """Seconds of processor time, which other programs on the machine change less than the clock's."""
    seconds = []
    for _ in range(n_rounds):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def main():
    print(f"stapo {stapo.__version__}, {N_RESPONSES} responses x {N_TOKENS} tokens, best of {N_ROUNDS}, processor time")
    exact = minibatch()
    single = {key: value.astype(numpy.float32) if value.dtype == float else value for key, value in exact.items()}
    for name in ("stapo", "dapo"):
        objective = stapo.Objective(name)
        for kind, batch in (("float64, in place", exact), ("float32, converted", single)):
            seconds = best(lambda: objective.evaluate(batch))
            rate = 1e-6 * N_RESPONSES * N_TOKENS / seconds
            print(f"{name:<8} {kind:<20} {rate:6.1f} million tokens/s")
    objective = stapo.Objective("stapo")
    n_calls = 20000
    one = {key: value[:1] for key, value in exact.items()} | {"offsets": numpy.array([0, 1])}
    calls = {
        "evaluate, one token": lambda: objective.evaluate(one),
        "grade, one digit": lambda: stapo.grade("\\boxed{4}", "4"),
        "an empty function of Python's": lambda: None,
    }
    for name, call in calls.items():
        seconds = best(lambda: [call() for _ in range(n_calls)], 3) / n_calls
        print(f"{name:<30} {1e6 * seconds:6.2f} microseconds a call")


if __name__ == "__main__":
    main()
