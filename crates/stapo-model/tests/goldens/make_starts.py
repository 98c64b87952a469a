"""Makes tests/data/formats/starts.json: ids by `transformers` of tokenizer folders whose files disagree about the tokens that
start and end a text.

    pip install transformers
    python make_starts.py
"""

import itertools
import json
import pathlib
import tempfile

from transformers import AutoTokenizer

OUT = pathlib.Path(__file__).parent.parent / "data" / "formats" / "starts.json"
VOCABULARY = {"<s>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5, "▁ab": 6}
ADDED = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": id, "content": token, **ADDED} for token, id in VOCABULARY.items() if id < 2],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "pre_tokenizer": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": VOCABULARY, "merges": ["▁ a", "▁a b"]},
}
FLAGS = [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]


def processor(*parts):
    """A post-processor that writes these tokens, and the text where there is none."""
    if not parts:
        return None
    single = [{"SpecialToken": {"id": p, "type_id": 0}} if p else {"Sequence": {"id": "A", "type_id": 0}} for p in parts]
    tokens = {p: {"id": p, "ids": [VOCABULARY[p]], "tokens": [p]} for p in parts if p}
    pair = single + [{"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def main():
    cases = []
    processors = [processor(), processor("<s>", None), processor("<s>", None, "</s>")]
    kinds = ["PreTrainedTokenizerFast", "LlamaTokenizerFast"]
    for kind, number, flags in itertools.product(kinds, range(len(processors)), FLAGS):
        file = TOKENIZER | {"post_processor": processors[number]}
        config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", **flags}
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "tokenizer.json").write_text(json.dumps(file))
            pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
            ids = AutoTokenizer.from_pretrained(folder)("ab b")["input_ids"]
        cases.append({"config": config, "post_processor": number, "ids": ids})
    golden = {"tokenizer": TOKENIZER, "post_processors": processors, "text": "ab b", "cases": cases}
    OUT.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")


main()
