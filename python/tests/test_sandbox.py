"""Programs of a model, run from Python."""

import unittest

import stapo
from stapo import sandbox


class Sandbox(unittest.TestCase):
    def setUp(self):
        try:
            sandbox.run("pass")
        except stapo.Error as error:
            self.skipTest(str(error))

    def test_outcomes_have_the_order_of_programs(self):
        programs = [(f"print({n} + int(input()))", "1") for n in range(6)]
        found = sandbox.run_batch(programs)
        self.assertEqual([outcome["stdout"] for outcome in found], [f"{n + 1}\n" for n in range(6)])
        self.assertEqual({outcome["end"] for outcome in found}, {"finished"})

    def test_limits_and_exceptions_are_ends(self):
        self.assertEqual(sandbox.run("while True: pass", cpu_seconds=0.2)["end"], "cpu_time")
        self.assertEqual(sandbox.run("import os; os.fork()")["end"], "processes")
        self.assertEqual(sandbox.run("1 / 0")["end"], {"raised": "ZeroDivisionError: division by zero"})
        self.assertNotEqual(sandbox.run("open('/etc/passwd')")["end"], "finished")


if __name__ == "__main__":
    unittest.main()
