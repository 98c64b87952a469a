"""Run folders and evaluations, written by the program and read from Python."""

import json
import tempfile
import unittest
from pathlib import Path

import stapo
from common import SETTINGS, json_lines, needs_numpy, numpy, stapo as program

OBJECTIVE = 'objective={preset="stapo", masks=[{kind="spurious", tau_p=0.2}]}'


class Folders(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.holder = tempfile.TemporaryDirectory()
        cls.at = Path(cls.holder.name)
        run = ["train", "--out", cls.at / "run", *SETTINGS, "--set", OBJECTIVE]
        program(*run, "--set", "record.responses=100", "--set", "record.responses_every_steps=1")
        for name, seed in (("a", 0), ("b", 1)):
            benchmark = ["--benchmarks", "arithmetic", "--limit", "12", "--samples", "2", "--max-tokens", "60"]
            program("eval", *benchmark, "--seed", seed, "--out", cls.at / name)

    @classmethod
    def tearDownClass(cls):
        cls.holder.cleanup()

    @needs_numpy
    def test_metrics_are_the_numbers_of_the_file(self):
        run = stapo.Run(self.at / "run")
        written = json_lines((self.at / "run/metrics.jsonl").read_text())
        metrics = run.metrics
        self.assertEqual(metrics["step"].tolist(), [1, 2])
        self.assertEqual(metrics["step"].dtype, numpy.int64)
        for key in ("loss", "n_tokens", "reward_mean"):
            if key in written[0]:
                self.assertEqual(metrics[key].tolist(), [line[key] for line in written])
        nested = [line["tokens_per_second"]["rollout"] for line in written]
        self.assertEqual(metrics["tokens_per_second.rollout"].tolist(), nested)
        self.assertEqual({len(column) for column in metrics.values()}, {2})

    def test_responses_and_silenced_tokens_are_the_records(self):
        run = stapo.Run(str(self.at / "run"))
        self.assertEqual(run.recorded_steps, [1, 2])
        written = json_lines((self.at / "run/rollouts/step-000002.jsonl").read_text())
        self.assertEqual([r["text"] for r in run.responses(2)], [r["text"] for r in written])
        self.assertEqual(run.responses(2)[0]["tokens"]["logp"], written[0]["tokens"]["logp"])
        self.assertEqual(len(run.responses()), len(run.responses(1)) + len(written))
        for call in (run.responses, run.silenced):
            with self.assertRaisesRegex(stapo.Error, "step 99: .*; 2 steps from 1 to 2 are\nhint: Run.recorded_steps"):
                call(step=99)
        files = sorted((self.at / "run/tokens").glob("*.jsonl"))
        silenced = [token for file in files for token in json_lines(file.read_text())]
        self.assertEqual(run.silenced(), silenced)

    def test_the_plan_is_a_dict(self):
        plan = stapo.Run(self.at / "run").plan
        self.assertEqual((plan["steps"], plan["rollout"]["group_size"]), (2, 4))

    def test_evaluations_have_the_statistics_of_the_commands(self):
        evaluation = stapo.read_eval(self.at / "a")
        self.assertEqual(evaluation["rows"], json.loads((self.at / "a/table.json").read_text()))
        self.assertEqual(len(evaluation["samples"]), 24)
        self.assertEqual(evaluation["plan"]["max_tokens"], 60)
        expected = json.loads(program("compare", self.at / "a", self.at / "b", "--json"))
        self.assertEqual(stapo.compare(self.at / "a", self.at / "b"), expected)

    def test_refusals_have_the_texts_of_the_command(self):
        cases = [
            (lambda: stapo.Run(self.at / "nowhere"), ["report", self.at / "nowhere"]),
            (lambda: stapo.compare(self.at / "run", self.at / "b"), ["compare", self.at / "run", self.at / "b"]),
        ]
        for call, arguments in cases:
            with self.assertRaises(stapo.Error) as refused:
                call()
            said = program(*arguments, status=2)
            self.assertEqual(said.splitlines()[0], f"error: {refused.exception}".splitlines()[0])
        with self.assertRaises(stapo.Error):
            stapo.read_eval(self.at / "run")
        with self.assertRaises(TypeError):
            stapo.Run(3)

    @needs_numpy
    def test_damaged_files_raise(self):
        folder = self.at / "damaged"
        (folder / "rollouts").mkdir(parents=True)
        (folder / "plan.toml").write_text((self.at / "run/plan.toml").read_text())
        (folder / "rollouts/step-000001.jsonl").write_text('{"schema": 1}\n')
        (folder / "metrics.jsonl").write_text("garbage\n")
        run = stapo.Run(folder)
        for call in (run.responses, lambda: run.metrics):
            with self.assertRaises(stapo.Error):
                call()
        whole = (self.at / "run/metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(whole + '{"step": 3, "lo')
        self.assertEqual(run.metrics["step"].tolist(), [1, 2])


if __name__ == "__main__":
    unittest.main()
