"""Processor time per answer of math-verify and of `stapo grade` on one thread each, by kind of text, in one run.

    python bench/verify/speed.py --data ../shared/data --stapo target/release/stapo

Needs `pip install math-verify==0.9.0`. Both grade the same records; start-up is left out of math-verify's time and left
in ours, as are reading and writing.
"""

import argparse
import json
import logging
import resource
import subprocess
import tempfile
import time
import warnings

from math_verify import parse, verify

from pairs import kinds

COPIES = 20  # of each file for `stapo grade`, so that its start weighs little


def theirs(record):
    response = record.get("response") or "\\boxed{" + record["answer"] + "}"
    try:
        gold = parse("$" + record["reference"] + "$", raise_on_error=False)
        return verify(gold, parse(response, raise_on_error=False), raise_on_error=False)
    except Exception:  # noqa: BLE001 - an exception in math-verify counts as its verdict "wrong"
        return False


def ours(program, records):
    """Seconds of processor time per record, and how many are right."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records) * COPIES)
        file.flush()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([program, "grade", "--threads", "1", file.name], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    n_right = sum(json.loads(line)["verdict"] == "right" for line in done.stdout.splitlines()[: len(records)])
    return spent / (len(records) * COPIES), n_right


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--stapo", default="target/release/stapo")
    parser.add_argument("--rows", type=int, default=1000)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    verify(parse("$1$"), parse("$1$"))  # imports what it needs at the first call
    for name, records in kinds(args.data, args.rows):
        start = time.process_time()
        theirs_right = sum(bool(theirs(record)) for record in records)
        peer = (time.process_time() - start) / len(records)
        own, ours_right = ours(args.stapo, records)
        print(
            f"{name:<34} {len(records):>5} records  math-verify {peer * 1e6:9.1f} us, {theirs_right} right  "
            f"stapo grade {own * 1e6:6.1f} us, {ours_right} right  {peer / own:5.0f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
