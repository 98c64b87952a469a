"""Reward functions for TRL, and for trainers that call them as TRL does. Neither torch nor TRL is imported.

    from stapo.reward import math_reward, worked_out_reward

    trainer = GRPOTrainer(model="Qwen/Qwen3-1.7B", reward_funcs=worked_out_reward, args=config, train_dataset=data)
"""

from __future__ import annotations

from typing import Any

from stapo import grade_batch

__all__ = ["math_reward", "worked_out_reward"]

_REFERENCE_COLUMNS = ("answer", "solution", "ground_truth", "reference")


def math_reward(completions: list, **columns: Any) -> list[float | None]:
    """A reward function for TRL: 1.0 for a right answer, 0.0 for every other, None for a row without a reference.

    The reference is the dataset's column `answer`, `solution`, `ground_truth` or `reference`, the first that is there.
    Completions are graded by the rules of `stapo grade --mode math`, on all cores.

    >>> from stapo.reward import math_reward
    >>> math_reward(completions=[r"\\boxed{3 + 4}", r"\\boxed{8}"], answer=["7", "7"])
    [1.0, 0.0]
    """
    return _rewards("math_reward", completions, columns, form="any")


def worked_out_reward(completions: list, prompts: list | None = None, **columns: Any) -> list[float | None]:
    """`math_reward`, but an answer that leaves a calculation to the grader earns 0.0, and so does a formula of the prompt.

    By values alone, policies learn to copy the question into the box.

    >>> from stapo.reward import worked_out_reward
    >>> worked_out_reward(completions=[r"\\boxed{3 + 4}", r"\\boxed{7}"], prompts=["What is $3+4$?"] * 2, answer=["7", "7"])
    [0.0, 1.0]
    """
    return _rewards("worked_out_reward", completions, columns, form="worked-out", prompts=prompts)


def _rewards(
    name: str, completions: list, columns: dict[str, Any], *, form: str, prompts: list | None = None
) -> list[float | None]:
    column = next((column for column in _REFERENCE_COLUMNS if columns.get(column) is not None), None)
    if column is None:
        raise ValueError(
            f"{name}: the dataset has none of the columns {', '.join(_REFERENCE_COLUMNS)}\n"
            "hint: rename the column that holds the reference answer to `answer`"
        )
    references = columns[column]
    rows = [row for row, reference in enumerate(references) if reference is not None]
    verdicts = grade_batch(
        [_text(completions[row]) for row in rows],
        [str(references[row]) for row in rows],
        form=form,
        problems=[_text(prompts[row]) for row in rows] if prompts else None,
    )
    rewards: list[float | None] = [None] * len(completions)
    for row, verdict in zip(rows, verdicts):
        rewards[row] = 1.0 if verdict else 0.0
    return rewards


def _text(turns: str | list[dict]) -> str:
    """The text of a prompt or completion; of a conversation, that of its last message."""
    if isinstance(turns, str):
        return turns
    return str(turns[-1]["content"]) if turns else ""
