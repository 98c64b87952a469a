//! Chat templates in the styles of published families, written for these tests, with tokenizers of their control tokens.

use super::{ChatTemplate, Map, SpecialTokens, Value, json};
use crate::Tokenizer;

pub(super) struct Style {
    pub(super) name: &'static str,
    source: &'static str,
    /// Control tokens; those after the first `n_special` are added tokens that a decoder shows, as `<tool_call>`.
    control: &'static [&'static str],
    n_special: usize,
    pub(super) end_of_turn: &'static str,
    pub(super) other_stop: Option<&'static str>,
    /// The role of observations.
    pub(super) role: &'static str,
    /// What is appended to a turn of the assistant.
    pub(super) expected: &'static str,
    pub(super) alternates: bool,
    pub(super) drops_thinking: bool,
    /// What the template makes of an observation.
    change: Change,
}

#[derive(PartialEq)]
enum Change {
    None,
    Trim,
    Json,
}

pub(super) const ALL: [Style; 11] =
    [QWEN, QWEN3, LLAMA3, GEMMA, MISTRAL, MISTRAL_SMALL, SMOLLM3, OLMO3, GRANITE, GPT_OSS, PHI];

/// ChatML with Hermes' tools. Replies of tools are parts of a message of the user.
const QWEN: Style = Style {
    name: "qwen",
    source: r#"{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"#,
    control: &[
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    ],
    n_special: 3,
    end_of_turn: "<|im_end|>",
    other_stop: Some("<|endoftext|>"),
    role: "tool",
    expected: "<|im_end|>\n<|im_start|>user\n<tool_response>\nOBSERVATION\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    alternates: false,
    drops_thinking: false,
    change: Change::None,
};

/// Qwen3 without thinking: earlier turns lose what is before `</think>`.
const QWEN3: Style = Style {
    name: "qwen3",
    source: r#"{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- if message.role == "user" and not message.content.startswith('<tool_response>') and ns.last == messages|length - 1 %}
{%- set ns.last = messages|length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
{%- if loop.index0 > ns.last %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + content }}{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' }}{{ message.content }}{{ '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"#,
    expected: "<|im_end|>\n<|im_start|>user\n<tool_response>\nOBSERVATION\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    drops_thinking: true,
    ..QWEN
};

/// Replies of tools are strings, which count as iterable and are written as JSON.
const LLAMA3: Style = Style {
    name: "llama3",
    source: r#"{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{%- if message.role == "tool" or message.role == "ipython" %}
{{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
{%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}
{{- "<|eot_id|>" }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"#,
    control: &[
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ],
    n_special: 6,
    end_of_turn: "<|eot_id|>",
    other_stop: Some("<|eom_id|>"),
    expected: "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n\"OBSERVATION\"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    change: Change::Json,
    ..QWEN
};

const GEMMA: Style = Style {
    name: "gemma",
    source: r#"{{ '<bos>' }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("Conversation roles must alternate user/assistant") }}{% endif %}
{%- set role = "model" if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"#,
    control: &["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    n_special: 4,
    end_of_turn: "<end_of_turn>",
    other_stop: Some("<eos>"),
    role: "user",
    expected: "<end_of_turn>\n<start_of_turn>user\nOBSERVATION<end_of_turn>\n<start_of_turn>model\n",
    alternates: true,
    change: Change::Trim,
    ..QWEN
};

/// Replies of tools need an identifier of nine characters.
const MISTRAL: Style = Style {
    name: "mistral",
    source: r#"{{ '<s>' }}
{%- for message in messages %}
{%- if message.role == "user" %}{{ "[INST] " + message.content + "[/INST]" }}
{%- elif message.role == "assistant" %}{{ " " + message.content + "</s>" }}
{%- elif message.role == "tool" %}
{%- if message.tool_call_id is not defined or message.tool_call_id|length != 9 %}{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"#,
    control: &["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    n_special: 7,
    end_of_turn: "</s>",
    other_stop: None,
    expected: "</s>[TOOL_RESULTS] {\"content\": OBSERVATION, \"call_id\": \"call00001\"}[/TOOL_RESULTS]",
    ..QWEN
};

/// The system prompt holds the date.
const MISTRAL_SMALL: Style = Style {
    name: "mistral small",
    source: include_str!("../../../../tests/data/chat/mistral-small.jinja"),
    control: &["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
    n_special: 6,
    role: "user",
    expected: "</s>[INST]OBSERVATION[/INST]",
    ..MISTRAL
};

const SMOLLM3: Style = Style {
    name: "smollm3",
    source: include_str!("../../../../tests/data/chat/smollm3.jinja"),
    expected: "<|im_end|>\n<|im_start|>user\nOBSERVATION<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n",
    ..QWEN
};

/// The last turn ends with another token than those before it.
const OLMO3: Style = Style {
    name: "olmo3",
    source: include_str!("../../../../tests/data/chat/olmo3.jinja"),
    expected: "<|im_end|>\n<|im_start|>environment\nOBSERVATION<|im_end|>\n<|im_start|>assistant\n<think>",
    ..QWEN
};

const GRANITE: Style = Style {
    name: "granite",
    source: include_str!("../../../../tests/data/chat/granite.jinja"),
    control: &["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"],
    n_special: 4,
    end_of_turn: "<|end_of_text|>",
    other_stop: None,
    expected: "<|end_of_text|>\n<|start_of_role|>tool<|end_of_role|>OBSERVATION<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    ..QWEN
};

const GPT_OSS: Style = Style {
    name: "gpt-oss",
    source: include_str!("../../../../tests/data/chat/gpt-oss.jinja"),
    control: &["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"],
    n_special: 6,
    end_of_turn: "<|end|>",
    other_stop: Some("<|return|>"),
    expected: "<|end|><|start|>functions.tool to=assistant<|channel|>commentary<|message|>\"OBSERVATION\"<|end|><|start|>assistant",
    change: Change::Json,
    ..QWEN
};

const PHI: Style = Style {
    name: "phi",
    source: r"{% for message in messages %}{% if message['role'] in ['user', 'assistant'] %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
    control: &["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
    n_special: 4,
    end_of_turn: "<|end|>",
    other_stop: Some("<|endoftext|>"),
    role: "user",
    expected: "<|end|>\n<|user|>\nOBSERVATION<|end|>\n<|assistant|>\n",
    ..QWEN
};

/// The variables of every template.
pub(super) fn variables() -> Map<String, Value> {
    json!({"enable_thinking": false, "today": "2026-11-18"}).as_object().unwrap().clone()
}

impl Style {
    pub(super) fn template(&self) -> ChatTemplate {
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let tokens: SpecialTokens = tokens.map(|(name, text)| (name.into(), text.into())).into();
        ChatTemplate::new("model", self.source, tokens).unwrap()
    }

    pub(super) fn shown(&self, content: &str) -> String {
        match self.change {
            Change::None => content.to_owned(),
            Change::Trim => content.trim().to_owned(),
            // Between the quotes of the template's text.
            Change::Json => {
                let json = Value::from(content).to_string();
                json[1..json.len() - 1].to_owned()
            }
        }
    }

    pub(super) fn control_ids(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        self.control.iter().map(|token| tokenizer.id_of(token).unwrap()).collect()
    }

    /// Bytes with a few merges, some of which span the borders of control tokens.
    pub(super) fn tokenizer(&self) -> Tokenizer {
        let added =
            self.control.iter().enumerate().map(|(idx, token)| (*token, idx < self.n_special)).collect();
        tokenizer(added, &[])
    }
}

/// A tokenizer whose model holds a control token as a word and takes words whole.
pub(super) fn tokenizer_with_control_tokens_in_vocabulary() -> Tokenizer {
    tokenizer(vec![("<|im_end|>", true)], &["<|im_end|>"])
}

fn tokenizer(added: Vec<(&str, bool)>, words: &[&str]) -> Tokenizer {
    let mut bytes: Vec<String> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet()
        .into_iter()
        .map(|c| c.to_string())
        .collect();
    bytes.sort();
    let merges =
        [("<", "|"), ("|", ">"), (">", "Ċ"), ("e", "n"), ("en", "d"), ("i", "m"), ("<|", "im"), ("Ġ", "a")];
    let mut vocab: Vec<String> = bytes;
    vocab.extend(merges.iter().map(|(a, b)| format!("{a}{b}")));
    let base: Vec<String> = vocab.clone();
    vocab.extend(words.iter().map(|word| (*word).to_string()));
    let vocab: Map<String, Value> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, Value::from(id))).collect();
    let mut next = vocab.len();
    let added: Vec<Value> = added
        .into_iter()
        .map(|(content, special)| {
            let id = vocab.get(content).and_then(Value::as_u64).unwrap_or_else(|| {
                next += 1;
                next as u64 - 1
            });
            json!({"id": id, "content": content, "special": special, "normalized": false,
                "lstrip": false, "rstrip": false, "single_word": false})
        })
        .collect();
    assert_eq!(base.len(), 264);
    let merges: Vec<String> = merges.iter().map(|(a, b)| format!("{a} {b}")).collect();
    let ignore_merges = !words.is_empty();
    // A tokenizer that takes words whole must see the control token as one word.
    let use_regex = words.is_empty();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges},
    });
    Tokenizer::from_json("tokenizer.json", file.to_string().as_bytes()).unwrap()
}
