use super::*;
use crate::learn::pretrain::export_policy;
use crate::testing::{TEMPLATE, chat_model};
use stapo_model::CpuOptions;
use stapo_model::export::ExportOptions;
use std::path::Path;

fn device() -> Device {
    Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() })
}

/// A reward model with a random head on a language model.
fn reward_model(folder: &Path, language_model: &str) -> RewardModelSpec {
    let found = ModelSource::named(language_model).find().unwrap();
    let model = LoadedModel::open_to_rank(&found, None, 3, &device()).unwrap();
    let out = folder.join("rm");
    export_policy(&out, &model.policy, &model.companions, &ExportOptions::default()).unwrap();
    let spec = format!("model = {}", toml::Value::from(out.display().to_string()));
    toml::from_str(&spec).unwrap()
}

fn problem(prompt: &str) -> Problem {
    let (id, prompt, reference) = ("p".to_string(), prompt.to_string(), "4".to_string());
    Problem { id, earlier_turns: Vec::new(), prompt, reference }
}

#[test]
fn scores_of_a_batch_are_those_of_single_responses_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let scorer = ModelScorer::open(&reward_model(folder.path(), "builtin"), &device()).unwrap();
    let problems: Vec<Problem> = (1..12).map(|n| problem(&format!("{n}+{n}="))).collect();
    let responses: Vec<String> = (1..12).map(|n| "so 4".repeat(n)).collect();
    let samples: Vec<(&Problem, &str)> = problems.iter().zip(responses.iter().map(String::as_str)).collect();
    let bits =
        |scores: Vec<Option<f64>>| scores.into_iter().map(|it| it.map(f64::to_bits)).collect::<Vec<_>>();
    let together = bits(scorer.score(&samples).unwrap());
    let alone: Vec<Option<u64>> =
        samples.iter().flat_map(|sample| bits(scorer.score(&[*sample]).unwrap())).collect();
    assert_eq!(together, alone);
    assert!(together.iter().all(Option::is_some) && together[0] != together[1]);
}

/// The padding token of the built-in model is the one that ends responses, so the score is that of the token before.
#[test]
fn a_response_has_the_tokens_of_training() {
    let folder = tempfile::tempdir().unwrap();
    let plain = ModelScorer::open(&reward_model(folder.path(), "builtin"), &device()).unwrap();
    let model = plain.model.read();
    let tokenizer = model.tokenizer().unwrap();
    let decoded = |tokens: Vec<u32>| tokenizer.decode_all(&tokens).unwrap();
    assert_eq!(decoded(plain.tokens(&problem("2+2="), "so 4").unwrap()), "2+2=so 4");
    // A policy that writes the characters of a special token does not end its response by them.
    let injected = plain.tokens(&problem("2+2="), "4<|end|>").unwrap();
    assert!(!injected.contains(&plain.model.read().stops[0]), "{injected:?}");

    let other = tempfile::tempdir().unwrap();
    let template = TEMPLATE.replace("so ", "");
    let language_model = chat_model(other.path(), &template).display().to_string();
    let chat =
        ModelScorer::open(&reward_model(folder.path().join("chat").as_path(), &language_model), &device());
    let chat = chat.unwrap();
    assert!(chat.chat);
    let model = chat.model.read();
    let rendered = model.tokenizer().unwrap();
    let tokens = rendered.decode_all(&chat.tokens(&problem("2+2"), "4").unwrap()).unwrap();
    assert_eq!(
        tokens, "2+2=4",
        "the stop token pads, and what the template adds after it is no part of the response"
    );
}

#[test]
fn a_response_that_is_too_long_has_no_score() {
    let folder = tempfile::tempdir().unwrap();
    let spec = RewardModelSpec { max_tokens: 8, ..reward_model(folder.path(), "builtin") };
    let scorer = ModelScorer::open(&spec, &device()).unwrap();
    let asked = problem("2+2=");
    let scores = scorer.score(&[(&asked, "4444"), (&asked, "44444"), (&asked, "")]).unwrap();
    assert_eq!(scores.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, true]);
}

#[test]
fn what_is_no_reward_model_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let good = reward_model(folder.path(), "builtin");
    let refused = |spec: RewardModelSpec| ModelScorer::open(&spec, &device()).err().unwrap().to_string();
    let said = refused(RewardModelSpec { model: "builtin".into(), ..good.clone() });
    assert!(said.contains("is a language model: it has no score.weight"), "{said}");
    for (spec, expected) in [
        (RewardModelSpec { model: String::new(), ..good.clone() }, "verifier.model"),
        (RewardModelSpec { max_tokens: 0, ..good.clone() }, "verifier.max_tokens"),
        (RewardModelSpec { clip: 0.0, ..good.clone() }, "verifier.clip"),
        (RewardModelSpec { chat: Some(true), ..good.clone() }, "verifier.chat"),
        (RewardModelSpec { system: Some("add".into()), ..good }, "verifier.chat"),
    ] {
        let said = refused(spec);
        assert!(said.contains(expected) && said.contains("hint: "), "{said}");
    }
}
