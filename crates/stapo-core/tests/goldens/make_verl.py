"""Writes verl.json: losses and gradients of verl's own advantage estimators and policy losses on random inputs.

    pip install torch verl ray orjson
    python make_verl.py > verl.json

Every case names the preset and the settings (`set`) with which `stapo objective` gives the same gradients. Losses of
the kind `stopgrad(weight) * logp` have another value than ours and the same gradient: `same_loss` is false there.
"""

import json
import types

import numpy as np
import torch
import verl
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

GROUPS, SIZE, LONGEST = 3, 4, 7
INDEX = np.repeat(np.arange(GROUPS), SIZE)


def actor(**settings):
    policy_loss = settings.pop("policy_loss", {})
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    for key, value in policy_loss.items():
        object.__setattr__(config.policy_loss, key, value)
    return config


def advantages(estimator, rewards, mask, logp, reference, settings):
    """`rewards` has a column per reward; the last token of a response carries the first one."""
    last = mask.sum(-1).long() - 1
    by_token = torch.zeros_like(mask)
    by_token[torch.arange(len(mask)), last] = rewards[:, 0]
    if "kl_in_reward" in settings:
        kind, beta = settings["kl_in_reward"]
        by_token = by_token - beta * core_algos.kl_penalty(logp, reference, kind) * mask
    more = {}
    if estimator == "reinforce_plus_plus":
        more["config"] = types.SimpleNamespace(gamma=settings.get("gamma", 1.0))
    if estimator == "gdpo":
        keys = [f"reward{k}" for k in range(rewards.shape[1])]
        more["config"] = {"gdpo_reward_keys": keys, "gdpo_reward_weights": settings["weights"]}
        more["non_tensor_batch"] = {key: rewards[:, k].numpy() for k, key in enumerate(keys)}
        more["batch"] = {
            "prompts": torch.zeros(len(mask), 1), "attention_mask": torch.cat([torch.ones(len(mask), 1), mask], 1).long(),
        }
    function = core_algos.get_adv_estimator_fn(estimator)
    return function(token_level_rewards=by_token, response_mask=mask, index=INDEX, **more)[0]


def case(name, estimator, loss_mode, settings, preset=None, set=(), drift=0.5, agg="token-mean", same_loss=True):
    n = GROUPS * SIZE
    settings = dict(settings)
    lengths = torch.randint(1, LONGEST + 1, (n,))
    mask = (torch.arange(LONGEST) < lengths[:, None]).double()
    logp = -6 * torch.rand(n, LONGEST, dtype=torch.float64) ** 2
    near = lambda: torch.clamp(logp + drift * (2 * torch.rand_like(logp) - 1), max=0.0)
    behavior, reference, sampler = near(), near(), near()
    entropy = 3 * torch.rand(n, LONGEST, dtype=torch.float64)
    rewards = torch.stack([torch.randint(0, 2, (n,)).double(), torch.randint(0, 5, (n,)).double()], 1)
    rewards[:SIZE, 0] = 1.0  # a group without contrast
    own = {key: settings.pop(key) for key in ("weights", "gamma", "kl_in_reward", "rollout_is") if key in settings}
    if "weights" not in own:
        rewards = rewards[:, :1]
    advantage = advantages(estimator, rewards, mask, behavior, reference, own).double()
    weights = None
    if "rollout_is" in own:
        level, threshold = own["rollout_is"]
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(behavior - sampler, mask, level, threshold)
    logp.requires_grad_(True)
    function = core_algos.get_policy_loss_fn(loss_mode)
    loss, _ = function(behavior, logp, advantage, mask, agg, actor(**settings), weights)
    loss.backward()
    cut = lambda x: [row[:k].tolist() for row, k in zip(x.detach(), lengths.tolist())]
    return {
        "name": name, "preset": preset or name, "set": list(set), "settings": {"loss": loss_mode, **settings, **own},
        "weights": own.get("weights", [1.0]), "same_loss": same_loss, "rewards": rewards.reshape(GROUPS, SIZE, -1).tolist(),
        "logp": cut(logp), "behavior_logp": cut(behavior), "reference_logp": cut(reference), "sampler_logp": cut(sampler),
        "entropy": cut(entropy), "advantage": cut(advantage), "loss": loss.item(), "d_logp": cut(logp.grad),
    }


# verl adds 1e-6 to the deviation of a group.
STD = "advantage.epsilon=1e-6"
BOTH = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}


def cases():
    clip = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    by_sequence = "seq-mean-token-mean"
    return [
        case("justrl", "grpo", "vanilla", {**BOTH, "clip_ratio_c": 1.4}, set=[STD, "surrogate.dual=1.4"]),
        case("gspo", "grpo", "gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, set=[STD], drift=1e-3, agg=by_sequence),
        case("sapo", "grpo", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, set=[STD], agg=by_sequence),
        case("cispo", "grpo", "cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, set=[STD, "surrogate.low=0.2"]),
        case("gmpo", "grpo", "geo_mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
             set=[STD, "ratio.low=0.2", "ratio.high=0.3"]),
        case("rloo", "rloo", "vanilla", {"clip_ratio_low": 1.0, "clip_ratio_high": 9.0, "clip_ratio_c": 20.0},
             set=['surrogate={kind="unclipped"}'], agg="seq-mean-token-sum"),
        case("clip-cov", "grpo", "clip_cov", {**clip, "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0}},
             set=[STD, "surrogate.low=0.2", "surrogate.high=0.2", "masks.0.share=1.0", "masks.0.low=0.2"]),
        case("kl-cov", "grpo", "kl_cov", {"policy_loss": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}},
             set=[STD, "surrogate.share=0.1"]),
        case("dppo-tv", "grpo", "dppo_tv", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 3.0},
             set=[STD, "surrogate.low=0.05", "surrogate.high=0.1", "surrogate.cap=3.0"], drift=1.5, same_loss=False),
        case("dppo-kl", "grpo", "dppo_kl", {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 3.0},
             set=[STD, "surrogate.low=0.01", "surrogate.high=0.02", "surrogate.cap=3.0"], drift=1.5, same_loss=False),
        case("reinforce++", "reinforce_plus_plus", "vanilla", {**clip, "clip_ratio_c": 3.0}),
        case("reinforce++, discounted", "reinforce_plus_plus", "vanilla", {**clip, "clip_ratio_c": 3.0, "gamma": 0.9},
             preset="reinforce++", set=["advantage.gamma=0.9"]),
        case("reinforce++, KL in the reward", "reinforce_plus_plus", "vanilla",
             {**clip, "clip_ratio_c": 3.0, "kl_in_reward": ["k1", 0.1]}, preset="reinforce++",
             set=['kl_in_reward={kind="k1",beta=0.1}']),
        case("reinforce++, baseline", "reinforce_plus_plus_baseline", "vanilla", {**clip, "clip_ratio_c": 3.0},
             preset="reinforce++", set=["advantage.kind=group_mean"]),
        case("GDPO", "gdpo", "vanilla", {**clip, "clip_ratio_c": 3.0, "weights": [1.0, 0.5]}, preset="reinforce++",
             set=["advantage.kind=group_z_score", STD, "multiple_rewards=normalize_each"]),
        case("grpo, KL in the reward", "grpo", "vanilla", {**clip, "clip_ratio_c": 3.0, "kl_in_reward": ["k3", 0.1]},
             preset="justrl", set=[STD, 'surrogate={kind="clip",low=0.2,high=0.2,dual=3.0}', 'kl_in_reward={kind="k3",beta=0.1}']),
        case("squared log-ratio", "grpo", "dro", {"policy_loss": {"dro_beta": 0.5}}, preset="reinforce",
             set=[STD, 'surrogate={kind="squared_log_ratio",beta=0.5}']),
        case("truncated weights", "grpo", "vanilla", {**BOTH, "clip_ratio_c": 10.0, "rollout_is": ["token", 1.2]}, preset="justrl",
             set=[STD, 'off_policy={kind="tis",cap=1.2}']),
        case("truncated weights of responses", "grpo", "vanilla", {**BOTH, "clip_ratio_c": 10.0, "rollout_is": ["sequence", 1.2]},
             preset="justrl", set=[STD, 'off_policy={kind="tis",cap=1.2,level="sequence"}']),
        case("IcePop", "grpo", "vanilla", {**BOTH, "clip_ratio_c": 10.0, "rollout_is": ["token", "0.8_1.3"]}, preset="justrl",
             set=[STD, 'off_policy={kind="icepop",low=0.8,high=1.3}']),
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({"verl": verl.__version__, "torch": torch.__version__.split("+")[0], "cases": cases()}))
