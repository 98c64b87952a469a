#!/usr/bin/env python3
"""Makes the golden adapters: LoRA adapters of the golden models saved by PEFT, with the numbers that PEFT computes.

    python make_lora.py [OUT] [CASE ...]        # OUT: this script's folder unless given; make_models.py and make_families.py
                                                # have been run in it; all cases unless given

Needs what make_models.py needs, and peft. Each case becomes a folder `lora-<name>` as PEFT's `save_pretrained` writes
it (adapter_config.json, adapter_model.safetensors) plus golden.safetensors with the tensors of make_models.py and

    merged_logp       f32 [R]      of the model with the adapter merged into its weights by PEFT
    grad.<factor>     f32          by autograd, without PEFT's prefix of names

The second factors are random too: zeros, with which PEFT starts, would hide a mistake. In the cases of Phi, PEFT adapts joined
matrices. Gradients there are those of an adapter of each part, for which PEFT computes an adapter of the whole whose B has a block of
rows and columns for each part. "phi3-blocks" is saved in that form; "phi3" is not, and all parts have the same A.
"""

import json
import pathlib
import sys

import torch
from make_families import CASES as FAMILIES
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
    "gemma3": ("gemma3-windows", 2, 4, False, "all-linear"),
    "olmo3": ("olmo3-windows", 2, 3, True, ["q_proj", "o_proj", "up_proj"]),
    "phi3": ("phi3-joined", 2, 4, False, "all-linear"),
    "phi3-blocks": ("phi3-joined", 2, 3, True, "all-linear"),
}
PREFIX = "base_model.model."
PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def adapted(folder, case, has_blocks):
    _, rank, alpha, stabilised, targets = CASES[case]
    times = {name: len(parts) for name, parts in PARTS.items()} if has_blocks else {}
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        use_rslora=stabilised,
        target_modules=targets,
        task_type="CAUSAL_LM",
        rank_pattern={name: n * rank for name, n in times.items()},
        alpha_pattern={name: n**0.5 * alpha if stabilised else n * alpha for name, n in times.items()},
    )
    load = dict(dtype=torch.float32, attn_implementation="eager")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder, **load), config).eval()


def blocks(name, config, rank):
    """For each part of a joined matrix its name, rows and columns in the factor; nothing for other matrices."""
    joined = next((joined for joined in PARTS if f".{joined}." in name), None)
    head = config.hidden_size // config.num_attention_heads
    kv = config.num_key_value_heads * head
    sizes = {"qkv_proj": [config.hidden_size, kv, kv], "gate_up_proj": 2 * [config.intermediate_size]}
    start = 0
    for i, (part, size) in enumerate(zip(PARTS.get(joined, []), sizes.get(joined, []))):
        columns = slice(i * rank, (i + 1) * rank)
        place = (columns, slice(None)) if "lora_A" in name else (slice(start, start + size), columns)
        yield name.replace(joined, part), place
        start += size


def with_blocks(model, base, case):
    """The same adapter with blocks for the parts of joined matrices."""
    rank = CASES[case][1]
    whole = dict(model.named_parameters())
    blocked = adapted(base, case, True)
    for name, p in blocked.named_parameters():
        if "lora_" in name and p.shape == whole[name].shape:
            p.data = whole[name].data.clone()
        elif "lora_" in name:
            p.data.zero_()
            for _, place in blocks(name, model.config, rank):
                p.data[place] = whole[name].data if "lora_A" in name else whole[name].data[place[0]]
    return blocked


def main():
    torch.set_num_threads(1)
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    for index, (case, (base, rank, *_)) in enumerate(CASES.items()):
        if len(sys.argv) > 2 and case not in sys.argv[2:]:
            continue
        generator = torch.Generator().manual_seed(2000 + index)
        vocab, temperature = FAMILIES[base][1:3] if base in FAMILIES else (MODELS[base][6], MODELS[base][9])
        model = adapted(out / base, case, case.endswith("blocks"))
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = 0.4 * torch.randn(p.shape, generator=generator)
                mask = torch.zeros(p.shape)
                for _, place in blocks(name, model.config, rank):
                    mask[place] = 1
                if case.endswith("blocks") and mask.any():
                    p.data = torch.where(mask > 0, p.data, 0.0)
        state = generator.get_state()
        parts = with_blocks(model, out / base, case) if case == "phi3" else model
        numbers = golden(parts, vocab, temperature, generator)
        for name, t in list(numbers.items()):
            for part, place in blocks(name, model.config, rank) if "lora_" in name else []:
                numbers.pop(name, None)
                numbers[part] = t[place].contiguous()
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
