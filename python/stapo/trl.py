"""S2T and every other objective inside TRL's `GRPOTrainer`.

    from stapo.trl import S2TGRPOTrainer, math_reward

    trainer = S2TGRPOTrainer(model="Qwen/Qwen3-1.7B", reward_funcs=math_reward, args=config, train_dataset=data)

`S2TGRPOTrainer` is `GRPOTrainer` with one more argument, `s2t`: the settings (`stapo.torch.S2T`), or None for plain
TRL. Before the first micro-batch of an optimizer step the trainer computes the log-probs and entropies of all of them,
takes the quantile over all micro-batches and processes, and hands the narrowed token mask (`tool_mask`) and the number
of kept tokens (`num_items_in_batch`) to TRL's own loss. That is one more forward pass per optimizer step.

`ObjectiveGRPOTrainer` is `GRPOTrainer` with a loss of `stapo objective`: `objective` is the name of a preset or a
`stapo.Objective`. It scores all micro-batches of an optimizer step in the same way, evaluates the objective on the
responses of all processes, and gives the derivatives of each micro-batch to its backward pass. TRL's `loss_type` and the
settings of its losses have no effect; `beta` above 0 makes TRL compute the log-probs of the reference.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from stapo._stapo import Effects, Objective
from stapo._versions import probe, require

require("trl", "1.16")

from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from stapo.reward import math_reward
from stapo.torch import S2T, Silenced, silence, write_minibatch

__all__ = ["ObjectiveGRPOTrainer", "ObjectiveMixin", "S2T", "S2TGRPOTrainer", "S2TMixin", "math_reward"]

probe("trl", GRPOTrainer._prepare_inputs, ["generation_batch"])
probe(
    "trl",
    GRPOTrainer._get_per_token_logps_and_entropies,
    ["model", "input_ids", "attention_mask", "logits_to_keep", "compute_entropy"],
)
probe("trl", disable_gradient_checkpointing, ["model"])

# The inputs of a micro-batch that the model's forward pass takes besides tokens and attention mask.
_FORWARD_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


@dataclass(frozen=True)
class _Window:
    """The micro-batches of one optimizer step: where they begin, what each of them keeps, and the count of all."""

    first_step: int
    kept: tuple[torch.Tensor, ...]
    num_items_in_batch: torch.Tensor


class _WindowMixin:
    """Looks at all micro-batches of an optimizer step before the first of them is trained on."""

    def _window_batches(self) -> list[dict[str, Any]]:
        """The generated micro-batches of the optimizer step that begins."""
        n_steps = self.current_gradient_accumulation_steps
        first = self._step % self.args.steps_per_generation
        batches = self._buffered_inputs[first : first + n_steps]
        if len(batches) < n_steps:
            raise RuntimeError(
                f"step {self._step}: {len(batches)} of {n_steps} micro-batches of the optimizer step are generated\n"
                "hint: all of them are needed; resume from a checkpoint at a multiple of steps_per_generation"
            )
        return batches

    def _score(self, batch: dict[str, Any], model: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of a micro-batch, by the calls that TRL's loss makes; of `model` with gradients."""
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        more = {name: batch[name] for name in _FORWARD_INPUTS if name in batch}
        n_kept = batch["completion_ids"].size(1)

        def scored(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
            logp, entropy, _ = self._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, n_kept, compute_entropy=True, **more
            )
            return logp, entropy

        if model is not None:
            return scored(model)
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return scored(self.model)


class S2TMixin(_WindowMixin):
    """Adds S2T to a trainer that is TRL's `GRPOTrainer` or derived from it."""

    def __init__(self, *args: Any, s2t: S2T | None = S2T(), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.s2t = s2t
        self._s2t_window: _Window | None = None
        if s2t is not None:
            _refuse_unsafe_settings(self)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        # The Trainer asks for the micro-batches of an optimizer step here, once per step.
        self._s2t_window = None
        return super().get_batch_samples(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if self.s2t is None or not self.model.training:
            return inputs
        if self._s2t_window is None:
            self._s2t_window = self._calibrate_window()
        window = self._s2t_window
        kept = window.kept[self._step - window.first_step]
        tool_mask = inputs.get("tool_mask")
        # A copy: TRL uses its buffered inputs again when num_iterations is above 1.
        narrowed = dict(inputs)
        narrowed["tool_mask"] = kept.to(inputs["completion_mask"].dtype) if tool_mask is None else tool_mask * kept
        narrowed["num_items_in_batch"] = window.num_items_in_batch
        return narrowed

    def _calibrate_window(self) -> _Window:
        n_steps = self.current_gradient_accumulation_steps
        spread = self.args.steps_per_generation
        batches = self._window_batches()
        scored = [self._score(batch) for batch in batches]
        logp = torch.cat([logp for logp, _ in scored])
        entropy = torch.cat([entropy for _, entropy in scored])
        mask = torch.cat([_loss_mask(batch) for batch in batches])
        advantages = torch.cat([batch["advantages"] for batch in batches])
        found = silence(logp, entropy, advantages, mask, self.s2t)
        self._log_s2t(found)
        if self.s2t.dump is not None:
            self._dump(batches, logp, entropy, found)
        # TRL scales this count, which it takes for that of a whole generation batch, to one optimizer step.
        count = torch.tensor(found.n_kept * spread / n_steps, dtype=torch.float32, device=logp.device)
        kept = torch.chunk(~found.silenced, n_steps)
        return _Window(first_step=self._step, kept=kept, num_items_in_batch=count)

    def _log_s2t(self, found: Silenced) -> None:
        metrics = self._metrics["train"]
        metrics["s2t/silenced"].append(found.n_silenced)
        metrics["s2t/candidates"].append(found.n_candidates)
        metrics["s2t/silenced_share"].append(found.n_silenced / max(found.n_tokens, 1))
        if found.tau_h is not None:
            metrics["s2t/tau_h"].append(found.tau_h)

    def _dump(self, batches: list[dict], logp: torch.Tensor, entropy: torch.Tensor, found: Silenced) -> None:
        columns = {"logp": logp, "entropy": entropy, "behavior_logp": logp}
        for name, column in (
            ("old_per_token_logps", "behavior_logp"),
            ("ref_per_token_logps", "reference_logp"),
            ("sampling_per_token_logps", "sampler_logp"),
        ):
            if batches[0].get(name) is not None:
                columns[column] = torch.cat([batch[name] for batch in batches])
        rank = self.accelerator.process_index
        write_minibatch(
            Path(self.s2t.dump) / f"step-{self.state.global_step + 1:06d}-rank-{rank:04d}.jsonl",
            groups=[_prompt_name(batch, row) for batch in batches for row in range(len(batch["prompt_ids"]))],
            advantages=torch.cat([batch["advantages"] for batch in batches]),
            mask=torch.cat([_loss_mask(batch) for batch in batches]),
            silenced=found.silenced,
            columns=columns,
        )


class S2TGRPOTrainer(S2TMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with S2T; `s2t=None` is plain TRL."""


@dataclass(frozen=True)
class _Derivatives:
    """The derivatives of an optimizer step's loss, for each micro-batch of this process, and the loss."""

    first_step: int
    d_logp: tuple[torch.Tensor, ...]
    d_entropy: tuple[torch.Tensor, ...] | None
    loss: float


class ObjectiveMixin(_WindowMixin):
    """Gives a trainer that is TRL's `GRPOTrainer` or derived from it a loss of `stapo objective`."""

    def __init__(self, *args: Any, objective: Objective | str = "dapo", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.objective = Objective(objective) if isinstance(objective, str) else objective
        self._objective_window: _Derivatives | None = None
        _refuse_unsafe_settings(self)
        needs_reference = self.objective.axes["kl"]["kind"] != "none"
        if needs_reference != (self.beta != 0.0):
            raise ValueError(
                f"beta: {self.beta}, and the objective's KL penalty is {self.objective.axes['kl']}\n"
                "hint: the weight of the penalty is the objective's; set beta above 0 with such a penalty, so that TRL "
                "computes the reference, and to 0 without"
            )
        if self.objective.n_passes > 1:
            raise ValueError(f"objective: updates in {self.objective.n_passes} passes\nhint: choose one with one pass")

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._objective_window = None
        return super().get_batch_samples(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        if self._objective_window is None:
            self._objective_window = self._evaluate_window()
        window = self._objective_window
        idx = self._step - window.first_step
        logp, entropy = self._score(inputs, model)
        loss = (window.d_logp[idx] * logp).sum()
        if window.d_entropy is not None:
            loss = loss + (window.d_entropy[idx] * entropy).sum()
        # The gradient is that of the objective; the value is this micro-batch's share of its loss.
        return loss - loss.detach() + window.loss / len(window.d_logp)

    def _evaluate_window(self) -> _Derivatives:
        batches = self._window_batches()
        scored = [self._score(batch) for batch in batches]
        inside = torch.cat([_loss_mask(batch) for batch in batches]).bool()
        logp = torch.cat([logp for logp, _ in scored])
        columns = {"logp": logp, "behavior_logp": logp, "entropy": torch.cat([entropy for _, entropy in scored])}
        for name, column in (
            ("old_per_token_logps", "behavior_logp"),
            ("ref_per_token_logps", "reference_logp"),
            ("sampling_per_token_logps", "sampler_logp"),
        ):
            if batches[0].get(name) is not None:
                columns[column] = torch.cat([batch[name] for batch in batches])
        own = {name: values.detach()[inside].double().cpu().numpy() for name, values in columns.items()}
        own["lengths"] = inside.sum(dim=1).cpu().numpy()
        advantages = torch.cat([batch["advantages"] for batch in batches]).double()
        own["advantage"] = (advantages if advantages.dim() == 1 else advantages[inside]).cpu().numpy()
        effects, start = _evaluated(self.objective, own, self.state.global_step)
        self._log_effects(effects)
        # Processes average their gradients, and the objective has the derivatives of the sum.
        scale = float(self.accelerator.num_processes)

        def spread(known: numpy.ndarray) -> tuple[torch.Tensor, ...]:
            full = torch.zeros(inside.shape, dtype=torch.float64, device=inside.device)
            mine = known[start : start + int(inside.sum())]
            full[inside] = scale * torch.as_tensor(mine, device=inside.device)
            return torch.chunk(full.to(logp.dtype), len(batches))

        d_entropy = None if effects.d_entropy is None else spread(effects.d_entropy)
        loss = float(effects.totals["loss"])
        return _Derivatives(self._step, spread(effects.d_logp), d_entropy, loss)

    def _log_effects(self, effects: Effects) -> None:
        metrics = self._metrics["train"]
        metrics["objective/silenced_share"].append(1.0 - float(effects.kept.mean()))
        metrics["objective/clipped_share"].append(float(effects.clipped.mean()))


class ObjectiveGRPOTrainer(ObjectiveMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with a loss of `stapo objective`, by its name or as an `Objective`."""


def _evaluated(objective: Objective, own: dict[str, numpy.ndarray], step: int) -> tuple[Effects, int]:
    """The effects on the tokens of all processes, and where those of this process begin."""
    parts = [own]
    rank = 0
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        parts, rank = [None] * dist.get_world_size(), dist.get_rank()
        dist.all_gather_object(parts, own)
    batch = {name: numpy.concatenate([part[name] for part in parts]) for name in own}
    batch["offsets"] = numpy.concatenate([[0], numpy.cumsum(batch.pop("lengths"))])
    start = sum(len(part["logp"]) for part in parts[:rank])
    return objective.evaluate(batch, step=step), start


def _loss_mask(batch: dict[str, Any]) -> torch.Tensor:
    tool_mask = batch.get("tool_mask")
    return batch["completion_mask"] if tool_mask is None else batch["completion_mask"] * tool_mask


def _prompt_name(batch: dict[str, Any], row: int) -> str:
    """A short name that rows of the same prompt share on every process."""
    tokens = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:12]


def _refuse_unsafe_settings(trainer: Any) -> None:
    args = trainer.args
    spread, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    if spread % accumulated != 0:
        raise ValueError(
            f"steps_per_generation: {spread} is no multiple of gradient_accumulation_steps {accumulated}, so an "
            "optimizer step would begin before all of its responses are generated\n"
            "hint: set steps_per_generation to gradient_accumulation_steps or a multiple of it"
        )
    if args.loss_type == "bnpo":
        raise ValueError(
            "loss_type: bnpo divides by the tokens of a micro-batch, so its loss depends on the micro-batch\n"
            "hint: dapo divides by the tokens of the whole optimizer step"
        )
    if args.top_entropy_quantile < 1.0:
        raise ValueError(
            f"top_entropy_quantile: {args.top_entropy_quantile} takes a quantile per micro-batch\n"
            "hint: set it to 1.0, or use s2t=None"
        )
    if args.entropy_coef != 0.0 or args.use_adaptive_entropy:
        raise ValueError(
            "entropy_coef, use_adaptive_entropy: TRL's entropy bonus is a mean over the tokens of a micro-batch\n"
            "hint: set entropy_coef=0.0 and use_adaptive_entropy=False, or use s2t=None"
        )
    dropout = next((m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0), 0.0)
    dropout = dropout or getattr(trainer.model.config, "attention_dropout", 0.0) or 0.0
    if dropout > 0:
        raise ValueError(
            f"dropout: {dropout}; with dropout the loss sees other log-probs than those that S2T looked at\n"
            "hint: set disable_dropout=True, and attention_dropout=0.0 in the model's config"
        )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and getattr(parallel, "non_data_parallel_size", 1) > 1:
        raise ValueError(
            "parallelism_config: S2T takes its quantile over data-parallel processes, and here some processes hold "
            "parts of the same responses\nhint: use data parallelism (DDP, FSDP, ZeRO)"
        )
