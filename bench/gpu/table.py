"""Prints the results of bench/gpu.sh as one table: each measurement beside its target."""

import json
import sys

PEAK = 790e12  # bf16 products of 8192^3 on random data, measured on an H200
PARAMETERS = 1_720_574_976
WEIGHT_BYTES = 2 * PARAMETERS
# Bytes of a token's keys and values in all layers. Those of a long shared prompt are counted once, those of a short one
# for every sequence, although they are read once for several sequences.
KV_BYTES = 2 * 2 * 8 * 128 * 28


def step_flops(tokens, length):
    """FLOPs of a step: 6 per weight and token plus attention; recomputation of the head is not counted."""
    attention = 3.5 * 4 * (length / 2) * 16 * 128 * 28
    return tokens * (6 * PARAMETERS + attention)


def peer_rate(results, task, r):
    """The best rate of vLLM with log-probs for prompts as those of the row `r`; 0 where it did not run."""
    same = [(p, r.get(p)) for p in ("prompts", "prompt")]
    if task == "generate":
        same.append(("samples", r["sequences"] // r["prompts"]))
    of_task = (p for p in results if p["name"] == "vllm" and p.get("task") == task and p["mode"] != "no-logprobs")
    return max((p["tokens_per_s"] for p in of_task if all(p[name] == value for name, value in same)), default=0)


def rows(results):
    full = next((r["tokens_per_s"] for r in results if r["name"] == "train" and "failed" not in r), 0)
    for r in results:
        name = r["name"]
        if "failed" in r:
            yield name, f"failed with status {r['failed']}: see its log", "", ""
        elif "failed_tests" in r:
            yield "tests on the GPU", f"{r['passed']} passed, {r['failed_tests']} failed", "0 failed", r["failed_tests"] == 0
        elif name == "train-cold":
            ok = r["first_step_after"] <= 3
            text = f"{r['first_step_after']:.1f} s, of which {r['kernel_s']:.1f} s waiting for kernels"
            yield "first step, cold kernel cache", text, "3 s", ok
        elif name == "train":
            share = r["tokens_per_s"] * step_flops(1, 2048) / PEAK
            yield "first step, warm kernel cache", f"{r['first_step_after']:.1f} s", "10 s", r["first_step_after"] <= 10
            text = f"{r['tokens_per_s']} tokens/s, {100 * share:.0f} %"
            yield "training step 1.7B, 8 x 2048", text, "50000 tokens/s", r["tokens_per_s"] >= 50000
            yield "  memory", f"{r['gib']} GiB", "50 GiB", r["gib"] <= 50
        elif name.startswith("train-16k"):
            kept, asked = ("layers recomputed", 26000) if "recomputed" in name else ("everything kept", 31000)
            text = f"{r['tokens_per_s']} tokens/s, {r['gib']} GiB (planned {r['planned_gib']})"
            yield f"training step 1.7B, 2 x 16384, {kept}", text, f"{asked} tokens/s", r["tokens_per_s"] >= asked
        elif name.startswith("update-") and r["task"] == "update":
            what = f"step {r['step']} of {r['tokens']} tokens, {r['shape']}"
            text = f"rollout {r['rollout']} s, update {r['calibrate'] + r['update']:.2f} s, record {r['record']} s"
            busy = r["busy_share"]
            yield f"{what}: GPU busy {100 * busy:.1f} % of the update", text, "90 %", busy >= 0.9 if r["step"] > 1 else ""
        elif name.startswith("update-") and r["task"] == "hash":
            yield f"  hash of the state, {name[7:]}", f"{r['seconds']} s", "", ""
        elif name in ("shared-short-1", "shared-long-1"):
            whole = next((x["seconds"] for x in results if x["name"] == name[:-1] + "0" and "failed" not in x), 0)
            what, asked = ("128 x 8, 100 + 280", 1.2) if "short" in name else ("8 x 8, 8192 + 256", 4)
            text = f"{r['seconds']} s, {whole / r['seconds']:.2f} times as fast as whole sequences, {r['gib']} GiB"
            yield f"training step 1.7B, shared prompts, {what}", text, f"{asked} times", whole >= asked * r["seconds"]
        elif name == "torch":
            yield "  PyTorch, same work", f"{r['tokens_per_s']} tokens/s, {r['gib']} GiB", "", ""
        elif r.get("task") == "exact":
            text = f"{r['differ']} of {r['tokens']} tokens differ, max {r['max_abs']}"
            of = {"exact": "", "exact-long": " at a context of 16384", "lora-exact": ", adapters of rank 32"}
            of = of.get(name, ", " + name.removeprefix("exact-").removesuffix("-exact"))
            yield f"sampled against training log-probs{of}", text, "0", r["differ"] == 0
        elif name == "lora-train":
            times = r["tokens_per_s"] / full if full else 0
            text = f"{r['tokens_per_s']} tokens/s, {times:.2f} times full training, {r['gib']} GiB"
            ok = times >= 1.25 and r["gib"] <= 24
            yield "training step 1.7B with adapters of rank 32", text, "1.25 times, 24 GiB", ok
        elif name.startswith("lora-decode"):
            # Tokens/s of decoding alone, without prefill.
            merged = next((x["decode_tokens_per_s"] for x in results if x["name"] == name[5:] and "failed" not in x), 0)
            loss = 1 - r["decode_tokens_per_s"] / merged if merged else 1
            asked = {512: 0.05, 64: 0.15}[r["sequences"]]
            text = f"alone {r['decode_tokens_per_s']} tokens/s, {100 * loss:.1f} % below none"
            yield f"decode {r['sequences']} with adapters of rank 32", text, f"{100 * asked:.0f} %", loss <= asked
        elif name.startswith("decode") and "8b" not in name:
            n, prompt, context = r["sequences"], r["prompt"], r["context"]
            # The bandwidth of a device copy, reads and writes counted, measured in the same run.
            copy = r["copy_bytes_per_s"]
            is_shared = prompt > 1000 and r["prompts"] < n
            prompts_read = r["prompts"] if is_shared else n
            keys = prompts_read * prompt + n * (context - prompt)
            bound = n / ((WEIGHT_BYTES + keys * KV_BYTES) / copy)
            share = r["decode_tokens_per_s"] / bound
            text = f"{r['tokens_per_s']} tokens/s; alone {r['decode_tokens_per_s']}, {100 * share:.1f} % of {copy / 1e12:.2f} TB/s"
            prompts = "a prompt each" if r["prompts"] == n else f"{r['prompts']} prompts"
            asked = {512: 0 if r["prompts"] == n else 0.6, 64: 0.6, 2: 0.6}.get(n, 0.75)
            ok = share >= asked and (n < 512 or r["tokens_per_s"] >= 20000) if asked else ""
            yield f"decode {n} of {context:.0f} keys, {prompts}", text, f"{100 * asked:.0f} %" if asked else "", ok
        elif name.startswith("prefill"):
            peer = peer_rate(results, "prefill", r)
            text = f"{r['tokens_per_s']} tokens/s, {100 * r['share']:.0f} % of the peak; without its kernel {r['without_kernel']}"
            asked = f"1.1 x vLLM's {peer:.0f}" if peer else ""
            yield f"prefill {r['prompts']} x {r['prompt']}", text, asked, r["tokens_per_s"] >= 1.1 * peer if peer else ""
            yield "  packed forward of training", f"{r['packed']} tokens/s", "", ""
        elif name.startswith("generate"):
            peer = peer_rate(results, "generate", r)
            text = f"{r['tokens_per_s']} tokens/s" + (f", {r['tokens_per_s'] / peer:.2f} times vLLM's" if peer else "")
            samples = r["sequences"] // r["prompts"]
            yield f"generate {r['prompts']} x {samples}, prompts of {r['prompt']}", text, "", ""
        elif name == "vllm" and "skipped" in r:
            yield "vLLM", r["skipped"], "", ""
        elif name == "vllm":
            if r["task"] == "failed":
                yield f"  vLLM, {r['mode']}", f"failed with status {r['status']}: see its log", "", ""
                continue
            of = {"prefill": "prefill", "spread": "8 samples of spread lengths"}.get(r["task"])
            of = of or f"{r['samples']} samples + {r['new']}"
            what = f"  vLLM {r['version']}, {r['mode']}: {r['prompts']} x {r['prompt']}, {of}"
            yield what, f"{r['tokens_per_s']:.0f} tokens/s", "", ""
        elif name in ("attention", "torch-attention"):
            plain = (r.get("head_dim", 128), r.get("kv_heads", 8), r.get("window", 0)) == (128, 8, 0)
            kind = "" if plain else f", {r['kv_heads']} key heads of {r['head_dim']}" + (f", window {r['window']}" if r["window"] else "")
            what = f"attention {r['sequences']} x {r['length']}{kind}, forward / backward"
            of_both = f"{r['forward_tflops']:.0f} / {r['backward_tflops']:.0f} TFLOP/s"
            shape = (r["sequences"], r["length"])
            peers = [x for x in results if x["name"] == "torch-attention" and (x.get("sequences"), x.get("length")) == shape]
            if name == "attention" and plain and peers and r["length"] >= 2048:
                asked = {2048: 340, 8192: 480, 16384: 500}.get(r["length"], 0)
                ok = r["forward_tflops"] >= peers[0]["forward_tflops"] and r["backward_tflops"] >= asked
                yield what, of_both, f"cuDNN's / {asked}", ok
            else:
                yield what if name == "attention" else "  cuDNN through PyTorch", of_both, "", ""
        elif name == "train-8b":
            text = f"{r['tokens_per_s']} tokens/s, {r['gib']} GiB (planned {r['planned_gib']})"
            ok = r["gib"] <= 139 and abs(r["planned_gib"] / r["gib"] - 1) <= 0.05
            yield "training step 8B, 4 x 2048, 8-bit states", text, "139 GiB, plan within 5 %", ok
        elif name == "train-8b-kept":
            text = f"{r['tokens_per_s']} tokens/s, {r['gib']} GiB (planned {r['planned_gib']})"
            yield "  8 x 2048, everything kept", text, "12500 tokens/s, 139 GiB", r["tokens_per_s"] >= 12500 and r["gib"] <= 139
        elif name.startswith(("family-", "hybrid-", "train-8b-16k", "decode-8b")):
            text = f"{r['tokens_per_s']} tokens/s"
            if r["task"] == "decode":
                text += f"; alone {r['decode_tokens_per_s']}, {100 * r['share']:.1f} % of {r['copy_bytes_per_s'] / 1e12:.2f} TB/s"
            else:
                text += f", {100 * r['share']:.0f} % of the peak"
            text += f", {r['gib']} GiB" if "gib" in r else ""
            text += f" (planned {r['planned_gib']})" if "planned_gib" in r else ""
            yield name.removeprefix("family-").replace("-", " "), text, "", ""
        elif name.startswith("rollout"):
            text = f"{r['tokens_per_s']} tokens/s, {100 * r['share']:.1f} % of an ideal scheduler"
            yield f"rollout of {r['sequences']} spread lengths", text, "70 %", r["share"] >= 0.7
        elif name.startswith("step-"):
            text = f"sampling {r['sample_s']} s, update {r['update_s']} s, {r['gib']} GiB (planned {r['planned_gib']})"
            ok = abs(r["planned_gib"] / r["gib"] - 1) <= 0.05
            yield f"one step of 8 x 8 responses, {r['shape']}", text, "plan within 5 %", ok


def main():
    results = [json.loads(line) for line in open(sys.argv[1])]
    print(f"{'what':<48} {'measured':<58} {'asked':<26}")
    for what, measured, asked, ok in rows(results):
        mark = {True: "yes", False: "no"}.get(ok, "")
        print(f"{what:<48} {measured:<58} {asked:<26} {mark}")


main()
