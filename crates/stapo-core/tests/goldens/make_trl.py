"""Writes trl.json: losses and gradients of TRL's own GRPOTrainer._compute_loss on random inputs.

    pip install torch trl
    python make_trl.py > trl.json

The trainer is not constructed: its loss function runs on an object that has the attributes the function reads, with a
stand-in for the model's forward pass that returns our log-probs as leaves, so that autograd gives d loss / d logp.
"""

import json
import types
from collections import defaultdict

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer

torch.manual_seed(0)
GROUPS, SIZE, LONGEST = 3, 4, 7


class Accelerator:
    num_processes = 1
    sync_gradients = True
    pad_across_processes = staticmethod(lambda x, dim, pad_index: x)
    gather = staticmethod(lambda x: x)
    gather_for_metrics = staticmethod(lambda x: x)
    reduce = staticmethod(lambda x, reduction: x)


def trainer(logp, entropy, settings):
    own = types.SimpleNamespace(
        accelerator=Accelerator(), model=types.SimpleNamespace(training=True), use_vllm=False, aux_loss_enabled=False,
        off_policy_mask_threshold=None, _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)), max_completion_length=settings.get("max_completion_length", 16),
        loss_type=settings["loss_type"], beta=settings.get("beta", 0.0),
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        epsilon_low=settings.get("epsilon_low", 0.2), epsilon_high=settings.get("epsilon_high", 0.2),
        top_entropy_quantile=settings.get("top_entropy_quantile", 1.0),
    )
    own.args = types.SimpleNamespace(
        delta=None, use_bias_correction_kl=False, steps_per_generation=1,
        sapo_temperature_pos=settings.get("sapo_temperature_pos", 1.0),
        sapo_temperature_neg=settings.get("sapo_temperature_neg", 1.05),
    )
    own._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp, entropy, None)
    own.get_high_entropy_mask = types.MethodType(GRPOTrainer.get_high_entropy_mask, own)
    return own


def case(name, settings, drift=0.5):
    n = GROUPS * SIZE
    lengths = torch.randint(1, LONGEST + 1, (n,))
    mask = (torch.arange(LONGEST) < lengths[:, None]).double()
    logp = -6 * torch.rand(n, LONGEST, dtype=torch.float64) ** 2
    near = lambda: torch.clamp(logp + drift * (2 * torch.rand_like(logp) - 1), max=0.0)
    behavior, reference = near(), near()
    # f32 values: TRL takes the entropy quantile in single precision.
    entropy = (3 * torch.rand(n, LONGEST)).double()
    rewards = torch.randint(0, 2, (GROUPS, SIZE)).double()
    rewards[0] = 1.0  # a group without contrast
    centred = rewards - rewards.mean(1, keepdim=True)
    if settings.get("scale_rewards", True):
        centred = centred / (rewards.std(1, keepdim=True) + 1e-4)
    logp.requires_grad_(True)
    inputs = {
        "prompt_ids": torch.zeros(n, 1, dtype=torch.long), "prompt_mask": torch.ones(n, 1),
        "completion_ids": torch.zeros(n, LONGEST, dtype=torch.long), "completion_mask": mask,
        "advantages": centred.flatten(), "old_per_token_logps": behavior, "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer(logp, entropy, settings), None, inputs)
    loss.backward()
    cut = lambda x: [row[:k].tolist() for row, k in zip(x.detach(), lengths.tolist())]
    return {
        "name": name, "settings": settings, "rewards": rewards.tolist(), "logp": cut(logp), "behavior_logp": cut(behavior),
        "reference_logp": cut(reference), "entropy": cut(entropy), "loss": loss.item(), "d_logp": cut(logp.grad),
    }


CASES = [
    case("grpo", {"loss_type": "grpo", "beta": 0.04}),
    case("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}),
    case("dr-grpo", {"loss_type": "dr_grpo", "scale_rewards": False, "max_completion_length": 16}),
    case("cispo", {"loss_type": "cispo", "epsilon_high": 1.2}),
    case("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}, drift=1e-3),
    case("sapo", {"loss_type": "sapo"}),
    case("entropy20", {"loss_type": "dapo", "epsilon_high": 0.28, "top_entropy_quantile": 0.2}),
]
print(json.dumps({"trl": trl.__version__, "torch": torch.__version__.split("+")[0], "cases": CASES}))
