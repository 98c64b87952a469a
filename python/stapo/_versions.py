"""Which versions of other trainers the adapters were tested with."""

from __future__ import annotations

from importlib.metadata import version


def require(package: str, tested: str) -> None:
    """Refuses a version of `package` that is not `tested`, such as "1.16" (any patch release of it)."""
    found = version(package)
    if found != tested and not found.startswith(tested + "."):
        raise ImportError(
            f"{package} {found}: the adapter was tested with {package} {tested}, and reads parts of it that change\n"
            f"hint: pip install '{package}=={tested}.*'"
        )
