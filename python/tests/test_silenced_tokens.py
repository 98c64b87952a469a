"""The classification of bench/evidence/silenced.py on small records."""
import contextlib
import importlib.util
import io
import json
import math
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

SCRIPT = pathlib.Path(__file__).parents[2] / "bench/evidence/silenced.py"


def record(texts, silenced, program=None, advantage=0.9354143466934853, sample_idx=0):
    """A recorded response whose tokens at `silenced` are silenced; the preferred token is ` total` everywhere."""
    n = len(texts)
    tokens = {
        "id": list(range(n)), "text": texts, "logp": [-8.0] * n, "entropy": [0.1] * n, "is_candidate": [i in silenced for i in range(n)],
        "silenced_by": ["spurious" if i in silenced else None for i in range(n)], "alternatives": [[{"id": 0, "text": " total", "logp": -0.1}]] * n,
    }
    line = {"step": 1, "problem_id": "p", "group_idx": 0, "sample_idx": sample_idx, "text": "".join(texts), "advantage": advantage, "tokens": tokens}
    return line if program is None else {**line, "program": {"source": program}}


@unittest.skipUnless(SCRIPT.exists(), "not in a checkout of the repository")
class SilencedTokens(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        spec = importlib.util.spec_from_file_location("silenced", SCRIPT)
        cls.script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(cls.script)

    def printed(self, *arguments):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", ["silenced.py", *map(str, arguments)]):
            self.script.main()
        return output.getvalue()

    def test_words_numbers_and_signs_have_kinds(self):
        cases = [
            (" the", "is", " sum", "function word"), (" Therefore", ".", ",", "word of flow"), (" calculate", "we", " the", "verb of calculation"),
            (" wildlife", "of", "}", "other word"), ("ared", "pies", " by", "part of a word"), ("Ass", "\n\n", "uming", "part of a word"),
            ("4", "{", "}", "number"), (" 1,200", "is", "", "number"), (" +", "14", " 14", "operator or punctuation"), (":\n", "is", "", "operator or punctuation"),
            (" \\(", "add", " 5", "LaTeX or markdown"), ("text", "= \\", "{", "LaTeX or markdown"), ("\n\n", ".", "", "line break or blank"),
            ("<|im_end|>", ".", "", "end of the response"),
        ]
        for text, before, after, expected in cases:
            self.assertEqual(self.script.part_of_speech(text, before, after), expected, (before, text, after))

    def test_position_and_preferred_token_have_classes(self):
        self.assertEqual(self.script.position(2, "To determine"), "first five tokens")
        self.assertEqual(self.script.position(50, "is \\(\\boxed{"), "within the box")
        self.assertEqual(self.script.position(50, "is 4.\n\n"), "start of a sentence or line")
        self.assertEqual(self.script.position(50, "is \\boxed{4} and the"), "within a sentence")
        cases = [
            (" Area", " area", "same word, other case, space or punctuation"), (" Calculates", " Calculate", "a form or a part of the same word"),
            (" wishes", " wants", "another word"), ("4", "2", "another number"), (" one", " 1", "a number for something else, or the reverse"),
            (":", ",", "another sign or break"), (" and", ".\n", "a word for a sign or break, or the reverse"),
            (" ComboBox", "<|im_end|>", "ends for goes on, or the reverse"), (" a", None, "unknown"),
        ]
        for text, preferred, expected in cases:
            self.assertEqual(self.script.preference(text, preferred), expected, (text, preferred))

    def test_an_advantage_gives_the_right_responses_of_its_group(self):
        for right in range(1, 8):
            rewards = [1.0] * right + [-1.0] * (8 - right)
            mean = sum(rewards) / 8
            for divisor in (7, 8):
                deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / divisor)
                self.assertEqual(self.script.n_right((1 - mean) / deviation), right)
        self.assertIsNone(self.script.n_right(0.1))

    def test_tokens_of_programs_have_the_category_of_their_source(self):
        source = "def f(x):\n    # add one\n    return x + 1\n"
        texts = ["Sure", ":\n", "def", " f", "(x", "):\n", "   ", " #", " add", " one", "\n", "   ", " return", " x", " +", " ", "1", "\n", "Done"]
        found = [token["category"] for token in self.script.from_response(record(texts, set(range(len(texts))), source))]
        expected = "prose prose keyword identifier operator operator whitespace comment comment comment whitespace whitespace keyword identifier operator whitespace literal whitespace prose"
        self.assertEqual(found, expected.split())

    def test_tables_count_each_token_once_and_show_examples(self):
        with tempfile.TemporaryDirectory() as folder:
            runs = [pathlib.Path(folder, name) for name in ("a", "b")]
            for run in runs:
                (run / "rollouts").mkdir(parents=True)
                lines = [record(["We", " wish", " 4", "."], {1, 2}, sample_idx=i, advantage=0.9354143466934853 * (1 if i < 4 else -1)) for i in range(8)]
                for line in lines[4:]:
                    line["tokens"]["silenced_by"], line["tokens"]["is_candidate"] = [None] * 4, [False] * 4
                (run / "rollouts/step-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            text = self.printed(*runs, "--examples", 3)
        self.assertIn("8 silenced tokens and 0 kept candidates", text)
        self.assertIn("| other word | 4 | 50.0 [21.5, 78.5] | ` wish` 4 |", text)
        self.assertIn("| number | 4 | 50.0", text)
        self.assertIn("| 4 | 8 | 8 | 100.0 [67.6, 100.0] |", text)
        self.assertIn("| 4 | 32 | 5000.0 | 5000.0 |", text)
        self.assertIn("3 examples", text)
        self.assertIn("[ wish |  total]", text)

    def test_a_run_without_silenced_tokens_is_refused_by_name(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(SystemExit) as refused:
            self.printed(folder)
        self.assertIn(folder, str(refused.exception))


if __name__ == "__main__":
    unittest.main()
