"""S2T inside verl, for real: verl's own worker and FSDP engine on CPU ranks, against `stapo objective`.

Run by peers.sh as `torchrun --nproc_per_node 2 peer_verl.py FOLDER`; the environment variable STAPO names the program.

What is real: verl's `TrainingWorker` with its FSDP2 engine, loss (`ppo_loss`), micro-batches, gradient accumulation and
optimizer, on two ranks that talk through gloo. What is not: verl registers its engine for accelerators only, so this
program describes the CPU to verl (`CpuPlatform`) and registers the same engine class for it; responses are random
tokens, not samples of an inference engine; there is no Ray. The trainer's part is checked on verl's own configuration:
its workers are S2T's, and it stops where a rank has S2T not active.
"""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

# verl 0.9.1 loads no model where it finds TRL 1.16, which lacks a class that verl changes: here it finds no TRL.
sys.modules["trl"] = None

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from verl.plugin.platform import PlatformBase, set_platform  # noqa: E402


class CpuPlatform(PlatformBase):
    """The CPU as verl's accelerator. What only GPUs have does nothing."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        mem_get_info=lambda *_: (0, 1),
        empty_cache=lambda: None,
        get_device_name=lambda *_: "CPU",
    )

    def current_device(self):
        return "cpu"

    def communication_backend_name(self):
        return "gloo"

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def device_count(self):
        return 1

    def visible_devices_envvar(self):
        return "CPU_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []


def nothing(*_args, **_kwargs):
    return None


for name in PlatformBase.__abstractmethods__:
    if name not in vars(CpuPlatform):
        setattr(CpuPlatform, name, nothing)
CpuPlatform.__abstractmethods__ = frozenset()
set_platform(CpuPlatform())

from tensordict import TensorDict  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding  # noqa: E402

from stapo.verl import S2T, S2TTrainingWorker, compute_score, refuse_unsafe_settings  # noqa: E402

EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)

N_STEPS = 10
TAU_P = 0.01
TOLERANCE = 1e-6
VOCABULARY = 48
# Per rank: responses of a mini-batch, and of a micro-batch.
N_MINI, N_MICRO = 8, 4
STAPO = os.environ["STAPO"]


def save_model(folder):
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.35,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = {str(n): n for n in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="2"))
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="0", eos_token="1", unk_token="2").save_pretrained(folder)


def worker(cls, folder):
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(folder),
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=N_MICRO,
            infer_micro_batch_size_per_gpu=N_MICRO,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=2e-3, total_training_steps=N_STEPS, lr_warmup_steps=0),
        checkpoint_config=CheckpointConfig(),
    )
    made = cls(config=config)
    made.reset()
    made.set_loss_fn(Recorded())
    return made


class Recorded:
    """verl's `ppo_loss`, which notes what it was given and what it returned, for each micro-batch."""

    def __init__(self):
        self.seen = []
        self.loss = partial(
            ppo_loss,
            config=FSDPActorConfig(
                strategy="fsdp2",
                rollout_n=1,
                ppo_micro_batch_size_per_gpu=N_MICRO,
                clip_ratio_low=0.2,
                clip_ratio_high=0.28,
                clip_ratio_c=10.0,
                loss_agg_mode="token-mean",
            ),
        )

    def __call__(self, model_output, data, dp_group=None):
        # The loss gets a copy of the log-probs whose derivatives can be read afterwards.
        given = model_output["log_probs"]
        flat = given.values().clone()
        if flat.requires_grad:
            flat.retain_grad()
        copied = torch.nested.nested_tensor_from_jagged(flat, offsets=given.offsets())
        loss, metrics = self.loss(model_output={**model_output, "log_probs": copied}, data=data, dp_group=dp_group)
        mask = data["response_mask"]
        responses = data["responses"]
        if responses.is_nested:
            lengths = responses.offsets().diff()
        else:
            lengths = data["attention_mask"][:, -responses.shape[1] :].sum(1)
        self.seen.append(
            {
                "flat": flat,
                "kept": (mask.to_padded_tensor(0) if mask.is_nested else mask).bool(),
                "lengths": lengths.tolist(),
                "sequences": given.offsets().tolist(),
            }
        )
        return loss, metrics

    def rows(self, first, last):
        """Kept flags, log-probs and derivatives of each response's tokens, of the given micro-batches."""
        rows = {"kept": [], "logp": [], "d_logp": []}
        for seen in self.seen[first:last]:
            for row, length in enumerate(seen["lengths"]):
                end = seen["sequences"][row + 1] - 1  # The value before a token is that token's.
                rows["kept"].append(seen["kept"][row, :length].tolist())
                rows["logp"].append(seen["flat"].detach()[end - length : end].double().tolist())
                rows["d_logp"].append(seen["flat"].grad[end - length : end].double().tolist())
        return rows


def minibatch(step, layout):
    """The rank's part of a mini-batch: random prompts and responses, nested or with padding on both sides."""
    random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=random))
    n_prompt, n_response = 6, 12
    prompts = torch.zeros(N_MINI, n_prompt, dtype=torch.long)
    responses = torch.zeros(N_MINI, n_response, dtype=torch.long)
    attention = torch.zeros(N_MINI, n_prompt + n_response, dtype=torch.long)
    for row in range(N_MINI):
        p, r = number(2, n_prompt + 1), number(3, n_response + 1)
        prompts[row, -p:] = torch.randint(3, VOCABULARY, (p,), generator=random)
        responses[row, :r] = torch.randint(3, VOCABULARY, (r,), generator=random)
        attention[row, n_prompt - p : n_prompt + r] = 1
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    mask = attention[:, n_prompt:].clone()
    mask[0, 1] = 0  # A token of the environment, which is in no loss.
    advantages = torch.randn(N_MINI, 1, generator=random) * torch.ones(1, n_response)
    if step == 3 and dist.get_rank() == 1:
        advantages = -advantages.abs()  # This rank has no candidate.
    data = TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": positions,
            "response_mask": mask,
            "advantages": advantages * mask,
            "old_log_probs": torch.zeros(N_MINI, n_response),
            "noise": 0.15 * torch.randn(N_MINI, n_response, generator=random),
        },
        batch_size=N_MINI,
    )
    data = left_right_2_no_padding(data)
    if layout == "nested":
        lengths = attention[:, n_prompt:].sum(1)
        for name in ("responses", "response_mask", "advantages", "old_log_probs", "loss_mask", "noise"):
            rows = [data[name][row, : lengths[row]] for row in range(N_MINI)]
            data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        rows = [prompts[row, attention[row, :n_prompt].bool()] for row in range(N_MINI)]
        data["prompts"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        tu.pop(data, key="max_response_len")
        data.pop("attention_mask")
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=False,
        global_batch_size=N_MINI * dist.get_world_size(),
        mini_batch_size=N_MINI * dist.get_world_size(),
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        compute_loss=False,
    )
    return data


def train(cls, folder, layout, s2t=None):
    made = worker(cls, folder)
    if s2t is not None or cls is S2TTrainingWorker:
        made.s2t = s2t
    losses = []
    for step in range(1, N_STEPS + 1):
        data = minibatch(step, layout)
        # The behaviour policy is the current one, a little off.
        logp = no_padding_2_padding(tu.get(made.infer_batch(data.copy()), "log_probs"), data)
        noise = data.pop("noise")
        if noise.is_nested:
            rows = [logp[row, : len(n)] + n for row, n in enumerate(noise.unbind())]
            data["old_log_probs"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        else:
            data["old_log_probs"] = logp + noise
        output = made.train_mini_batch(data)
        losses.append(tu.get(output, "metrics")["loss"][0])
    return made, losses


def compare(layout, dump, made, losses):
    """Every optimizer step against `stapo objective`: masks, loss and derivatives. Rank 0 compares."""
    per_step = N_MINI // N_MICRO
    mine = [made.loss_fn.rows(step * per_step, (step + 1) * per_step) for step in range(N_STEPS)]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() != 0:
        return
    n_ranks, n_silenced, n_tokens, worst = len(everyone), 0, 0, 0.0
    for step in range(N_STEPS):
        files = sorted(dump.glob(f"step-{step + 1:06d}-rank-*.jsonl"))
        assert len(files) == n_ranks, files
        lines = "".join(file.read_text() for file in files)
        command = [STAPO, "objective", "--spec", "stapo"]
        for override in [f"masks.0.tau_p={TAU_P}", "surrogate.dual=10.0"]:
            command += ["--set", override]
        result = subprocess.run(command + ["-"], input=lines, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        *responses, total = [json.loads(line) for line in result.stdout.splitlines()]
        # The dump leaves tokens outside the response mask out; the first row of a rank has one at place 1.
        kept, derivatives, logp = [], [], []
        for rank in everyone:
            for row in range(N_MINI):
                places = [t for t in range(len(rank[step]["kept"][row])) if not (row == 0 and t == 1)]
                kept.append([rank[step]["kept"][row][t] for t in places])
                logp.append([rank[step]["logp"][row][t] for t in places])
                derivatives += [rank[step]["d_logp"][row][t] for t in places]
                assert row != 0 or rank[step]["kept"][row][1] is False
        assert [r["kept"] for r in responses] == kept, f"{layout} {step}: masks"
        dumped = [json.loads(line)["logp"] for line in lines.splitlines()]
        assert dumped == logp, f"{layout} {step}: log-probs of the two passes"
        expected = [d for r in responses for d in r["d_logp"]]
        largest = max(abs(d) for d in expected)
        error = abs(losses[step] - total["loss"])
        error = max([error] + [abs(d / n_ranks - e) / largest for d, e in zip(derivatives, expected, strict=True)])
        assert error < TOLERANCE, f"{layout} step {step + 1}: error {error}, {losses[step]}, expected {total['loss']}"
        worst = max(worst, error)
        n_silenced += total["n_silenced"]
        n_tokens += total["n_tokens"]
    assert n_silenced > 20, f"{layout}: {n_silenced} silenced tokens are too few to show anything"
    print(
        f"verl {layout}: {N_STEPS} mini-batches x {n_ranks} ranks x {per_step} micro-batches of verl's TrainingWorker "
        f"and FSDP2 engine on the CPU, {n_silenced} of {n_tokens} tokens silenced; masks equal, loss and derivatives "
        f"(as shares of the largest) within {worst:.1e} of stapo objective",
        flush=True,
    )


def parameters(made):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in made.engine.module.parameters()]


def refused():
    actor = lambda **keys: SettingsLike(
        {"strategy": "fsdp2", "policy_loss": {"loss_mode": "vanilla"}, "loss_agg_mode": "token-mean"} | keys
    )
    refuse_unsafe_settings(actor())
    for keys, name in [
        ({"strategy": "megatron"}, "megatron"),
        ({"policy_loss": {"loss_mode": "clip_cov"}}, "clip_cov"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_scale_factor"),
    ]:
        try:
            refuse_unsafe_settings(actor(**keys))
        except ValueError as error:
            assert name in str(error) and "hint:" in str(error), error
        else:
            raise AssertionError(f"{keys} was not refused")


class SettingsLike(dict):
    __getattr__ = dict.__getitem__


def trainer_uses_the_worker():
    """verl's configuration, composed by Hydra, leads to S2T's trainer and worker; a rank without S2T stops it."""
    import verl.trainer
    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.trainer.ppo.v1 import get_trainer_cls

    import stapo.verl_trainer
    from stapo.verl import S2TActorRolloutRefWorker

    with initialize_config_dir(str(Path(verl.trainer.__file__).parent / "config"), version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                "trainer.v1.trainer_mode=stapo_sync",
                "+actor_rollout_ref.s2t.tau_p=0.001",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
                "reward.custom_reward_function.path=pkg://stapo.verl",
                "reward.custom_reward_function.name=compute_score",
            ],
        )
    score = get_custom_reward_fn(config)
    assert score(data_source="math", solution_str=r"\boxed{7}", ground_truth="7")["score"] == 1.0
    cls = get_trainer_cls(config.trainer.v1.trainer_mode)
    assert cls is stapo.verl_trainer.S2TPPOTrainerSync
    trainer = cls(config)
    assert (trainer.trainer_mode, trainer.s2t) == ("sync", S2T(tau_p=0.001))
    trainer._init_resource_pool_mgr()
    made = [remote.__ray_metadata__.modified_class for remote in trainer.role_worker_mapping.values()]
    assert any(issubclass(cls, S2TActorRolloutRefWorker) for cls in made), made
    right = dataclasses.asdict(trainer.s2t)
    trainer.assert_s2t([right, right])
    for wrong in [None, right | {"tau_p": 0.002}]:
        try:
            trainer.assert_s2t([right, wrong])
        except RuntimeError as error:
            assert "rank 1" in str(error), error
        else:
            raise AssertionError("a rank without S2T was not noticed")
    print("verl trainer: stapo_sync gives the actor's role to S2T's worker, and stops where a rank has S2T not active")


def scores():
    right = compute_score("math", r"so \boxed{\frac{1}{2}}", "0.5")
    assert (right["score"], right["acc"], right["pred"]) == (1.0, True, r"\frac{1}{2}"), right
    wrong = compute_score("math", "no answer", "0.5", extra_info={})
    assert (wrong["score"], wrong["acc"], wrong["pred"]) == (0.0, False, ""), wrong


def main():
    scores()
    folder = Path(sys.argv[1]).absolute()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        save_model(folder / "model")
    dist.barrier()
    for layout in ["nested", "padded"]:
        dump = folder / layout
        made, losses = train(S2TTrainingWorker, folder / "model", layout, S2T(tau_p=TAU_P, dump=str(dump)))
        dist.barrier()
        compare(layout, dump, made, losses)
    plain, plain_losses = train(TrainingWorker, folder / "model", "nested")
    for name, settings in [("off", None), ("none", S2T(tau_p=1e-30))]:
        other, losses = train(S2TTrainingWorker, folder / "model", "nested", settings)
        assert losses == plain_losses, name
        assert all(torch.equal(a, b) for a, b in zip(parameters(plain), parameters(other))), name
        if dist.get_rank() == 0:
            print(
                f"verl {name}: losses and weights after {N_STEPS} steps are those of plain verl, bit for bit",
                flush=True,
            )
    refused()
    if dist.get_rank() == 0:
        trainer_uses_the_worker()
    dist.barrier()
    dist.destroy_process_group()


main()
