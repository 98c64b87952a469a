"""vLLM with the shapes of `bench_gpu decode` and `bench_gpu prefill`: Qwen3-1.7B shape, random weights, no tokenizer.

    python bench/gpu/vllm.py [--quick]

Each mode runs in a process of its own, because vLLM keeps the GPU's memory: `default` and `batch-invariant` (the environment
variable VLLM_BATCH_INVARIANT) return the log-prob of each sampled token, as stapo always does; `no log-probs` does not. Samples of one
prompt share its keys and values; prompts share nothing. Rates are end to end, prompts included, of the best of two runs behind a first
one. Prints JSON objects for bench/gpu/table.py, and one that says why where vLLM is not installed. The script uses vLLM's documented
interface for offline inference; the figures in docs/exactness.md are of vLLM 0.24.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The folder of this script holds a file of the package's name.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}
# Prompts, samples, tokens of a prompt, new tokens.
SHAPES = [(64, 8, 128, 512), (8, 8, 128, 512), (512, 1, 128, 512), (2, 1, 128, 512), (8, 8, 8192, 256), (40, 1, 15000, 256)]
PREFILLS = [(40, 15000), (16, 8192), (64, 2048), (512, 128)]
MODES = {"default": {}, "batch-invariant": {"VLLM_BATCH_INVARIANT": "1"}, "no log-probs": {}}


def measure(mode, quick):
    """One mode in this process."""
    import vllm

    def tokens(prompt, n):
        return {"prompt_token_ids": [(prompt * 7919 + i * 104_729) % CONFIG["vocab_size"] for i in range(n)]}

    def rate(llm, prompts, samples, length, new, counted):
        logprobs = None if mode == "no log-probs" else 0
        params = vllm.SamplingParams(
            n=samples, temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs)
        batch = [tokens(prompt, length) for prompt in range(prompts)]
        best = float("inf")
        for run in range(3):
            start = time.perf_counter()
            llm.generate(batch, params, use_tqdm=False)
            best = min(best, time.perf_counter() - start) if run else best
        return counted / best

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        os.chdir(folder)  # vLLM starts `python -m vllm..`, which would find this script in its own folder.
        llm = vllm.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=False,
            max_model_len=15_616, max_num_batched_tokens=16_384, max_num_seqs=512, gpu_memory_utilization=0.85, seed=0)
        common = {"mode": mode, "version": vllm.__version__}
        for prompts, length in PREFILLS if mode != "no log-probs" else []:
            speed = rate(llm, prompts, 1, length, 1, prompts * length)
            print(json.dumps({"task": "prefill", "prompts": prompts, "prompt": length, "tokens_per_s": speed, **common}))
        for prompts, samples, length, new in SHAPES[:2] if quick else SHAPES:
            speed = rate(llm, prompts, samples, length, new, prompts * samples * new)
            shape = {"prompts": prompts, "samples": samples, "prompt": length, "new": new}
            print(json.dumps({"task": "generate", "tokens_per_s": speed, **shape, **common}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes of generation only")
    parser.add_argument("--mode", choices=MODES, help="one mode, in this process")
    args = parser.parse_args()
    if args.mode:
        return measure(args.mode, args.quick)
    if importlib.util.find_spec("vllm") is None:
        return print(json.dumps({"skipped": "vLLM is not installed: pip install vllm"}))
    for mode, variables in MODES.items():
        command = [sys.executable, __file__, "--mode", mode] + ["--quick"] * args.quick
        subprocess.run(command, env={**os.environ, **variables}, check=True)


if __name__ == "__main__":
    main()
