"""Objectives on arrays: the numbers of `stapo objective` on the same mini-batch, bit for bit."""

import copy
import inspect
import json
import pickle
import random
import tempfile
import unittest
from pathlib import Path

import stapo
from common import json_lines, needs_numpy, numpy, stapo as program

COLUMNS = (
    "logp",
    "behavior_logp",
    "entropy",
    "reference_logp",
    "behavior_entropy",
    "sampler_logp",
    "collision",
    "teacher_logp",
)


def lines(seed=0, n_groups=3, group_size=4):
    """A mini-batch as JSON lines; some tokens are improbable, one response is empty."""
    draw = random.Random(seed)
    found = []
    for idx in range(n_groups * group_size):
        n = 0 if idx == 5 else draw.randrange(1, 40)
        logp = [-12.0 * draw.random() ** 4 for _ in range(n)]
        near = lambda: [min(0.0, x + 0.2 * draw.random() - 0.1) for x in logp]
        entropy = lambda: [2.0 * draw.random() for _ in range(n)]
        found.append(
            {
                "group": f"g{idx % n_groups}",
                "reward": float(draw.random() < 0.4),
                "logp": logp,
                "behavior_logp": near(),
                "entropy": entropy(),
                "reference_logp": near(),
                "behavior_entropy": entropy(),
                "sampler_logp": near(),
                "collision": [draw.random() for _ in range(n)],
                "teacher_logp": near(),
            }
        )
    return found


def flat(rows, column):
    return [value for row in rows for value in row[column]]


def batch(rows, **changes):
    """The same mini-batch as arrays."""
    lengths = [len(row["logp"]) for row in rows]
    made = {column: numpy.array(flat(rows, column)) for column in COLUMNS if column in rows[0]}
    made["offsets"] = numpy.concatenate([[0], numpy.cumsum(lengths)])
    for key in ("group", "reward"):
        made[key] = [row[key] for row in rows]
    return {**made, **changes}


def command(rows, *arguments):
    """The effects by columns, and the totals, as the program prints them."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    *responses, totals = json_lines(program("objective", *arguments, "-", input=text))
    keys = ("kept", "silenced_by", "clipped", "ratio", "d_logp")
    return {key: flat(responses, key) for key in keys}, totals, responses


@needs_numpy
class Same(unittest.TestCase):
    def assert_same(self, effects, expected, totals):
        names = [None if code < 0 else stapo.Effects.MASKS[code] for code in effects.silenced_by]
        self.assertEqual(effects.kept.tolist(), expected["kept"])
        self.assertEqual(names, expected["silenced_by"])
        self.assertEqual(effects.clipped.tolist(), expected["clipped"])
        self.assertEqual([None if x != x else x for x in effects.ratio.tolist()], expected["ratio"])
        self.assertEqual(effects.d_logp.tolist(), expected["d_logp"])
        self.assertEqual(effects.totals, totals)

    def test_every_preset(self):
        rows = lines()
        for name in stapo.presets():
            with self.subTest(name):
                objective = stapo.Objective(name)
                for number in range(1, objective.n_passes + 1):
                    expected, totals, responses = command(rows, "--spec", name, "--pass", number, "--step", 3)
                    effects = objective.evaluate(batch(rows), step=3, pass_number=number)
                    self.assert_same(effects, expected, totals)
                    given = [response["advantage"] for response in responses]
                    if all(isinstance(advantage, float) for advantage in given):
                        self.assertEqual(effects.advantage.tolist(), given)
                    if "d_entropy" in responses[0]:
                        self.assertEqual(effects.d_entropy.tolist(), flat(responses, "d_entropy"))
                    else:
                        self.assertIsNone(effects.d_entropy)

    def test_given_advantages_and_a_loss_mask(self):
        rows = lines(1)
        draw = random.Random(2)
        for per_token in (False, True):
            for row in rows:
                own = lambda: draw.random() - 0.3
                row["advantage"] = [own() for _ in row["logp"]] if per_token else own()
                row["loss_mask"] = [int(draw.random() < 0.7) for _ in row["logp"]]
            expected, totals, _ = command(rows)
            advantage = flat(rows, "advantage") if per_token else [row["advantage"] for row in rows]
            given = batch(rows, advantage=advantage, loss_mask=flat(rows, "loss_mask"))
            self.assert_same(stapo.Objective("stapo").evaluate(given), expected, totals)

    def test_several_rewards_with_weights(self):
        rows = lines(3)
        for row in rows:
            row["reward"] = [row["reward"], len(row["logp"]) / 40]
        expected, totals, _ = command(rows, "--reward-weights", "1,0.5")
        given = batch(rows, reward=numpy.array([row["reward"] for row in rows]))
        self.assert_same(stapo.Objective("stapo").evaluate(given, reward_weights=[1, 0.5]), expected, totals)

    def test_other_types_and_layouts_are_converted(self):
        rows = lines(4)
        exact = batch(rows)
        whole = stapo.Objective("stapo").evaluate(exact)
        strided = {key: numpy.repeat(exact[key], 2)[::2] for key in COLUMNS}
        lists = {key: exact[key].tolist() for key in COLUMNS}
        for columns in (strided, lists):
            effects = stapo.Objective("stapo").evaluate({**exact, **columns})
            self.assertEqual(effects.d_logp.tolist(), whole.d_logp.tolist())
        rounded = {key: exact[key].astype(numpy.float32) for key in COLUMNS}
        widened = {key: rounded[key].astype(numpy.float64) for key in COLUMNS}
        short = stapo.Objective("stapo").evaluate({**exact, **rounded})
        long = stapo.Objective("stapo").evaluate({**exact, **widened})
        self.assertEqual(short.d_logp.tolist(), long.d_logp.tolist())

    def test_a_tensor_comes_by_dlpack(self):
        class Tensor:
            def __init__(self, array):
                self.array = array

            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        rows = lines(5)
        exact = batch(rows)
        tensors = {key: Tensor(exact[key]) for key in COLUMNS}
        found = stapo.Objective("stapo").evaluate({**exact, **tensors})
        self.assertEqual(found.d_logp.tolist(), stapo.Objective("stapo").evaluate(exact).d_logp.tolist())


@needs_numpy
class Refused(unittest.TestCase):
    def refuse(self, text, **changes):
        made = {key: value for key, value in batch(lines(), **changes).items() if value is not ...}
        with self.assertRaisesRegex(stapo.Error, text):
            stapo.Objective("stapo").evaluate(made)

    def test_bad_columns_are_named(self):
        n = len(batch(lines())["logp"])
        self.refuse("missing key `logp`", logp=...)
        self.refuse("missing key `reward`\nhint: ", reward=...)
        self.refuse("missing key `offsets`", offsets=...)
        self.refuse(rf"entropy has 3 entries, logp has {n}", entropy=[0.0, 0.1, 0.2])
        self.refuse(r"response 0: logp\[0\] is NaN, expected a finite log-prob", logp=numpy.full(n, numpy.nan))
        self.refuse(r"response 0: entropy\[0\] is -1, expected", entropy=numpy.full(n, -1.0))
        self.refuse("logp: 2 dimensions, expected 1\nhint: ", logp=numpy.zeros((2, n)))
        self.refuse("logp: elements of type <U1, expected numbers", logp=["x"] * n)
        self.refuse("logp: elements of type complex128", logp=numpy.zeros(n, complex))
        self.refuse("logp: NumPy cannot read|elements of type object", logp=[[1.0], 2.0])
        self.refuse("unknown key `colision`\nhint: did you mean `collision`", colision=[1.0])
        for name, ours in (
            ("completion_mask", "loss_mask"),
            ("response_mask", "loss_mask"),
            ("old_logp", "behavior_logp"),
            ("ref_logp", "reference_logp"),
            ("rewards", "reward"),
            ("logps", "logp"),
        ):
            self.refuse(f"unknown key `{name}`\nhint: did you mean `{ours}`", **{name: numpy.ones(n)})
        self.refuse("advantage has 3 entries", advantage=[1.0, 2.0, 3.0])
        self.refuse("loss_mask", loss_mask=numpy.full(n, 0.5))
        self.refuse("reward: shape", reward=[1.0])
        self.refuse("group: 1 entries", group=["a"])
        self.refuse(r"reward: shape \[12, 0\]", reward=numpy.zeros((12, 0)))
        self.refuse("is NaN, expected a finite number", advantage=[numpy.nan] * 12)
        self.refuse("is inf, expected a finite number", reward=[numpy.inf] * 12)

    def test_bad_offsets_are_named(self):
        n = len(batch(lines())["logp"])
        for bad in ([], [0], [0, n + 1], [1, n], [0, 5, 3, n], [-1, n], [0, 2**62, n]):
            self.refuse("offsets: ", offsets=numpy.array(bad, numpy.int64))
        self.refuse("offsets: elements of type float64", offsets=numpy.array([0.0, n]))
        self.refuse("offsets: empty, expected one number more than there are responses", offsets=[])

    def test_what_is_no_batch_and_no_step_is_named(self):
        objective = stapo.Objective("dapo")
        with self.assertRaisesRegex(TypeError, "batch: <class 'NoneType'>, expected a dict of columns"):
            objective.evaluate(None)
        with self.assertRaisesRegex(stapo.Error, "step -1: expected a number from 0"):
            objective.evaluate(batch(lines()), step=-1)

    def test_an_objective_says_what_it_looks_at(self):
        self.assertEqual(stapo.Objective("gspo").axes["ratio"]["kind"], "sequence")
        chosen = {name for name in stapo.presets() if stapo.Objective(name).needs_minibatch}
        self.assertLessEqual({"stapo", "clip-cov", "kl-cov"}, chosen)
        self.assertFalse({"grpo", "dapo", "gspo", "cispo"} & chosen)

    def test_a_masked_token_is_named_by_its_place(self):
        rows = lines()
        n = len(rows[0]["logp"])
        bad, mask = numpy.array(flat(rows, "logp")), numpy.ones(len(flat(rows, "logp")))
        bad[n - 1], mask[0] = 1.0, 0
        self.refuse(rf"response 0: logp\[{n - 1}\] is 1, expected", logp=bad, loss_mask=mask)

    def test_what_is_no_mapping(self):
        for bad in (None, 3, [1, 2]):
            with self.assertRaises((TypeError, AttributeError)):
                stapo.Objective("stapo").evaluate(bad)
        with self.assertRaisesRegex(stapo.Error, "pass_number 2: this objective has 1 pass"):
            stapo.Objective("stapo").evaluate(batch(lines()), pass_number=2)


@needs_numpy
class Values(unittest.TestCase):
    def test_effects_can_be_pickled_and_copied(self):
        effects = stapo.Objective("stapo").evaluate(batch(lines()))
        for again in (pickle.loads(pickle.dumps(effects)), copy.copy(effects), copy.deepcopy(effects)):
            for name in ("kept", "silenced_by", "is_candidate", "clipped", "d_logp", "advantage"):
                numpy.testing.assert_array_equal(getattr(again, name), getattr(effects, name))
            self.assertEqual((again.totals, again.d_entropy), (effects.totals, None))
        self.assertIsNot(copy.deepcopy(effects).d_logp, effects.d_logp)


class Spec(unittest.TestCase):
    def test_equal_objectives_are_equal_and_hash(self):
        first, same = stapo.Objective("stapo", set="masks.0.tau_p=0.01"), stapo.Objective("stapo", set={"masks.0.tau_p": 0.01})
        self.assertEqual(first, same)
        self.assertEqual(len({first, same, stapo.Objective("stapo")}), 2)
        self.assertNotEqual(first, "stapo")

    def test_set_takes_a_dict_a_list_or_a_text(self):
        wanted = stapo.Objective("stapo", set=["masks.0.tau_p=0.01", "masks.0.select=full"])
        self.assertEqual(stapo.Objective("stapo", set={"masks": {"0": {"tau_p": 0.01, "select": "full"}}}), wanted)
        self.assertEqual(stapo.Objective("stapo", set=None), stapo.Objective("stapo"))
        with self.assertRaisesRegex(TypeError, "set: <class 'int'>, expected a dict such as"):
            stapo.Objective("stapo", set=3)
        with self.assertRaises(stapo.Error):
            stapo.Objective("stapo", set={"masks.0.tau_q": 0.01})

    def test_entropies_are_read_by_masks_and_bonuses_alone(self):
        self.assertTrue(stapo.Objective("stapo").reads_entropy)
        self.assertFalse(stapo.Objective("dapo").reads_entropy)

    def test_signatures_are_readable(self):
        signature = lambda function: str(inspect.signature(function))
        self.assertEqual(signature(stapo.Objective), "(spec, *, set=None)")
        evaluate = "(self, /, batch, *, step=0, pass_number=1, reward_weights=None)"
        self.assertEqual(signature(stapo.Objective.evaluate), evaluate)
        verdict = "(verdict, extracted=None, reason='', answer=None, reference='')"
        self.assertEqual(signature(stapo.Verdict).replace('"', "'"), verdict)
        self.assertNotIn("...", signature(stapo.grade_batch))

    def test_names_dicts_texts_and_files_give_the_same_objective(self):
        named = stapo.Objective("stapo", set=["masks.0.tau_p=0.01"])
        table = {"preset": "stapo", "masks": [{"kind": "spurious", "tau_p": 0.01}]}
        self.assertEqual(stapo.Objective(table).toml, named.toml)
        self.assertEqual(stapo.Objective(named.toml).toml, named.toml)
        self.assertEqual(pickle.loads(pickle.dumps(named)).toml, named.toml)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "spec.toml"
            path.write_text(named.toml)
            self.assertEqual(stapo.Objective(path).toml, named.toml)
            self.assertEqual(stapo.Objective(str(path)).toml, named.toml)
        self.assertEqual(program("objective", "--show", "--spec", "dapo"), stapo.Objective("dapo").toml)

    def test_refusals_have_the_texts_of_the_command(self):
        for spec in ("stapoo", "stapo+spurious", "gone.toml"):
            with self.assertRaises(stapo.Error) as refused:
                stapo.Objective(spec)
            said = program("objective", "--show", "--spec", spec, status=2)
            self.assertEqual(said.strip().splitlines()[0], f"error: {refused.exception}".splitlines()[0])
        for bad in ({"preset": 3}, {"no_such_axis": 1}, "surrogate = 3", {"masks": None}):
            with self.assertRaises(stapo.Error):
                stapo.Objective(bad)
        with self.assertRaises(TypeError):
            stapo.Objective(3)


if __name__ == "__main__":
    unittest.main()
