"""Objectives and S2T (silencing spurious tokens) on PyTorch tensors, for trainers other than `stapo train`.

`policy_loss` is the loss of any preset on padded tensors, with its exact derivatives.

S2T takes tokens out of the loss; it rewrites no loss. A token is a candidate where its advantage is above 0 and its
probability below `tau_p`. `tau_h` is the q-quantile of the candidates' entropies over the whole mini-batch, that is
over all micro-batches and all ranks of one optimizer step, and candidates of an entropy below `tau_h` are silenced. All
comparisons are strict, and every rank computes the same `tau_h`, bit for bit.

>>> import torch
>>> logp = torch.tensor([[-0.1, -9.0, -8.0], [-7.0, -0.2, -9.5]])
>>> entropy = torch.tensor([[0.3, 0.1, 2.0], [1.0, 0.4, 0.2]])
>>> mask = torch.ones(2, 3)
>>> found = silence(logp, entropy, torch.tensor([1.0, -1.0]), mask)
>>> found.silenced.tolist()
[[False, True, False], [False, False, False]]
>>> (found.n_tokens, found.n_candidates, found.n_silenced, round(found.tau_h, 3))
(6, 2, 1, 1.525)
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Mapping

import numpy
import torch
import torch.distributed as dist

from stapo._stapo import Effects, Objective

__all__ = ["S2T", "Silenced", "candidates", "exact_tau", "policy_loss", "silence", "write_minibatch"]


@dataclass(frozen=True)
class S2T:
    """The settings of S2T.

    `tau_p` is the probability below which a rewarded token is a candidate, `q` the quantile of the candidates'
    entropies, and `dump` a folder into which an adapter writes every mini-batch as the JSON lines that `stapo
    objective` reads.
    """

    tau_p: float = 0.002
    q: float = 0.75
    dump: str | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.tau_p <= 1.0:
            raise ValueError(f"tau_p: {self.tau_p} is not a probability above 0\nhint: the paper's value is 0.002")
        if not 0.0 <= self.q <= 1.0:
            raise ValueError(f"q: {self.q} is not between 0 and 1\nhint: the paper's value is 0.75")


@dataclass(frozen=True)
class Silenced:
    """What S2T found in a mini-batch. The counts and `tau_h` are those of all ranks.

    `silenced` has the shape of the log-probs and is true for a token that leaves the loss. `tau_h` is None if there
    is no candidate.
    """

    silenced: torch.Tensor
    tau_h: float | None
    n_tokens: int
    n_candidates: int
    n_silenced: int

    @property
    def n_kept(self) -> int:
        return self.n_tokens - self.n_silenced


def candidates(logp: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, tau_p: float = 0.002) -> torch.Tensor:
    """The tokens that S2T may silence: in the loss, advantage above 0, probability below `tau_p`.

    Shapes: `logp` and `mask` [B, T]; `advantages` [B], [B, 1] or [B, T]. The probability is compared as a logarithm in
    double precision, as `stapo objective` does.

    >>> candidates(torch.tensor([[-7.0, -6.0]]), torch.tensor([0.5]), torch.tensor([[1, 1]])).tolist()
    [[True, False]]
    """
    _require_float32("logp", logp)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    improbable = logp.detach().double() < math.log(tau_p)
    return mask.bool() & (advantages > 0) & improbable


def exact_tau(entropies: torch.Tensor, q: float = 0.75, group: dist.ProcessGroup | None = None) -> float | None:
    """The q-quantile of the entropies of all ranks of `group`, or None if no rank has any.

    Each rank gives as many values as it has, also none; every rank must make the call. `group` is the default process
    group unless given; without torch.distributed the values of this process are all there are. The quantile
    interpolates linearly in double precision.

    >>> exact_tau(torch.tensor([0.0, 1.0, 2.0, 3.0]), 0.75)
    2.25
    >>> exact_tau(torch.tensor([])) is None
    True
    """
    _require_float32("entropies", entropies)
    values = _gather_ragged(entropies.detach().reshape(-1).contiguous(), group).cpu().double()
    if values.numel() == 0:
        return None
    # Every rank sees the same gathered values, so all of them raise or none does.
    if not torch.isfinite(values).all():
        raise ValueError("entropies: a candidate's entropy is not finite\nhint: look for NaN in the model's logits")
    ordered = values.sort().values
    position = q * (ordered.numel() - 1)
    below = math.floor(position)
    low, high = ordered[below].item(), ordered[math.ceil(position)].item()
    fraction = position - below
    # Interpolation from the nearer end: equal neighbours give exactly their value.
    return low + (high - low) * fraction if fraction < 0.5 else high - (high - low) * (1.0 - fraction)


def silence(
    logp: torch.Tensor,
    entropy: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    s2t: S2T = S2T(),
    group: dist.ProcessGroup | None = None,
) -> Silenced:
    """Finds the spurious tokens of a mini-batch, of which this rank holds a part.

    Shapes: `logp`, `entropy` and `mask` [B, T]; `advantages` [B], [B, 1] or [B, T]. The tensors are those of all
    micro-batches of one optimizer step on this rank; with a part of them `tau_h` would be another. No gradient flows.
    """
    _require_float32("entropy", entropy)
    found = candidates(logp, advantages, mask, s2t.tau_p)
    tau_h = exact_tau(entropy[found], s2t.q, group)
    silenced = torch.zeros_like(found) if tau_h is None else found & (entropy.detach().double() < tau_h)
    counts = torch.stack([mask.bool().sum(), found.sum(), silenced.sum()])
    if _n_ranks(group) > 1:
        dist.all_reduce(counts, group=group)
    n_tokens, n_candidates, n_silenced = counts.tolist()
    return Silenced(silenced, tau_h, n_tokens, n_candidates, n_silenced)


def policy_loss(
    logp: torch.Tensor,
    behavior_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    objective: Objective | str = "stapo",
    *,
    entropy: torch.Tensor | None = None,
    step: int = 0,
    pass_number: int = 1,
    return_effects: bool = False,
    **columns: torch.Tensor,
) -> torch.Tensor | tuple[torch.Tensor, Effects]:
    """The loss of a mini-batch, to be minimised: `loss.backward()` gives the derivatives that `stapo objective` prints.

    Shapes: `logp`, `behavior_logp`, `mask` and `entropy` [B, T]; `advantages` [B], [B, 1] or [B, T]. `mask` is true for
    the tokens of the responses, wherever the padding is. `objective` is a preset's name or a `stapo.Objective`. `entropy`
    is needed where `Objective.reads_entropy` is true, and gets a gradient where the objective has an entropy bonus.
    `columns` are further columns of a mini-batch: `reference_logp`, `sampler_logp`, `behavior_entropy`, `collision`,
    `teacher_logp`.

    The numbers are computed in double precision on the CPU, whatever the device of the tensors, and the gradients have
    the device and type of `logp`. Masks and denominators look at the whole mini-batch, so give all responses of one
    optimizer step at once: the loss of a micro-batch is that of a separate mini-batch. With `return_effects` the fates
    of the tokens come too, as `Objective.evaluate` returns them for the tokens in `mask`, row by row.

    >>> logp = torch.tensor([[-0.1, -9.0, -0.3], [-0.2, -0.4, 0.0]], requires_grad=True)
    >>> mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    >>> loss = policy_loss(logp, logp.detach(), torch.tensor([1.0, -1.0]), mask, "dapo")
    >>> loss.backward()
    >>> [[round(x, 6) for x in row] for row in logp.grad.tolist()]
    [[-0.2, -0.2, -0.2], [0.2, 0.2, 0.0]]
    """
    objective = Objective(objective) if isinstance(objective, str) else objective
    if logp.dim() != 2:
        raise ValueError(f"logp: shape {tuple(logp.shape)}, expected [B, T]\nhint: pad the responses to one length")
    inside = mask.bool()
    if entropy is None and objective.reads_entropy:
        raise ValueError(
            "entropy: absent, and this objective reads it\nhint: give the entropy of the policy at each token, [B, T]; "
            "presets without masks and bonus need none"
        )
    wanted = {"behavior_logp": behavior_logp, **columns}
    if entropy is not None:
        wanted["entropy"] = entropy
    for name, values in {"mask": mask, **wanted}.items():
        if values.shape != logp.shape:
            raise ValueError(f"{name}: shape {tuple(values.shape)}, expected that of logp, {tuple(logp.shape)}")
    if advantages.dim() == 2 and advantages.shape[1] == 1:
        advantages = advantages.squeeze(1)
    if advantages.shape not in (logp.shape, logp.shape[:1]):
        raise ValueError(
            f"advantages: shape {tuple(advantages.shape)}, expected {tuple(logp.shape[:1])}, or {tuple(logp.shape)} "
            "for one per token"
        )

    def flat(values: torch.Tensor) -> numpy.ndarray:
        return values.detach()[inside].double().cpu().numpy()

    lengths = inside.sum(1).cpu().numpy()
    batch = {"logp": flat(logp), "offsets": numpy.concatenate([[0], numpy.cumsum(lengths)])}
    batch.update({name: flat(values) for name, values in wanted.items()})
    batch.setdefault("entropy", numpy.zeros_like(batch["logp"]))
    per_token = advantages.shape == logp.shape
    batch["advantage"] = flat(advantages) if per_token else advantages.detach().double().cpu().numpy()
    effects = objective.evaluate(batch, step=step, pass_number=pass_number)
    gradients = [effects.d_logp] if effects.d_entropy is None else [effects.d_logp, effects.d_entropy]
    loss = _Loss.apply(float(effects.totals["loss"]), inside, gradients, logp, *[entropy][: len(gradients) - 1])
    return (loss, effects) if return_effects else loss


class _Loss(torch.autograd.Function):
    """A number whose derivatives are known: by the log-probs, and where there is a bonus by the entropies."""

    @staticmethod
    def forward(ctx, loss, inside, gradients, *inputs):  # type: ignore[no-untyped-def]
        spread = [torch.zeros_like(values, dtype=torch.float64) for values in inputs]
        for full, known in zip(spread, gradients):
            full[inside] = torch.as_tensor(known, device=full.device)
        ctx.save_for_backward(*[full.to(values.dtype) for full, values in zip(spread, inputs)])
        return inputs[0].new_tensor(loss)

    @staticmethod
    def backward(ctx, d_loss):  # type: ignore[no-untyped-def]
        return (None, None, None, *[d_loss * gradient for gradient in ctx.saved_tensors])


def write_minibatch(
    path: str | Path,
    groups: Iterable[str],
    advantages: torch.Tensor,
    mask: torch.Tensor,
    silenced: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
) -> None:
    """Writes responses as the JSON lines that `stapo objective` reads, one file per rank and optimizer step.

    `columns` are `logp`, `behavior_logp`, `entropy` and what else `stapo objective` knows, each [B, T]. Tokens outside
    `mask` are left out. `kept`, which `stapo objective` does not read, is this rank's mask after S2T.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as out:
        for row, group in enumerate(groups):
            inside = mask[row].bool()
            advantage = advantages[row].reshape(-1)
            line = {
                "group": group,
                "advantage": advantage.item() if advantage.numel() == 1 else advantage[inside].tolist(),
                "kept": (~silenced[row][inside]).tolist(),
            }
            line.update({name: values[row][inside].double().tolist() for name, values in columns.items()})
            out.write(json.dumps(line) + "\n")


def _gather_ragged(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The values of all ranks in one tensor, in the order of the ranks; any rank may have none."""
    n_ranks = _n_ranks(group)
    if n_ranks == 1:
        return values
    count = torch.tensor([values.numel()], dtype=torch.int64, device=values.device)
    counts = [torch.empty_like(count) for _ in range(n_ranks)]
    dist.all_gather(counts, count, group=group)
    lengths = [int(length) for length in torch.cat(counts).tolist()]
    longest = max(lengths)
    if longest == 0:
        return values
    padded = values.new_zeros(longest)
    padded[: values.numel()] = values
    parts = [torch.empty_like(padded) for _ in range(n_ranks)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths)])


def _n_ranks(group: dist.ProcessGroup | None) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


def _require_float32(name: str, values: torch.Tensor) -> None:
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name}: {values.dtype}, expected float32 or float64; in fewer bits tau_p has no meaning\n"
            "hint: compute log-probs and entropies in float32, whatever the model's weights are stored in"
        )
