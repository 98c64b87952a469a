"""S2T inside TRL, for real: trains a tiny random model and compares every optimizer step with `stapo objective`.

Run by peers.sh as `torchrun --nproc_per_node 2 peer_trl.py FOLDER`; the environment variable STAPO names the program.

Four trainings of ten optimizer steps, on two processes with two accumulation steps each:
- `dapo`: S2T with TRL's default loss; two optimizer steps per generation, so that ratios are not 1;
- `grpo`: S2T with a mean over responses; every generation is used twice (num_iterations = 2);
- `off` against `plain`: `S2TGRPOTrainer(s2t=None)` and TRL's own trainer give the same weights, bit for bit;
- `none` against `plain`: S2T with a threshold that no token reaches does too.

Then `ObjectiveGRPOTrainer`: its derivatives are those of TRL's own loss, and with the preset `stapo` those of S2T.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import stapo
from stapo.trl import S2T, ObjectiveGRPOTrainer, S2TGRPOTrainer, math_reward

N_STEPS = 10
TAU_P = 0.01
TOLERANCE = 1e-6
STAPO = os.environ["STAPO"]


def tokenizer():
    words = ["<pad>", "<eos>", "<unk>"] + [str(n) for n in range(45)]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model():
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=48,
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
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


def reward(completion_ids, **_):
    """Odd tokens are good: some responses of a group get more than others."""
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


class Recorder:
    """Notes what TRL's loss was given and what it returned, for each micro-batch."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if result[0].requires_grad:
            result[0].retain_grad()
            self.logp = result[0]
        return result

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        tool_mask = inputs.get("tool_mask")
        kept = inputs["completion_mask"] if tool_mask is None else inputs["completion_mask"] * tool_mask
        self.seen.append(
            {
                "step": self.state.global_step + 1,
                "loss": loss.detach().double().item(),
                "in_loss": inputs["completion_mask"].bool(),
                "kept": kept.bool(),
                "logp": self.logp,
            }
        )
        return loss


class RecordedS2T(Recorder, S2TGRPOTrainer):
    pass


class RecordedPlain(Recorder, GRPOTrainer):
    pass


class RecordedObjective(Recorder, ObjectiveGRPOTrainer):
    pass


def train(folder, trainer_cls, s2t_kwargs, **settings):
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=12,
        max_steps=N_STEPS,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        log_completions=False,
        seed=3,
        **settings,
    )
    policy = model()
    if config.beta:
        # TRL loads the reference by the name of the model.
        policy.save_pretrained(folder / f"model-{os.environ['RANK']}")
        policy.config._name_or_path = str(folder / f"model-{os.environ['RANK']}")
    prompts = [" ".join(str((3 * n + k) % 45) for k in range(2 + n % 4)) for n in range(64)]
    trainer = trainer_cls(
        model=policy,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        **s2t_kwargs,
    )
    trainer.train()
    return trainer


def rows_of(trainer):
    """Per optimizer step: the loss of this process, and kept flags and derivatives of each response's tokens."""
    steps = {}
    for batch in trainer.seen:
        step = steps.setdefault(batch["step"], {"loss": 0.0, "kept": [], "d_logp": [], "logp": []})
        step["loss"] += batch["loss"]
        for row in range(len(batch["in_loss"])):
            inside = batch["in_loss"][row]
            step["kept"].append(batch["kept"][row][inside].tolist())
            step["d_logp"].append(batch["logp"].grad[row][inside].double().tolist())
            step["logp"].append(batch["logp"].detach()[row][inside].double().tolist())
    return steps


def compare(name, folder, trainer, overrides):
    """Every optimizer step against `stapo objective`: masks, loss and derivatives. Rank 0 compares."""
    mine = rows_of(trainer)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() != 0:
        return
    n_ranks, n_silenced, n_tokens, worst = len(everyone), 0, 0, 0.0
    assert sorted(mine) == list(range(1, N_STEPS + 1)), sorted(mine)
    for step in range(1, N_STEPS + 1):
        files = sorted(folder.glob(f"step-{step:06d}-rank-*.jsonl"))
        assert len(files) == n_ranks, files
        lines = "".join(file.read_text() for file in files)
        command = [STAPO, "objective", "--spec", "stapo"]
        for override in overrides:
            command += ["--set", override]
        result = subprocess.run(command + ["-"], input=lines, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        *responses, total = [json.loads(line) for line in result.stdout.splitlines()]
        ours = [rank[step] for rank in everyone]
        assert [r["kept"] for r in responses] == [row for rank in ours for row in rank["kept"]], f"{name} {step}: masks"
        dumped = [json.loads(line)["logp"] for line in lines.splitlines()]
        assert dumped == [row for rank in ours for row in rank["logp"]], f"{name} {step}: log-probs of the two passes"
        loss = sum(rank["loss"] for rank in ours) / n_ranks
        error = abs(loss - total["loss"])
        derivatives = [d for rank in ours for row in rank["d_logp"] for d in row]
        expected = [d for r in responses for d in r["d_logp"]]
        largest = max(abs(d) for d in expected)
        error = max([error] + [abs(d / n_ranks - e) / largest for d, e in zip(derivatives, expected)])
        assert error < TOLERANCE, f"{name} step {step}: error {error}, loss {loss}, expected {total['loss']}"
        worst = max(worst, error)
        n_silenced += total["n_silenced"]
        n_tokens += total["n_tokens"]
    assert n_silenced > 20, f"{name}: {n_silenced} silenced tokens are too few to show anything"
    print(
        f"trl {name}: {N_STEPS} steps x {n_ranks} processes x 2 accumulation steps, {n_silenced} of {n_tokens} tokens "
        f"silenced; masks equal, "
        f"loss and derivatives (as shares of the largest) within {worst:.1e} of stapo objective",
        flush=True,
    )


def fates_by_micro_batch(folder):
    """What a quantile per micro-batch would do to the silenced tokens of a training: how many, how many differ."""
    n_silenced = n_other = 0
    for file in sorted(folder.glob("step-*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for first in range(0, len(rows), 4):
            tokens = [
                (kept, row["advantage"] > 0 and logp < math.log(TAU_P), entropy)
                for row in rows[first : first + 4]
                for kept, logp, entropy in zip(row["kept"], row["logp"], row["entropy"])
            ]
            entropies = [entropy for _, is_candidate, entropy in tokens if is_candidate]
            tau_h = torch.quantile(torch.tensor(entropies, dtype=torch.float64), 0.75).item() if entropies else 0.0
            n_silenced += sum(not kept for kept, _, _ in tokens)
            n_other += sum((not kept) != (is_one and entropy < tau_h) for kept, is_one, entropy in tokens)
    return n_silenced, n_other


def refused(folder):
    for settings, name in [
        ({"steps_per_generation": 1}, "steps_per_generation"),
        ({"steps_per_generation": 3}, "steps_per_generation"),
        ({"loss_type": "bnpo"}, "bnpo"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        ({"entropy_coef": 0.01}, "entropy_coef"),
    ]:
        try:
            train(folder, S2TGRPOTrainer, {}, **settings)
        except ValueError as error:
            assert name in str(error) and "hint:" in str(error), error
        else:
            raise AssertionError(f"{settings} was not refused")


def same_derivatives(name, one, other):
    """The first two optimizer steps of two trainings: loss and derivatives of every micro-batch."""
    pairs = [(a, b) for a, b in zip(one.seen, other.seen) if a["step"] <= 2]
    assert len(pairs) == 4 and all(a["step"] == b["step"] for a, b in pairs)
    worst = 0.0
    for a, b in pairs:
        largest = a["logp"].grad.abs().max().item()
        worst = max(worst, (a["logp"].grad - b["logp"].grad).abs().max().item() / largest)
    for step in (1, 2):
        of_step = lambda trainer: sum(batch["loss"] for batch in trainer.seen if batch["step"] == step)
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, (of_step(one), of_step(other)))
        ours, theirs = (sum(pair[side] for pair in losses) / len(losses) for side in (0, 1))
        worst = max(worst, abs(ours - theirs))
    assert worst < 1e-5, (name, worst)
    if dist.get_rank() == 0:
        print(f"trl {name}: loss and derivatives within {worst:.1e} of TRL's own loss", flush=True)


def objectives(folder):
    clip = {"surrogate.low": 0.2, "surrogate.high": 0.2}
    # With more steps per generation TRL divides by the mean count of tokens of these steps.
    theirs = train(folder, RecordedPlain, {}, loss_type="dapo", steps_per_generation=2)
    ours = train(folder, RecordedObjective, {"objective": stapo.Objective("dapo", set=clip)}, steps_per_generation=2)
    same_derivatives("objective dapo", theirs, ours)
    theirs = train(
        folder, RecordedPlain, {}, loss_type="grpo", beta=0.04, use_bias_correction_kl=False, steps_per_generation=4
    )
    ours = train(folder, RecordedObjective, {"objective": "grpo"}, beta=0.04, steps_per_generation=4)
    same_derivatives("objective grpo with its KL", theirs, ours)
    theirs = train(folder, RecordedS2T, {"s2t": S2T(tau_p=TAU_P)}, loss_type="dapo", steps_per_generation=4)
    spec = stapo.Objective("stapo", set={"masks.0.tau_p": TAU_P, **clip, "surrogate.dual": 1e9})
    ours = train(folder, RecordedObjective, {"objective": spec}, steps_per_generation=4)
    same_derivatives("objective stapo", theirs, ours)
    for settings, expected in [({"beta": 0.1}, "beta"), ({"objective": "lopti"}, "passes")]:
        chosen = {"objective": settings.pop("objective", "dapo")}
        try:
            train(folder, ObjectiveGRPOTrainer, chosen, **settings)
        except ValueError as error:
            assert expected in str(error) and "hint:" in str(error), error
        else:
            raise AssertionError(f"{chosen} {settings} was not refused")


def rewards():
    texts = [r"so \boxed{\frac{1}{2}}", [{"role": "assistant", "content": r"\boxed{3}"}], "no answer", r"\boxed{1}"]
    assert math_reward(completions=texts, prompts=[], answer=["0.5", "4", "1", None]) == [1.0, 0.0, 0.0, None]
    assert math_reward(completions=texts[:1], solution=[r"\frac12"]) == [1.0]
    try:
        math_reward(completions=texts, label=["1"] * 4)
    except ValueError as error:
        assert "answer" in str(error)
    else:
        raise AssertionError("a dataset without a reference was not refused")


def main():
    rewards()
    folder = Path(sys.argv[1])
    if "objectives" in sys.argv[2:]:
        objectives(folder)
        dist.destroy_process_group()
        return
    s2t = lambda name: {"s2t": S2T(tau_p=TAU_P, dump=str(folder / name))}
    bounds = [f"masks.0.tau_p={TAU_P}", "surrogate.low=0.2", "surrogate.high=0.2"]

    trainer = train(folder, RecordedS2T, s2t("dapo"), loss_type="dapo", steps_per_generation=4)
    compare("dapo", folder / "dapo", trainer, bounds)
    if dist.get_rank() == 0:
        n_silenced, n_other = fates_by_micro_batch(folder / "dapo")
        print(
            f"trl dapo: a quantile per micro-batch would decide otherwise on {n_other} tokens, of {n_silenced} silenced"
        )
    trainer = train(folder, RecordedS2T, s2t("grpo"), loss_type="grpo", steps_per_generation=2, num_iterations=2)
    means = ["aggregate.kind=sequence_mean_of_token_mean", "denominator.silenced_responses=stay"]
    compare("grpo", folder / "grpo", trainer, bounds + means)

    plain = train(folder, RecordedPlain, {}, steps_per_generation=2)
    for name, settings in [("off", None), ("none", S2T(tau_p=1e-30))]:
        other = train(folder, RecordedS2T, {"s2t": settings}, steps_per_generation=2)
        assert [seen["loss"] for seen in plain.seen] == [seen["loss"] for seen in other.seen], name
        pairs = list(zip(plain.model.parameters(), other.model.parameters()))
        assert pairs and all(torch.equal(a, b) for a, b in pairs), name
        if dist.get_rank() == 0:
            print(
                f"trl {name}: losses and weights after {N_STEPS} steps are those of plain TRL, bit for bit", flush=True
            )
    changed = train(folder, RecordedS2T, {"s2t": S2T(tau_p=TAU_P)}, steps_per_generation=2)
    assert not all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), changed.model.parameters()))
    refused(folder)
    objectives(folder)
    dist.barrier()
    dist.destroy_process_group()


main()
