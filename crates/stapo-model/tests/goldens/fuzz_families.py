"""Scores random tokens by models of random configs with `stapo score` and with `transformers`, and prints every difference.

    pip install torch transformers
    python fuzz_families.py STAPO [N] [SEED] [FAMILY ...]       # N configs of each family (10), from this seed on (0)

A config is drawn from the values that change how a family computes. Log-probs may differ from those of `transformers` in f64 by 1e-4,
or by ten times what those of `transformers` in f32 do, since random weights amplify rounding. Exits with 1 where a model is off or
refused.
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
import transformers
from make_models import randomise, tokenizer_of

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
LENGTHS = [2, 3, 5, 17, 31, 40, 63, 64, 65, 70, 130]
KINDS = ("default", "linear", "yarn", "llama3")


def rope(r, kinds=KINDS, **more):
    kind = r.choice(kinds)
    keys = {"rope_type": kind, "rope_theta": r.choice([10000.0, 500000.0, 1e6, 123.0]), **more}
    if kind == "linear":
        keys["factor"] = r.choice([2.0, 4.0, 8.0])
    if kind == "llama3":
        keys |= dict(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=r.choice([16, 32])
        )
    if kind == "yarn":
        keys |= dict(factor=r.choice([2.0, 4.0, 8.0]), original_max_position_embeddings=r.choice([16, 32]))
        further = (
            dict(beta_fast=16.0, beta_slow=2.0),
            dict(attention_factor=1.3),
            dict(mscale=0.7, mscale_all_dim=0.5),
            dict(truncate=False),
        )
        for some in further:
            keys |= some if r.random() < 0.3 else {}
    return keys


def common(r, has_head_dim):
    heads = r.choice([1, 2, 3, 4, 6])
    keys = dict(
        vocab_size=r.randint(20, 44),
        hidden_size=r.choice([12, 18, 24, 32]) if has_head_dim else heads * r.choice([4, 6, 8, 10]),
        intermediate_size=r.randint(5, 40),
        num_hidden_layers=r.randint(1, 5),
        num_attention_heads=heads,
        num_key_value_heads=r.choice([n for n in (1, 2, 3, 6) if heads % n == 0]),
        max_position_embeddings=r.choice([256, 4096]),
        rms_norm_eps=r.choice([1e-5, 1e-6]),
        tie_word_embeddings=r.random() < 0.5,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    return keys | (dict(head_dim=r.choice([4, 6, 8, 10, 16])) if has_head_dim else {})


def biases(r):
    return dict(attention_bias=r.random() < 0.4, mlp_bias=r.random() < 0.4)


def windows(r):
    return dict(use_sliding_window=True, sliding_window=r.choice([5, 9, 33])) if r.random() < 0.4 else {}


def mixed(r, keys, kinds=(SLIDING, FULL)):
    return dict(layer_types=[r.choice(kinds) for _ in range(keys["num_hidden_layers"])])


def smollm3(r, keys):
    none = r.random() < 0.7
    which = (
        dict(no_rope_layers=[r.randint(0, 1) for _ in range(keys["num_hidden_layers"])])
        if none
        else dict(no_rope_layer_interval=r.randint(1, 4))
    )
    return which | dict(rope_parameters=rope(r)) | biases(r) | windows(r)


def olmo3(r, keys):
    # transformers 5.23 reads `truncate` beside the kinds of layers, where no config has it.
    by_kind = {FULL: rope(r) | dict(truncate=True), SLIDING: rope(r, ("default",))}
    return dict(sliding_window=r.choice([4, 11, 64]), rope_parameters=r.choice([rope(r), by_kind]), **mixed(r, keys))


def gemma(r, keys, **more):
    caps = dict(final_logit_softcapping=r.choice([None, 3.0, 30.0]), query_pre_attn_scalar=r.choice([7, 16, 256]))
    return caps | dict(sliding_window=r.choice([4, 11, 64]), attention_bias=r.random() < 0.3) | mixed(r, keys) | more


def gemma3(r, keys):
    return gemma(
        r, keys, rope_parameters={FULL: rope(r, ("default", "linear", "yarn")), SLIDING: rope(r, ("default",))}
    )


def phi3(r, keys):
    dim = keys["hidden_size"] // keys["num_attention_heads"]
    part = r.choice([part for part in (1.0, 0.5, 0.75) if int(dim * part) % 2 == 0])
    parameters = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=part)
    keys = dict(sliding_window=r.choice([None, 6, 12]), pad_token_id=0, rope_parameters=parameters)
    if r.random() < 0.4:
        factors = [[round(1 + most * r.random(), 2) for _ in range(int(dim * part) // 2)] for most in (1, 3)]
        parameters |= dict(rope_type="longrope", short_factor=factors[0], long_factor=factors[1])
        keys |= dict(original_max_position_embeddings=r.choice([16, 64, 200]), max_position_embeddings=256)
    return keys


def granite(r, keys):
    of_results = dict(residual_multiplier=r.choice([1.0, 0.22]), attention_multiplier=r.choice([1.0, 0.0156, 0.3]))
    return (
        of_results
        | dict(embedding_multiplier=r.choice([1.0, 12.0]), logits_scaling=r.choice([1.0, 8.0]), rope_parameters=rope(r))
        | biases(r)
    )


def hybrid(r, keys):
    parameters = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=r.choice([0.25, 0.5, 1.0]))
    n = r.choice([1, 2])
    heads = dict(
        linear_num_key_heads=n,
        linear_num_value_heads=n * r.choice([1, 2, 3]),
        linear_conv_kernel_dim=r.choice([2, 3, 4]),
    )
    dims = dict(
        linear_key_head_dim=r.choice([4, 8]), linear_value_head_dim=r.choice([4, 8]), head_dim=r.choice([8, 16])
    )
    which = mixed(r, keys, (LINEAR, FULL))
    which["layer_types"][-1] = FULL
    return heads | dims | which | dict(rope_parameters=parameters, attention_bias=r.random() < 0.3)


# The class of a config, whether heads have a size of their own, and the further keys.
FAMILIES = {
    "llama": ("LlamaConfig", True, lambda r, keys: dict(rope_parameters=rope(r)) | biases(r)),
    "qwen2": ("Qwen2Config", False, lambda r, keys: dict(rope_parameters=rope(r), max_window_layers=r.randint(0, 3)) | windows(r)),
    "qwen3": ("Qwen3Config", True, lambda r, keys: dict(rope_parameters=rope(r), attention_bias=r.random() < 0.4, max_window_layers=r.randint(0, 3)) | windows(r)),
    "mistral": ("MistralConfig", True, lambda r, keys: dict(rope_parameters=rope(r), sliding_window=r.choice([None, 4, 11, 1000]))),
    "smollm3": ("SmolLM3Config", False, smollm3),
    "olmo2": ("Olmo2Config", False, lambda r, keys: dict(rope_parameters=rope(r), attention_bias=r.random() < 0.3)),
    "olmo3": ("Olmo3Config", False, olmo3),
    "gemma2": ("Gemma2Config", True, lambda r, keys: gemma(r, keys, attn_logit_softcapping=r.choice([None, 5.0, 50.0]))),
    "gemma3": ("Gemma3TextConfig", True, gemma3),
    "phi3": ("Phi3Config", False, phi3),
    "granite": ("GraniteConfig", False, granite),
    "qwen3_5": ("Qwen3_5TextConfig", True, hybrid),
}  # fmt: skip


def model_of(family, seed):
    """A random model, and the lengths to score it at; None where `transformers` refuses the config."""
    r = random.Random(f"{family}-{seed}")
    name, has_head_dim, further = FAMILIES[family]
    keys = common(r, has_head_dim)
    keys |= further(r, keys)
    try:
        config = getattr(transformers, name)(**keys)
    except Exception as refusal:
        if "validate" not in str(refusal):
            raise
        return None
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    lengths = r.sample(LENGTHS, 4)
    if border := keys.get("original_max_position_embeddings"):
        # transformers chooses LongRoPE's factors by the length of each call, a run once.
        fit = min if r.random() < 0.5 else lambda length, border: max(length, border + 1)
        lengths = [fit(length, border) for length in lengths]
    return randomise(model, torch.Generator().manual_seed(seed)), lengths


def scored(stapo, folder, sequences):
    records = "".join(json.dumps({"tokens": ids.tolist(), "prompt_tokens": 1}) + "\n" for ids in sequences)
    longest = max(len(ids) for ids in sequences)
    command = [stapo, "score", "-q", "--model", folder, "--input", "-", "--max-tokens", str(longest)]
    done = subprocess.run(command, input=records, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.strip()
    return [torch.tensor(json.loads(line)["logp"]) for line in done.stdout.splitlines()]


def expected(model, sequences):
    def logp(ids):
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
        return logits[:-1].gather(1, ids[1:, None])[:, 0].double()

    return torch.cat([logp(ids) for ids in sequences])


def compare(stapo, model, lengths):
    """What is wrong with a model; None if nothing is."""
    draw = torch.Generator().manual_seed(sum(lengths))
    sequences = [torch.randint(0, model.config.vocab_size, (length,), generator=draw) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer_of(model.config.vocab_size).save_pretrained(folder)
        config = pathlib.Path(folder, "config.json").read_text()
        try:
            found = torch.cat(scored(stapo, folder, sequences)).double()
        except AssertionError as refusal:
            return f"{str(refusal).replace(folder, '')}\n{config}"
    single = expected(model, sequences)
    double = expected(model.double(), sequences)
    off, rounding = ((logp - double).abs().max().item() for logp in (found, single))
    return None if off < max(1e-4, 10 * rounding) else f"off by {off}, transformers in f32 by {rounding}\n{config}"


def main(stapo, n=10, first=0, *families):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    n_wrong = 0
    for family in families or FAMILIES:
        made = [(seed, model_of(family, seed)) for seed in range(int(first), int(first) + int(n))]
        found = {seed: compare(stapo, *model) for seed, model in made if model is not None}
        wrong = {seed: text for seed, text in found.items() if text is not None}
        for seed, text in wrong.items():
            print(f"{family} {seed}: {text}")
        print(f"{family}: {len(found) - len(wrong)} of {len(found)} equal", flush=True)
        n_wrong += len(wrong)
    sys.exit(n_wrong > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
