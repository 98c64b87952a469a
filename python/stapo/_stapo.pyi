from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, SupportsFloat, final

import numpy
from numpy.typing import NDArray

__all__ = [
    "Error",
    "main",
    "Run",
    "compare",
    "read_eval",
    "Verdict",
    "grade",
    "grade_batch",
    "verify",
    "Effects",
    "Objective",
    "presets",
    "Sandbox",
    "__version__",
]

__version__: str

_Mode = Literal["math", "boxed-exact", "dapo", "multiple-choice", "exact"]
_Order = Literal["box-first", "line-first"]
_Fallback = Literal["nothing", "last-number", "last-formula"]
_Rounding = Literal["six-decimals", "shown-digits"]
_Form = Literal["any", "worked-out"]

class Error(ValueError): ...

@final
class Verdict:
    def __new__(
        cls,
        verdict: str,
        extracted: str | None = None,
        reason: str = "",
        answer: str | None = None,
        reference: str = "",
    ) -> Verdict: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs__(self) -> tuple[str, str | None, str, str | None, str]: ...
    @property
    def verdict(self) -> Literal["right", "wrong", "no_answer", "unparsable", "over_budget"]: ...
    @property
    def extracted(self) -> str | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def answer(self) -> str | None: ...
    @property
    def reference(self) -> str: ...
    def __bool__(self) -> bool: ...

def grade(
    response: str,
    reference: str,
    mode: _Mode = "math",
    *,
    order: _Order = "box-first",
    fallback: _Fallback = "nothing",
    rounding: _Rounding = "six-decimals",
    form: _Form = "any",
    problem: str | None = None,
) -> Verdict: ...
def verify(
    gold: str | Iterable[str],
    answer: str,
    *,
    rounding: _Rounding = "six-decimals",
    form: _Form = "any",
    problem: str | None = None,
) -> bool: ...
def grade_batch(
    responses: Iterable[str],
    references: Iterable[str],
    mode: _Mode = "math",
    *,
    order: _Order = "box-first",
    fallback: _Fallback = "nothing",
    rounding: _Rounding = "six-decimals",
    form: _Form = "any",
    problems: Iterable[str] | None = None,
    threads: int | None = None,
) -> list[Verdict]: ...
def presets() -> dict[str, str]: ...

@final
class Effects:
    MASKS: ClassVar[tuple[str, ...]]
    def __new__(cls, *attributes: Any) -> Effects: ...
    def __getnewargs__(self) -> tuple[Any, ...]: ...
    @property
    def kept(self) -> NDArray[numpy.bool_]: ...
    @property
    def silenced_by(self) -> NDArray[numpy.int8]: ...
    @property
    def is_candidate(self) -> NDArray[numpy.bool_]: ...
    @property
    def clipped(self) -> NDArray[numpy.bool_]: ...
    @property
    def ratio(self) -> NDArray[numpy.float64]: ...
    @property
    def d_logp(self) -> NDArray[numpy.float64]: ...
    @property
    def d_entropy(self) -> NDArray[numpy.float64] | None: ...
    @property
    def advantage(self) -> NDArray[numpy.float64]: ...
    @property
    def totals(self) -> dict[str, Any]: ...

@final
class Objective:
    def __new__(
        cls,
        spec: str | PathLike[str] | Mapping[str, Any],
        *,
        set: Mapping[str, Any] | Sequence[str] | str | None = None,
    ) -> Objective: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs__(self) -> tuple[str]: ...
    @property
    def reads_entropy(self) -> bool: ...
    @property
    def axes(self) -> dict[str, Any]: ...
    @property
    def needs_minibatch(self) -> bool: ...
    @property
    def toml(self) -> str: ...
    @property
    def n_passes(self) -> int: ...
    def evaluate(
        self,
        batch: Mapping[str, Any],
        *,
        step: int = 0,
        pass_number: int = 1,
        reward_weights: Sequence[SupportsFloat] | None = None,
    ) -> Effects: ...

@final
class Run:
    def __new__(cls, folder: str | PathLike[str]) -> Run: ...
    def __getnewargs__(self) -> tuple[Path]: ...
    @property
    def folder(self) -> Path: ...
    @property
    def plan(self) -> dict[str, Any]: ...
    @property
    def metrics(self) -> dict[str, NDArray[Any]]: ...
    @property
    def recorded_steps(self) -> list[int]: ...
    def to_pandas(self) -> Any: ...
    def to_arrow(self) -> Any: ...
    def responses(self, step: int | None = None) -> list[dict[str, Any]]: ...
    def silenced(self, step: int | None = None) -> list[dict[str, Any]]: ...

def read_eval(folder: str | PathLike[str]) -> dict[str, Any]: ...
def compare(a: str | PathLike[str], b: str | PathLike[str]) -> list[dict[str, Any]]: ...
def main(arguments: Sequence[str], executable: str, first_arguments: Sequence[str]) -> int: ...

@final
class Sandbox:
    def __new__(
        cls, python: str, cpu_seconds: float, memory_mib: int, executable: str, first_arguments: list[str]
    ) -> Sandbox: ...
    @property
    def level(self) -> str: ...
    def run(self, programs: list[tuple[str, str]]) -> list[dict[str, Any]]: ...
