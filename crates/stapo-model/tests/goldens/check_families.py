"""Exports the golden model of every family with `stapo model convert` and compares logits as `transformers` computes them.

    pip install torch transformers
    python check_families.py STAPO

The logits of 60 tokens must be equal bit for bit, and transformers must miss no weight and ignore none. It has no class for the golden
model of gpt-oss, which has no experts.
"""

import pathlib
import subprocess
import sys
import tempfile

import torch
from make_families import CASES as FAMILIES
from make_models import CASES as MODELS
from transformers import AutoModelForCausalLM


def logits(folder, ids):
    load = dict(dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    model, report = AutoModelForCausalLM.from_pretrained(folder, **load)
    wrong = {kind: names for kind, names in report.items() if names}
    assert not wrong, f"{folder}: {wrong}"
    with torch.no_grad():
        return model.eval()(ids).logits


def main(stapo):
    torch.set_num_threads(1)
    goldens = pathlib.Path(__file__).parent
    ids = torch.arange(60).mul(7).remainder(28)[None]
    for case in [*MODELS, *FAMILIES]:
        if case.startswith("gpt-oss"):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            out = pathlib.Path(temporary) / "exported"
            command = [stapo, "model", "convert", goldens / case, out, "--dtype", "f32"]
            subprocess.run(command, check=True, capture_output=True)
            off = (logits(out, ids) - logits(goldens / case, ids)).abs().max().item()
        assert off == 0, f"{case}: off by {off}"
        print(f"{case}: equal")


main(*sys.argv[1:])
