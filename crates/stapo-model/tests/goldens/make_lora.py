#!/usr/bin/env python3
"""Makes the golden adapters: LoRA adapters of the golden models saved by PEFT, with the numbers that PEFT computes.

    python make_lora.py [OUT]          # OUT: this script's folder unless given; make_models.py has been run in it

Needs what make_models.py needs, and peft. Each case becomes a folder `lora-<name>` as PEFT's `save_pretrained` writes
it (adapter_config.json, adapter_model.safetensors) plus golden.safetensors with the tensors of make_models.py and

    merged_logp       f32 [R]      of the model with the adapter merged into its weights by PEFT
    grad.<factor>     f32          by autograd, without PEFT's prefix of names

The second factors are random too: zeros, with which PEFT starts, would hide a mistake.
"""

import json
import pathlib
import sys

import torch
from make_models import CASES as MODELS
from make_models import golden
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

# name: (golden model, rank, alpha, rank-stabilised, targets)
CASES = {
    "all-linear": ("qwen3-tied-gqa2", 4, 8, False, "all-linear"),
    "some": ("qwen2-untied-gqa2", 3, 5, True, ["q_proj", "v_proj", "up_proj"]),
    "rank1": ("llama3-untied-gqa1", 1, 2, False, ["k_proj", "o_proj", "gate_proj", "down_proj"]),
}
PREFIX = "base_model.model."


def main():
    torch.set_num_threads(1)
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    for index, (case, (base, rank, alpha, stabilised, targets)) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(2000 + index)
        vocab, temperature = MODELS[base][6], MODELS[base][9]
        load = dict(dtype=torch.float32, attn_implementation="eager")
        model = AutoModelForCausalLM.from_pretrained(out / base, **load)
        config = LoraConfig(
            r=rank, lora_alpha=alpha, use_rslora=stabilised, target_modules=targets, task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, config).eval()
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = 0.4 * torch.randn(p.shape, generator=generator)
        state = generator.get_state()
        numbers = golden(model, vocab, temperature, generator)
        numbers = {
            name.removeprefix("grad." + PREFIX).replace(".default.", "."): t for name, t in numbers.items()
        }
        numbers = {("grad." + name if "lora_" in name else name): t for name, t in numbers.items()}
        folder = out / f"lora-{case}"
        model.save_pretrained(folder)
        for file in folder.iterdir():
            if file.name not in ("adapter_config.json", "adapter_model.safetensors"):
                file.unlink()
        # PEFT lists targets in the order of a set, and names the base by its path here.
        keys = json.loads((folder / "adapter_config.json").read_text())
        keys["target_modules"] = sorted(keys["target_modules"])
        keys["base_model_name_or_path"] = base
        (folder / "adapter_config.json").write_text(json.dumps(keys, indent=2) + "\n")
        merged = model.merge_and_unload()
        for p in merged.parameters():
            p.requires_grad_(True)
        generator.set_state(state)
        numbers["merged_logp"] = golden(merged, vocab, temperature, generator)["logp"]
        save_file(numbers, folder / "golden.safetensors")
        print(case, base, sum(t.numel() for name, t in numbers.items() if "lora_" in name), "parameters")


if __name__ == "__main__":
    main()
