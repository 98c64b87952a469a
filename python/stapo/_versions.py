"""Which versions of other trainers the adapters were tested with."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any


def require(package: str, tested: str) -> None:
    """Checks the version of `package`, before anything of it is imported; `tested` is such as "1.16".

    Patch releases of the tested version are accepted, newer versions with a warning, and older ones are refused: their
    parts have other forms. `probe` then says whether a newer version still has the form that an adapter needs.
    """
    found = version(package)
    if found == tested or found.startswith(tested + "."):
        return
    remedy = f"hint: pip install '{package}=={tested}.*'"
    if _numbers(found) < _numbers(tested):
        raise ImportError(
            f"{package} {found}: the adapter was tested with {package} {tested}, and older versions have other parts\n"
            f"{remedy}"
        )
    warnings.warn(
        f"{package} {found} is newer than {tested}, with which the adapter was tested; the functions that it replaces "
        f"have the expected parameters, and what they do may have changed\n{remedy}",
        stacklevel=2,
    )


def probe(package: str, function: Callable[..., Any], parameters: Sequence[str]) -> None:
    """Refuses a version of `package` whose `function` lacks one of the parameters that an adapter calls it with."""
    known = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    missing = [name for name in parameters if name not in known]
    if missing and not takes_any:
        raise ImportError(
            f"{package} {version(package)}: {function.__qualname__} has no parameter {missing[0]!r}, which the adapter "
            f"gives it; it has {', '.join(known)}\nhint: install the version that the adapter was tested with"
        )


def _numbers(text: str) -> list[int]:
    """The numbers of a version before any suffix: [1, 16, 0] of 1.16.0rc1."""
    parts = re.match(r"\d+(\.\d+)*", text)
    return [int(part) for part in parts.group().split(".")] if parts else []
