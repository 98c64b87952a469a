"""`stapo.torch.policy_loss`: the numbers of `stapo objective` as a loss of PyTorch. Skipped where PyTorch is not installed."""

import doctest
import random
import unittest

import stapo
from common import needs_numpy, numpy

try:
    import torch
except ImportError:
    torch = None

COLUMNS = ("behavior_logp", "reference_logp", "sampler_logp", "behavior_entropy", "teacher_logp", "collision")


def load_tests(loader, tests, pattern):
    if torch is not None and numpy is not None:
        import stapo.torch

        tests.addTests(doctest.DocTestSuite(stapo.torch))
    return tests


def padded(seed, shape=(6, 9)):
    """A mini-batch of padded tensors; padding is on both sides and holds nonsense."""
    draw = torch.Generator().manual_seed(seed)
    rand = lambda: torch.rand(shape, generator=draw)
    logp = -12.0 * rand() ** 4
    batch = {name: (logp + 0.2 * rand() - 0.1).clamp(max=0.0) for name in COLUMNS}
    batch["behavior_entropy"], batch["collision"] = 2.0 * rand(), rand()
    mask = torch.zeros(shape)
    for row in range(shape[0]):
        start = random.Random(seed + row).randrange(0, 4)
        mask[row, start : start + 5] = 1.0
    for values in batch.values():
        values[mask == 0] = 77.0
    return logp, 2.0 * rand(), torch.randn(shape[0], generator=draw), mask, batch


@needs_numpy
@unittest.skipIf(torch is None, "PyTorch is not installed")
class PolicyLoss(unittest.TestCase):
    def test_every_preset_has_the_loss_and_the_derivatives_of_the_objective(self):
        import stapo.torch

        for seed, preset in enumerate(stapo.presets()):
            with self.subTest(preset=preset):
                logp, entropy, advantages, mask, more = padded(seed)
                logp.requires_grad_()
                entropy.requires_grad_()
                behavior = more.pop("behavior_logp")
                loss, effects = stapo.torch.policy_loss(
                    logp, behavior, advantages, mask, preset, entropy=entropy, return_effects=True, **more
                )
                (3.0 * loss).backward()
                inside = mask.bool()
                flat = lambda values: values.detach()[inside].double().numpy()
                expected = stapo.Objective(preset).evaluate(
                    {
                        "logp": flat(logp),
                        "behavior_logp": flat(behavior),
                        "entropy": flat(entropy),
                        "offsets": numpy.arange(0, 31, 5),
                        "advantage": advantages.double().numpy(),
                        **{name: flat(values) for name, values in more.items()},
                    }
                )
                self.assertAlmostEqual(loss.item(), expected.totals["loss"], delta=1e-6)
                numpy.testing.assert_allclose(logp.grad[inside], 3.0 * expected.d_logp, atol=1e-6)
                self.assertEqual(float(logp.grad[~inside].abs().sum()), 0.0)
                if expected.d_entropy is None:
                    self.assertIsNone(entropy.grad)
                else:
                    numpy.testing.assert_allclose(entropy.grad[inside], 3.0 * expected.d_entropy, atol=1e-6)
                numpy.testing.assert_array_equal(effects.kept, expected.kept)

    def test_derivatives_are_those_of_the_loss(self):
        import stapo.torch

        logp, entropy, advantages, mask, more = padded(3)
        behavior = (logp + 0.05).clamp(max=0.0)
        value = lambda x: stapo.torch.policy_loss(x, behavior.double(), advantages, mask, "gspo")
        self.assertTrue(torch.autograd.gradcheck(value, logp.double().requires_grad_(), eps=1e-5, atol=1e-6))

    def test_wrong_shapes_and_missing_entropies_are_refused_by_name(self):
        import stapo.torch

        logp, entropy, advantages, mask, _ = padded(1)
        loss = stapo.torch.policy_loss
        with self.assertRaisesRegex(ValueError, "entropy: absent, and this objective reads it"):
            loss(logp, logp, advantages, mask, "stapo")
        with self.assertRaisesRegex(ValueError, r"mask: shape \(6, 8\), expected that of logp, \(6, 9\)"):
            loss(logp, logp, advantages, mask[:, :8], "dapo")
        with self.assertRaisesRegex(ValueError, r"advantages: shape \(5,\), expected \(6,\), or \(6, 9\)"):
            loss(logp, logp, advantages[:5], mask, "dapo")
        per_token = advantages.unsqueeze(1).expand(6, 9)
        self.assertEqual(loss(logp, logp, advantages, mask, "dapo"), loss(logp, logp, per_token, mask, "dapo"))


if __name__ == "__main__":
    unittest.main()
