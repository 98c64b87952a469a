"""Seeded mutants of one crate where `cargo mutants` is not installed: `bench/mutants.sh` calls this.

A mutant is one token of the sources changed into its opposite. Each is built and tested in place, one after another; the
file is put back whatever happens. Mutants that do not compile do not count.
"""

import argparse
import pathlib
import random
import re
import subprocess
import time

ROOT = pathlib.Path(__file__).parent.parent
CHANGES = [
    (r" == ", " != "), (r" != ", " == "), (r" < (?=[\w(])", " <= "), (r" <= ", " < "), (r" > (?=[\w(])", " >= "),
    (r" >= ", " > "), (r" && ", " || "), (r" \|\| (?=[\w!(])", " && "), (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " / "),
    (r" / ", " * "), (r" \+= ", " -= "), (r"\btrue\b", "false"), (r"\bfalse\b", "true"), (r"\.max\(", ".min("),
    (r"\.min\(", ".max("), (r"\bis_some_and\(", "is_none_or("), (r"\bis_none_or\(", "is_some_and("), (r"(?<=[ (])!(?=[\w(])", ""),
    (r"\.first\(\)", ".last()"), (r"\.last\(\)", ".first()"), (r"\.any\(", ".all("), (r"\.all\(", ".any("),
]  # fmt: skip
SKIPPED = re.compile(r'//[^\n]*|r#*"[\s\S]*?"#*|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|#!?\[[^\]]*\]')


def sources(crate):
    for path in sorted((ROOT / f"crates/stapo-{crate}/src").rglob("*.rs")):
        if not {"tests", "cuda"} & {part.removesuffix(".rs") for part in path.parts} and path.name != "testing.rs":
            yield path


def mutants(crate):
    """All mutants as (path, start, end, replacement)."""
    for path in sources(crate):
        text = path.read_text()
        code = SKIPPED.sub(lambda found: " " * len(found[0]), text)
        tests = re.search(r"#\[cfg\((all\()?test\b", text)
        code = code[: tests.start() if tests else None]
        for pattern, replacement in CHANGES:
            for found in re.finditer(pattern, code):
                yield path, found.start(), found.end(), replacement


def outcome(path, text, mutated, commands, limit):
    """"caught", "survived", "does not compile", or "too slow", which counts as caught."""
    path.write_text(mutated)
    try:
        for command in commands:
            built = subprocess.run([*command.split(" -- ")[0].split(), "--no-run"], cwd=ROOT, capture_output=True)
            if built.returncode:
                return "does not compile"
            try:
                tested = subprocess.run(command.split(), cwd=ROOT, capture_output=True, timeout=limit)
            except subprocess.TimeoutExpired:
                return "too slow"
            if tested.returncode:
                return "caught"
        return "survived"
    finally:
        path.write_text(text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("crate")
    parser.add_argument("n", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begins no mutant after this time")
    parser.add_argument("--test", action="append", help="a test command; each is run until one fails")
    args = parser.parse_args()
    commands = args.test or [f"cargo test -p stapo-{args.crate}"]
    drawn = list(mutants(args.crate))
    random.Random(args.seed).shuffle(drawn)
    began, survivors, n_caught = time.monotonic(), [], 0
    for path, start, end, replacement in drawn:
        if n_caught + len(survivors) >= args.n or time.monotonic() - began > args.seconds:
            break
        text = path.read_text()
        line = text[:start].count("\n")
        mutated = text[:start] + replacement + text[end:]
        found = outcome(path, text, mutated, commands, 900)
        where = f"{path.relative_to(ROOT)}:{line + 1}: {mutated.splitlines()[line].strip()}"
        print(f"{found}: {where}", flush=True)
        n_caught += found in ("caught", "too slow")
        survivors += [where] if found == "survived" else []
    n = n_caught + len(survivors)
    print(f"\nstapo-{args.crate}, seed {args.seed}: {n_caught} of {n} mutants caught; survivors:", *survivors, sep="\n  ")


main()
