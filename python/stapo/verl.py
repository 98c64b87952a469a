"""S2T inside verl, for clusters that run verl: Ray, FSDP and vLLM stay verl's.

`S2TTrainingWorker` is verl's `TrainingWorker` whose `train_batch` first computes the log-probs and entropies of this
rank's part of the mini-batch, takes the quantile over the data-parallel group, and narrows `response_mask` and
`loss_mask` before verl's own loss sees them. That is one more forward pass per mini-batch. `stapo.verl_trainer`
registers a trainer that uses it; `compute_score` is a reward function for verl.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stapo._versions import probe, require

require("verl", "0.9.1")

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from stapo.torch import S2T, Silenced, silence, write_minibatch

__all__ = ["S2T", "S2TActorRolloutRefWorker", "S2TTrainingWorker", "compute_score", "refuse_unsafe_settings"]

probe("verl", TrainingWorker.train_batch, ["data"])
probe("verl", no_padding_2_padding, ["data"])

# Policy losses of verl that choose tokens within a micro-batch.
_LOSSES_BY_MICRO_BATCH = ("clip_cov", "kl_cov")
_TESTED_STRATEGIES = ("fsdp", "fsdp2")


class S2TTrainingWorker(TrainingWorker):
    """verl's `TrainingWorker` with S2T; with `s2t = None` it is verl's own."""

    s2t: S2T | None = S2T()
    n_s2t_steps = 0

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict:
        if self.s2t is None:
            return super().train_batch(data)
        self.n_s2t_steps += 1
        data, found = self._narrowed(data)
        output = super().train_batch(data)
        if output is not None:
            metrics = tu.get(output, "metrics")
            metrics["s2t/silenced"] = found.n_silenced
            metrics["s2t/candidates"] = found.n_candidates
            metrics["s2t/silenced_share"] = found.n_silenced / max(found.n_tokens, 1)
        return output

    def _narrowed(self, data: TensorDict) -> tuple[TensorDict, Silenced]:
        """A copy of the mini-batch without the spurious tokens in its masks, and what was found."""
        logp, entropy = self._score(data)
        mask = _padded(data["response_mask"]).to(logp.device)
        advantages = _padded(data["advantages"]).to(logp.device)
        found = silence(logp, entropy, advantages, mask, self.s2t, self.engine.get_data_parallel_group())
        if self.s2t.dump is not None:
            self._dump(data, logp, entropy, found)
        narrowed = data.copy()
        for name in ("response_mask", "loss_mask"):
            narrowed[name] = _without(data[name], found.silenced)
        return narrowed, found

    def _score(self, data: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the responses [B, T], in the micro-batches of the training pass."""
        _refuse_dropout(self.engine.module)
        scored = data.copy()
        settings = {
            "use_remove_padding": self.model_config.get("use_remove_padding", False),
            "use_dynamic_bsz": self.engine_config.use_dynamic_bsz,
            "max_token_len_per_gpu": self.engine_config.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": self.engine_config.micro_batch_size_per_gpu,
            "use_fused_kernels": self.engine_config.use_fused_kernels,
        }
        tu.assign_non_tensor(scored, **{key: value for key, value in settings.items() if key not in scored.keys()})
        tu.assign_non_tensor(scored, calculate_entropy=True)
        with self.engine.eval_mode(disable_auto_offload=tu.get(data, key="disable_auto_offload", default=False)):
            output = self.engine.infer_batch(scored, loss_function=None)["model_output"]
        return no_padding_2_padding(output["log_probs"], data), no_padding_2_padding(output["entropy"], data)

    def _dump(self, data: TensorDict, logp: torch.Tensor, entropy: torch.Tensor, found: Silenced) -> None:
        columns = {"logp": logp, "entropy": entropy}
        for name, column in (
            ("old_log_probs", "behavior_logp"),
            ("ref_log_prob", "reference_logp"),
            ("rollout_log_probs", "sampler_logp"),
        ):
            if name in data.keys():
                columns[column] = _padded(data[name]).to(logp.device)
        rank = self.engine.get_data_parallel_rank()
        write_minibatch(
            Path(self.s2t.dump) / f"step-{self.n_s2t_steps:06d}-rank-{rank:04d}.jsonl",
            groups=[_prompt_name(prompt) for prompt in data["prompts"].unbind()],
            advantages=_padded(data["advantages"]).to(logp.device),
            mask=_padded(data["response_mask"]).to(logp.device),
            silenced=found.silenced,
            columns=columns,
        )


class S2TActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's worker whose actor is trained by `S2TTrainingWorker`; settings are those of `actor_rollout_ref.s2t`."""

    actor_worker_cls = S2TTrainingWorker

    def __init__(self, config: Any, role: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, role, *args, **kwargs)
        self.s2t = S2T(**dict(config.get("s2t") or {}))
        if self._is_actor:
            refuse_unsafe_settings(config.actor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        if self.actor is not None:
            self.actor.s2t = self.s2t

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def s2t_settings(self) -> dict[str, Any] | None:
        """The settings that this rank's actor trains with; None if S2T is not active."""
        if not isinstance(self.actor, S2TTrainingWorker) or self.actor.s2t is None:
            return None
        return asdict(self.actor.s2t)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None, **_: Any
) -> dict[str, Any]:
    """A reward function for verl: 1.0 for a right answer, else 0.0, by the rules of `stapo grade --mode math`."""
    from stapo import grade

    verdict = grade(solution_str, str(ground_truth))
    return {"score": 1.0 if verdict else 0.0, "acc": bool(verdict), "pred": verdict.extracted or ""}


def refuse_unsafe_settings(actor: Any) -> None:
    """Refuses settings of `actor_rollout_ref.actor` under which S2T would not be exact."""
    if actor.strategy not in _TESTED_STRATEGIES:
        raise ValueError(
            f"actor.strategy: {actor.strategy}; S2T was tested with {' and '.join(_TESTED_STRATEGIES)}\n"
            "hint: set actor_rollout_ref.actor.strategy=fsdp2"
        )
    mode = actor.policy_loss.get("loss_mode", "vanilla")
    if mode in _LOSSES_BY_MICRO_BATCH:
        raise ValueError(
            f"actor.policy_loss.loss_mode: {mode} chooses tokens within a micro-batch, so its loss depends on the "
            "micro-batch\nhint: vanilla, gspo, sapo, cispo and geo_mean do not"
        )
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor") is None:
        raise ValueError(
            "actor.loss_agg_mode: seq-mean-token-sum-norm divides by the longest response of a micro-batch\n"
            "hint: set actor_rollout_ref.actor.loss_scale_factor to a constant"
        )


def _refuse_dropout(module: torch.nn.Module) -> None:
    dropout = next((m.p for m in module.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0), 0.0)
    if dropout > 0:
        raise ValueError(
            f"dropout: {dropout}; with dropout the loss sees other log-probs than those that S2T looked at\n"
            "hint: set the model's dropout to 0 in actor_rollout_ref.model.override_config"
        )


def _padded(values: torch.Tensor) -> torch.Tensor:
    """Values of responses as [B, T], with zeros behind each response."""
    return values.to_padded_tensor(0) if values.is_nested else values


def _without(mask: torch.Tensor, silenced: torch.Tensor) -> torch.Tensor:
    """A mask over responses, nested or padded, without the silenced tokens [B, T]."""
    kept = (~silenced).to(mask.device)
    if not mask.is_nested:
        if mask.shape != kept.shape:
            raise ValueError(f"mask: shape {tuple(mask.shape)}, expected that of the responses {tuple(kept.shape)}")
        return mask * kept.to(mask.dtype)
    lengths = mask.offsets().diff()
    inside = torch.arange(kept.shape[1], device=mask.device) < lengths.unsqueeze(1)
    if int(inside.sum()) != mask.values().numel():
        raise ValueError(f"mask: {mask.values().numel()} tokens, expected those of the responses, {int(inside.sum())}")
    values = mask.values() * kept[inside].to(mask.dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets=mask.offsets())


def _prompt_name(tokens: torch.Tensor) -> str:
    """A short name that rows of the same prompt share on every rank."""
    return hashlib.sha256(repr(tokens.tolist()).encode()).hexdigest()[:12]
