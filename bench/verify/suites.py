"""Agreement of `stapo grade` with the test suites of other graders.

    python bench/verify/suites.py --stapo target/release/stapo --out disagreements.tsv math_verify/tests test_other.py

Each path is a Python test file or a folder of such files. The files are parsed and never executed or imported: a
suite's rows are the literal tuples of `pytest.mark.parametrize` whose names say which column is the reference, which
the response and which the verdict, and the literal arguments of `assert math_equal(answer, reference)`, with or without
`not`. Prints one table row per path and writes every disagreement, to be judged by a person.
"""

import argparse
import ast
import json
import pathlib
import re
import subprocess

REFERENCE = {"gold", "reference", "target", "ground_truth", "answer"}
RESPONSE = {"pred", "prediction", "completion", "response"}
VERDICT = {"expected", "result", "same", "is_equal"}
PAIR = {"output_pair"}
EQUALITY = {"math_equal", "is_equiv", "symbolic_equal", "grade_answer", "_test_is_equiv", "_test_is_not_equiv"}
RIGHT = {"CORRECT": True, "INCORRECT": False}


def value(node):
    """The value of a literal, or of a name that stands for a verdict; None for anything else."""
    if isinstance(node, ast.Name):
        return RIGHT.get(node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def text(cell):
    return cell if isinstance(cell, str) else str(cell)


def parametrized(function):
    """The rows (response, reference, is_right) of a function's `parametrize` decorators."""
    for decorator in function.decorator_list:
        if not (isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", "") == "parametrize"):
            continue
        names = value(decorator.args[0])
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names or [])
        rows = decorator.args[1].elts if isinstance(decorator.args[1], (ast.List, ast.Tuple)) else []
        for row in rows:
            cells = [value(cell) for cell in getattr(row, "elts", [])]
            if names and names[0] in PAIR and len(cells) == 2 and None not in cells:
                is_right = "incorrect" not in function.name
                yield text(cells[0]), text(cells[1]), is_right
                yield text(cells[1]), text(cells[0]), is_right
            named = dict(zip(names, cells))
            column = {role: next((named[name] for name in names if name in known and named.get(name) is not None), None)
                      for role, known in (("reference", REFERENCE), ("response", RESPONSE), ("verdict", VERDICT))}
            if column["reference"] is not None and column["response"] is not None and len(cells) == len(names):
                verdict = column["verdict"]
                if verdict is None and not set(names) & VERDICT:
                    verdict = True
                if verdict is not None:
                    yield text(column["response"]), text(column["reference"]), bool(verdict)


def asserted(function):
    """The rows of assertions such as `assert math_equal("1/2", "0.5")`, under `not` or `is False` as well."""
    for node in ast.walk(function):
        is_false = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "assertFalse"
        is_true = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "assertTrue"
        test = node.test if isinstance(node, ast.Assert) else (node.args[0] if is_true or is_false else None)
        truth = not is_false
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, truth = test.operand, not truth
        if isinstance(test, ast.Compare) and isinstance(test.comparators[0], ast.Constant):
            truth, test = bool(test.comparators[0].value), test.left
        if isinstance(test, ast.Call) and len(test.args) >= 2:
            name = getattr(test.func, "id", getattr(test.func, "attr", ""))
            bound = {}
            for line in function.body:
                if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and line.lineno < test.lineno:
                    bound[line.targets[0].id] = value(line.value)
            cells = [bound.get(arg.id) if isinstance(arg, ast.Name) else value(arg) for arg in test.args[:2]]
            if name in EQUALITY and None not in cells:
                yield text(cells[0]), text(cells[1]), truth


def rows_of(path):
    files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test"):
                yield from ((file.name, *row) for row in [*parametrized(node), *asserted(node)])


def boxes(text):
    """What the boxes of the last line with a box hold, outermost boxes only."""
    found = []
    at = text.find("\\boxed{")
    while at >= 0:
        depth, end = 0, at + len("\\boxed")
        while end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                break
            end += 1
        found.append((at, text[at + len("\\boxed{"):end]))
        at = text.find("\\boxed{", end)
    last_line = text.rfind("\n", 0, found[-1][0]) if found else -1
    return [inside for at, inside in found if at > last_line]


def bare(reference):
    """The answer that a reference holds: suites also give whole solutions as references."""
    reference = reference.strip()
    if inside := boxes(reference):
        return ", ".join(dict.fromkeys(inside))
    formulas = re.findall(r"\$\$?([^$]+)\$\$?", reference)
    if formulas and reference.startswith("$") and reference.endswith("$"):
        return ", ".join(formula.strip() for formula in formulas)
    return formulas[-1].strip() if formulas and is_prose(reference) else reference


def is_prose(text):
    return len(re.findall(r"(?<![\\a-zA-Z{])[A-Za-z]{3,}(?![a-zA-Z}])", text)) >= 2


def record(response, reference):
    """A line for `stapo grade`: a whole response where the text has prose, a box or several lines, else an answer."""
    marks = ("\\boxed", "\\fbox", "nswer", "\n")
    is_response = any(mark in response for mark in marks) or is_prose(response)
    return {"response" if is_response else "answer": response, "reference": bare(reference)}


def grade(stapo, rows):
    """Verdicts, with the last formula as fallback: these suites often leave the answer unmarked."""
    lines = "\n".join(json.dumps(record(response, reference)) for _, response, reference, _ in rows)
    command = [stapo, "grade", "--fallback", "last-formula", "-"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    parser.add_argument("--stapo", default="target/release/stapo")
    parser.add_argument("--out", default="disagreements.tsv")
    args = parser.parse_args()
    print("| suite | rows | agree | theirs right, ours not | ours right, theirs not |")
    print("|---|---|---|---|---|")
    with open(args.out, "w") as out:
        out.write("suite\tfile\tresponse\treference\ttheirs\tours\treason\n")
        for path in args.paths:
            rows = list(rows_of(path))
            graded = grade(args.stapo, rows)
            counts = {True: 0, False: 0}
            for (file, response, reference, truth), record in zip(rows, graded):
                if (record["verdict"] == "right") != truth:
                    counts[truth] += 1
                    cells = [path.name, file, response, reference, str(truth), record["verdict"], record["reason"]]
                    out.write("\t".join(cell.replace("\t", " ").replace("\n", "⏎") for cell in cells) + "\n")
            n_agree = len(rows) - sum(counts.values())
            print(f"| {path} | {len(rows)} | {n_agree} | {counts[True]} | {counts[False]} |")


if __name__ == "__main__":
    main()
