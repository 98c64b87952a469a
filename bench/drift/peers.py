"""The tokenizer of the drift bench, and the same turns through other ways of continuing a conversation.

`make FOLDER` trains a byte-level BPE tokenizer on the prose and the source of this repository and writes it with a ChatML
template. `count FOLDER` reads the turns that the bench wrote and counts, for each turn by itself:

- messages: the turn is decoded to text, the conversation rendered and encoded anew, as loops over chat messages do;
- suffix: only the tool's message is rendered and encoded, with special tokens, as TRL's tool loop does today.
"""

import json
import pathlib
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).parent.parent.parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TEMPLATE = (
    "{%- for message in messages %}{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def make(folder):
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16000, initial_alphabet=alphabet, show_progress=False)
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("crates/*/src/**/*.rs")])
    tokenizer.train([str(file) for file in files], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokenizer.save(f"{folder}/tokenizer.json")
    pathlib.Path(folder, "chat_template.jinja").write_text(TEMPLATE)


def count(folder):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    control = set(tokenizer.convert_tokens_to_ids(SPECIAL + ADDED))

    def encode(messages, prompt=True):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)

    dummy = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": ""}]
    prefix = encode(dummy, prompt=False)
    prefix = prefix[: len(prefix) - prefix[::-1].index(end)]

    def n_control(content):
        suffix = encode([*dummy, {"role": "tool", "content": content}])[len(prefix) :]
        return sum(token in control for token in suffix)

    neutral, brought, starts = n_control(""), {}, {}
    n_turns = n_sampled = n_changed_turns = n_changed = n_injected = 0
    for line in open(f"{folder}/turns.jsonl"):
        turn = json.loads(line)
        ids, observation, question = turn["ids"], turn["observation"], turn["question"]
        messages = [{"role": "user", "content": question}]
        if question not in starts:
            starts[question] = len(encode(messages))
        messages.append({"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)})
        messages.append({"role": "tool", "content": observation})
        start = starts[question]
        again = encode(messages)[start : start + len(ids)]
        changed = sum(old != new for old, new in zip(ids, again))
        n_turns += 1
        n_sampled += len(ids)
        n_changed_turns += changed > 0
        n_changed += changed
        if observation not in brought:
            brought[observation] = n_control(observation) > neutral
        n_injected += brought[observation]
    print(
        f"messages: of {n_turns} turns with {n_sampled} sampled tokens {n_changed} tokens in {n_changed_turns} turns changed; "
        f"{n_injected} observations brought control tokens"
    )
    print(f"suffix: tokens are only appended; {n_injected} observations brought control tokens")


def main():
    {"make": make, "count": count}[sys.argv[1]](sys.argv[2])


main()
