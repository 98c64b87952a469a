"""Exports a tiny random multimodal Gemma 3 with `stapo model convert` and compares both folders as transformers reads them.

    pip install torch torchvision transformers
    python check_multimodal.py STAPO

The logits of a text and of a text with an image must be equal, and every weight but those of norms, to which 1 is added in f32
on reading and subtracted on writing. The exported folder must load its processor of images, with equal settings.
"""

import pathlib
import subprocess
import sys
import tempfile

import torch
from make_families import FULL, SLIDING, config_of
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ImageProcessor,
    SiglipVisionConfig,
)


def config():
    text = config_of("gemma3-windows", layer_types=[SLIDING, SLIDING, FULL])
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    return Gemma3Config(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        mm_tokens_per_image=4,
        image_token_index=40,
        boi_token_index=38,
        eoi_token_index=39,
        tie_word_embeddings=True,
    )


def logits(model):
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(1, 37, (1, 24), generator=generator)
    shown = torch.cat([text[:, :5], torch.tensor([[38, 40, 40, 40, 40, 39]]), text[:, 5:]], 1)
    image = torch.randn(1, 3, 16, 16, generator=generator)
    with torch.no_grad():
        alone = model(input_ids=text).logits
        types = (shown == 40).long()
        return alone, model(input_ids=shown, pixel_values=image, token_type_ids=types).logits


def main(stapo):
    torch.set_num_threads(1)
    load = lambda folder: AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with tempfile.TemporaryDirectory() as temporary:
        folder, out = pathlib.Path(temporary, "model"), pathlib.Path(temporary, "out")
        model = AutoModelForImageTextToText.from_config(config(), attn_implementation="eager").float()
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
        model.save_pretrained(folder)
        Gemma3ImageProcessor(size={"height": 16, "width": 16}, do_convert_rgb=True).save_pretrained(folder)
        subprocess.run([stapo, "model", "convert", str(folder), str(out), "--dtype", "f32"], check=True)
        theirs, ours = load(folder), load(out)
        given, kept = (AutoImageProcessor.from_pretrained(place).to_dict() for place in (folder, out))
        assert given == kept and given["size"]["height"] == 16, (given, kept)
    a, b = theirs.state_dict(), ours.state_dict()
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    off = [name for name in a if not torch.equal(a[name], b[name]) and not name.endswith("norm.weight")]
    assert not off, off
    differences = [(x - y).abs().max().item() for x, y in zip(logits(theirs), logits(ours))]
    print(f"{len(a)} tensors; logits of a text and of a text with an image differ by {differences}")
    assert max(differences) <= 1e-5


main(*sys.argv[1:])
