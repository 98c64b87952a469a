"""Trains an adapter, exports it, and compares log-probs of the exported files under PEFT with those of `stapo score`.

    pip install torch transformers peft
    python check_lora.py STAPO MODEL_FOLDER

The adapter beside the weights and the merged model must give the same log-probs within 1e-5 in f32.
"""

import json
import os
import subprocess
import sys
import tempfile

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def log_probs(model, prompt, tokens):
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        all_logp = torch.log_softmax(model(ids).logits[0].double(), -1)
    places = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    return [all_logp[place, token].item() for place, token in zip(places, tokens)]


def main(stapo, folder):
    folder = os.path.abspath(folder)
    with tempfile.TemporaryDirectory() as at:
        run, adapter, merged = (os.path.join(at, name) for name in ("run", "adapter", "merged"))
        settings = ["steps=4", "model.lora.rank=4", "update.learning_rate=3e-3", "evaluation.problems=4"]
        settings += [f"model.path={folder}", "rollout.problems_per_step=8", "update.problems_per_minibatch=4"]
        train = [stapo, "train", "grpo", "--out", run] + [part for text in settings for part in ("--set", text)]
        subprocess.run(train, check=True, cwd=at)
        subprocess.run([stapo, "export", run, "--out", adapter], check=True)
        subprocess.run([stapo, "export", run, "--merge", "--f32", "--out", merged], check=True)
        vocabulary = json.load(open(os.path.join(folder, "config.json")))["vocab_size"]
        numbers = lambda i, n: [(7 * i + 5 * k) % vocabulary for k in range(n)]
        rows = [{"prompt": numbers(i, 5), "tokens": numbers(i + 9, 20)} for i in range(4)]
        lines = os.path.join(at, "rows.jsonl")
        with open(lines, "w") as file:
            for row in rows:
                whole = {"tokens": row["prompt"] + row["tokens"], "prompt_tokens": len(row["prompt"])}
                file.write(json.dumps(whole) + "\n")
        score = [stapo, "score", "--model", folder, "--adapter", adapter, "--input", lines]
        out = subprocess.run(score, check=True, capture_output=True, text=True).stdout
        ours = [json.loads(line)["logp"] for line in out.splitlines()]
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        plain = [log_probs(base, row["prompt"], row["tokens"]) for row in rows]
        peft = PeftModel.from_pretrained(base, adapter).eval()
        whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, attn_implementation="eager")
        for name, model in [("PEFT", peft), ("the merged model", whole.eval())]:
            theirs = [log_probs(model, row["prompt"], row["tokens"]) for row in rows]
            worst = max(abs(a - b) for mine, other in zip(ours, theirs) for a, b in zip(mine, other))
            moved = max(abs(a - b) for mine, other in zip(plain, theirs) for a, b in zip(mine, other))
            assert worst <= 1e-5, f"{name}: off by {worst}"
            assert moved > 1e-3, f"{name}: the adapter changes log-probs by {moved} only"
            print(f"{name}: log-probs within {worst:.1e} of stapo score; the adapter changed them by up to {moved:.3f}")


main(*sys.argv[1:])
