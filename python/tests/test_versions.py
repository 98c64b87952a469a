"""The versions of other trainers that the adapters accept."""

import ast
import unittest
import warnings
from pathlib import Path
from unittest import mock

import stapo
from stapo._versions import probe, require


def found(version):
    return mock.patch("stapo._versions.version", return_value=version)


class Versions(unittest.TestCase):
    def test_an_older_version_is_refused_by_name_with_the_tested_one(self):
        for version in ("1.15.9", "0.160.0", "1.2"):
            with found(version), self.assertRaisesRegex(
                ImportError, rf"trl {version}: .* tested with trl 1\.16(.|\n)*hint: pip"
            ):
                require("trl", "1.16")

    def test_a_newer_version_is_accepted_with_a_warning(self):
        for version in ("1.17.0", "1.160.0", "2.0", "1.17.0.dev0"):
            with found(version), self.assertWarnsRegex(UserWarning, rf"trl {version} is newer than 1\.16"):
                require("trl", "1.16")

    def test_patch_releases_of_the_tested_version_are_accepted(self):
        for version in ("1.16", "1.16.0", "1.16.3"):
            with found(version), warnings.catch_warnings():
                warnings.simplefilter("error")
                require("trl", "1.16")

    def test_a_function_with_other_parameters_is_refused(self):
        def step(data, scale=1.0):
            return data

        with found("9.0"):
            probe("trl", step, ["data", "scale"])
            with self.assertRaisesRegex(ImportError, r"trl 9\.0: .*step has no parameter 'mask'.* it has data, scale"):
                probe("trl", step, ["data", "mask"])

    def test_adapters_check_versions_before_they_import_internals(self):
        folder = Path(stapo.__file__).parent
        for name, package in (("trl.py", "trl"), ("verl.py", "verl")):
            body = ast.parse((folder / name).read_text()).body
            is_import = lambda node: isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package
            first_import = next(node.lineno for node in body if is_import(node))
            is_check = lambda node: (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Call)
                and getattr(node.value.func, "id", "") == "require"
            )
            self.assertLess(next(node.lineno for node in body if is_check(node)), first_import, name)
