//! Published models against `transformers`: `STAPO_TEST_MODELS` names a folder with `smollm2.gguf` (SmolLM2-135M-Instruct, `Q4_1`)
//! or `gemma3-270m.gguf` (Gemma 3 270M, `Q4_K_M`); `bench/engine/real_model.py` has written the results of `transformers`.

use serde_json::Value;
use stapo_model::decoder::{HeadOptions, PackedBatch, Pass, Policy};
use stapo_model::generate::{Engine, EngineMemory, EngineSettings, Request, SamplingRule};
use stapo_model::{CpuOptions, Device, Pretrained};
use std::path::Path;

const TOLERANCE: f64 = 1e-3;

#[test]
fn published_models_from_gguf_agree_with_transformers() {
    let Some(folder) = std::env::var_os("STAPO_TEST_MODELS") else {
        println!("skipped: STAPO_TEST_MODELS is not set to a folder with smollm2.gguf or gemma3-270m.gguf");
        return;
    };
    let goldens = [
        ("smollm2.gguf", include_str!("goldens/smollm2.json")),
        ("gemma3-270m.gguf", include_str!("goldens/gemma3.json")),
    ];
    for (name, golden) in goldens {
        let path = Path::new(&folder).join(name);
        if path.exists() {
            check(&path, &serde_json::from_str(golden).unwrap());
        } else {
            println!("skipped: there is no {}", path.display());
        }
    }
}

fn check(path: &Path, golden: &Value) {
    let ids = |key: &str| -> Vec<u32> {
        golden[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let numbers = |key: &str| -> Vec<f64> {
        golden[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let pretrained = Pretrained::open(path).unwrap();
    let device = Device::cpu(CpuOptions::default());
    let policy = Policy::load(&device, &pretrained.config, &pretrained.weights).unwrap();
    let tokens = ids("tokens");

    let mut batch = PackedBatch::new();
    batch.push_response(&tokens, 1);
    let scores = Pass::scoring(&policy).unwrap().forward(&policy, &batch, HeadOptions::default()).unwrap();
    for (i, (ours, theirs)) in scores.logp.iter().zip(numbers("logp")).enumerate() {
        assert!((f64::from(*ours) - theirs).abs() <= TOLERANCE, "token {i}: {ours} against {theirs}");
    }

    let wanted = ids("continuation");
    let gaps = numbers("gaps");
    let settings = EngineSettings { rule: SamplingRule::Greedy, ..EngineSettings::default() };
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(&policy, &mut memory, settings).unwrap();
    let n = wanted.len();
    engine
        .submit(Request { problem: 0, prompt: tokens, n_samples: 1, max_tokens: n, stops: vec![] })
        .unwrap();
    let made: Vec<u32> = engine.generate().unwrap()[0].tokens.iter().map(|t| t.token).collect();
    // Where two tokens are almost equally likely, the two implementations may choose differently from there on.
    let n_clear = gaps.iter().take_while(|gap| **gap > TOLERANCE).count();
    assert_eq!(made[..n_clear], wanted[..n_clear]);
}
