"""Writes preferences.json: losses and gradients of preference objectives on random batches, by PyTorch's autograd.

    pip install torch
    python make_preferences.py > preferences.json

The formulas below are written from the papers. With `--trl` (pip install trl) ORPO's is also compared with TRL's own function,
whose trainer is no curve to follow: its first term is over the prompt too.
"""

import json
import sys

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)


def dpo(c, r, rc, rr, n, beta=0.1, label_smoothing=0.0):
    margin = beta * ((c - rc) - (r - rr))
    return -F.logsigmoid(margin) * (1 - label_smoothing) - F.logsigmoid(-margin) * label_smoothing


def ipo(c, r, rc, rr, n, beta=0.1):
    return ((c - rc) / n[0] - (r - rr) / n[1] - 1 / (2 * beta)) ** 2


def simpo(c, r, rc, rr, n, beta=2.0, gamma=1.0):
    return -F.logsigmoid(beta * (c / n[0] - r / n[1]) - gamma)


def orpo(c, r, rc, rr, n, beta=0.1):
    c, r = c / n[0], r / n[1]
    odds = (c - r) - (torch.log1p(-torch.exp(c)) - torch.log1p(-torch.exp(r)))
    return -c - beta * F.logsigmoid(odds)


def kto(c, r, rc, rr, z, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0):
    chosen = 1 - torch.sigmoid(beta * ((c - rc) - z))
    rejected = 1 - torch.sigmoid(beta * (z - (r - rr)))
    return desirable_weight * chosen, undesirable_weight * rejected


LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo}
CASES = [
    ("dpo", {}), ("dpo", {"beta": 0.5, "label_smoothing": 0.1}), ("ipo", {}), ("ipo", {"beta": 0.4}),
    ("simpo", {}), ("simpo", {"beta": 2.5, "gamma": 0.5}), ("orpo", {}), ("orpo", {"beta": 1.0}),
    ("kto", {}), ("kto", {"beta": 0.3, "desirable_weight": 1.33, "undesirable_weight": 0.7}),
]


def case(number, kind, settings):
    torch.manual_seed(number)
    lengths = [(int(torch.randint(1, 9, ())), int(torch.randint(1, 9, ()))) for _ in range(6)]
    draw = lambda n: -torch.rand(n) * 3 - 0.01
    logp = [[draw(n).requires_grad_() for n in pair] for pair in lengths]
    reference = [[draw(n) for n in pair] for pair in lengths]
    # The log-ratios of responses to other prompts; their mean is below 0 in every second case.
    other = torch.randn(6) + (1.0 if number % 2 else -1.0)
    z = other.mean().clamp(min=0)
    terms = []
    for pair, refs, n in zip(logp, reference, lengths):
        sums = [x.sum() for x in (*pair, *refs)]
        if kind == "kto":
            terms.extend(kto(*sums, z, **settings))
        else:
            terms.append(LOSSES[kind](*sums, n, **settings))
    loss = torch.stack(terms).mean()
    loss.backward()
    table = lambda rows, of: [[of(x).tolist() for x in row] for row in rows]
    return {
        "loss": {"kind": kind, **settings}, "logp": table(logp, lambda x: x.detach()),
        "reference_logp": table(reference, lambda x: x), "other_log_ratios": other.tolist(),
        "value": loss.item(), "d_logp": table(logp, lambda x: x.grad),
    }


def compare_with_trl():
    """Asserts that TRL's odds ratio is the one above. Its trainers run in stapo-rl's make_preference_curves.py."""
    import types

    from trl.experimental.orpo import ORPOTrainer

    own = types.SimpleNamespace(beta=0.3, accelerator=types.SimpleNamespace(device="cpu"))
    c, r = -torch.rand(50) * 4 - 0.01, -torch.rand(50) * 4 - 0.01
    theirs = -c - ORPOTrainer.odds_ratio_loss(own, c, r)[0]
    torch.testing.assert_close(orpo(c, r, None, None, (1, 1), beta=0.3), theirs.double(), rtol=1e-5, atol=1e-5)


if "--trl" in sys.argv:
    compare_with_trl()
cases = ",\n".join(json.dumps(case(number, *it)) for number, it in enumerate(CASES))
print(f'{{"torch": "{torch.__version__}", "cases": [\n{cases}\n]}}')
