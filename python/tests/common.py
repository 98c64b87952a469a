"""What the tests share: NumPy where it is installed, and the program as a process of its own."""

import json
import subprocess
import sys
import unittest

try:
    import numpy
except ImportError:
    numpy = None

needs_numpy = unittest.skipIf(numpy is None, "NumPy is not installed")

# Runs of the built-in model that take a second or two. Its tau_p is high enough that the small model has candidates.
TINY = [
    "steps=2",
    "rollout.problems_per_step=4",
    "update.problems_per_minibatch=4",
    "rollout.group_size=4",
    "evaluation={problems=8,every_steps=1}",
]
SETTINGS = [word for setting in TINY for word in ("--set", setting)]


def stapo(*arguments, status=0, **options):
    """Runs the program and returns what it printed on standard output, or its complaint where it should fail."""
    command = [sys.executable, "-m", "stapo", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != status:
        raise AssertionError(f"{arguments}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stderr if status else done.stdout


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]
