"""The objectives of `stapo objective` as policy losses and advantage estimators of verl.

    VERL_USE_EXTERNAL_MODULES=stapo.verl_losses python -m verl.trainer.main_ppo \\
        actor_rollout_ref.actor.policy_loss.loss_mode=stapo/gspo algorithm.adv_estimator=stapo/leave_one_out ...

Importing this module registers `stapo/PRESET` for every preset and `stapo/KIND` for every kind of advantage. `register`
adds an objective of your own under a name.

verl calls a policy loss for each micro-batch and divides by the counts of the whole mini-batch, and so do these losses: the
sum over micro-batches and ranks is the loss of the mini-batch. A preset that chooses among the tokens of a mini-batch (most
masks) is refused where verl cuts the mini-batch, and one that reads entropies always, because verl gives none to a policy
loss; `stapo.verl` has S2T for these cases. The objective's `aggregate` counts, not `actor.loss_agg_mode`, which verl applies
to its own KL and entropy terms. A KL penalty of the objective is left to verl (`actor.use_kl_loss`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stapo._versions import probe, require

require("verl", "0.9.1")

import numpy
import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_adv_est, register_policy_loss

from stapo import Objective, presets
from stapo.torch import policy_loss

__all__ = ["ADVANTAGES", "register"]

_ARGUMENTS = ["old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights"]
probe("verl", compute_policy_loss_vanilla, _ARGUMENTS)

ADVANTAGES = (
    "group_z_score",
    "group_mean",
    "leave_one_out",
    "group_mean_batch_std",
    "length_weighted_mean",
    "group_mean_nonzero_share",
    "best_above_second",
)


def register(name: str, objective: Objective | str) -> None:
    """Registers an objective as the policy loss `name`, for `actor_rollout_ref.actor.policy_loss.loss_mode`.

    A penalty by a reference or a sampler, which verl computes itself, is taken out of the objective.
    """
    objective = Objective(objective) if isinstance(objective, str) else objective
    kept_out = {"kl": {"kind": "none"}, "off_policy": {"kind": "none"}}
    objective = Objective({**objective.axes, **kept_out})
    register_policy_loss(name)(_policy_loss(name, objective))


def _policy_loss(name: str, objective: Objective) -> Callable[..., tuple[torch.Tensor, dict[str, Any]]]:
    def loss_fn(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if objective.reads_entropy:
            raise ValueError(
                f"policy_loss.loss_mode: {name} reads entropies, and verl gives none to a policy loss\n"
                "hint: stapo.verl_trainer trains with S2T; a preset without masks and bonus needs none"
            )
        if objective.n_passes > 1:
            raise ValueError(
                f"policy_loss.loss_mode: {name} updates a mini-batch in {objective.n_passes} passes, and verl in one\n"
                "hint: choose a preset with one pass"
            )
        batch = dict(getattr(config, "global_batch_info", None) or {})
        filled = response_mask.bool().any(dim=1)
        inside = response_mask.bool()[filled]
        if not filled.any():
            return (log_prob * 0.0).sum(), {}
        scale = _share(objective, inside, batch)
        if objective.needs_minibatch and scale != 1.0:
            raise ValueError(
                f"policy_loss.loss_mode: {name} chooses among the tokens of a mini-batch, and this is a part of one\n"
                "hint: one rank, and actor.ppo_micro_batch_size_per_gpu as large as the mini-batch"
            )
        weighted = advantages if rollout_is_weights is None else advantages * rollout_is_weights
        loss, effects = policy_loss(
            log_prob[filled],
            old_log_prob[filled],
            _per_response(weighted[filled], inside),
            inside,
            objective,
            return_effects=True,
        )
        drift = (old_log_prob - log_prob).detach()[filled][inside].mean().item()
        return loss * scale, {"actor/pg_clipfrac": float(effects.clipped.mean()), "actor/ppo_kl": drift}

    return loss_fn


def _share(objective: Objective, inside: torch.Tensor, batch: dict[str, Any]) -> float:
    """What turns the mean over this micro-batch into its part of the mean over the mini-batch, as verl sums it."""
    if objective.axes["aggregate"]["kind"] == "token_mean":
        own, whole = int(inside.sum()), batch.get("batch_num_tokens")
    else:
        own, whole = inside.shape[0], batch.get("global_batch_size")
    return 1.0 if whole is None else float(own / whole * batch.get("dp_size", 1))


def _per_response(advantages: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """One advantage per response where its tokens share it, as objectives with one ratio per response need."""
    first = advantages.gather(1, inside.to(torch.int8).argmax(dim=1, keepdim=True))
    return first.squeeze(1) if bool(((advantages == first) | ~inside).all()) else advantages


def _advantages(kind: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    objective = Objective({"preset": "dapo", "advantage": {"kind": kind}})

    def estimate(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: numpy.ndarray | None = None,
        config: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if index is None:
            raise ValueError(f"adv_estimator: stapo/{kind} compares the responses to one prompt, and there is no uid")
        inside = response_mask.bool()
        lengths = inside.sum(dim=1).cpu().numpy()
        zeros = numpy.zeros(int(lengths.sum()))
        batch = {name: zeros for name in ("logp", "behavior_logp", "entropy")}
        batch["offsets"] = numpy.concatenate([[0], numpy.cumsum(lengths)])
        batch["reward"] = token_level_rewards.detach().sum(dim=1).double().cpu().numpy()
        batch["group"] = [str(uid) for uid in index]
        found = torch.as_tensor(objective.evaluate(batch).advantage, device=response_mask.device)
        spread = found.to(token_level_rewards.dtype).unsqueeze(1) * response_mask
        return spread, spread

    return estimate


for _preset in presets():
    register(f"stapo/{_preset}", _preset)
for _kind in ADVANTAGES:
    register_adv_est(f"stapo/{_kind}")(_advantages(_kind))
