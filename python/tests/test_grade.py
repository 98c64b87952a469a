"""The grader."""

import json
import pickle
import signal
import threading
import unittest

import stapo
from common import json_lines, stapo as program

PAIRS = [
    (r"so \boxed{\frac{1}{2}}", "0.5"),
    (r"so \boxed{\frac{1}{3}}", "0.5"),
    ("no answer here", "7"),
    (r"\boxed{x^2-1}", "(x-1)(x+1)"),
    (r"\boxed{\frac{}", "1"),
    ("Answer: 12", "12"),
]

HOSTILE = [
    "",
    "\0",
    "\ud800 \\boxed{1}",
    "\\boxed{" * 5000,
    "\\boxed{" + "(" * 100_000 + "}",
    "\\boxed{9^{9^{9^{9}}}}",
    "\\boxed{" + "9" * 100_000 + "!}",
    "\U0001f600" * 1000,
]


class Grade(unittest.TestCase):
    def test_verdicts_are_those_of_the_command(self):
        lines = "".join(json.dumps({"response": a, "reference": b}) + "\n" for a, b in PAIRS)
        for mode in ("math", "exact", "dapo"):
            expected = json_lines(program("grade", "-", "--mode", mode, input=lines))
            graded = [stapo.grade(response, reference, mode) for response, reference in PAIRS]
            for line, verdict in zip(expected, graded, strict=True):
                found = (verdict.verdict, verdict.extracted, verdict.reason)
                self.assertEqual(found, (line["verdict"], line["extracted"], line["reason"]))
                self.assertEqual(bool(verdict), line["verdict"] == "right")

    def test_a_batch_is_its_responses_one_by_one(self):
        responses, references = zip(*PAIRS * 50)
        one_by_one = [stapo.grade(*pair) for pair in PAIRS * 50]
        for threads in (0, 1, 7):
            self.assertEqual(stapo.grade_batch(responses, references, threads=threads), one_by_one)
        self.assertEqual(stapo.grade_batch([], []), [])

    def test_any_text_gets_a_verdict(self):
        for verdict in stapo.grade_batch(HOSTILE * 2, HOSTILE + HOSTILE[::-1]):
            self.assertIn(verdict.verdict, ("right", "wrong", "no_answer", "unparsable", "over_budget"))
        self.assertEqual(stapo.grade("\ud800 \\boxed{1}", "1").verdict, "right")

    def test_an_answer_that_is_not_worked_out_is_wrong_on_request(self):
        undone = ("\\boxed{60 + 180}", "240")
        self.assertTrue(stapo.grade(*undone))
        self.assertFalse(stapo.grade(*undone, form="worked-out"))
        verdicts = stapo.grade_batch([undone[0], "\\boxed{240}"], ["240", "240"], form="worked-out")
        self.assertEqual([verdict.verdict for verdict in verdicts], ["wrong", "right"])
        with self.assertRaisesRegex(stapo.Error, "form: unknown variant `short`"):
            stapo.grade(*undone, form="short")

    def test_a_formula_of_the_question_is_not_worked_out(self):
        copied, answer, problem = "\\boxed{x^2 - 1}", "(x-1)(x+1)", "Factor $x^2-1$."
        self.assertTrue(stapo.grade(copied, answer, form="worked-out"))
        self.assertFalse(stapo.grade(copied, answer, form="worked-out", problem=problem))
        self.assertTrue(stapo.grade(copied, answer, problem=problem))
        batch = stapo.grade_batch([copied, copied], [answer, answer], form="worked-out", problems=[problem, "?"])
        self.assertEqual([bool(verdict) for verdict in batch], [False, True])
        with self.assertRaisesRegex(stapo.Error, "1 responses, 2 problems"):
            stapo.grade_batch([copied], [answer], problems=["", ""])

    def test_verify_takes_texts_and_several_gold_answers(self):
        self.assertTrue(stapo.verify("1/2", "0.5"))
        self.assertTrue(stapo.verify("1/2", "The answer is $\\frac12$."))
        self.assertTrue(stapo.verify(["3", "1/2"], "\\boxed{0.5}"))
        self.assertFalse(stapo.verify("1/2", "0.6"))
        self.assertFalse(stapo.verify([], "0.5"))
        self.assertFalse(stapo.verify("7", "3+4", form="worked-out"))
        with self.assertRaisesRegex(TypeError, "gold\\[0\\]"):
            stapo.verify([1], "1")

    def test_rewards_are_called_as_trl_calls_them(self):
        from stapo.reward import math_reward, worked_out_reward

        texts = ["\\boxed{3+4}", "\\boxed{7}", "\\boxed{8}", "\\boxed{7}"]
        answers = ["7", "7", "7", None]
        self.assertEqual(math_reward(completions=texts, answer=answers), [1.0, 1.0, 0.0, None])
        self.assertEqual(worked_out_reward(completions=texts, solution=answers), [0.0, 1.0, 0.0, None])
        chats = [[{"role": "assistant", "content": "\\boxed{x^2-1}"}]]
        asked = [[{"role": "user", "content": "Factor $x^2-1$."}]]
        self.assertEqual(worked_out_reward(completions=chats, prompts=asked, answer=["(x-1)(x+1)"]), [0.0])
        self.assertEqual(math_reward(completions=chats, prompts=asked, answer=["(x-1)(x+1)"]), [1.0])
        with self.assertRaisesRegex(ValueError, "none of the columns"):
            math_reward(completions=texts, label=answers)

    def test_wrong_arguments_are_named(self):
        with self.assertRaisesRegex(stapo.Error, "mode maths: expected one of math, boxed-exact"):
            stapo.grade("1", "1", "maths")
        with self.assertRaisesRegex(stapo.Error, "order: unknown variant `x`"):
            stapo.grade("1", "1", order="x")
        with self.assertRaisesRegex(stapo.Error, "2 responses, 1 references"):
            stapo.grade_batch(["1", "2"], ["1"])
        with self.assertRaisesRegex(TypeError, "references: a string, expected a list"):
            stapo.grade_batch(["1"], "1")
        with self.assertRaisesRegex(TypeError, r"responses\[1\]: .*int.*, expected a string"):
            stapo.grade_batch(["1", 2], ["1", "2"])
        with self.assertRaisesRegex(stapo.Error, "threads 5000: expected None or 0"):
            stapo.grade_batch(["1"], ["1"], threads=5000)
        with self.assertRaises(TypeError):
            stapo.grade(None, "1")
        self.assertTrue(issubclass(stapo.Error, ValueError))

    def test_verdicts_can_be_pickled(self):
        verdict = stapo.grade(*PAIRS[0])
        self.assertEqual(pickle.loads(pickle.dumps(verdict)), verdict)

    @unittest.skipUnless(hasattr(signal, "setitimer"), "this system has no timers")
    def test_a_signal_ends_a_long_batch(self):
        class Rang(Exception):
            pass

        def ring(*_):
            raise Rang

        responses, references = zip(*PAIRS)
        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with self.assertRaises(Rang):
                stapo.grade_batch(responses * 100_000, references * 100_000)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def test_other_threads_run_while_a_batch_is_graded(self):
        # The thread answers each step of the main one only where it gets the interpreter's lock during the call.
        during = []
        is_called, is_over = threading.Event(), threading.Event()

        def count():
            is_called.wait()
            while not is_over.is_set():
                during.append(None)

        thread = threading.Thread(target=count)
        thread.start()
        responses, references = zip(*PAIRS * 2000)
        is_called.set()
        n_before = len(during)
        stapo.grade_batch(responses, references)
        n_after = len(during)
        is_over.set()
        thread.join()
        self.assertGreater(n_after - n_before, 1000)



class Values(unittest.TestCase):
    def test_verdicts_hash_as_they_are_equal(self):
        seven = lambda: stapo.grade(r"\boxed{7}", "7")
        self.assertEqual(len({seven(), seven(), stapo.grade(r"\boxed{8}", "7")}), 2)

    def test_threads_are_none_or_a_number_of_them(self):
        self.assertTrue(stapo.grade_batch([r"\boxed{7}"], ["7"], threads=None)[0])
        with self.assertRaisesRegex(TypeError, "responses: <class 'NoneType'>, expected a list of strings"):
            stapo.grade_batch(None, ["7"])
        with self.assertRaisesRegex(stapo.Error, "threads -1: expected None or 0 for one per core, or up to 1024"):
            stapo.grade_batch([r"\boxed{7}"], ["7"], threads=-1)


if __name__ == "__main__":
    unittest.main()
