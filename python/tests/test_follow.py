"""The follower of run folders, with a sink that keeps nothing; peers.sh has the real services."""

import contextlib
import io
import tempfile
import unittest
from pathlib import Path

from follow_story import story
from stapo import follow


class Nowhere:
    def start(self, name, folder, plan):
        self.plan = plan
        return 0

    def metrics(self, step, numbers):
        pass

    def event(self, event):
        pass

    def finish(self, reason):
        pass


class Followed(unittest.TestCase):
    def test_steps_and_events_of_a_torn_resumed_and_stopped_run_arrive_once(self):
        with tempfile.TemporaryDirectory() as folder:
            story(Path(folder) / "run", Nowhere())

    def test_a_folder_that_is_no_run_is_refused(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(follow.main([folder, "--to", "mlflow"]), 2)
        self.assertIn("no plan.toml", said.getvalue())
