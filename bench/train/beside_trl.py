"""`stapo train` beside TRL's GRPOTrainer: same built-in model, task, problems, batch and machine.

    python bench/train/beside_trl.py --stapo target/release/stapo --steps 20 --out trl.json --plot trl.png

A step is one rollout batch (32 problems x 8 responses), its scoring, and two optimizer steps of 16 problems each, without
a KL penalty: preset `justrl` in stapo, `loss_type="dapo"` with `beta=0` in TRL (the same loss as long as no ratio leaves the
dual clip). stapo also records tokens, state hashes and checkpoints, as it always does. Both see the problems in the same
order. TRL's reward function is a regular expression, the cheapest possible. Both are evaluated on the held-out problems
before and after.
Needs torch, transformers, trl, datasets; matplotlib for --plot.
"""

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS, SAMPLES, LIMIT = 32, 8, 96


def problems(stapo, split, n):
    command = [stapo, "problems", "--split", split, "-n", str(n), "--json"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def ours(stapo, steps, threads):
    """Seconds of each step and the accuracies."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["objective.preset=justrl", f"steps={steps}", "evaluation.every_steps=0"]
        command = [stapo, "train", "--json", "--threads", str(threads), "--out", f"{folder}/run"]
        command += [part for setting in settings for part in ("--set", setting)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        times, accuracy, held_out, last = [], [], [], None
        for line in process.stdout:
            now, record = time.perf_counter(), json.loads(line)
            times += [now - last] if last is not None else []
            last = now
            accuracy.append(record["accuracy"])
            held_out += [record[key] for key in ("eval_accuracy_before", "eval_accuracy") if record.get(key) is not None]
        if process.wait() != 0:
            raise SystemExit("stapo train failed")
        # The time of the last step includes the held-out evaluation, so it is left out.
        return {"seconds": times[:-1], "accuracy": accuracy, "held_out": held_out}


def is_right(text, reference):
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return bool(boxes) and boxes[-1] == reference


def theirs(stapo, steps, threads):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/base")
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models/base", dtype=torch.float32)

    def held_out():
        rows = problems(stapo, "held-out", 256)
        inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
        torch.manual_seed(0)
        tokens = model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=True, temperature=1.0,
            top_p=1.0, top_k=0, max_new_tokens=LIMIT, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(tokens[:, inputs.input_ids.shape[1]:], skip_special_tokens=True)
        return sum(is_right(text, row["reference"]) for text, row in zip(texts, rows)) / len(rows)

    accuracy, times = [], []

    def reward(completions, reference, **_):
        right = [is_right(text, answer) for text, answer in zip(completions, reference)]
        accuracy.append(sum(right) / len(right))
        return [1.0 if r else -1.0 for r in right]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.last = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % 2 == 0:
                now = time.perf_counter()
                times.append(now - self.last)
                self.last = now

    rows = problems(stapo, "train", steps * PROBLEMS)
    data = Dataset.from_list([{"prompt": row["prompt"], "reference": row["reference"]} for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1000,
            disable_tqdm=True, max_steps=2 * steps, per_device_train_batch_size=PROBLEMS * SAMPLES // 2,
            gradient_accumulation_steps=1, steps_per_generation=2, num_generations=SAMPLES, shuffle_dataset=False,
            max_completion_length=LIMIT, temperature=1.0, top_p=1.0, top_k=0, beta=0.0, loss_type="dapo",
            epsilon=0.2, epsilon_high=0.28, scale_rewards="group", learning_rate=1e-4, weight_decay=0.1,
            lr_scheduler_type="constant_with_warmup", warmup_steps=5, max_grad_norm=1.0,
            gradient_checkpointing=False, seed=0)
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer,
            callbacks=[Clock()])
        before = held_out()
        trainer.train()
        return {"seconds": times[1:], "accuracy": accuracy, "held_out": [before, held_out()]}


def plot(result, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, color in (("stapo", "#0072b2"), ("trl", "#d55e00")):
        side = result[name]
        percent = [100 * value for value in side["accuracy"]]
        by_step.plot(range(1, len(percent) + 1), percent, color=color, label=name)
        pace = statistics.median(side["seconds"])
        by_time.plot([pace * (i + 1) for i in range(len(percent))], percent, color=color, label=name)
    by_step.set(xlabel="step (256 responses)", ylabel="training accuracy, %", title="by step")
    by_time.set(xlabel="seconds", title="by wall-clock time")
    by_step.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stapo", default=str(ROOT / "target/release/stapo"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out")
    parser.add_argument("--plot")
    args = parser.parse_args()
    result = {"stapo": ours(args.stapo, args.steps, args.threads)}
    result["trl"] = theirs(args.stapo, args.steps, args.threads)
    rows = {name: statistics.median(side["seconds"]) for name, side in result.items()}
    print(f"{'':6} {'s/step':>8} {'held-out before':>16} {'after':>8}")
    for name, side in result.items():
        before, after = side["held_out"][0], side["held_out"][-1]
        print(f"{name:6} {rows[name]:8.3f} {100 * before:14.1f} % {100 * after:6.1f} %")
    print(f"ratio  {rows['trl'] / rows['stapo']:8.2f}  (median of {len(result['stapo']['seconds'])} and {len(result['trl']['seconds'])} steps)")
    if args.out:
        Path(args.out).write_text(json.dumps(result))
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
