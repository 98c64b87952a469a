"""What copying the question earns, and whether a reference answer is ever refused for its form.

    python bench/verify/copying.py --data ../shared/data --program "target/release/stapo grade"

The first part boxes the last formula of every training problem of MATH and grades the box by value (`any`), under
`worked-out`, and under `worked-out` with the question at hand; every box that is right under `worked-out` is listed. The
second part grades every reference answer of all benchmarks and training sets against itself under `worked-out`, with the
question at hand: as it is, and with other white space so that the grader has to read it.
"""

import argparse
import json
import re
import subprocess
from pathlib import Path

FORMULA = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\$(.+?)\$", re.S)


def grade(program, rows, form):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    done = subprocess.run([*program.split(), "--form", form, "-"], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line)["verdict"] == "right" for line in done.stdout.splitlines()]


def last_formula(problem):
    found = [next(part for part in match if part) for match in FORMULA.findall(problem)]
    return found[-1].strip().rstrip(".,;") if found else None


def read(path):
    return [json.loads(line) for line in path.open()]


def copying(program, data):
    rows = []
    for row in read(data / "train/math.jsonl"):
        formula = last_formula(row["problem"])
        if formula and row["answer"].strip():
            rows.append({"response": f"\\boxed{{{formula}}}", "reference": row["answer"], "problem": row["problem"]})
    bare = [{key: row[key] for key in ("response", "reference")} for row in rows]
    by_value, worked_out, with_problem = grade(program, bare, "any"), grade(program, bare, "worked-out"), grade(program, rows, "worked-out")
    for name, right in [("any", by_value), ("worked-out", worked_out), ("worked-out, question at hand", with_problem)]:
        print(f"{name:<30} {sum(right):>5} of {len(rows)} ({100 * sum(right) / len(rows):.2f} %)")
    for row, without, kept in zip(rows, worked_out, with_problem):
        if without:
            print(f"  {'kept' if kept else 'copy'}\t{row['response']}\t{row['reference']}")


def refusals(program, data):
    for path in sorted([*(data / "benchmarks").glob("*.jsonl"), *(data / "train").glob("*.jsonl")]):
        rows = []
        for row in read(path):
            if row["answer"].strip():
                rows += [
                    {"answer": text, "reference": row["answer"], "problem": row["problem"]}
                    for text in (row["answer"], f"\\displaystyle {{{row['answer']}}}", row["answer"].replace("\\frac", "\\dfrac"))
                ]
        by_value, worked_out = grade(program, rows, "any"), grade(program, rows, "worked-out")
        refused = [row for row, right, kept in zip(rows, by_value, worked_out) if right and not kept]
        print(f"{path.stem:<16} {len(rows):>6} answers, {len(refused)} refused for their form")
        for row in refused[:20]:
            print(f"  {row['answer']}\t{row['reference']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--program", default="target/release/stapo grade")
    args = parser.parse_args()
    copying(args.program, args.data)
    refusals(args.program, args.data)


if __name__ == "__main__":
    main()
