"""Makes tests/data/formats/words.json: ids by the `tokenizers` package for every name of `tokenizer.ggml.pre`.

    pip install tokenizers
    python make_words.py

One vocabulary serves all names. Its merges were learned without cutting lines into words, so they go across the borders of
words, and ids differ wherever two names cut a text at different places. Some tokens have lost their merge, as words of Llama 3
have that only a look into the vocabulary finds.
"""

import json
import pathlib

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

OUT = pathlib.Path(__file__).parent.parent / "data" / "formats" / "words.json"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BEHIND_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + BEHIND_NUMBERS
QWEN35 = (
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + BEHIND_NUMBERS
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def by_case(suffix, numbers):
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{UPPER}*{LOWER}+{suffix}|{start}{UPPER}+{LOWER}*{suffix}"
    return words + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


GPT4O = by_case(CONTRACTIONS + "?", r"|\p{N}{1,3}")
TEKKEN = by_case("", r"|\p{N}")

# How a name cuts words, and whether words that are tokens are taken whole.
NAMES = {
    "default": (None, False),
    "gpt-2": (None, False),
    "qwen2": (QWEN2, False),
    "deepseek-r1-qwen": (QWEN2, False),
    "qwen35": (QWEN35, False),
    "llama-bpe": (LLAMA3, True),
    "llama3": (LLAMA3, True),
    "llama-v3": (LLAMA3, True),
    "smaug-bpe": (LLAMA3, False),
    "dbrx": (LLAMA3, False),
    "gpt-4o": (GPT4O, False),
    "tekken": (TEKKEN, True),
    "smollm": ("digits", False),
    "refact": ("digits", False),
    "starcoder": ("digits", False),
}

TRAINING_TEXT = """
The end, and it's 12 or 345 or 6789; they're faster than we'll EVER be. IT'S theirs, DON'T!
    def getHTTPServer(x1):  return "/path/to"// + x1**2\r\n\r\n
cafe\u0301 Größe naïve \u0928\u092e\u0938\u094d\u0924\u0947 数字和文字。 Числа 😀  the end  the end\n\n\n
""" * 4
TEXTS = [
    "The end,  and it's 12 or 345 or 6789; they're",
    "DON'T IT'S We'LL x's getHTTPServer(x1):  return",
    ' "/path/to"// + x1**2\r\n\r\n\n  x',
    "cafe\u0301 e\u0301\u0302 Größe \u0928\u092e\u0938\u094d\u0924\u0947 数字和文字。Числа",
    "  the end  \n\n\n 1234567 ½²١٢٣  ",
    "<|im_start|>the end<|im_end|>/\n😀",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LOST = ["end", "Ġend", "The", "Ġthe"]


def vocabulary():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=520, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(keepends=True), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens, merges = dict(model["vocab"]), [tuple(pair) for pair in model["merges"]]
    for word in LOST:
        tokens.setdefault(word, len(tokens))
    return tokens, [pair for pair in merges if "".join(pair) not in LOST]


def tokenizer_of(name, tokens, merges):
    cut, takes_whole_words = NAMES[name]
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=merges, ignore_merges=takes_whole_words))
    tokenizer.add_special_tokens(SPECIAL)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut in (None, "digits"))
    before = []
    if cut == "digits":
        before = [pre_tokenizers.Digits(individual_digits=True)]
    elif cut is not None:
        before = [pre_tokenizers.Split(Regex(cut), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before + [words])
    if cut in (QWEN2, QWEN35):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main():
    tokens, merges = vocabulary()
    names = {}
    for name in NAMES:
        tokenizer = tokenizer_of(name, tokens, merges)
        names[name] = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    distinct = {json.dumps(ids) for ids in names.values()}
    assert len(distinct) == len({(cut, whole) for cut, whole in NAMES.values()}), "two names give the same ids"
    by_id = sorted(tokens, key=tokens.get)
    golden = {"tokens": by_id, "merges": [" ".join(pair) for pair in merges], "texts": TEXTS, "names": names}
    OUT.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")


main()
