"""The generators of `reasoning-gym`: one question, one answer, scored by the generator.

    python -m stapo.environments.reasoning_gym_env leg_counting --size 1000 --seed 0 > rows.jsonl
"""

import argparse
import functools
import json
import re
import sys

import reasoning_gym

ASK = "\nGive the final answer as \\boxed{answer}."


@functools.lru_cache(maxsize=256)
def dataset(name, size, seed):
    """The generator of a row, which finds the row's entry again by its index."""
    return reasoning_gym.create_dataset(name, size=size, seed=seed)


def rows(name, size, seed):
    """The rows of a data file."""
    for index, entry in enumerate(dataset(name, size, seed)):
        origin = {"dataset": name, "size": size, "seed": seed, "index": index}
        yield {"id": f"{name}-{seed}-{index}", "prompt": entry["question"] + ASK, "answer": str(entry["answer"]), **origin}


def answer_of(message):
    """The last boxed text, or the text between answer tags; None if there is neither."""
    start = message.rfind("\\boxed{")
    if start < 0:
        tagged = re.findall(r"<answer>(.*?)</answer>", message, re.DOTALL)
        return tagged[-1].strip() if tagged else None
    depth, inside = 1, message[start + len("\\boxed{") :]
    for at, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return inside[:at].strip()
    return None


class Environment:
    """An episode of one turn. The reward is the generator's score, and 1 is right."""

    def reset(self, row):
        """Finds the entry of a row."""
        self.dataset = dataset(row["dataset"], row["size"], row["seed"])
        self.entry = self.dataset[row["index"]]

    def step(self, message):
        """Scores the answer in a message."""
        answer = answer_of(message)
        if answer is None:
            return {"reward": 0.0, "done": True, "verdict": "no_answer"}
        try:
            score = float(self.dataset.score_answer(answer=answer, entry=self.entry))
        except Exception as error:
            # Some generators raise an error at an answer that they cannot read.
            reason = f"{type(error).__name__}: {error}"
            return {"reward": 0.0, "done": True, "verdict": "unparsable", "answer": answer, "reason": reason}
        return {"reward": score, "done": True, "verdict": score >= 1.0, "answer": answer, "reason": f"score {score:g}"}


def main():
    """Writes the rows of one generator."""
    parser = argparse.ArgumentParser(description=rows.__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for row in rows(given.dataset, given.size, given.seed):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
