"""The stubs say what the extension module has, by mypy's own comparison. Skipped where mypy is not installed."""

import importlib.util
import subprocess
import sys
import unittest


@unittest.skipIf(importlib.util.find_spec("mypy") is None, "mypy is not installed")
class Stubs(unittest.TestCase):
    def test_stubs_and_module_agree(self):
        command = [sys.executable, "-m", "mypy.stubtest", "stapo._stapo", "--concise"]
        checked = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)


if __name__ == "__main__":
    unittest.main()
