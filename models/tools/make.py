"""Writes what the model in this folder was made from: the built-in model with more characters, and rows that call a tool.

    python3 models/tools/make.py /tmp/tools
    stapo sft models/tools/sft.toml --out runs/tools

The model sees two kinds of rows for a product of two numbers of four digits: a call of the calculator and, after its
answer, the boxed result; or a guess. Half of the products are guessed, and one number in ten is copied with a wrong digit,
so that reinforcement learning has something to improve.
"""

import json
import pathlib
import random
import shutil
import sys

N_PRODUCTS = 20_000
GUESSED = 0.5
MISCOPIED = 0.1
MORE_CHARACTERS = "\nACLcl"
END = "<|end|>"


def with_more_characters(base, folder):
    """A copy of the model whose tokenizer knows more characters. Their embeddings are the spare ones of the vocabulary."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[END] = len(vocabulary)
    for character in MORE_CHARACTERS:
        vocabulary[character] = len(vocabulary)
    path.write_text(json.dumps(tokenizer, indent=2, sort_keys=True) + "\n")


def miscopied(draw, number):
    """The number, or one with another digit in one place."""
    digits = list(str(number))
    if draw.random() < MISCOPIED:
        digits[draw.randrange(len(digits))] = str(draw.randrange(10))
    return "".join(digits)


def rows(draw):
    for _ in range(N_PRODUCTS):
        left, right = draw.randint(1000, 9999), draw.randint(1000, 9999)
        prompt = f"{left}*{right}="
        if draw.random() < GUESSED:
            guess = str(left * right)[:1] + "".join(str(draw.randrange(10)) for _ in str(left * right)[1:])
            yield {"prompt": prompt, "response": f"\\boxed{{{guess}}}"}
            continue
        called = [miscopied(draw, number) for number in (left, right)]
        call = f"CALL calculator({'*'.join(called)})"
        yield {"prompt": prompt, "response": call}
        value = int(called[0]) * int(called[1])
        yield {"prompt": f"{prompt}{call}{END}\n{value}\n", "response": f"\\boxed{{{miscopied(draw, value)}}}"}


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with_more_characters(pathlib.Path(__file__).parent.parent / "base", folder / "start")
    with open(folder / "rows.jsonl", "w") as file:
        for row in rows(random.Random(0)):
            file.write(json.dumps(row) + "\n")


main()
