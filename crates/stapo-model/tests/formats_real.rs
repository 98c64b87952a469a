//! Published models and tokenizers. A test whose files are missing says so and passes.
//!
//! `STAPO_TEST_MODELS`: a folder with `smollm2.gguf` (`SmolLM2-135M-Instruct` in `Q4_1`) and `qwen2.5-coder-0.5b.gguf`
//! (`Qwen2.5-Coder-0.5B-Instruct` in `Q4_K_M`). `STAPO_TEST_TOKENIZERS`: one with `qwen3/tokenizer.json` and
//! `qwen3/tokenizer_config.json`; by default `../shared/data/tokenizers` beside the repository.

use crate::formats_shared::{check_tensors, check_tokens, golden};
use serde_json::Value;
use stapo_model::decoder::LoraTarget;
use stapo_model::peft::PeftAdapter;
use stapo_model::{ChatTemplate, Message, ModelConfig, Pretrained, Tokenizer};
use std::path::{Path, PathBuf};

fn real_model(name: &str) -> Option<Pretrained> {
    let Some(folder) = std::env::var_os("STAPO_TEST_MODELS") else {
        println!("skipped: STAPO_TEST_MODELS is not set");
        return None;
    };
    let path = PathBuf::from(folder).join(name);
    if !path.is_file() {
        println!("skipped: {} is not there", path.display());
        return None;
    }
    Some(Pretrained::open(&path).unwrap())
}

fn qwen3(file: &str) -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/tokenizers");
    let folder = std::env::var_os("STAPO_TEST_TOKENIZERS").map_or(beside, PathBuf::from);
    let path = folder.join("qwen3").join(file);
    if !path.is_file() {
        println!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

fn check_chat(template: &ChatTemplate, cases: &Value) {
    for case in cases.as_array().unwrap() {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let turn = |m: &Value| Message { role: text(&m["role"]), content: text(&m["content"]) };
        let messages: Vec<_> = case["messages"].as_array().unwrap().iter().map(turn).collect();
        let variables = case["variables"].as_object().unwrap();
        let ours = if case["prompt"] == true {
            template.prompt(&messages, variables)
        } else {
            template.transcript(&messages, variables)
        };
        assert_eq!(ours.unwrap(), text(&case["text"]), "{case}");
    }
}

fn check_model(name: &str) {
    let Some(model) = real_model(name) else { return };
    let expected = &golden("real.json")[name];
    check_tensors(&model, &expected["tensors"]);
    check_tokens(&model.tokenizer().unwrap(), &expected["tokens"]);
    check_chat(&model.chat_template().unwrap().unwrap(), &expected["chat"]);
}

#[test]
fn smollm2_is_read_as_by_transformers() {
    check_model("smollm2.gguf");
}

#[test]
fn qwen2_5_coder_is_read_as_by_transformers() {
    check_model("qwen2.5-coder-0.5b.gguf");
}

#[test]
fn qwen3_tokenizes_and_chats_as_by_transformers() {
    let (Some(path), Some(config)) = (qwen3("tokenizer.json"), qwen3("tokenizer_config.json")) else {
        return;
    };
    let tokenizer = Tokenizer::from_json("tokenizer.json", &std::fs::read(path).unwrap()).unwrap();
    let expected = &golden("real.json")["qwen3"];
    check_tokens(&tokenizer, &expected["tokens"]);
    let config: Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
    let template = config["chat_template"].as_str().unwrap();
    check_chat(&ChatTemplate::new("qwen3", template, [].into()).unwrap(), &expected["chat"]);
    assert_eq!(tokenizer.n_ids(), 151_669);
}

/// The adapter of the package `llm-security-reviewer` 0.1.1, of Qwen2.5-Coder-7B: its folder in `STAPO_TEST_MODELS`.
#[test]
fn a_published_adapter_fits_its_model_and_no_other() {
    let folder =
        std::env::var_os("STAPO_TEST_MODELS").map(|folder| PathBuf::from(folder).join("reviewer/adapters"));
    let Some(folder) = folder.filter(|folder| folder.is_dir()) else {
        println!("skipped: STAPO_TEST_MODELS has no folder reviewer/adapters");
        return;
    };
    let adapter = PeftAdapter::open(&folder).unwrap();
    assert_eq!((adapter.spec.rank, adapter.spec.alpha, adapter.spec.factor()), (16, 32.0, 2.0));
    assert_eq!((adapter.spec.targets.as_slice(), adapter.dropout), (LoraTarget::ALL.as_slice(), 0.05));
    adapter.check(&ModelConfig::known("qwen2.5-7b").unwrap()).unwrap();
    let other = adapter.check(&ModelConfig::known("qwen2.5-3b").unwrap()).unwrap_err().to_string();
    assert!(other.contains("lora_A") && other.contains("shape"), "{other}");
}
