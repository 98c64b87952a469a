"""Programs that a model wrote, run where they can do no harm: what the verifier `code` uses, for rewards of your own.

>>> from stapo import sandbox
>>> outcome = sandbox.run("print(int(input()) * 2)", "21")
>>> outcome["end"], outcome["stdout"]
('finished', '42\\n')
>>> sandbox.run("while True: pass", cpu_seconds=0.2)["end"]
'cpu_time'
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from . import _command
from ._stapo import Sandbox


def run(
    source: str, stdin: str = "", *, cpu_seconds: float = 3.0, memory_mib: int = 512, python: str | None = None
) -> dict[str, Any]:
    """Runs a program in Python with its standard input, and returns `end`, `stdout`, `stderr` and `cpu_seconds`.

    `end` is `finished`, the limit that was reached (`cpu_time`, `wall_time`, `memory`, `processes`, `file_size`, `output`), or a
    dict with one key (`exited`, `raised`, `signal`). `python` is the interpreter, by default this one.
    """
    return run_batch([(source, stdin)], cpu_seconds=cpu_seconds, memory_mib=memory_mib, python=python)[0]


def run_batch(
    programs: list[tuple[str, str]], *, cpu_seconds: float = 3.0, memory_mib: int = 512, python: str | None = None
) -> list[dict[str, Any]]:
    """Runs pairs of a program and its standard input on all cores; the outcomes have the order of the pairs."""
    return _open(python or sys.executable, cpu_seconds, memory_mib).run(list(programs))


@functools.lru_cache(maxsize=4)
def _open(python: str, cpu_seconds: float, memory_mib: int) -> Sandbox:
    script = os.path.abspath(_command.__file__)
    return Sandbox(python, cpu_seconds, memory_mib, sys.executable, ["-I", script])
