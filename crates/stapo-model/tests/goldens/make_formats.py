"""Makes tests/data/formats: small files of every format, and the results of independent readers.

    pip install torch transformers gguf tokenizers sentencepiece
    python make_formats.py [--models FOLDER] [--tokenizers FOLDER]

blocks.json      random quantised blocks and their numbers by the `gguf` package
llama-spm.gguf   a tiny Llama with mixed encodings, rotary scaling by rope_freqs, a SentencePiece vocabulary
qwen2-bpe.gguf   a tiny Qwen2 with biases, a byte-level vocabulary, a finer output.weight
tensors.json     CRC-32 of every tensor of the two, as `transformers` reads them
tokenizers.json  ids by `sentencepiece` and by the `tokenizers` package (which has another regular expression engine)
chat.json        conversations rendered by `transformers`
real.json        the same for published models (see real(); left unchanged where the models are not given)
configs.json     config.json files that `transformers` saved, three families by four kinds of rotary scaling
"""

import argparse
import json
import os
import tempfile
import zlib

import gguf
import numpy as np
import sentencepiece
import tokenizers
import torch
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "formats")
GGML = gguf.GGMLQuantizationType
rng = np.random.default_rng(7)

TRAINING_TEXT = """
The quick brown fox jumps over the lazy dog, and it's 12 or 345 times that they're faster than we'll ever be.
Let x = 3.14 and y = 2x + 1; then \\frac{1}{2} of y is the answer: \\boxed{7}. "Yes!" he said; why not?
    def area(width, height):
        return width * height  # in square metres

Größe, café, naïve, Ärger: words of other tongues. Числа и буквы. 数字和文字。 The end, the end, the end.
""" * 4

TEXTS = [
    "", " ", "  two", "Hello, world!", " leading and trailing ", "it's they'RE we'LL I'd", "1234567 12 3.14e-10 x86",
    "naïve café e\u0301 \u212b \u00c5", "数字和文字 日本 한국", "😀 👩\u200d👧 🇩🇪", "a\n\n  b\t\tc\r\n\r\n", "\n", " \n ", "!!!???...",
    "١٢٣ Ⅷ ½ ²", "def area(w):\n    return w**2\n\n\n", "\\boxed{\\frac{1}{2}}", "\u200b\u00a0\u3000\ufeff", "<s>the end</s>",
    "<|im_start|>user\nthe end<|im_end|>", "x" * 70, "'s'S'ſ", "the  end   the    end", "▁ Ġ <0x0A>",
]


def blocks():
    """Random bits in every block, but finite scales."""
    cases = {}
    for kind in ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]:
        numbers, size = gguf.GGML_QUANT_SIZES[GGML[kind]]
        n_blocks = 64 if numbers == 1 else 6
        raw = rng.integers(0, 256, (n_blocks, size), dtype=np.uint8)
        if numbers == 1:
            raw = rng.normal(0, 1, n_blocks * 2).astype(np.float32).view(np.uint8)[: n_blocks * size].reshape(n_blocks, size)
            if kind == "F16":
                raw = rng.normal(0, 1, n_blocks).astype(np.float16).view(np.uint8).reshape(n_blocks, size)
        else:
            places = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}.get(kind, [0])
            for place in places:
                scales = rng.normal(0, 0.1, n_blocks).astype(np.float16)
                scales[0], scales[1] = 0.0, 6e-8
                raw[:, place : place + 2] = scales.view(np.uint8).reshape(n_blocks, 2)
        expected = gguf.dequantize(raw.reshape(-1), GGML[kind]).astype(np.float32).reshape(-1)
        cases[kind] = {"bytes": raw.tobytes().hex(), "bits": expected.view(np.uint32).tolist()}
    return cases


def sentence_piece_vocabulary():
    with tempfile.TemporaryDirectory() as folder:
        text, model = os.path.join(folder, "text"), os.path.join(folder, "model")
        open(text, "w").write(TRAINING_TEXT)
        sentencepiece.SentencePieceTrainer.train(
            input=text, model_prefix=model, model_type="bpe", vocab_size=480, byte_fallback=True, character_coverage=0.98,
            split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            add_dummy_prefix=True, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
        )
        return sentencepiece.SentencePieceProcessor(model_file=model + ".model")


WORDS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_vocabulary(kind):
    """A small vocabulary of one kind, trained here; returns the tokenizer, its tokens by id, and its merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in WORDS)
    if kind in WORDS:
        split = pre_tokenizers.Split(Regex(WORDS[kind]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif kind == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(keepends=True), trainer)
    state = json.loads(tokenizer.to_str())
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    return tokenizer, tokens, [" ".join(pair) for pair in state["model"]["merges"]]


def add_byte_level(writer, kind, tokens, merges):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)


def add_shape(writer, width, layers, heads, kv_heads, ffn):
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)


def add_tensor(writer, name, shape, kind):
    numbers = rng.normal(0, 0.05, shape).astype(np.float32)
    if kind == "F32":
        writer.add_tensor(name, numbers)
    else:
        writer.add_tensor(name, gguf.quantize(numbers, GGML[kind]), raw_dtype=GGML[kind])


def add_layers(writer, width, layers, heads, kv_heads, ffn, bias, kinds):
    head = width // heads
    kinds = iter(kinds * 100)
    for layer in range(layers):
        for name, shape in {
            "attn_q": (width, width), "attn_k": (kv_heads * head, width), "attn_v": (kv_heads * head, width),
            "attn_output": (width, width), "ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn),
        }.items():
            add_tensor(writer, f"blk.{layer}.{name}.weight", shape, next(kinds))
            if bias and name in ("attn_q", "attn_k", "attn_v"):
                add_tensor(writer, f"blk.{layer}.{name}.bias", shape[:1], "F32")
        add_tensor(writer, f"blk.{layer}.attn_norm.weight", (width,), "F32")
        add_tensor(writer, f"blk.{layer}.ffn_norm.weight", (width,), "F32")
    add_tensor(writer, "output_norm.weight", (width,), "F32")


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_factors(theta, head, factor, low, high, context):
    frequency = 1.0 / theta ** (np.arange(0, head, 2) / head)
    turns = context * frequency / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1.0 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def write_llama(path, spm):
    writer = gguf.GGUFWriter(path, "llama")
    add_shape(writer, width=64, layers=2, heads=4, kv_heads=2, ffn=96)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(spm.vocab_size())
    writer.add_tokenizer_model("llama")
    ids = range(spm.vocab_size())
    kind = lambda i: 2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1
    writer.add_token_list([spm.id_to_piece(i) for i in ids])
    writer.add_token_scores([spm.get_score(i) for i in ids])
    writer.add_token_types([kind(i) for i in ids])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    add_tensor(writer, "token_embd.weight", (spm.vocab_size(), 64), "Q4_0")
    add_layers(writer, 64, 2, 4, 2, 96, False, ["Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32", "Q4_0"])
    writer.add_tensor("rope_freqs.weight", llama3_factors(500000.0, 16, 32.0, 1.0, 4.0, 8192))
    finish(writer)


def write_qwen2(path, tokens, merges):
    tokens = tokens + [f"[PAD{i}]" for i in range(len(tokens), 432)]
    writer = gguf.GGUFWriter(path, "qwen2")
    add_shape(writer, width=64, layers=1, heads=2, kv_heads=1, ffn=64)
    writer.add_rope_freq_base(1000000.0)
    add_byte_level(writer, "qwen2", tokens, merges)
    writer.kv_data[-1]["tokenizer.ggml.token_type"].value = [
        3 if t in SPECIAL else 5 if t.startswith("[PAD") else 1 for t in tokens
    ]
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    add_tensor(writer, "token_embd.weight", (432, 64), "Q5_0")
    add_tensor(writer, "output.weight", (432, 64), "Q8_0")
    add_layers(writer, 64, 1, 2, 1, 64, True, ["Q8_0"])
    finish(writer)


def tensor_sums(name):
    model = AutoModelForCausalLM.from_pretrained(OUT, gguf_file=name, dtype=torch.float32)
    tied = model.config.tie_word_embeddings
    state = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    return {k: {"shape": list(v.shape), "crc32": zlib.crc32(v.numpy().astype("<f4").tobytes())} for k, v in state.items()}


def sentence_piece_cases(spm):
    # `<s>` in text is a control token here but plain text to `sentencepiece`.
    texts = [t for t in TEXTS if t and "<s>" not in t]
    return [{"text": t, "ids": [1] + spm.encode(t)} for t in texts]


CHAT_TEMPLATE = """
{%- macro turn(role, content) -%}
    [{{ role | upper }}] {{ content | trim }}
{%- endmacro -%}
{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'none' %}
{%- endif %}
{% if tools %}tools{% else %}no tools{% endif %} {{ system | tojson }}
{% set ns = namespace(last=-1, n=0) %}
{% for message in messages[::-1] %}
    {% set index = messages | length - 1 - loop.index0 %}
    {% if message.role == 'user' and not message.content.startswith('<skip>') %}
        {% set ns.last = index %}
        {% break %}
    {% endif %}
{% endfor %}
last user {{ ns.last }}
{% for message in messages %}
    {% if message.role not in ['user', 'assistant'] %}
        {{ raise_exception('unknown role ' + message.role) }}
    {% endif %}
    {% if '</think>' in message.content %}
        {% set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {% else %}
        {% set content = message.content %}
    {% endif %}
    {% if content is string and content.strip() == '' %}
        {% continue %}
    {% endif %}
    {% set ns.n = ns.n + 1 %}
{{ turn(message['role'], content) }}{{ eos_token if message.role == 'assistant' else '' }}
    {%- if not loop.last %}
 |{{ loop.index }}|
    {%- endif %}

{% endfor %}
{{ {'n': ns.n, 'list': [1, 2.5, true, none, 'é"\\n<b>'], 'empty': {}} | tojson }}
{{ [{'a': 1}, []] | tojson(indent=2) }}
{% generation %}x{% endgeneration %}
{%- if add_generation_prompt %}
<assistant>{{ '' if enable_thinking is defined and enable_thinking is false else '<think>' }}
{% endif %}
"""


def chat_cases():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    turn = lambda role, content: {"role": role, "content": content}
    conversations = [
        [turn("user", "hi")],
        [turn("system", 'be "brief" & <b>'), turn("user", " hi \n"), turn("assistant", "hello"), turn("user", "more?")],
        [turn("user", "a"), turn("assistant", "<think>\nhm\n</think>\n\nyes "), turn("user", "<skip> b"), turn("assistant", " ")],
        [turn("system", ""), turn("assistant", "é 😀")],
        [turn("user", "x"), turn("tool", "y")],
    ]
    cases = []
    for messages in conversations:
        for prompt in [True, False]:
            for variables in [{}, {"enable_thinking": False}]:
                try:
                    text = tokenizer.apply_chat_template(
                        messages, chat_template=CHAT_TEMPLATE, tokenize=False, add_generation_prompt=prompt, **variables
                    )
                except Exception as refusal:
                    text, refused = None, str(refusal)
                    cases.append({"messages": messages, "prompt": prompt, "variables": variables, "refused": refused})
                    continue
                cases.append({"messages": messages, "prompt": prompt, "variables": variables, "text": text})
    return {"template": CHAT_TEMPLATE, "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"}, "cases": cases}


def config_cases():
    shape = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=131072, bos_token_id=1, eos_token_id=2,
    )
    ropes = {
        "default": {"rope_type": "default", "rope_theta": 1000000.0},
        "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        "llama3": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "yarn": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
    }
    classes = {"qwen3": (Qwen3Config, {"head_dim": 32}), "qwen2": (Qwen2Config, {}), "llama": (LlamaConfig, {})}
    cases = {}
    for family, (kind, extra) in classes.items():
        for rope, parameters in ropes.items():
            config = kind(**shape, **extra, rope_parameters=dict(parameters), tie_word_embeddings=rope == "yarn")
            config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                cases[f"{family}-{rope}"] = json.load(open(os.path.join(folder, "config.json")))
    return cases


PLAIN_TURNS = [
    [("user", "hi")],
    [("system", "Be brief."), ("user", " 1 + 1? "), ("assistant", "2\n"), ("user", "Sure?")],
    [("system", ""), ("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", 'c "quoted" <b> & é 😀')],
]


def plain_chat(tokenizer, conversations):
    """Conversations through the model's own template."""
    cases = []
    for turns in conversations:
        messages = [{"role": role, "content": content} for role, content in turns]
        for prompt in [True, False]:
            for variables in [{}, {"enable_thinking": False}]:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **variables)
                cases.append({"messages": messages, "prompt": prompt, "variables": variables, "text": text})
    return cases


def tokens(tokenizer, texts):
    return [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in texts]


def real(models, folder):
    """The results of `transformers` on published models: some tensors, texts, conversations.

    Conversations with the GGUF models bring their own system message, so that the models' default message is not
    stored. When `transformers` reads a GGUF vocabulary it leaves out what GGUF only implies: Qwen's NFC normaliser and
    SmolLM's splitting of digits. This function adds both before it takes the ids.
    """
    cases = {}
    if models:
        for name in ["smollm2.gguf", "qwen2.5-coder-0.5b.gguf"]:
            model = AutoModelForCausalLM.from_pretrained(models, gguf_file=name, dtype=torch.float32)
            parts = ["layers.0.", "layers.11.", "model.norm", "lm_head" if "qwen" in name else "embed_tokens"]
            state = {k: v for k, v in model.state_dict().items() if any(part in k for part in parts)}
            sums = {k: {"shape": list(v.shape), "crc32": zlib.crc32(v.numpy().tobytes())} for k, v in state.items()}
            tokenizer = AutoTokenizer.from_pretrained(models, gguf_file=name)
            if "qwen" in name:
                tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
            else:
                byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
                digits = pre_tokenizers.Digits(individual_digits=True)
                tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
            cases[name] = {"tensors": sums, "tokens": tokens(tokenizer, TEXTS), "chat": plain_chat(tokenizer, PLAIN_TURNS[1:])}
    if folder:
        tokenizer = AutoTokenizer.from_pretrained(os.path.join(folder, "qwen3"))
        texts = TEXTS + ["<think>\n</think>", "a" * 3000, " " * 5000 + "x", "x\u0301\u0302" * 50]
        cases["qwen3"] = {"tokens": tokens(tokenizer, texts), "chat": plain_chat(tokenizer, PLAIN_TURNS)}
    return cases


def write(name, value):
    with open(os.path.join(OUT, name), "w") as file:
        json.dump(value, file, ensure_ascii=False, separators=(",", ":"))
        file.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="folder with smollm2.gguf and qwen2.5-coder-0.5b.gguf")
    parser.add_argument("--tokenizers", help="folder with qwen3/tokenizer.json and qwen3/tokenizer_config.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.models or args.tokenizers:
        write("real.json", real(args.models, args.tokenizers))
    write("blocks.json", blocks())
    spm = sentence_piece_vocabulary()
    write_llama(os.path.join(OUT, "llama-spm.gguf"), spm)
    cases = {"sentence piece": {"cases": sentence_piece_cases(spm)}}
    for kind in ["qwen2", "llama-bpe", "smollm", "gpt-2"]:
        tokenizer, tokens, merges = byte_level_vocabulary(kind)
        if kind == "qwen2":
            write_qwen2(os.path.join(OUT, "qwen2-bpe.gguf"), tokens, merges)
        encoded = [{"text": t, "ids": tokenizer.encode(t).ids} for t in TEXTS]
        cases[kind] = {"tokens": tokens, "merges": merges, "cases": encoded}
    write("tokenizers.json", cases)
    write("tensors.json", {name: tensor_sums(name) for name in ["llama-spm.gguf", "qwen2-bpe.gguf"]})
    write("chat.json", chat_cases())
    write("configs.json", config_cases())
    print("made with transformers", transformers.__version__, "tokenizers", tokenizers.__version__)


main()
