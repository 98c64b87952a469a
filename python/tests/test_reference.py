"""docs/reference/python.md is printed from the docstrings. STAPO_WRITE_DOCS=1 writes the page."""

import ast
import inspect
import os
import re
import unittest
from pathlib import Path

import stapo
from stapo import _command, _stapo

PAGE = Path(__file__).parents[2] / "docs/reference/python.md"
# Modules in Python. They are read and not imported: some need a framework that may not be installed.
MODULES = ("reward", "sandbox", "torch", "trl", "verl", "verl_losses", "callbacks")

HEAD = """\
<!-- Written by a test from the docstrings. Change them, then run: STAPO_WRITE_DOCS=1 cargo test -p stapo-py -->
# Python API
The package `stapo` has the grader, the objectives and run folders; its modules connect other trainers. [From
Python](../python.md) shows how to install and use them.
"""


def described(text):
    """A docstring as Markdown: examples become blocks of code."""
    out = []
    for part in inspect.cleandoc(text or "").split("\n\n"):
        is_example = part.lstrip().startswith(">>>")
        out.append(f"```python\n{inspect.cleandoc(part)}\n```" if is_example else part)
    return "\n\n".join(part for part in out if part)


def of_extension(name, owner):
    """A function or class of the extension module, with its members."""
    signature = re.sub(r"[$]self(, )?", "", getattr(owner, "__text_signature__", None) or "")
    yield f"### `{name}{signature}`\n{described(owner.__doc__)}\n"
    members = vars(owner).items() if inspect.isclass(owner) else ()
    for key, member in sorted(members):
        text = described(getattr(member, "__doc__", None))
        if not key.startswith("_") and text and not isinstance(member, (str, tuple)):
            yield f"**`{name}.{key}`**: {text}\n"


def of_module(name):
    """What a module in Python has, by its source."""
    tree = ast.parse((Path(stapo.__file__).parent / f"{name}.py").read_text())
    yield f"\n## stapo.{name}\n{described(ast.get_docstring(tree))}\n"
    for node in tree.body:
        is_described = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node)
        if not is_described or node.name.startswith("_"):
            continue
        arguments = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
        yield f"### `stapo.{name}.{node.name}{arguments}`\n{described(ast.get_docstring(node))}\n"


def page():
    parts = [HEAD, "## stapo\n" + described(stapo.__doc__) + "\n"]
    for name in sorted(stapo.__all__, key=str.lower):
        if not name.startswith("__") and name != "main":
            parts.extend(of_extension(f"stapo.{name}", getattr(_stapo, name)))
    parts.append(f"### `stapo.main`\n{described(_command.main.__doc__)}\n")
    for name in MODULES:
        parts.extend(of_module(name))
    return "\n".join(parts).replace("\n\n\n", "\n\n")


@unittest.skipUnless(PAGE.parent.exists(), "the documentation is not here")
class Reference(unittest.TestCase):
    def test_the_page_is_printed_from_the_docstrings(self):
        if os.environ.get("STAPO_WRITE_DOCS"):
            PAGE.write_text(page())
        self.assertEqual(PAGE.read_text(), page(), "STAPO_WRITE_DOCS=1 cargo test -p stapo-py writes the page")


if __name__ == "__main__":
    unittest.main()
