"""Compares the scores of a reward model, as `stapo score` computes them, with those of `transformers`.

    pip install torch transformers
    python check_reward_model.py STAPO MODEL [MODEL ...]

Random sequences of tokens, one of them ending with padding, go through both; the largest difference of the scores is printed and
must be within 1e-4 of the largest score. Both compute in f32.
"""

import json
import os
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForSequenceClassification


def ours(stapo, folder, sequences):
    with tempfile.TemporaryDirectory() as temporary:
        path = os.path.join(temporary, "in.jsonl")
        with open(path, "w") as file:
            for tokens in sequences:
                print(json.dumps({"tokens": tokens, "prompt_tokens": 1}), file=file)
        command = [stapo, "score", "--model", folder, "--input", path]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return torch.tensor([json.loads(line)["score"] for line in lines])


def theirs(model, sequences):
    """One padded batch, as users of transformers score."""
    padding = model.config.pad_token_id
    longest = max(map(len, sequences))
    ids = torch.tensor([tokens + [padding] * (longest - len(tokens)) for tokens in sequences])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in sequences])
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits[:, 0]


def main(stapo, *folders):
    for folder in folders:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        assert model.config.num_labels == 1, model.config.num_labels
        generator = torch.Generator().manual_seed(0)
        draw = lambda n: torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist()
        sequences = [draw(n) for n in (2, 3, 17, 40, 9)]
        sequences[-1] += [model.config.pad_token_id] * 2
        a, b = ours(stapo, folder, sequences), theirs(model, sequences)
        difference, largest = (a - b).abs().max().item(), b.abs().max().item()
        assert difference <= 1e-4 * largest, (difference, largest)
        name = type(model).__name__
        print(f"{folder}: {name}, {len(sequences)} scores of up to {largest:.3f}, largest difference {difference:.1e}")


main(*sys.argv[1:])
