"""STAPO from Python: the grader, the objectives, run folders, and the program `stapo` itself.

>>> import stapo
>>> bool(stapo.grade(r"The area is \\boxed{\\frac{\\sqrt{8}}{2}}.", r"\\sqrt{2}"))
True

`stapo.reward` has reward functions for TRL and trainers like it. `stapo.sandbox` runs programs that a model wrote. `stapo.torch`, `stapo.trl` and `stapo.verl` bring S2T into other trainers; each imports its own framework.
"""

from ._command import main
from ._stapo import (
    Effects,
    Error,
    Objective,
    Run,
    Verdict,
    __version__,
    compare,
    grade,
    grade_batch,
    presets,
    read_eval,
    verify,
)

__all__ = [
    "Effects",
    "Error",
    "Objective",
    "Run",
    "Verdict",
    "__version__",
    "compare",
    "grade",
    "grade_batch",
    "main",
    "presets",
    "read_eval",
    "verify",
]
