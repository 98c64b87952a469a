#!/usr/bin/env python3
"""Makes golden reward models: tiny random `*ForSequenceClassification` with one label, saved by transformers.

    python make_reward_models.py [OUT]        # OUT: this script's folder unless given

Each case is a folder as `save_pretrained` writes it plus golden.safetensors:

    tokens          i32 [T]      sequences one after another; one ends with padding tokens, one is all padding
    lengths         i32 [S]      tokens of each sequence
    scores          f32 [S]      of one batch, padded on the right
    d_scores        f32 [S]      random coefficients of the loss  sum d_scores * scores
    grad.<parameter>  f32        of that loss, by autograd

All in f32 on the CPU, one thread, eager attention.
"""

import pathlib
import sys

import make_families
import make_models
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

# name: the case of a language model that has the same decoder
CASES = {
    "reward-qwen2": (make_models, "qwen2-untied-gqa2"),
    "reward-qwen3": (make_models, "qwen3-tied-gqa2"),
    "reward-llama": (make_models, "llama3-untied-gqa1"),
    "reward-gemma2": (make_families, "gemma2-softcaps"),
    "reward-gemma3": (make_families, "gemma3-windows"),
}
LENGTHS = [1, 19, 33, 8, 3]
PADDING = 5


def sequences(vocab, generator):
    made = [torch.randint(0, vocab, (n,), generator=generator) for n in LENGTHS]
    made[3][-2:] = PADDING
    made[4][:] = PADDING
    return made


def golden(model, vocab, generator):
    made = sequences(vocab, generator)
    batch = torch.nn.utils.rnn.pad_sequence(made, batch_first=True, padding_value=PADDING)
    # The mask is of the lengths: tokens of a sequence that look like padding are read like others.
    mask = torch.arange(batch.shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    scores = model(batch, attention_mask=mask.int()).logits[:, 0]
    d_scores = torch.randn(len(made), generator=generator)
    (d_scores @ scores).backward()
    out = {
        "tokens": torch.cat(made).int(),
        "lengths": torch.tensor(LENGTHS, dtype=torch.int32),
        "scores": scores.detach(),
        "d_scores": d_scores,
    }
    out.update({f"grad.{name}": p.grad for name, p in model.named_parameters()})
    return {name: t.contiguous() for name, t in out.items()}


def main():
    torch.set_num_threads(1)
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    for index, (case, (module, like)) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(3000 + index)
        config = module.config_of(like)
        config.num_labels = 1
        config.pad_token_id = PADDING
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
        model = make_models.randomise(model.float(), generator)
        # With an index, autograd leaves out the row of the padding token, also where a sequence reads that token.
        model.model.embed_tokens.padding_idx = None
        model.save_pretrained(out / case)
        save_file(golden(model.eval(), config.vocab_size, generator), out / case / "golden.safetensors")
        print(case, sum(p.numel() for p in model.parameters()), "parameters")


if __name__ == "__main__":
    main()
