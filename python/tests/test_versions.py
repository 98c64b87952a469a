"""The versions of other trainers that the adapters accept."""

import unittest
from unittest import mock

from stapo._versions import require


class Versions(unittest.TestCase):
    def test_an_untested_version_is_refused_by_name_with_the_tested_one(self):
        for found in ("1.17.0", "1.160.0", "2.0"):
            with mock.patch("stapo._versions.version", return_value=found):
                with self.assertRaisesRegex(ImportError, rf"trl {found}: .* tested with trl 1\.16(.|\n)*hint: pip"):
                    require("trl", "1.16")

    def test_patch_releases_of_the_tested_version_are_accepted(self):
        for found in ("1.16", "1.16.0", "1.16.3"):
            with mock.patch("stapo._versions.version", return_value=found):
                require("trl", "1.16")
