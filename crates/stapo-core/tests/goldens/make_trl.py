"""Writes trl.json: losses and gradients of TRL's own GRPOTrainer._compute_loss on random inputs.

    pip install torch trl
    python make_trl.py > trl.json

The trainer is not constructed: its loss function runs on an object that has the attributes the function reads, with a
stand-in for the model's forward pass that returns our log-probs as leaves, so that autograd gives d loss / d logp.
Every case names the preset and the settings (`set`) with which `stapo objective` gives the same numbers.
"""

import json
import types
from collections import defaultdict

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer

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
        accelerator=Accelerator(), model=types.SimpleNamespace(training=True), aux_loss_enabled=False,
        use_vllm="sampler" in settings, vllm_importance_sampling_correction=True,
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"), current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)), max_completion_length=settings.get("max_completion_length", 16),
        loss_type=settings["loss_type"], beta=settings.get("beta", 0.0),
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        epsilon_low=settings.get("epsilon_low", 0.2), epsilon_high=settings.get("epsilon_high", 0.2),
        top_entropy_quantile=settings.get("top_entropy_quantile", 1.0),
        entropy_coef=settings.get("entropy_coef", 0.0), _entropy_bonus_enabled="entropy_coef" in settings,
        use_adaptive_entropy=False,
    )
    own.args = types.SimpleNamespace(
        delta=settings.get("delta"), use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
        steps_per_generation=1, sapo_temperature_pos=settings.get("sapo_temperature_pos", 1.0),
        sapo_temperature_neg=settings.get("sapo_temperature_neg", 1.05),
        vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )
    own._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp, entropy, None)
    own.get_high_entropy_mask = types.MethodType(GRPOTrainer.get_high_entropy_mask, own)
    own.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    own.get_gamma_weights = GRPOTrainer.get_gamma_weights
    return own


def sampler_weights(behavior, sampler, mask, settings):
    """The weights that TRL multiplies the loss by under `vllm_importance_sampling_mode`."""
    level, how = settings["sampler"].split("_")
    difference = (behavior - sampler) * mask
    weight = torch.exp(difference.sum(-1, keepdim=True) if level == "sequence" else difference)
    if how == "truncate":
        return weight.clamp(max=settings["clip_max"])
    outside = (weight < settings.get("clip_min", 0.0)) | (weight > settings["clip_max"])
    return weight.masked_fill(outside, 0.0)


def case(name, settings, drift=0.5, preset=None, set=()):
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
    sampler = near() if "sampler" in settings or "off_policy_mask_threshold" in settings else None
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
    if sampler is not None:
        inputs["sampling_per_token_logps"] = sampler
    if "sampler" in settings:
        inputs["importance_sampling_ratio"] = sampler_weights(behavior, sampler, mask, settings)
    loss = GRPOTrainer._compute_loss(trainer(logp, entropy, settings), None, inputs)
    loss.backward()
    cut = lambda x: [row[:k].tolist() for row, k in zip(x.detach(), lengths.tolist())]
    out = {
        "name": name, "preset": preset or name, "set": list(set), "settings": settings, "rewards": rewards.tolist(),
        "logp": cut(logp), "behavior_logp": cut(behavior), "reference_logp": cut(reference), "entropy": cut(entropy),
        "loss": loss.item(), "d_logp": cut(logp.grad),
    }
    return out if sampler is None else {**out, "sampler_logp": cut(sampler)}


# TRL adds 1e-4 to the deviation of a group.
STD = "advantage.epsilon=1e-4"
ALL = "denominator.kind=all_tokens"


def cases():
    sequence = {"importance_sampling_level": "sequence"}
    return [
        case("grpo", {"loss_type": "grpo", "beta": 0.04}, set=[STD]),
        case("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}, set=[STD]),
        case("dr-grpo", {"loss_type": "dr_grpo", "scale_rewards": False, "max_completion_length": 16},
             set=["denominator.length=16.0"]),
        case("cispo", {"loss_type": "cispo", "epsilon_high": 1.2}, set=[STD]),
        case("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
             drift=1e-3, set=[STD]),
        case("sapo", {"loss_type": "sapo"}, set=[STD]),
        case("entropy20", {"loss_type": "dapo", "epsilon_high": 0.28, "top_entropy_quantile": 0.2}, set=[STD, ALL]),
        case("luspo", {"loss_type": "luspo", **sequence, "epsilon_low": 2e-3, "epsilon_high": 2.5e-3}, drift=1e-2, set=[STD]),
        case("vespo", {"loss_type": "vespo"}, drift=0.3, set=[STD]),
        case("grpo, unbiased KL", {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True}, preset="grpo",
             set=[STD, 'kl={kind="unbiased_k3",beta=0.04}']),
        case("dapo, off-policy sequence mask", {"loss_type": "dapo", "epsilon_high": 0.28, "off_policy_mask_threshold": 0.05},
             preset="dapo", set=[STD, ALL, 'masks=[{kind="off_policy_sequence",delta=0.05}]']),
        case("dapo, truncated weights", {"loss_type": "dapo", "epsilon_high": 0.28, "sampler": "token_truncate", "clip_max": 1.2},
             preset="dapo", set=[STD, 'off_policy={kind="tis",cap=1.2}']),
        case("dapo, truncated weights of responses",
             {"loss_type": "dapo", "epsilon_high": 0.28, "sampler": "sequence_truncate", "clip_max": 1.2},
             preset="dapo", set=[STD, 'off_policy={kind="tis",cap=1.2,level="sequence"}']),
        case("dapo, masked weights", {"loss_type": "dapo", "epsilon_high": 0.28, "sampler": "token_mask", "clip_min": 0.8, "clip_max": 1.3},
             preset="dapo", set=[STD, 'off_policy={kind="mis",low=0.8,high=1.3,level="token"}']),
        case("dapo, masked weights of responses", {"loss_type": "dapo", "epsilon_high": 0.28, "sampler": "sequence_mask", "clip_max": 1.3},
             preset="dapo", set=[STD, 'off_policy={kind="mis",low=0.0,high=1.3}']),
        case("gspo with a mask", {"loss_type": "grpo", **sequence, "epsilon_low": 3e-4, "epsilon_high": 4e-4, "top_entropy_quantile": 0.5},
             drift=1e-3, preset="gspo", set=[STD, ALL, 'masks=[{kind="top_entropy",share=0.5}]', "ratio.silenced=stay"]),
        case("justrl", {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.4}, set=[STD, "surrogate.dual=1.4"]),
        case("dapo, entropy bonus", {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.01}, preset="dapo",
             set=[STD, 'entropy_bonus={kind="constant",coefficient=0.01}']),
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({"trl": trl.__version__, "torch": torch.__version__.split("+")[0], "cases": cases()}))
