#!/usr/bin/env python3
"""A real pretrained model from GGUF: ours against transformers on the same dequantised weights, in f32.

    cargo build --release
    python bench/engine/real_model.py MODEL.gguf [--golden FILE]

Needs torch, transformers, gguf. Checks, and exits with 1 when one fails:
  - log-probs of a fixed text of 64 tokens through `stapo score`: all within 1e-3 of transformers
  - greedy continuation by 48 tokens through `stapo generate`: the same token wherever transformers' two best differ by
    more than 1e-3 in log-prob, read along our continuation
  - `stapo model convert` to a Hugging Face folder: transformers gives the same logits from either
--golden writes the text's tokens, transformers' log-probs and the continuation for crates/stapo-model/tests.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = (
    "The river bends twice before it reaches the old mill, and every spring the water climbs a little higher than the "
    "year before. Anna counts the stones that are still dry: seven on the left bank, five on the right. If three more "
    "disappear tonight, she says, nine will be left tomorrow, and we shall have to move the boats."
)
N_TEXT, N_NEW, TOLERANCE = 64, 48, 1e-3


def stapo(*arguments, lines=None):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for line in lines or []:
            file.write(json.dumps(line) + "\n")
        file.flush()
        more = ["--input", file.name] if lines else []
        done = subprocess.run(
            [ROOT / "target/release/stapo", *arguments, *more], check=True, stdout=subprocess.PIPE, text=True
        )
    return [json.loads(line) for line in done.stdout.splitlines()] if lines else done.stdout


@torch.no_grad()
def all_logp(model, ids):
    return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--golden", type=pathlib.Path)
    args = parser.parse_args()
    load = dict(gguf_file=args.model.name, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(args.model.parent, **load).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model.parent, gguf_file=args.model.name)
    ids = tokenizer(TEXT)["input_ids"][:N_TEXT]
    assert len(ids) == N_TEXT
    failed = []

    theirs = all_logp(model, ids)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    [scored] = stapo("score", "--model", args.model, lines=[{"tokens": ids, "prompt_tokens": 1}])
    worst = (torch.tensor(scored["logp"]) - theirs).abs().max().item()
    print(f"log-probs of {N_TEXT} tokens: largest difference {worst:.2e}, allowed {TOLERANCE:.0e}")
    if not worst <= TOLERANCE:
        failed.append("log-probs")

    arguments = ["generate", "--model", args.model, "--greedy", "-n", "1", "--max-tokens", str(N_NEW), "--json"]
    [made] = stapo(*arguments, lines=[{"tokens": ids}])
    along = all_logp(model, ids + made["tokens"])[N_TEXT - 1 : -1]
    best = along.topk(2, -1)
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    clear = [i for i, gap in enumerate(gaps) if gap > TOLERANCE]
    differ = [i for i in clear if best.indices[i, 0].item() != made["tokens"][i]]
    print(f"greedy continuation by {len(gaps)} tokens: {len(clear)} clear choices, {len(differ)} differ")
    print(f"  smallest gap {min(gaps):.2e}; text {made['text']!r}")
    if differ:
        failed.append("greedy continuation")

    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "converted"
        stapo("model", "convert", "--dtype", "f32", args.model, out)
        converted = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        worst = (all_logp(converted, ids) - all_logp(model, ids)).abs().max().item()
        same_ids = AutoTokenizer.from_pretrained(out)(TEXT)["input_ids"][:N_TEXT] == ids
    print(f"converted folder in transformers: largest log-prob difference {worst:.2e}; tokenizer agrees: {same_ids}")
    if not worst <= 1e-5 or not same_ids:
        failed.append("conversion")

    if args.golden:
        golden = {"tokens": ids, "logp": theirs.tolist(), "continuation": made["tokens"], "gaps": gaps}
        args.golden.write_text(json.dumps(golden) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
