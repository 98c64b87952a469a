"""A reward of your own, as a Python function."""

import re


def reward(prompt, response, reference, row):
    """A right answer is worth 1, or 0.7 where it takes more words than the row allows; a wrong one nothing."""
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", response)
    if not boxes:
        return {"reward": 0.0, "verdict": "no_answer"}
    if boxes[-1].strip() != reference:
        return {"reward": 0.0, "verdict": "wrong", "answer": boxes[-1]}
    n_words = len(response.split())
    is_brief = n_words <= row["max_words"]
    return {"reward": 1.0 if is_brief else 0.7, "verdict": "right", "answer": boxes[-1], "reason": f"{n_words} words"}


def rewards(prompts, responses, references, rows):
    """The same for all responses of a step at once: function = "rewards", batch = true."""
    return [reward(*sample) for sample in zip(prompts, responses, references, rows)]
