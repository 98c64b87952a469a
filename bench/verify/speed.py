"""Time per answer of math-verify and of `stapo grade` on one thread each, over the same file in one run.

    python bench/verify/speed.py --data ../shared/data --stapo target/release/stapo

Needs `pip install math-verify==0.9.0`. Both read JSON lines {response, reference}; start-up is left out of
math-verify's time and left in ours.
"""

import argparse
import json
import logging
import subprocess
import tempfile
import time
import warnings

from math_verify import parse, verify

from pairs import bare, pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--stapo", default="target/release/stapo")
    parser.add_argument("--rows", type=int, default=2000)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")

    rows = list(dict.fromkeys(pairs(args.data, 600)))
    rows = rows[:: max(1, len(rows) // args.rows)]
    reasoning = "Let us think step by step. We have $x + 1 = 2$ and so on. " * 40
    records = [{"response": f"{reasoning} So the answer is \\boxed{{{bare(answer)}}}.", "reference": bare(reference)}
               for *_, answer, reference, _ in rows]
    verify(parse("$1$"), parse("$1$"))

    start = time.perf_counter()
    n_right = 0
    for record in records:
        try:
            gold = parse("$" + record["reference"] + "$", raise_on_error=False)
            n_right += verify(gold, parse(record["response"], raise_on_error=False), raise_on_error=False)
        except Exception:  # noqa: BLE001
            pass
    peer = (time.perf_counter() - start) / len(records)
    print(f"math-verify     {len(records)} responses  {peer * 1e6:9.1f} us each  {n_right} right")

    copies = 20
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records) * copies)
        file.flush()
        start = time.perf_counter()
        done = subprocess.run([args.stapo, "grade", "--threads", "1", file.name], capture_output=True, text=True, check=True)
        own = (time.perf_counter() - start) / (len(records) * copies)
    n_right = sum(json.loads(line)["verdict"] == "right" for line in done.stdout.splitlines()[: len(records)])
    print(f"stapo grade     {len(records)} responses  {own * 1e6:9.1f} us each  {n_right} right  (file of {copies} copies, 1 thread, reading and writing included)")
    print(f"ratio per core  {peer / own:.0f}x")


if __name__ == "__main__":
    main()
