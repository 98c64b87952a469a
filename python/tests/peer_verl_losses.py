"""`stapo.verl_losses` with the real verl: its registries, its calls, and its own losses and advantages beside ours."""

from types import SimpleNamespace

import numpy
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig

import stapo
import stapo.verl_losses

ROWS, WIDTH = 8, 11


def minibatch():
    """A mini-batch with responses of different lengths, one of them empty."""
    draw = torch.Generator().manual_seed(1)
    logp = -3.0 * torch.rand(ROWS, WIDTH, generator=draw)
    old = (logp + 0.2 * torch.randn(ROWS, WIDTH, generator=draw)).clamp(max=0.0)
    mask = torch.arange(WIDTH) < torch.arange(3, 3 + ROWS).unsqueeze(1)
    mask[6] = False
    advantages = torch.randn(ROWS, 1, generator=draw).expand(ROWS, WIDTH) * mask
    return logp.requires_grad_(), old, advantages, mask


def loss_of(name, parts, config=None, weights=None, mode="token-mean"):
    """The loss that verl sums over micro-batches, and its gradient."""
    logp, old, advantages, mask = minibatch()
    config = config or SimpleNamespace(global_batch_info={})
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=ROWS)
    total = 0.0
    for rows in parts:
        loss, metrics = core_algos.get_policy_loss_fn(name)(
            old_log_prob=old[rows],
            log_prob=logp[rows],
            advantages=advantages[rows],
            response_mask=mask[rows],
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=None if weights is None else weights[rows],
        )
        assert all(isinstance(value, float) for value in metrics.values()), metrics
        total = total + loss
    return total.item(), torch.autograd.grad(total, logp)[0]


def close(one, other, name, atol=1e-6):
    assert abs(one[0] - other[0]) < atol, (name, one[0], other[0])
    torch.testing.assert_close(one[1], other[1], atol=atol, rtol=0.0, msg=name)


WHOLE = [torch.arange(ROWS)]
CUT = [torch.arange(0, 3), torch.arange(3, 4), torch.arange(4, ROWS)]

# The cuts of a mini-batch do not change its loss; presets that cannot keep this promise are refused by name.
n_exact, refused = 0, []
for preset in stapo.presets():
    try:
        close(loss_of(f"stapo/{preset}", WHOLE), loss_of(f"stapo/{preset}", CUT), preset)
        n_exact += 1
    except ValueError as error:
        assert f"stapo/{preset}" in str(error) and "hint: " in str(error), error
        refused.append(preset)
assert n_exact >= 15 and {"stapo", "kl-cov"} <= set(refused), (n_exact, refused)

# verl's own losses beside ours, with verl's own config.
actor = FSDPActorConfig(
    strategy="fsdp",
    rollout_n=2,
    ppo_micro_batch_size_per_gpu=1,
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio_c=3.0,
    optim=FSDPOptimizerConfig(lr=1e-6),
)
clip = {"surrogate.low": 0.2, "surrogate.high": 0.28, "surrogate.dual": 3.0}
stapo.verl_losses.register("own/vanilla", stapo.Objective("justrl", set=clip))
weights = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)) + 0.5
for given in (None, weights):
    close(loss_of("vanilla", CUT, actor, given), loss_of("own/vanilla", CUT, actor, given), "vanilla")
stapo.verl_losses.register("own/gspo", stapo.Objective("gspo", set={"surrogate.low": 0.2, "surrogate.high": 0.28}))
close(loss_of("gspo", CUT, actor, mode="seq-mean-token-mean"), loss_of("own/gspo", CUT, actor), "gspo")

# Advantages: every kind is registered, and those that verl has too agree with verl's.
_, _, _, mask = minibatch()
mask[6, :4] = True
rewards = torch.zeros(ROWS, WIDTH)
rewards[:, 2] = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
uid = numpy.array(["a", "a", "a", "a", "b", "b", "b", "b"], dtype=object)
given = {"token_level_rewards": rewards, "response_mask": mask.float(), "index": uid, "config": None}
for kind in stapo.verl_losses.ADVANTAGES:
    found, returns = core_algos.get_adv_estimator_fn(f"stapo/{kind}")(**given)
    assert found.shape == rewards.shape and torch.isfinite(found).all() and (found[~mask] == 0).all(), kind
for kind, theirs in (("group_z_score", "grpo"), ("leave_one_out", "rloo"), ("length_weighted_mean", "opo")):
    ours, _ = core_algos.get_adv_estimator_fn(f"stapo/{kind}")(**given)
    expected, _ = core_algos.get_adv_estimator_fn(theirs)(**given)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0.0, msg=kind)
print(
    f"verl losses: {n_exact} presets are exact under cuts, {len(refused)} refused; vanilla, gspo and three advantages equal verl's"
)
