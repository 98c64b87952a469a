"""Writes reward_models.json: the loss of TRL's RewardTrainer and its gradients on random scores, by PyTorch's autograd in f64.

    pip install torch
    python make_reward_models.py > reward_models.json
"""

import json

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)


def case(number, has_margins, coefficient):
    torch.manual_seed(number)
    scores = (3 * torch.randn(7, 2)).requires_grad_()
    margins = torch.rand(7) * 2 if has_margins else torch.zeros(7)
    chosen, rejected = scores.unbind(1)
    # RewardTrainer.compute_loss
    loss = -F.logsigmoid(chosen - rejected - margins).mean()
    loss = loss + coefficient * torch.mean((chosen + rejected) ** 2)
    loss.backward()
    return {
        "center_coefficient": coefficient, "scores": scores.tolist(), "margins": margins.tolist(),
        "value": loss.item(), "d_scores": scores.grad.tolist(),
    }


CASES = [(False, 0.0), (True, 0.0), (False, 0.01), (True, 0.3)]
cases = ",\n".join(json.dumps(case(number, *it)) for number, it in enumerate(CASES))
print(f'{{"torch": "{torch.__version__}", "cases": [\n{cases}\n]}}')
