"""vLLM with the shapes of `bench_gpu decode` and `bench_gpu prefill`: Qwen3-1.7B shape, random weights, no tokenizer.

    python bench/gpu/vllm.py [--quick] [--mode default] [--mode batch-invariant] [--mode no-logprobs]

Each mode runs in a process of its own, because vLLM keeps the GPU's memory: `default`, the only one unless others are named, and
`batch-invariant` (the environment variable VLLM_BATCH_INVARIANT) return the log-prob of each sampled token, as stapo always does;
`no-logprobs` does not. Samples of one prompt share its keys and values (vLLM shares them through its prefix cache, which is emptied
before each run); prompts share nothing. Rates are end to end, prompts included, of the best of two runs behind a first one; responses
of spread lengths run once. Prints JSON objects for bench/gpu/table.py, and one that says
why where vLLM is not installed or a mode fails. The script uses vLLM's documented interface for offline inference; the figures in
docs/exactness.md are of vLLM 0.24.
"""

import argparse
import importlib.util
import json
import math
import os
import random
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
# The shortest first, so that a time limit loses least.
PREFILLS = [(512, 128), (64, 2048), (16, 8192), (40, 15000)]
# Prompts, samples, tokens of a prompt: responses as long as `bench_gpu rollout` forces them to be, in distribution.
SPREAD = (16, 8, 512)
LONGEST, MEAN, SIGMA = 15_360, 4000, 0.8
MODES = {"default": {}, "batch-invariant": {"VLLM_BATCH_INVARIANT": "1"}, "no-logprobs": {}}


def measure(mode, quick):
    """One mode in this process."""
    import vllm

    def tokens(prompt, n):
        return {"prompt_token_ids": [(prompt * 7919 + i * 104_729) % CONFIG["vocab_size"] for i in range(n)]}

    def params(samples, new):
        logprobs = None if mode == "no-logprobs" else 0
        return vllm.SamplingParams(
            n=samples, temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs)

    def spread_rate(llm):
        prompts, samples, length = SPREAD
        numbers = random.Random(0)
        drawn = [numbers.lognormvariate(math.log(MEAN) - SIGMA**2 / 2, SIGMA) for _ in range(prompts * samples)]
        lengths = [max(1, min(LONGEST, round(x))) for x in drawn]
        batch = [tokens(i // samples, length) for i in range(prompts * samples)]
        start = time.perf_counter()
        llm.generate(batch, [params(1, new) for new in lengths], use_tqdm=False)
        return sum(lengths) / (time.perf_counter() - start)

    def rate(llm, prompts, samples, length, new, counted):
        batch = [tokens(prompt, length) for prompt in range(prompts)]
        best = float("inf")
        for run in range(3):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate(batch, params(samples, new), use_tqdm=False)
            best = min(best, time.perf_counter() - start) if run else best
        return counted / best

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        # vLLM starts `python -m vllm...`, which must not find this file in its working directory.
        os.chdir(folder)
        llm = vllm.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=True,
            max_model_len=16_384, max_num_batched_tokens=16_384, max_num_seqs=512, gpu_memory_utilization=0.85, seed=0)

        def report(task, speed, **shape):
            line = {"task": task, "tokens_per_s": round(speed), **shape, "mode": mode, "version": vllm.__version__}
            print(json.dumps(line), flush=True)

        for prompts, length in PREFILLS if mode != "no-logprobs" else []:
            report("prefill", rate(llm, prompts, 1, length, 1, prompts * length), prompts=prompts, prompt=length)
        for prompts, samples, length, new in SHAPES[:2] if quick else SHAPES:
            speed = rate(llm, prompts, samples, length, new, prompts * samples * new)
            report("generate", speed, prompts=prompts, samples=samples, prompt=length, new=new)
        if mode == "default" and not quick:
            prompts, samples, length = SPREAD
            report("spread", spread_rate(llm), prompts=prompts, samples=samples, prompt=length)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes of generation only")
    parser.add_argument("--mode", choices=MODES, action="append", help="may be repeated; default: default")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return measure(args.mode[0], args.quick)
    if importlib.util.find_spec("vllm") is None:
        return print(json.dumps({"skipped": "vLLM is not installed: pip install vllm"}))
    for mode in args.mode or ["default"]:
        command = [sys.executable, str(Path(__file__).resolve()), "--inside", "--mode", mode] + ["--quick"] * args.quick
        status = subprocess.run(command, env={**os.environ, **MODES[mode]}, check=False).returncode
        if status != 0:
            print(json.dumps({"task": "failed", "mode": mode, "status": status}), flush=True)


if __name__ == "__main__":
    main()
