"""S2T (silencing spurious tokens) on PyTorch tensors, for trainers other than `stapo train`.

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

import torch
import torch.distributed as dist

__all__ = ["S2T", "Silenced", "candidates", "exact_tau", "silence", "write_minibatch"]


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

    `silenced` has the shape of the log-probs and is true for a token that leaves the loss. `tau_h` is None where there
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
    """The q-quantile of the entropies of all ranks of `group`, or None where no rank has any.

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
