"""`stapo.torch` against the cases that stapo-core decided (crates/stapo-core/tests/goldens/s2t.json)."""

import json
import unittest
from pathlib import Path

try:
    import torch
except ImportError:
    torch = None

CASES = Path(__file__).resolve().parents[2] / "crates/stapo-core/tests/goldens/s2t.json"


def is_published(mask):
    """True for the settings that `stapo.torch.S2T` has: it offers the published rule, and `tau_p` and `q`."""
    return (mask["threshold"]["kind"], mask["select"], mask["quantile_over"]) == ("tau_p", "low_entropy", "candidates")


@unittest.skipIf(torch is None, "PyTorch is not installed")
class Cases(unittest.TestCase):
    def test_tokens_are_silenced_as_core_silences_them(self):
        from stapo.torch import S2T, candidates, silence

        golden = json.loads(CASES.read_text())
        minibatch = golden["minibatch"]
        width = max(len(response["logp"]) for response in minibatch)

        def padded(name, fill=0.0):
            rows = [response[name] + [fill] * (width - len(response[name])) for response in minibatch]
            return torch.tensor(rows, dtype=torch.float64)

        advantages = torch.tensor(
            [
                (response["advantages"] or [response["advantage"]] * len(response["logp"]))
                + [1.0] * (width - len(response["logp"]))
                for response in minibatch
            ]
        )
        mask = torch.tensor([[t < len(response["logp"]) for t in range(width)] for response in minibatch])
        # Padding that looks like candidates must not count.
        logp, entropy = padded("logp", -20.0), padded("entropy", 0.0)
        cases = [case for case in golden["cases"] if is_published(case["mask"])]
        self.assertGreater(len(cases), 3)
        for case in cases:
            s2t = S2T(tau_p=case["mask"]["tau_p"], q=case["mask"]["q"])
            found = silence(logp, entropy, advantages, mask, s2t)
            is_candidate = candidates(logp, advantages, mask, s2t.tau_p)
            fates = [
                "".join(str(int(c) + int(s)) for c, s, m in zip(*row) if m)
                for row in zip(is_candidate.tolist(), found.silenced.tolist(), mask.tolist())
            ]
            self.assertEqual(fates, case["fates"], case["mask"])
            self.assertEqual(found.tau_h, case["tau_h"], case["mask"])


if __name__ == "__main__":
    unittest.main()
