"""Instructions of one grading by kind of text, counted by valgrind: a number that a busy machine does not change.

    python bench/verify/instructions.py --data ../shared/data --stapo target/release/stapo

Each kind of text is a file of responses, graded once and twice over on one thread; the difference of the two counts over
the number of responses is printed, so that starting the program is left out and reading and writing are left in. With
`--before PROGRAM` an earlier version is counted on the same files and the change is printed.
"""

import argparse
import json
import re
import subprocess
import tempfile

from pairs import kinds


def count(program, records, copies):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records) * copies)
        file.flush()
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, "grade", "--threads", "1", file.name],
            capture_output=True, text=True, check=True,
        )
    return int(re.search(r"Collected : (\d+)", done.stderr)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--stapo", default="target/release/stapo")
    parser.add_argument("--before", help="an earlier version of the program")
    parser.add_argument("--n", type=int, default=500)
    args = parser.parse_args()
    programs = [args.before, args.stapo] if args.before else [args.stapo]
    for name, records in kinds(args.data, args.n):
        counts = [(count(program, records, 2) - count(program, records, 1)) / len(records) for program in programs]
        change = f"  {100 * (counts[-1] / counts[0] - 1):+.1f} %" if args.before else ""
        print(f"{name:<34} " + "  ".join(f"{n:>9,.0f}" for n in counts) + f" instructions{change}", flush=True)


if __name__ == "__main__":
    main()
