"""Runs the mutation run over every gold answer and sorts the mutants called right into classes.

    python bench/verify/mutate.py --data ../shared/data

Builds and runs `cargo run --release -p stapo-verify --example mutate`. A class is a reason why a mutant is truly equal
to its gold answer under the rules of docs/verifier.md; what no class covers is printed for a person to judge.
"""

import argparse
import collections
import re
import subprocess

LAYOUT = r"\\(left|right|displaystyle|quad|qquad|text|textbf|textit|mathrm|mathbf|mbox|textnormal)(?![a-zA-Z])"


def plain(text):
    """`text` without spacing, grouping and formatting."""
    text = re.sub(r"\\[dt]frac", r"\\frac", re.sub(LAYOUT, "", text))
    text = re.sub(r"\\[,;:! ]", "", text).replace("\\\\", "\\").replace("⏎", "")
    return re.sub(r"[\s{}$~]", "", text).rstrip(".,;")


def letters(text):
    return re.sub(r"(begin|end)[bp]?matrix|[\s{}$~\\^;]|r?i?ght|lg|log|leq|le(?=g)", "", plain(text))


def zeros(text):
    """`text` without zeros that carry no value and without the plural s."""
    text = re.sub(r"(?<![\d.])0+(?=[\d.])", "", plain(text))
    text = re.sub(r"(\.\d*?)0+(?!\d)", r"\1", text)
    return re.sub(r"\.(?!\d)", "", text)


def words(text):
    return re.sub(r"(ies|y|e?s)(?![a-z])", "", plain(text))


def brackets(text):
    return re.sub(r"[\[(](?=-\\?infty)|(?<=infty)[\])]", "", re.sub(r"\s", "", plain(text)))


CLASSES = [
    ("formatting: spaces, braces, sizes of brackets, styles", lambda m, g, why: plain(m) == plain(g)),
    ("a unit on the answer alone", lambda m, g, why: m == g + "\\text{ cm}"),
    ("a percent or degree sign on one side", lambda m, g, why: re.sub(r"\\?%|\\$", "", m) == re.sub(r"\\?%|\\$", "", g) or m.replace("\\circ", "^\\circ") == g),
    ("zeros that carry no value", lambda m, g, why: zeros(m) == zeros(g)),
    ("times one, to the power of one", lambda m, g, why: m in (g + "1", "1" + g, "+" + g) or "+" + m == g or re.match(r"1[_^]\d", m) is not None or re.search(r"(?<![\d.])[01](\$?)\^2\.?$", m) is not None),
    ("0!, 1!, 2!", lambda m, g, why: re.search(r"(?<![\d.])[012][$})]*!$", m) is not None and m.replace("!", "") == g.replace("!", "")),
    ("a backslash, brace or caret left out", lambda m, g, why: letters(m) == letters(g)),
    ("a comma of thousands or a doubled comma", lambda m, g, why: re.sub(r"[,.;]|\\text", "", m) == re.sub(r"[,.;]|\\text", "", g) or m.replace(",,", ",") == g.replace(",\\,", ",")),
    ("an infinite end, open or closed", lambda m, g, why: "infty" in g and brackets(m) == brackets(g)),
    ("the name or an equals sign repeated or left out", lambda m, g, why: m == g + "=1" or re.sub(r"^[\s$]*[A-Za-z]?\s*=", "", m) == re.sub(r"^[\s$]*[A-Za-z]\s*=", "", g)),
    ("factors or segment ends in another order", lambda m, g, why: sorted(plain(m)) == sorted(plain(g)) and why != "text"),
    ("a plural, a spelling, an exclamation mark", lambda m, g, why: words(m.rstrip("!")) == words(g) or re.search(r"metre|inch|eur|mile|degree", m) is not None),
    ("zero times something, minus zero", lambda m, g, why: re.search(r"(?<!\d)0\$?x$", m) is not None or re.match(r"^-\s*\$?0", m) is not None or "0" in g and re.search(r"(?<![\d.])0 ?\\[a-z]+\)", m) is not None or re.match(r"(-|2)\\begin", m) is not None),
    ("a ratio as its quotient, a choice with one bracket or a value", lambda m, g, why: m.replace("/", ":") == g or re.search(r"\([A-H]\)", g) is not None),
    ("a sign of multiplication left out, ± and ∓ alone", lambda m, g, why: m.replace("*", "") == g.replace("*", "") or m.replace("\\mp", "\\pm") == g),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    args = parser.parse_args()
    command = ["cargo", "run", "--release", "--offline", "-p", "stapo-verify", "--example", "mutate", "--", args.data]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    counts = collections.Counter()
    for row in rows:
        _, kind, mutant, gold, why = row[:5]
        name = next((name for name, covers in CLASSES if covers(mutant, gold, why)), None)
        counts[name or "to judge"] += 1
        if name is None:
            print(f"{kind}\t{mutant}\t{gold}\t{why}")
    print("\n".join(line for line in done.stderr.splitlines() if "mutants" in line))
    for name, n in counts.most_common():
        print(f"| {name} | {n} |")


if __name__ == "__main__":
    main()
