"""Trains models of random configs with `stapo`: gradients beside `transformers`, and runs that must have equal state hashes.

    pip install torch transformers
    python fuzz_training.py STAPO [N] [SEED] [FAMILY ...]       # N configs of each family (10), from this seed on (0)

The gradient's norm of one step of `stapo sft` may differ by 0.1 % from that of `transformers` in f64, and micro-batches, recomputation
and threads may not change a bit of the step. Then three runs of `stapo train` take random settings that may not change a bit (threads,
memory for keys and values, drafts, recomputation, micro-batches or ranks), and the third is killed and resumed: equal state hashes
after every step, and a sampled log-prob never differs from the trained one. The export of the first scores as the run, here and in
`transformers`. Exits with 1 where something is off.
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import torch
import transformers
from fuzz_families import FAMILIES, expected, model_of, scored
from make_models import LETTERS, tokenizer_of

N_STEPS = 3
REWARD = """def reward(prompt, response, reference, row):
    return float(sum(map(ord, response)) % 5 > 2)
"""


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def command(stapo, name, folder, out, keys, *arguments):
    changes = [word for key, value in keys.items() for word in ("--set", f"{key}={toml(value)}")]
    return [stapo, name, "-q", "--model", folder / "model", "--out", folder / out, *arguments, *changes]


def must(words):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.strip()
    return done.stdout


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_gradient(stapo, folder, model, lengths, r):
    """One step on texts of random letters, each ended by token 0."""
    n_letters = min(model.config.vocab_size - 1, len(LETTERS))
    texts = [[r.randint(1, n_letters) for _ in range(length - 1)] for length in lengths]
    rows = ({"text": "".join(LETTERS[token - 1] for token in text)} for text in texts)
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"steps": 1, "update.batch_rows": len(texts), "update.learning_rate": 1e-9}
    free = {
        "update.microbatch_tokens": max(lengths) + r.choice([0, 20, 100]),
        "update.recompute": r.choice(["inputs", "layers"]),
    }
    must(command(stapo, "sft", folder, "sft", keys, "--data", folder / "texts.jsonl"))
    must(command(stapo, "sft", folder, "sft-again", keys | free, "--data", folder / "texts.jsonl", "--threads", 1))
    (step,), (again,) = rows_of(folder / "sft"), rows_of(folder / "sft-again")
    assert step["state_sha256"] == again["state_sha256"], f"other bits with {free}"
    model.double()
    losses = []
    for text in texts:
        ids = torch.tensor([*text, 0])
        logp = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
        losses.append(-logp[:-1].gather(1, ids[1:, None])[:, 0])
    torch.cat(losses).mean().backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    off = abs(step["gradient_norm"] / norm - 1)
    assert off < 1e-3, f"gradient's norm {step['gradient_norm']}, expected {norm}"


def settings(folder, seed, r):
    keys = {
        "steps": N_STEPS,
        "seed": seed,
        "device": "cpu",
        "task.kind": "jsonl",
        "task.path": str(folder / "problems.jsonl"),
        "task.held_out_share": 0.0,
        "task.template": "{{ problem }}",
        "task.verifier": {"kind": "python", "file": str(folder / "reward.py"), "function": "reward"},
        "rollout.problems_per_step": 4,
        "rollout.group_size": r.choice([2, 4]),
        "rollout.max_prompt_tokens": 128,
        "rollout.max_response_tokens": r.choice([20, 70, 120]),
        "rollout.temperature": r.choice([1.0, 0.7, 1.3]),
        "update.problems_per_minibatch": 2,
        "update.learning_rate": 1e-2,
        "update.schedule.warmup_steps": 0,
        "objective.preset": r.choice(["stapo", "justrl", "grpo", "dapo"]),
        "evaluation.every_steps": 0,
        "evaluation.at_start": False,
        "evaluation.problems": 1,
        "record.state_hash_every_steps": 1,
        "record.checkpoint_every_steps": 1,
    }
    if r.random() < 0.5:
        keys |= {"update.sum": "microbatches", "update.share_prompts": r.random() < 0.7}
        keys |= {"update.microbatch_tokens": r.choice([300, 1000])}
    if r.random() < 0.3:
        keys |= {"rollout.top_k": r.choice([3, 10]), "rollout.top_p": 0.9}
    if r.random() < 0.3:
        keys |= {"model.lora.rank": r.choice([1, 2, 5])}
    return keys


def free_settings(keys, r):
    """The same settings with others that may not change a bit."""
    free = {
        "rollout.speculate": r.choice(["off", "auto"]),
        "rollout.kv_mib": r.choice(["auto", 1, 2]),
        "update.recompute": r.choice(["nothing", "inputs", "layers"]),
        "update.microbatch_tokens": r.choice([400, 1000, 8192]),
    }
    return free | keys


def killed(words, run):
    """Starts a run and kills it after its first step."""
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and "\n" in metrics.read_text():
            process.kill()
        time.sleep(0.01)


def check_runs(stapo, folder, seed, r, n_tokens):
    letters = [letter for letter in LETTERS[: n_tokens - 1] if letter.isalnum()]
    problems = ("".join(r.choices(letters, k=r.choice([3, 17, 40, 63, 64, 65, 100]))) for _ in range(12))
    rows = (json.dumps({"problem": problem, "answer": "x"}) + "\n" for problem in problems)
    (folder / "problems.jsonl").write_text("".join(rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.toml").write_text("")
    keys = settings(folder, seed, r)

    def start(out):
        threads = r.choice([1, 2, 3])
        return command(stapo, "train", folder, out, free_settings(keys, r), "--threads", threads, folder / "run.toml")

    n_ranks = r.choice([2, 3]) if keys.get("update.sum") == "microbatches" else 1
    ranks = ["launch", "-q", "--ranks", n_ranks] if n_ranks > 1 else []
    must(start("first"))
    must([stapo, *ranks, *start("second")[1:]])
    killed(start("third"), folder / "third")
    if len(rows_of(folder / "third")) < N_STEPS:
        must([stapo, "train", "-q", "--resume", folder / "third"])
    runs = [rows_of(folder / out) for out in ("first", "second", "third")]
    hashes = [[row["state_sha256"] for row in rows] for rows in runs]
    assert len(hashes[0]) == N_STEPS and hashes[0] == hashes[1] == hashes[2], f"{hashes} of {keys}"
    exactness = {row["exactness_max_abs"] for rows in runs for row in rows}
    assert exactness == {0.0}, f"sampled and trained log-probs differ by {exactness} of {keys}"
    return sum(row["decoding"]["accepted"] for rows in runs for row in rows), "model.lora.rank" in keys


def check_export(stapo, folder, has_adapters, lengths):
    """The exported policy of a run is that of the run, for `transformers` too."""
    merge = ["--merge"] if has_adapters else []
    must([stapo, "export", "-q", "--f32", *merge, folder / "first", "--out", folder / "exported"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported", attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(sum(lengths))
    sequences = [torch.randint(0, model.config.vocab_size, (length,), generator=draw) for length in lengths]
    trained, exported = (torch.cat(scored(stapo, folder / of, sequences)).double() for of in ("first", "exported"))
    single = expected(model, sequences)
    double = expected(model.double(), sequences)
    assert has_adapters or torch.equal(trained, exported), "the export has other bits than the run"
    off, rounding = ((logp - double).abs().max().item() for logp in (trained, single))
    assert off < max(2e-4, 10 * rounding), f"export off by {off}, transformers in f32 by {rounding}"


def check(stapo, family, seed):
    """The number of accepted drafts, or what is wrong; None where `transformers` refuses the config."""
    made = model_of(family, seed)
    if made is None:
        return None
    model, lengths = made
    r = random.Random(f"{family}-{seed}-runs")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model.save_pretrained(folder / "model")
        tokenizer_of(model.config.vocab_size).save_pretrained(folder / "model")
        try:
            check_gradient(stapo, folder, model, lengths, r)
            n_drafted, has_adapters = check_runs(stapo, folder, seed, r, model.config.vocab_size)
            # transformers chooses LongRoPE's factors by the length of each call, a run by its longest sequence.
            if model.config.rope_parameters.get("rope_type") != "longrope":
                check_export(stapo, folder, has_adapters, lengths)
            return n_drafted
        except AssertionError as wrong:
            return f"{wrong}\n{(folder / 'model/config.json').read_text()}"


def main(stapo, n=10, first=0, *families):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    n_wrong = 0
    for family in families or FAMILIES:
        found = {seed: check(stapo, family, seed) for seed in range(int(first), int(first) + int(n))}
        found = {seed: result for seed, result in found.items() if result is not None}
        wrong = {seed: text for seed, text in found.items() if isinstance(text, str)}
        for seed, text in wrong.items():
            print(f"{family} {seed}: {text}")
        n_drafted = sum(n for n in found.values() if isinstance(n, int))
        print(f"{family}: {len(found) - len(wrong)} of {len(found)} right, {n_drafted} drafts accepted", flush=True)
        n_wrong += len(wrong)
    sys.exit(n_wrong > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
