"""Converts a GGUF file with `stapo model convert` and compares the folder with the file as `transformers` reads it.

    pip install torch transformers gguf
    python check_export.py STAPO FILE.gguf

Every weight and the logits of 64 tokens must be equal bit for bit, and the tokenizer's vocabulary must be the same.
"""

import os
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(stapo, file):
    folder, name = os.path.split(os.path.abspath(file))
    with tempfile.TemporaryDirectory() as temporary:
        out = os.path.join(temporary, "model")
        subprocess.run([stapo, "model", "convert", file, out, "--dtype", "f32", "--max-shard", "1GB"], check=True)
        ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        our_tokenizer = AutoTokenizer.from_pretrained(out)
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    their_tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)

    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different, different
    ids = torch.arange(64).mul(37).remainder(ours.config.vocab_size)[None]
    with torch.no_grad():
        difference = (ours(ids).logits - theirs(ids).logits).abs().max().item()
    assert difference == 0, difference
    vocabulary = {token: i for token, i in their_tokenizer.get_vocab().items() if not token.startswith("[PAD")}
    assert our_tokenizer.get_vocab() == vocabulary
    print(f"{name}: {len(a)} tensors, logits of {ids.numel()} tokens and {len(vocabulary)} tokens of vocabulary are equal")


main(*sys.argv[1:])
