"""`stapo.torch` on several processes: the ragged gather, and fates that do not depend on how a mini-batch is cut.

Run by peers.sh as `torchrun --nproc_per_node 3 peer_torch.py`.
"""

import doctest

import torch
import torch.distributed as dist

import stapo.callbacks
import stapo.torch
from stapo.torch import S2T, candidates, exact_tau, silence


def quantile_of_ragged_parts():
    """Ranks give 7, 0 and 2 values, or none at all; every rank gets NumPy's quantile of the whole."""
    random = torch.Generator().manual_seed(1)
    whole = torch.rand(9, generator=random)
    mine = whole[[slice(0, 7), slice(7, 7), slice(7, 9)][dist.get_rank()]]
    for q in (0.0, 0.3, 0.75, 1.0):
        expected = torch.quantile(whole.double(), q).item()
        assert abs(exact_tau(mine, q) - expected) < 1e-15, (q, exact_tau(mine, q), expected)
    assert exact_tau(whole[:0]) is None
    assert exact_tau(whole[:1] if dist.get_rank() == 2 else whole[:0]) == whole[0].double().item()


def fates_do_not_depend_on_the_cut():
    """All rows on one rank, or a row here and the rest there: the same tokens are silenced, with the same counts."""
    random = torch.Generator().manual_seed(2)
    n_rows, n_tokens = 24, 40
    logp = -10.0 * torch.rand(n_rows, n_tokens, generator=random) ** 2
    entropy = 3.0 * torch.rand(n_rows, n_tokens, generator=random)
    advantages = torch.randn(n_rows, generator=random)
    mask = torch.rand(n_rows, n_tokens, generator=random) < 0.9
    s2t = S2T(tau_p=0.002)
    seen = []
    for cut in ([0, 24, 24, 24], [0, 1, 9, 24], [0, 8, 16, 24]):
        rows = slice(cut[dist.get_rank()], cut[dist.get_rank() + 1])
        found = silence(logp[rows], entropy[rows], advantages[rows], mask[rows], s2t)
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found.silenced.tolist())
        fates = [row for part in parts for row in part]
        seen.append((fates, found.tau_h, found.n_tokens, found.n_candidates, found.n_silenced))
    assert seen[0] == seen[1] == seen[2]
    fates, tau_h, n_tokens, n_candidates, n_silenced = seen[0]
    assert n_tokens == int(mask.sum()) and n_silenced == sum(map(sum, fates)) > 0
    found = candidates(logp, advantages, mask, 0.002)
    assert n_candidates == int(found.sum())
    assert torch.equal(torch.tensor(fates), found & (entropy < tau_h))


def low_precision_is_refused():
    for values in (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)):
        try:
            exact_tau(values)
        except TypeError as error:
            assert "float32" in str(error)
        else:
            raise AssertionError(f"{values.dtype} was not refused")


dist.init_process_group("gloo")
quantile_of_ragged_parts()
fates_do_not_depend_on_the_cut()
low_precision_is_refused()
is_first = dist.get_rank() == 0
dist.barrier()
dist.destroy_process_group()
for module in (stapo.torch, stapo.callbacks):
    assert doctest.testmod(module).failed == 0
if is_first:
    print("torch: quantile over 3 processes, one of them without values; fates do not depend on the cut", flush=True)
