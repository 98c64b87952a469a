"""verl's synchronous trainer with S2T, under the name `stapo_sync`.

    VERL_USE_EXTERNAL_MODULES=stapo.verl_trainer python -m verl.trainer.main_ppo trainer.v1.trainer_mode=stapo_sync ...

verl stops where an external module cannot be imported, and where the name of a trainer is unknown. The trainer gives
the actor's role to `S2TActorRolloutRefWorker`, and before the first step it asks every rank whether S2T is active
there.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import ray
from omegaconf import open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from stapo.verl import S2T, S2TActorRolloutRefWorker, refuse_unsafe_settings

__all__ = ["S2TPPOTrainerSync"]

_ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)


@register_trainer("stapo_sync")
class S2TPPOTrainerSync(PPOTrainerSync):
    """`PPOTrainerSync` whose actor is trained with S2T; settings are those of `actor_rollout_ref.s2t`."""

    def __init__(self, config: Any) -> None:
        refuse_unsafe_settings(config.actor_rollout_ref.actor)
        self.s2t = S2T(**dict(config.actor_rollout_ref.get("s2t") or {}))
        # verl chooses the replay buffer and its settings by the mode's name.
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in _ACTOR_ROLES:
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(S2TActorRolloutRefWorker)

    def on_init_end(self) -> None:
        self.assert_s2t(self.actor_rollout_wg.s2t_settings())
        super().on_init_end()

    def assert_s2t(self, ranks: list[dict[str, Any] | None]) -> None:
        """Stops a training whose ranks do not all train with the settings asked for."""
        wanted = asdict(self.s2t)
        for rank, settings in enumerate(ranks):
            if settings != wanted:
                raise RuntimeError(
                    f"rank {rank}: S2T settings {settings}, expected {wanted}\n"
                    "hint: install the same version of stapo on every node"
                )
