"""Agreement of `stapo grade` with math-verify on pairs whose truth is known by construction.

    python bench/verify/differential.py --data ../shared/data --stapo target/release/stapo --out disagreements.tsv

Needs `pip install math-verify==0.9.0`. Prints one table row per source and writes every disagreement with its class:
`theirs` when ours is the constructed truth, `ours` when theirs is, to be looked at by a person.
"""

import argparse
import collections
import csv
import json
import logging
import subprocess
import warnings

from math_verify import parse, verify

from pairs import bare, pairs


def theirs(answer, reference):
    try:
        gold = parse("$" + bare(reference) + "$", raise_on_error=False)
        found = parse("\\boxed{" + bare(answer) + "}", raise_on_error=False)
        return bool(verify(gold, found, raise_on_error=False))
    except Exception:  # noqa: BLE001 - an exception in math-verify counts as its verdict "wrong"
        return False


def ours(stapo, rows):
    lines = "\n".join(json.dumps({"answer": answer, "reference": reference}) for *_, answer, reference, _ in rows)
    done = subprocess.run([stapo, "grade", "-"], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--stapo", default="target/release/stapo")
    parser.add_argument("--generated", type=int, default=2000)
    parser.add_argument("--out", default="disagreements.tsv")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")

    rows = list(dict.fromkeys(pairs(args.data, args.generated)))
    graded = ours(args.stapo, rows)
    table = collections.defaultdict(lambda: [0] * 7)
    with open(args.out, "w", newline="") as file:
        out = csv.writer(file, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_NONE, escapechar="\\", quotechar=None)
        file.write("source\tkind\tanswer\treference\ttruth\tours\ttheirs\tfault\treason\n")
        for (source, kind, answer, reference, truth), record in zip(rows, graded):
            us, them = record["verdict"] == "right", theirs(answer, reference)
            cells = table[source]
            for i, is_counted in enumerate([True, us == truth, them == truth, us == them, us != truth and not truth,
                                            them != truth and not truth, us != truth and us != them]):
                cells[i] += is_counted
            if us != them or us != truth:
                fault = "both" if us == them else ("theirs" if us == truth else "ours")
                file.write("\t".join([source, kind, answer, reference, str(truth), record["verdict"], str(them), fault,
                                      record["reason"]]).replace("\n", " ") + "\n")
    print("| source | pairs | ours is right | math-verify is right | agree | ours falsely right | theirs falsely right | ours at fault |")
    print("|---|---|---|---|---|---|---|---|")
    total = [sum(cells[i] for cells in table.values()) for i in range(7)]
    for source, cells in [*table.items(), ("all", total)]:
        print(f"| {source} | " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
