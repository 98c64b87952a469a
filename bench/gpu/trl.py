"""A whole RL step of TRL's GRPOTrainer with vLLM on the same GPU, beside `stapo train`.

    python bench/gpu/trl.py --model Qwen/Qwen2.5-1.5B --data gsm8k-train.jsonl --stapo target/release/stapo --steps 20

Both sides: 64 problems x 8 responses of at most 512 tokens, four optimizer steps of 16 problems, temperature 1, group-normalised
rewards, DAPO's token-mean loss with clipping 0.2 and 0.28, no KL penalty, learning rate 1e-6. Prints one JSON object for each side:
seconds of a step (median behind the first two), peak memory of the GPU, the largest difference between the log-prob of a token at
sampling and in training, and the accuracy of the first and the last three steps.

The data are JSON lines with `problem` and `answer`. TRL's side follows its documented interface (`GRPOConfig(use_vllm=True,
vllm_mode="colocate")`) and takes about half a minute a step on one H200. Needs torch, trl, vllm, datasets and, for memory, nvidia-smi; a
side that cannot run says why.
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# The folder of this script holds a file of the package's name.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

PROBLEMS, SAMPLES, LIMIT, UPDATES = 64, 8, 512, 4
TEMPLATE = "{{ problem }}\n\nPlease reason step by step, and put your final answer within \\boxed{}."


class Memory(threading.Thread):
    """The most memory of the GPU in use, asked twice a second, in GiB."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most = 0.0

    def run(self):
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while True:
            try:
                used = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return
            self.most = max(self.most, float(used.split()[0]) / 1024)
            time.sleep(0.5)


def progress(side, seconds, accuracy, memory):
    if seconds:
        step = f"{side}: step {len(seconds)}, {seconds[-1]:.2f} s, accuracy {accuracy[-1]:.3f}, {memory.most:.1f} GiB so far"
        print(step, file=sys.stderr, flush=True)


def summary(side, seconds, memory, mismatch, accuracy):
    steady = seconds[2:] or seconds
    return {
        "side": side, "seconds": round(statistics.median(steady), 2), "gib": round(memory.most, 1), "max_mismatch": mismatch,
        "accuracy_first": statistics.mean(accuracy[:3]), "accuracy_last": statistics.mean(accuracy[-3:]), "steps": len(seconds),
    }


def ours(args):
    memory = Memory()
    memory.start()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.toml")
        config.write_text(f"""
            name = "beside-trl"
            steps = {args.steps}
            device = "cuda"
            model = {{ kind = "path", path = {json.dumps(str(Path(args.model).resolve()))} }}
            objective = {{ preset = "justrl" }}
            task = {{ kind = "jsonl", path = {json.dumps(str(Path(args.data).resolve()))}, template = {json.dumps(TEMPLATE)} }}
            [rollout]
            problems_per_step = {PROBLEMS}
            group_size = {SAMPLES}
            max_prompt_tokens = 512
            max_response_tokens = {LIMIT}
            chat = true
            [update]
            problems_per_minibatch = {PROBLEMS // UPDATES}
            learning_rate = 1e-6
            weight_decay = 0.01
            [evaluation]
            every_steps = 0
            best = "none"
            [record]
            checkpoint_every_steps = {args.steps}
        """)
        command = [args.stapo, "train", str(config), "--json", "--out", f"{folder}/run"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        seconds, accuracy, mismatch, last = [], [], 0.0, None
        for line in process.stdout:
            now, record = time.perf_counter(), json.loads(line)
            seconds += [now - last] if last is not None else []
            last = now
            accuracy.append(record["accuracy"])
            progress("stapo", seconds, accuracy, memory)
            mismatch = max(mismatch, record.get("exactness_max_abs") or 0.0)
        if process.wait() != 0:
            raise SystemExit("stapo train failed")
    return summary("stapo", seconds, memory, mismatch, accuracy)


def theirs(args):
    missing = [name for name in ("torch", "trl", "vllm", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        return {"side": "trl", "skipped": f"not installed: {', '.join(missing)}"}
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback

    # By line feeds alone: texts may hold other characters that end a line.
    with open(args.data, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    prompts = [
        {
            "prompt": [{"role": "user", "content": TEMPLATE.replace("{{ problem }}", row["problem"])}],
            "reference": str(row["answer"]).split("####")[-1].strip(),
        }
        for row in rows
    ]
    accuracy, seconds, mismatch = [], [], []

    def reward(completions, reference, **_):
        boxes = [re.findall(r"\\boxed\{([^{}]*)\}", messages[0]["content"]) for messages in completions]
        right = [bool(box) and box[-1].replace(",", "") == answer.replace(",", "") for box, answer in zip(boxes, reference)]
        accuracy.append(sum(right) / len(right))
        return [1.0 if is_right else -1.0 for is_right in right]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.last = time.perf_counter()

        def on_step_end(self, _args, state, _control, **_):
            if state.global_step % UPDATES == 0:
                now = time.perf_counter()
                seconds.append(now - self.last)
                self.last = now
                progress("trl", seconds, accuracy, memory)

        def on_log(self, _args, _state, _control, logs=None, **_):
            mismatch.append((logs or {}).get("sampling/sampling_logp_difference/max", 0.0))

    memory = Memory()
    memory.start()
    with tempfile.TemporaryDirectory() as folder:
        # The packages start processes of their own, which must not find the files of this folder under their names.
        os.chdir(folder)
        # A batch of the optimizer is PROBLEMS / UPDATES problems, in micro-batches of 32 responses.
        of_update = PROBLEMS // UPDATES * SAMPLES
        config = trl.GRPOConfig(
            output_dir=folder, bf16=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
            max_steps=UPDATES * args.steps, per_device_train_batch_size=32, gradient_accumulation_steps=of_update // 32,
            generation_batch_size=PROBLEMS * SAMPLES, num_generations=SAMPLES, shuffle_dataset=False,
            max_completion_length=LIMIT, temperature=1.0, top_p=1.0, beta=0.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28,
            scale_rewards="group", learning_rate=1e-6, weight_decay=0.01, lr_scheduler_type="constant", max_grad_norm=1.0,
            use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, seed=0)
        # With a fingerprint of its own: to compute one, dill copies whole modules where packages lie in no folder `site-packages`.
        dataset = Dataset(InMemoryTable.from_pylist(prompts), fingerprint="prompts")
        trainer = trl.GRPOTrainer(
            model=args.model, reward_funcs=reward, args=config, train_dataset=dataset, callbacks=[Clock()])
        trainer.train()
    return {**summary("trl", seconds, memory, max(mismatch, default=None), accuracy), "version": trl.__version__}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder or name")
    parser.add_argument("--data", required=True, help="JSON lines with `problem` and `answer`")
    parser.add_argument("--stapo", help="the program; without it only TRL runs")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    args.data = str(Path(args.data).resolve())
    args.model = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    for side in ([ours] if args.stapo else []) + [theirs]:
        print(json.dumps(side(args)), flush=True)


if __name__ == "__main__":
    main()
