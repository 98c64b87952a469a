//! Small models in files: this crate against the results of `transformers`, `gguf` and `sentencepiece`, which
//! `tests/goldens/make_formats.py` has written.

use crate::formats_shared::{check_tensors, check_tokens, crc32, golden};
use serde_json::json;
use stapo_model::config::AttentionBiases;
use stapo_model::export::{Existing, ExportOptions, Precision, export};
use stapo_model::{Encoding, Message, Pretrained, Rope, RopeScaling};
use std::fs;
use std::path::{Path, PathBuf};

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/formats").join(name)
}

fn convert(model: &Pretrained, out: &Path, precision: Precision) {
    let options = ExportOptions { precision, max_shard_bytes: 100_000, existing: Existing::Refuse };
    let read = |spec: &stapo_model::TensorSpec, out: &mut [f32]| {
        model.weights.read_f32(&spec.name, &spec.shape, out)
    };
    export(out, &model.config, &model.companions().unwrap(), &options, read).unwrap();
}

#[test]
fn the_checksum_is_crc32() {
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
}

#[test]
fn tensors_of_both_models_are_those_that_transformers_reads() {
    for (name, expected) in golden("tensors.json").as_object().unwrap() {
        check_tensors(&Pretrained::open(&tiny(name)).unwrap(), expected);
    }
}

#[test]
fn llama_3_scaling_is_found_in_its_factors() {
    let config = Pretrained::open(&tiny("llama-spm.gguf")).unwrap().config;
    let scaling = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 8192,
    };
    let rope = &config.uniform_layer().unwrap().attention().unwrap().rope;
    assert_eq!(*rope, Rope { theta: 500000.0, scaling });
    assert!(config.tied_embeddings);
}

#[test]
fn a_finer_output_matrix_is_the_head() {
    let model = Pretrained::open(&tiny("qwen2-bpe.gguf")).unwrap();
    let attention = model.config.uniform_layer().unwrap().attention().unwrap();
    assert_eq!(attention.biases, AttentionBiases::QueryKeyValue);
    assert!(!model.config.tied_embeddings);
    assert_eq!(model.weights.encoding("lm_head.weight"), Some(Encoding::Q8_0));
    assert_eq!(model.weights.encoding("model.embed_tokens.weight"), Some(Encoding::Q5_0));
}

#[test]
fn sentence_piece_ids_are_those_of_sentencepiece() {
    let tokenizer = Pretrained::open(&tiny("llama-spm.gguf")).unwrap().tokenizer().unwrap();
    check_tokens(&tokenizer, &golden("tokenizers.json")["sentence piece"]["cases"]);
}

#[test]
fn a_converted_model_is_the_same_model() {
    for name in ["llama-spm.gguf", "qwen2-bpe.gguf"] {
        let model = Pretrained::open(&tiny(name)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("model");
        convert(&model, &out, Precision::F32);
        let again = Pretrained::open(&out).unwrap();
        assert_eq!(again.config, model.config);
        assert_eq!((model.format(), again.format()), ("GGUF", "Hugging Face"));
        check_tensors(&again, &golden("tensors.json")[name]);
        let ours = again.tokenizer().unwrap();
        let theirs = model.tokenizer().unwrap();
        for text in ["the end", " 😀 <s> café\n\n 12"] {
            assert_eq!(ours.encode(text).unwrap(), theirs.encode(text).unwrap());
        }
        // Exporting a folder copies its tokenizer files unchanged.
        let next = folder.path().join("next");
        convert(&again, &next, Precision::Bf16);
        for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            assert_eq!(fs::read(next.join(file)).unwrap(), fs::read(out.join(file)).unwrap(), "{file}");
        }
    }
}

#[test]
fn chat_templates_come_from_metadata_and_from_every_place_in_a_folder() {
    let message = [Message { role: "user".into(), content: "hi".into() }];
    let expected = "<|im_start|>user\nhi<|im_end|>\n";
    let rendered = |model: &Pretrained| {
        let template = model.chat_template().unwrap();
        template.map(|template| template.prompt(&message, &serde_json::Map::new()).unwrap())
    };
    let model = Pretrained::open(&tiny("qwen2-bpe.gguf")).unwrap();
    assert_eq!(rendered(&model).unwrap(), expected);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    convert(&model, &out, Precision::Bf16);
    assert_eq!(rendered(&Pretrained::open(&out).unwrap()).unwrap(), expected);
    let named = json!({"eos_token": {"content": "</s>"}, "chat_template": [
        {"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]});
    fs::write(out.join("tokenizer_config.json"), named.to_string()).unwrap();
    assert_eq!(rendered(&Pretrained::open(&out).unwrap()).unwrap(), "</s>");
    fs::write(out.join("chat_template.jinja"), "jinja").unwrap();
    assert_eq!(rendered(&Pretrained::open(&out).unwrap()).unwrap(), "jinja");
    let llama = Pretrained::open(&tiny("llama-spm.gguf")).unwrap();
    assert_eq!(rendered(&llama), None);
}

/// `tokenizer.json` alone says which tokens start and end a text: transformers drops the flags of `tokenizer_config.json`
/// where there is one.
#[test]
fn flags_of_tokenizer_config_add_no_tokens_as_in_transformers() {
    let golden = golden("starts.json");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    convert(&Pretrained::open(&tiny("llama-spm.gguf")).unwrap(), &out, Precision::Bf16);
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 24);
    for case in cases {
        let mut file = golden["tokenizer"].clone();
        let number = case["post_processor"].as_u64().unwrap() as usize;
        file["post_processor"] = golden["post_processors"][number].clone();
        fs::write(out.join("tokenizer.json"), file.to_string()).unwrap();
        fs::write(out.join("tokenizer_config.json"), case["config"].to_string()).unwrap();
        let tokenizer = Pretrained::open(&out).unwrap().tokenizer().unwrap();
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(golden["text"].as_str().unwrap()).unwrap(), expected, "{case}");
    }
}

#[test]
fn generation_config_names_the_stop_tokens() {
    let model = Pretrained::open(&tiny("qwen2-bpe.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    convert(&model, &out, Precision::Bf16);
    fs::write(out.join("generation_config.json"), r#"{"eos_token_id": [2, 1], "temperature": 0.6}"#).unwrap();
    assert_eq!(Pretrained::open(&out).unwrap().config.stops, [2, 1]);
    fs::write(out.join("generation_config.json"), r#"{"eos_token_id": 432}"#).unwrap();
    let message = Pretrained::open(&out).unwrap_err().to_string();
    assert!(message.contains("generation_config.json") && message.contains("432"), "{message}");
    fs::remove_file(out.join("generation_config.json")).unwrap();
    // `<|im_end|>`, which the file names, and `<|endoftext|>`, a control token.
    assert_eq!(Pretrained::open(&out).unwrap().config.stops, [2, 0]);
}

#[test]
fn a_model_is_found_by_folder_file_or_the_one_gguf_in_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |path: &Path| Pretrained::open(path).unwrap_err().to_string();
    assert!(refused(folder.path()).contains("no config.json and no GGUF"));
    fs::copy(tiny("llama-spm.gguf"), folder.path().join("a.gguf")).unwrap();
    Pretrained::open(folder.path()).unwrap();
    fs::copy(tiny("llama-spm.gguf"), folder.path().join("b.gguf")).unwrap();
    assert!(refused(folder.path()).contains("2 GGUF files"));
    assert!(refused(&folder.path().join("absent")).contains("absent"));
    fs::write(folder.path().join("x.bin"), b"PK").unwrap();
    assert!(refused(&folder.path().join("x.bin")).contains("GGUF"));
    let out = folder.path().join("model");
    let model = Pretrained::open(&tiny("llama-spm.gguf")).unwrap();
    let options = ExportOptions::default();
    export(&out, &model.config, &[], &options, |s, o| model.weights.read_f32(&s.name, &s.shape, o)).unwrap();
    Pretrained::open(&out.join("model.safetensors")).unwrap();
    let message = Pretrained::open(&out).unwrap().tokenizer().unwrap_err().to_string();
    assert!(message.contains("no tokenizer.json"), "{message}");
}

#[test]
fn weights_of_another_size_are_refused_by_tensor() {
    let model = Pretrained::open(&tiny("qwen2-bpe.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    convert(&model, &out, Precision::Bf16);
    let path = out.join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    let check = |from: &str, to: &str, words: &[&str]| {
        assert!(text.contains(from), "{from}");
        fs::write(&path, text.replace(from, to)).unwrap();
        let message = Pretrained::open(&out).unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word), "{message:?} does not say {word:?}");
        }
    };
    check("\"intermediate_size\": 64", "\"intermediate_size\": 128", &["gate_proj", "[64, 64]", "[128, 64]"]);
    check("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2", &["no tensor model.layers.1"]);
    check("\"qwen2\"", "\"llama\"", &["architectures"]);
    check("Qwen2ForCausalLM\"\n  ],", "LlamaForCausalLM\"], \"x\": [],", &["architectures"]);
    fs::write(&path, text.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true"))
        .unwrap();
    assert_eq!(Pretrained::open(&out).unwrap().ignored, ["lm_head.weight"]);
}
