"""Seeded mutants of one crate where `cargo mutants` is not installed: `bench/mutants.sh` calls this.

A mutant is one token changed into its opposite. All mutants of a sample are built at once: each line holds the right and
the wrong expression, and the variable STAPO_MUTANT says which mutant is alive. Lines that cannot be written so (parts of
longer expressions, constants) are passed over. The sources are put back at the end.
"""

import argparse
import os
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
SWITCH = """
#[doc(hidden)]
pub fn mutant_is(number: u32) -> bool {
    static ALIVE: std::sync::LazyLock<Option<u32>> =
        std::sync::LazyLock::new(|| std::env::var("STAPO_MUTANT").ok()?.parse().ok());
    *ALIVE == Some(number)
}
"""
# Each form of a line: what is before the expression, the expression, what is after it.
FORMS = [
    re.compile(r"(\s*(?:\} else )?if )(?!let )(.*)( \{)"),
    re.compile(r"(\s*let [^=|]*= )(?!if |match |\|)(.*)(;)"),
    re.compile(r"(\s*\w+: )(?!\|)([^{]*)(,)"),
    re.compile(r"(\s*)((?:[\w.*&\[\]]+) [-+]= .*)(;)"),
    re.compile(r"(\s*return )(.*)(;)"),
    re.compile(r"(\s*)(?!let |if |for |while |return |\.|\}|\||//|fn |pub )([^;{=]*)()"),
]


def mutants(crate):
    """All mutants as (path, line number, mutated line)."""
    for path in sorted((ROOT / f"crates/stapo-{crate}/src").rglob("*.rs")):
        if {"tests", "cuda", "testing"} & {part.removesuffix(".rs") for part in path.parts}:
            continue
        text = path.read_text()
        tests = re.search(r"#\[cfg\((all\()?test\b", text)
        code = SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)[: tests.start() if tests else None]
        for number, (bare, line) in enumerate(zip(code.split("\n"), text.split("\n"))):
            for pattern, replacement in CHANGES:
                for found in re.finditer(pattern, bare):
                    yield path, number, line[: found.start()] + replacement + line[found.end() :]


def switched(line, mutated, number):
    """The line with both expressions; None where its form is not known."""
    for form in FORMS:
        right, wrong = form.fullmatch(line), form.fullmatch(mutated)
        if right and wrong and right[1] == wrong[1] and right[3] == wrong[3]:
            balanced = all(right[2].count(a) == right[2].count(b) for a, b in ("()", "[]", "{}"))
            if balanced and right[2]:
                both = f"if crate::mutant_is({number}) {{ {wrong[2]} }} else {{ {right[2]} }}"
                is_inner = right[3] == " {" or not right[3]
                return f"{right[1]}{f'({both})' if is_inner else both}{right[3]}"
    return None


class Sample:
    """The mutants that are built in, by number; `lines` are their places."""

    def __init__(self, crate, n, seed, first):
        self.crate, self.first = crate, first
        drawn = list(mutants(crate))
        random.Random(seed).shuffle(drawn)
        self.original, self.lines = {}, {}
        for path, number, mutated in drawn:
            line = path.read_text().split("\n")[number]
            both = switched(line, mutated, first + len(self.lines))
            if both and (path, number) not in [place[:2] for place in self.lines.values()]:
                self.lines[first + len(self.lines)] = (path, number, both, mutated.strip())
            if len(self.lines) >= n:
                break
        for path in {place[0] for place in self.lines.values()} | {ROOT / f"crates/stapo-{crate}/src/lib.rs"}:
            self.original[path] = path.read_text()

    def write(self):
        for path, text in self.original.items():
            lines = text.split("\n")
            for where, number, both, _ in self.lines.values():
                if where == path:
                    lines[number] = both
            path.write_text("\n".join(lines) + (SWITCH if path.name == "lib.rs" and path.parent.name == "src" else ""))

    def restore(self):
        for path, text in self.original.items():
            path.write_text(text)

    def drop_uncompiled(self):
        """Drops mutants whose line does not compile, until all do."""
        while True:
            self.write()
            command = ["cargo", "check", "--tests", "-p", f"stapo-{self.crate}", "--message-format", "short"]
            checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if checked.returncode == 0:
                return
            errors = set(re.findall(r"^(\S+\.rs):(\d+):\d+: error", checked.stderr, re.M))
            errors = {(os.path.normpath(path), line) for path, line in errors}
            bad = [k for k, (p, n, _, _) in self.lines.items() if (str(p.relative_to(ROOT)), str(n + 1)) in errors]
            if not bad:
                raise SystemExit(checked.stderr)
            for number in bad:
                del self.lines[number]


def is_caught(number, commands, limit):
    for command in commands:
        environment = {**os.environ, "STAPO_MUTANT": str(number), "RUST_BACKTRACE": "0"}
        try:
            tested = subprocess.run(command.split(), cwd=ROOT, capture_output=True, timeout=limit, env=environment)
        except subprocess.TimeoutExpired:
            return True
        if tested.returncode:
            return True
    return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("crate")
    parser.add_argument("n", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begins no mutant after this time")
    parser.add_argument("--test", action="append", help="a test command; each is run until one fails")
    args = parser.parse_args()
    commands = args.test or [f"cargo test -p stapo-{args.crate}"]
    sample = Sample(args.crate, args.n, args.seed, 0)
    began, survivors, n_caught = time.monotonic(), [], 0
    try:
        sample.drop_uncompiled()
        for command in commands:
            subprocess.run([*command.split(" -- ")[0].split(), "--no-run"], cwd=ROOT, check=True)
        for number, (path, line, _, mutated) in sample.lines.items():
            if time.monotonic() - began > args.seconds:
                break
            where = f"{path.relative_to(ROOT)}:{line + 1}: {mutated}"
            caught = is_caught(number, commands, 900)
            print("caught:  " if caught else "SURVIVED:", where, flush=True)
            n_caught += caught
            survivors += [] if caught else [where]
    finally:
        sample.restore()
    n = n_caught + len(survivors)
    print(f"\nstapo-{args.crate}, seed {args.seed}: {n_caught} of {n} mutants caught; survivors:", *survivors, sep="\n  ")


if __name__ == "__main__":
    main()
