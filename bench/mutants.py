"""Seeded mutants of crates where `cargo mutants` is not installed: `bench/mutants.sh` calls this.

A mutant is one token changed into its opposite, a statement left out, or a function that returns the default value at once.
All mutants of a sample are built at once: each line holds the right and the wrong code, and the variable STAPO_MUTANT says
which mutant is alive. Lines that cannot be written so (parts of longer expressions, constants) are passed over. Every test of the workspace runs once by itself and notes the mutants that it
reaches, also those that programs it starts reach. A mutant is then tried against the tests that reach it, the quickest first,
until one fails. The sources are put back at the end.

    python3 bench/mutants.py rl:40 model:40 cli:40 core:25 verify:25 --seed 2
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import re
import subprocess
import tempfile
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
    use std::io::Write;
    use std::sync::{LazyLock, Mutex};
    static ALIVE: LazyLock<Option<u32>> = LazyLock::new(|| std::env::var("STAPO_MUTANT").ok()?.parse().ok());
    static REACHED: LazyLock<Option<Mutex<(std::collections::BTreeSet<u32>, std::fs::File)>>> = LazyLock::new(|| {
        let path = std::env::var_os("STAPO_MUTANTS_REACHED")?;
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path).ok()?;
        Some(Mutex::new((std::collections::BTreeSet::new(), file)))
    });
    if let Some(reached) = &*REACHED
        && let Ok(mut reached) = reached.lock()
        && reached.0.insert(number)
    {
        let _ = reached.1.write_all(format!("{number}\\n").as_bytes());
    }
    *ALIVE == Some(number)
}
"""
# What changes nothing without a GPU, of stapo-model: functions, and lines with recorded steps of a GPU, with a flag that drops these
# or with weights that stay quantised there. The capacity of a new list changes nothing at all.
ON_GPU = {"load_quantised", "check_device", "write_inputs", "share_masters", "plan_ahead"}
WITHOUT_EFFECT = re.compile(r"with_capacity\(|\bis_quantised\(\)|\bmoved\b|\brecordings\b")
# Tests that look at the sources, which are changed here, or that need minutes.
PASSED_OVER = re.compile(r"^(house|language|docs)::|every_kernel_compiles")
# A statement of one line that can be left out, and the last line of a function's head, behind which it can return at once.
STATEMENT = re.compile(r"(\s*)(?!let |return |break|continue|use |assert|debug_assert|pub\b|mod |const |static |type |fn )([\w*&][^;]*;)")
HEAD = re.compile(r"(?:\s*(?:pub(?:\([\w: ]+\))? )?fn \w.*|\s*)\)(?: -> (.+))? \{")
LEFT_OUT, AT_ONCE = "left out: ", "returns at once: "
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
        if {"tests", "cuda", "nccl", "pinned", "testing"} & {part.removesuffix(".rs") for part in path.parts}:
            continue
        text = path.read_text()
        tests = re.search(r"#\[cfg\((all\()?test\b", text)
        code = SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)[: tests.start() if tests else None]
        function = before = ""
        for number, (bare, line) in enumerate(zip(code.split("\n"), text.split("\n"))):
            begins, before = before[-1:] in ("", ";", "{", "}"), bare.strip() or before
            function = (re.findall(r"\bfn (\w+)", bare) or [function])[-1]
            if function in ON_GPU or WITHOUT_EFFECT.search(bare):
                continue
            if begins and STATEMENT.fullmatch(bare.rstrip()):
                yield path, number, LEFT_OUT + line.strip()
            if HEAD.fullmatch(bare) and not re.search(r" (const|main)\b", bare):
                yield path, number, AT_ONCE + line.strip()
            for pattern, replacement in CHANGES:
                for found in re.finditer(pattern, bare):
                    yield path, number, line[: found.start()] + replacement + line[found.end() :]


def default_of(result):
    """The value that a function with this result returns at once; most types that have none do not compile."""
    if not result:
        return ""
    if found := re.match(r"(?:\w+::)*Result<(.*)", result):
        return "Ok(())" if found[1].startswith("()") else "Ok(Default::default())"
    return "None" if result.startswith("Option<") else "Default::default()"


def switched(line, mutated, number):
    """The line with both expressions; None where its form is not known."""
    alive = f"crate::mutant_is({number})"
    if mutated.startswith(LEFT_OUT):
        return f"if !{alive} {{ {line.strip()} }}"
    if mutated.startswith(AT_ONCE):
        return f"{line} if {alive} {{ return {default_of(HEAD.fullmatch(SKIPPED.sub('', line))[1])}; }}"
    for form in FORMS:
        right, wrong = form.fullmatch(line), form.fullmatch(mutated)
        if right and wrong and right[1] == wrong[1] and right[3] == wrong[3]:
            balanced = all(right[2].count(a) == right[2].count(b) for a, b in ("()", "[]", "{}"))
            if balanced and right[2]:
                both = f"if {alive} {{ {wrong[2]} }} else {{ {right[2]} }}"
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
        # Tests may compile modules of the crate a second time (`mod source`), which then look for the switch there.
        folder = ROOT / f"crates/stapo-{crate}"
        tests = folder / "tests/all.rs"
        self.roots = {folder / "src/lib.rs"} | ({tests} if tests.exists() and "mod source" in tests.read_text() else set())
        for path in {place[0] for place in self.lines.values()} | self.roots:
            self.original[path] = path.read_text()

    def write(self):
        for path, text in self.original.items():
            lines = text.split("\n")
            for where, number, both, _ in self.lines.values():
                if where == path:
                    lines[number] = both
            # A mutant that overflows at once is wrong, which the compiler would refuse only after the check.
            begin, end = ("#![allow(arithmetic_overflow, unconditional_panic)] ", SWITCH) if path in self.roots else ("", "")
            path.write_text(begin + "\n".join(lines) + end)

    def restore(self):
        for path, text in self.original.items():
            path.write_text(text)


def drop_uncompiled(samples, packages):
    """Drops mutants whose line does not compile, until all do."""
    while True:
        for sample in samples:
            sample.write()
        command = ["cargo", "check", *packages, "--lib", "--bins", "--message-format", "short"]
        checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if checked.returncode == 0:
            return
        errors = set(re.findall(r"^(\S+\.rs):(\d+):\d+: error", checked.stderr, re.M))
        errors = {(os.path.normpath(path), line) for path, line in errors}
        # An expression of several lines is named by one near the change.
        for reach in (1, 3, 8):
            n_bad = sum(drop_near(sample, errors, reach) for sample in samples)
            if n_bad:
                break
        else:
            raise SystemExit(checked.stderr)


def drop_near(sample, errors, reach):
    """Drops the mutants of a sample that have an error at most so many lines away, and counts them."""
    bad = []
    for number, (path, line, _, _) in sample.lines.items():
        near = {(str(path.relative_to(ROOT)), str(line + 1 + more)) for more in range(-1 - reach, reach + 1)}
        if errors & near:
            bad.append(number)
    for number in bad:
        del sample.lines[number]
    return len(bad)


def test_programs(packages):
    """The test executables of the packages, each with the folder that its tests run in."""
    command = ["cargo", "test", *packages, "--lib", "--bins", "--tests", "--no-run", "--message-format", "json"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if built.returncode:
        raise SystemExit(built.stderr)
    for line in built.stdout.splitlines():
        unit = json.loads(line)
        if unit.get("executable") and unit.get("profile", {}).get("test"):
            yield unit["executable"], pathlib.Path(unit["manifest_path"]).parent


def run_test(test, environment, limit):
    """Whether a test passes, alone in its process, and its seconds."""
    program, folder, name = test
    began = time.monotonic()
    command = [program, "--exact", name, "--test-threads", "1"]
    try:
        ended = subprocess.run(command, cwd=folder, capture_output=True, timeout=limit, env={**os.environ, **environment})
    except subprocess.TimeoutExpired:
        return False, limit
    return ended.returncode == 0, time.monotonic() - began


def reached_by_tests(jobs, packages):
    """The tests that reach each mutant, the quickest first, with their seconds."""
    tests = []
    for program, folder in test_programs(packages):
        listed = subprocess.run([program, "--list", "--format", "terse"], cwd=folder, capture_output=True, text=True)
        names = [line.removesuffix(": test") for line in listed.stdout.splitlines() if line.endswith(": test")]
        tests += [(program, folder, name) for name in names if not PASSED_OVER.search(name)]
    by_mutant = {}
    with tempfile.TemporaryDirectory() as notes, concurrent.futures.ThreadPoolExecutor(jobs) as pool:

        def trace(idx):
            note = pathlib.Path(notes) / str(idx)
            passes, seconds = run_test(tests[idx], {"STAPO_MUTANTS_REACHED": str(note)}, 900)
            numbers = {int(word) for word in note.read_text().split()} if note.exists() else set()
            return idx, passes, seconds, numbers

        for idx, passes, seconds, numbers in pool.map(trace, range(len(tests))):
            if not passes:
                print("fails without a mutant, left out:", tests[idx][2], flush=True)
                continue
            for number in numbers:
                by_mutant.setdefault(number, []).append((seconds, tests[idx]))
    print(f"{len(tests)} tests reach {len(by_mutant)} mutants", flush=True)
    return {number: sorted(tests, key=lambda test: (test[0], test[1][2])) for number, tests in by_mutant.items()}


def attempt(number, tests, each):
    """What becomes of a mutant: a test notices it, none does, or tests are left. A test that takes far longer hangs."""
    alive = {"STAPO_MUTANT": str(number), "RUST_BACKTRACE": "0"}
    began = time.monotonic()
    for seconds, test in tests:
        if time.monotonic() - began > each:
            return "open"
        if not run_test(test, alive, 60 + 10 * seconds)[0]:
            return "caught"
    return "survived" if tests else "reached by no test"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("samples", nargs="+", help="CRATE:N, a crate without stapo- and its number of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begins no mutant after this time")
    parser.add_argument("--each", type=float, default=900.0, help="begins no test of a mutant after this time: it stays open")
    parser.add_argument("--own", action="store_true", help="tries the tests of the sampled crates alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants that are tried at the same time")
    args = parser.parse_args()
    began, results = time.monotonic(), {}
    samples = []
    for idx, sample in enumerate(args.samples):
        crate, n = sample.split(":")
        # Some lines do not compile, and some mutants are reached by no test that runs here.
        samples.append(Sample(crate, int(n) * 3 // 2, args.seed, 10_000 * idx))
    packages = [f"--package=stapo-{sample.crate}" for sample in samples] if args.own else ["--workspace"]
    try:
        drop_uncompiled(samples, packages)
        tests = reached_by_tests(args.jobs, packages)
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for sample, asked in zip(samples, args.samples):
                numbers = list(sample.lines)[: int(asked.split(":")[1])]

                def unless_late(number):
                    late = time.monotonic() - began > args.seconds
                    return None if late else attempt(number, tests.get(number, []), args.each)

                for number, fate in zip(numbers, pool.map(unless_late, numbers)):
                    path, line, _, mutated = sample.lines[number]
                    where = f"{fate}: {path.relative_to(ROOT)}:{line + 1}: {mutated}"
                    if fate is not None:
                        results.setdefault(sample.crate, []).append((fate, where))
                        print(where, flush=True)
    finally:
        for sample in samples:
            sample.restore()
    for crate, found in results.items():
        left = [where for fate, where in found if fate != "caught"]
        caught = f"{len(found) - len(left)} of {len(found)} mutants caught"
        print(f"\nstapo-{crate}, seed {args.seed}: {caught}; the others:", *left, sep="\n  ")


if __name__ == "__main__":
    main()
