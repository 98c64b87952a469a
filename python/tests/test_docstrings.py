"""The examples of the docstrings and of docs/python.md."""

import doctest
import importlib.resources
import importlib.util
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import stapo
from common import numpy
from stapo import _command, _stapo

PAGE = Path(__file__).parents[2] / "docs/python.md"


def load_tests(loader, tests, pattern):
    """Python's finder takes no functions of extension modules, so each docstring is read by name."""
    parser = doctest.DocTestParser()
    described = {"stapo": stapo, "stapo.main": _command.main}
    for name in dir(_stapo):
        owner = getattr(_stapo, name)
        described[f"stapo.{name}"] = owner
        if isinstance(owner, type):
            described.update({f"stapo.{name}.{key}": value for key, value in vars(owner).items()})
    for name, owner in described.items():
        text = getattr(owner, "__doc__", None) or ""
        is_ready = numpy is not None or ".evaluate(" not in text
        if ">>>" in text and is_ready and isinstance(text, str):
            example = parser.get_doctest(text, {}, name, None, None)
            tests.addTest(doctest.DocTestCase(example))
    if PAGE.exists() and numpy is not None:
        tests.addTest(doctest.DocFileTest(str(PAGE), module_relative=False))
    return tests


class Documented(unittest.TestCase):
    def test_everything_public_has_a_docstring_and_a_stub(self):
        stubs = importlib.resources.files("stapo").joinpath("_stapo.pyi").read_text()
        for name in stapo.__all__:
            if name.startswith("__"):
                continue
            self.assertTrue(getattr(stapo, name).__doc__, name)
            if name != "main":
                self.assertRegex(stubs, rf"(?m)^(def|class) {name}\b")

    def test_stubs_name_every_member(self):
        stubs = importlib.resources.files("stapo").joinpath("_stapo.pyi").read_text()
        for owner in (stapo.Effects, stapo.Objective, stapo.Run, stapo.Verdict):
            body = stubs.split(f"class {owner.__name__}")[1].split("\nclass ")[0].split("\ndef ")[0]
            for name in vars(owner):
                if not name.startswith("_"):
                    self.assertRegex(body, rf"\b{name}\b", owner)

    @unittest.skipIf(importlib.util.find_spec("mypy") is None or numpy is None, "mypy or NumPy is not installed")
    def test_stubs_are_those_of_the_extension(self):
        command = [sys.executable, "-m", "mypy.stubtest", "stapo._stapo"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir())
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
