"""Pairs of answers with a known truth: gold answers reformatted and perturbed, and generated expressions.

Each pair is (kind, answer, reference, is_equal). Randomness is seeded, so a run repeats itself.
"""

import json
import random
import re
from fractions import Fraction
from pathlib import Path

SETS = ["benchmarks/aime24", "benchmarks/aime25", "benchmarks/amc23", "benchmarks/math500", "benchmarks/minerva",
        "benchmarks/olympiad", "benchmarks/gsm8k", "train/math", "train/dapo-math-17k"]
INTEGERS_PER_SET = 60


def gold(folder):
    """Distinct gold answers of every set; of the plain integers only some."""
    for name in SETS:
        path = Path(folder) / f"{name}.jsonl"
        seen = {json.loads(line)["answer"].strip() for line in path.open()}
        seen.discard("")
        whole = sorted(answer for answer in seen if re.fullmatch(r"-?\d+", answer))
        rest = sorted(seen - set(whole))
        random.Random(name).shuffle(whole)
        yield from ((name, answer) for answer in whole[:INTEGERS_PER_SET] + rest)


def bare(answer):
    return re.sub(r"(?<!\\)\$", "", answer).strip().rstrip(".")


def reformatted(answer):
    """The same answer written differently."""
    text = bare(answer)
    yield "spaces", re.sub(r"([+=])", r" \1 ", text)
    yield "dfrac", text.replace("\\frac", "\\dfrac")
    if "\\left" not in text and re.fullmatch(r"\(.*\)", text):
        yield "left-right", "\\left" + text[:-1] + "\\right)"
    if "\\left" in text:
        yield "no left-right", text.replace("\\left", "").replace("\\right", "")
    if re.fullmatch(r"-?\d{4,}", text):
        yield "thousands", f"{int(text):,}"
        yield "braced thousands", f"{int(text):,}".replace(",", "{,}")
    if re.fullmatch(r"-?\d+", text):
        yield "whole decimal", text + ".0"
        yield "named", "x = " + text
        yield "text", "\\text{" + text + "}"
    if match := re.fullmatch(r"(-?)\\d?frac\{(-?\d+)\}\{(\d+)\}", text):
        sign, top, bottom = match.groups()
        yield "slash", f"{sign}{top}/{bottom}"
        value = Fraction(int(sign + top) if not (sign and top.startswith("-")) else -int(top), int(bottom))
        if not re.sub("[25]", "", "".join(map(str, prime_factors(value.denominator)))):
            yield "decimal", decimal(value)
    if match := re.fullmatch(r"(\d+) ?\\sqrt\{(\d+)\}", text):
        yield "under the root", f"\\sqrt{{{int(match[1]) ** 2 * int(match[2])}}}"
    if "," in text and not re.search(r"[()\[\]{}\\=]", text) and not re.fullmatch(r"-?\d{1,3}(,\d{3})+", text):
        yield "reversed list", ", ".join(reversed([part.strip() for part in text.split(",")]))
    if re.fullmatch(r"[-+ 0-9a-zA-Z^]+", text) and re.search(r"[a-z]", text) and not re.search(r"[a-zA-Z]{3}|\de", text):
        terms = re.findall(r"[-+]?[^-+]+", text.replace(" ", ""))
        yield "reversed sum", "".join(t if t[0] in "+-" else "+" + t for t in reversed(terms)).lstrip("+")


def perturbed(answer):
    """A wrong version of the answer."""
    text = bare(answer)
    if re.search(r"\\text|\\mbox|[a-zA-Z]{4}", re.sub(r"\\[a-z]+", "", text)):
        return
    digits = [match.start() for match in re.finditer(r"\d", text)]
    if digits:
        at = digits[0]
        yield "first digit", text[:at] + str(int(text[at]) % 9 + 1) + text[at + 1:]
        at = digits[-1]
        if "." not in text and "e" not in text:
            yield "last digit", text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1:]
    if re.fullmatch(r"\d[\d.]*", text) and float(text) != 0:
        yield "sign", "-" + text
        yield "ten times", text + "0" if "." not in text else str(float(text) * 10)
    if match := re.fullmatch(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}", text):
        if match[2] != match[3]:
            yield "upside down", f"{match[1]}\\frac{{{match[3]}}}{{{match[2]}}}"
    if re.fullmatch(r"\([^()]*,[^()]*\)", text) and "infty" not in text:
        parts = [part.strip() for part in text[1:-1].split(",")]
        if parts != parts[::-1]:
            yield "tuple reversed", "(" + ",".join(reversed(parts)) + ")"
    if re.fullmatch(r"[\[(].*,.*[\])]", text) and "\\cup" not in text and text.count(",") == 1 and "infty" not in text:
        yield "other bracket", ("[" if text[0] == "(" else "(") + text[1:]
    if "," in text and not re.search(r"[()\[\]{}\\=$]", text) and not re.fullmatch(r"-?\d{1,3}(,\d{3})+", text):
        yield "element left out", ", ".join(text.split(",")[1:]).strip()
    if "\\sqrt" in text and not re.search(r"[a-zA-Z=,]", re.sub(r"\\[a-z]+", "", text)):
        yield "plus one", text + "+1"


def prime_factors(n):
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors


def decimal(value):
    digits = 0
    while (value * 10**digits).denominator != 1:
        digits += 1
    text = str(abs((value * 10**digits).numerator)).rjust(digits + 1, "0")
    return ("-" if value < 0 else "") + (text[:-digits] + "." + text[-digits:] if digits else text)


def generated(n, seed=1):
    """Pairs from templates, half of them unequal."""
    rng = random.Random(seed)
    for _ in range(n):
        a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 40)
        k = rng.choice([1, 2, 3])
        off = rng.choice([0, 0, k])
        equal = off == 0
        name, answer, reference = rng.choice([
            ("mixed number", f"{c}\\frac{{{a}}}{{{a + b}}}", f"\\frac{{{c * (a + b) + a + off}}}{{{a + b}}}"),
            ("scientific", f"{a}.{b} \\times 10^{{-{c}}}", f"{a}.{b}e-{c + off}"),
            ("scientific integer", f"{a}\\times 10^{a}", f"{a * 10**a + off}"),
            ("base", f"{to_base(c + 20, 7)}_7", f"{c + 20 + off}"),
            ("base and base", f"{to_base(c + 20, 7)}_{{7}}", f"{to_base(c + 20 + off, 5)}_{{5}}"),
            ("complex", f"({a}+{b}i)^2", f"{a * a - b * b}+{2 * a * b + off}i"),
            ("complex order", f"{a}+{b}i", f"{b + off}i+{a}"),
            ("repeating", f"0.\\overline{{{a}}}", f"\\frac{{{a + off}}}{{9}}"),
            ("unicode power", f"{a}³", f"{a**3 + off}"),
            ("unicode fraction", f"{c}½", f"{2 * c + 1 + off}/2"),
            ("thin space", f"{c}\\,{100 * a}", f"{c * 1000 + 100 * a + off}"),
            ("currency", f"{c} dollars", f"\\${c + off}"),
            ("degrees in trig", f"\\cos {60 + 30 * off}^\\circ", "\\frac12"),
            ("interval", f"{a}\\le x<{a + b}", f"[{a},{a + b + off})"),
            ("vector", f"\\langle {a},{b}\\rangle", f"({a},{b + off})"),
            ("plus-minus", f"\\frac{{{a}\\pm\\sqrt{{{b}}}}}{{2}}",
             f"\\frac{{{a + off}+\\sqrt{{{b}}}}}{{2}},\\frac{{{a + off}-\\sqrt{{{b}}}}}{{2}}"),
            ("polynomial", f"(x+{a})(x-{b})", f"x^2+{a - b}x-{a * b + off}".replace("+-", "-")),
            ("surd", f"\\sqrt{{{a * a * b}}}", f"{a}\\sqrt{{{b + off}}}"),
            ("rationalised", f"\\frac{{1}}{{\\sqrt{{{b}}}}}", f"\\frac{{\\sqrt{{{b}}}}}{{{b + off}}}"),
            ("set", f"\\{{{a},{a + b},{c + 20}\\}}", f"\\{{{c + 20 + off},{a},{a + b}\\}}"),
            ("equation", f"y={a}x+{b}", f"{a}x-y+{b + off}=0"),
            ("trig identity", f"\\sin^2 x+{a}", f"{a + 1 + off}-\\cos^2 x"),
            ("logarithm", f"\\log_{{{a}}} {a**3}", f"{3 + off}"),
            ("factorial", f"\\frac{{{a + 3}!}}{{{a}!}}", f"{(a + 1) * (a + 2) * (a + 3) + off}"),
            ("binomial", f"\\binom{{{a + 3}}}{{2}}", f"{(a + 3) * (a + 2) // 2 + off}"),
            ("matrix", f"\\begin{{pmatrix}}{a}\\\\{b}\\end{{pmatrix}}", f"\\begin{{bmatrix}}{a}\\\\{b + off}\\end{{bmatrix}}"),
            ("percent", f"{c}\\%", f"{c + off}"),
            ("time", f"{a}:{c + 10} PM", f"{a + off}:{c + 10} pm"),
            ("ratio", f"{a * 3}:{b * 3}", f"{a}:{b + off}"),
            ("absolute value", f"|{a}-{a + c}|", f"{c + off}"),
        ])
        # A shifted ratio or cosine may hit the same value again; these are left out.
        if name == "degrees in trig" and off == 2:
            continue
        yield name, answer, reference, equal


def to_base(n, base):
    digits = ""
    while n:
        n, digit = divmod(n, base)
        digits = str(digit) + digits
    return digits


def pairs(folder, n_generated):
    """All pairs: (source, kind, answer, reference, is_equal)."""
    for source, answer in gold(folder):
        yield source, "itself", answer, answer, True
        for kind, text in reformatted(answer):
            yield source, kind, text, answer, True
        for kind, text in perturbed(answer):
            yield source, kind, text, answer, False
    for kind, answer, reference, equal in generated(n_generated):
        yield "generated", kind, answer, reference, equal


def kinds(data, n):
    """Kinds of text that are graded, each a name and n records {response or answer, reference}."""
    rows = list(dict.fromkeys(pairs(data, 600)))
    random.Random(0).shuffle(rows)
    rows = [(bare(answer), bare(reference)) for *_, answer, reference, _ in rows[:n]]
    words = "Let us think step by step. We have $x + 1 = 2$ and so on. " * 40
    yield "2,400 characters and a box", [
        {"response": f"{words} So the answer is \\boxed{{{answer}}}.", "reference": reference} for answer, reference in rows
    ]
    formulas = "\n\n".join(f"Therefore $${answer} = {reference}$$ holds." for answer, reference in rows[:12])
    yield "paragraphs of formulas and a box", [
        {"response": f"{formulas}\n\n$$\\boxed{{{answer}}}$$", "reference": reference} for answer, reference in rows
    ]
    with (Path(data) / "train/gsm8k.jsonl").open() as file:
        solved = [json.loads(line) for line in file][:n]
    yield "a GSM8K solution with ####", [
        {"response": f"{row['solution'].split('####')[0]}#### {row['answer']}", "reference": row["answer"]} for row in solved
    ]
    yield "a response behind </think>", [
        {"response": f"<think>{words}</think>The answer is \\boxed{{{answer}}}.", "reference": reference}
        for answer, reference in rows
    ]
    yield "an answer", [{"answer": answer, "reference": reference} for answer, reference in rows]
