"""The program `stapo` inside Python: exit statuses, signals, pipes, and processes that it starts."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import stapo
from common import SETTINGS, stapo as program

EXPERIMENT = """
name = "two"
seeds = [0]
[[arms]]
name = "grpo"
set = ["objective={preset=\\"grpo\\"}"]
[[arms]]
name = "stapo"
"""

VERIFIER = 'task.verifier={kind="command",program="sh",args=["-c","while read -r line; do echo \'{\\"reward\\":0.25}\'; done"]}'


class Command(unittest.TestCase):
    def test_statuses_are_those_of_the_executable(self):
        self.assertIn(stapo.__version__, program("version"))
        self.assertIn("Usage: stapo", program("--help"))
        self.assertIn("unknown preset", program("objective", "--show", "--spec", "x", status=2))
        self.assertIn("unexpected argument", program("train", "--no-such-flag", status=2))
        self.assertIn("1 malformed", program("grade", "-", input="x\n", status=1))

    def test_a_reader_that_leaves_is_no_error(self):
        lines = json.dumps({"response": "\\boxed{1}", "reference": "1"}) + "\n"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "lines.jsonl")
            path.write_text(lines * 10000)
            command = [sys.executable, "-m", "stapo", "grade", path]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
                child.stdout.close()
                said = child.stderr.read().decode()
        self.assertEqual(child.returncode, 0, said)

    @unittest.skipUnless(os.path.exists("/proc/self/maps"), "this system does not show the handlers of a process")
    def test_ctrl_c_ends_a_command(self):
        with subprocess.Popen([sys.executable, "-m", "stapo", "grade", "-"], stdin=subprocess.PIPE) as child:
            while not is_ready(child.pid):
                time.sleep(0.01)
            child.send_signal(signal.SIGINT)
            self.assertEqual(child.wait(), -signal.SIGINT)

    def test_an_experiment_starts_its_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "two.toml").write_text(EXPERIMENT)
            said = program("experiment", "two.toml", "--json", *SETTINGS, cwd=folder)
            self.assertEqual([arm["name"] for arm in json.loads(said)], ["grpo", "stapo"])
            for arm in ("grpo", "stapo"):
                metrics = Path(folder, "experiments/two", arm, "seed-0/metrics.jsonl").read_text()
                self.assertEqual(len(metrics.splitlines()), 2)

    def test_a_verifier_runs_behind_its_launcher(self):
        with tempfile.TemporaryDirectory() as folder:
            program("train", "--out", "run", *SETTINGS, "--set", "steps=1", "--set", VERIFIER, cwd=folder)
            [line] = Path(folder, "run/metrics.jsonl").read_text().splitlines()
            self.assertIn("0.25", line)


def is_ready(pid):
    """Whether the process has loaded the extension module and given SIGINT its default meaning back."""
    is_loaded = "_stapo" in Path(f"/proc/{pid}/maps").read_text()
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return is_loaded and not int(caught, 16) >> (signal.SIGINT - 1) & 1


if __name__ == "__main__":
    unittest.main()
