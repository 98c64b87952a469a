use super::*;
use crate::plan::config::Config;

#[test]
fn a_judge_takes_its_weights_and_memory_to_work_in() {
    let parts = |settings: &[&str]| {
        let settings = [&["device=cuda"], settings].concat();
        let plan = Plan::resolve(Config::from_toml("", settings).unwrap()).unwrap();
        let model = plan.config.model.find().unwrap().shape().unwrap();
        let planned = resolve(&plan, &model, &frozen(&plan).unwrap(), None);
        let bytes =
            |name: &str| planned.parts().filter(|part| part.name == name).map(|part| part.bytes).sum::<u64>();
        (bytes("judge"), bytes("judge's work"), 2 * model.n_parameters())
    };
    let judge = |read: &str| format!("task.verifier={{kind=\"judge\",model=\"builtin\",read=\"{read}\"}}");
    let (weights, scoring, expected) = parts(&[&judge("yes-no")]);
    assert_eq!(weights, expected);
    let (_, writing, _) = parts(&[&judge("letter")]);
    // 64 sequences of 4096 + 64 + 32 tokens, with 512 numbers of 2 bytes per token.
    assert!(writing > 64 * 4192 * 512 * 2 && scoring > 0, "{writing} {scoring}");
    assert_eq!(parts(&[]).1, 0);
    let elsewhere = |device: &str| judge("yes-no").replace('}', &format!(",device=\"{device}\"}}"));
    assert_eq!(parts(&[&elsewhere("cuda:1")]), (0, 0, expected));
    assert_eq!(parts(&[&elsewhere("cuda")]), (weights, scoring, expected));
    // The host keeps the weights: the judge takes the memory of sampling and updates, which is larger.
    let peaks = ["device", "host"].map(|keep| {
        let settings = ["device=cuda", &judge("yes-no").replace('}', &format!(",keep=\"{keep}\"}}"))];
        let plan = Plan::resolve(Config::from_toml("", settings).unwrap()).unwrap();
        let model = plan.config.model.find().unwrap().shape().unwrap();
        let planned = resolve(&plan, &model, &frozen(&plan).unwrap(), None);
        (planned.peak_bytes(), sum(&planned.judging), planned.region_bytes() >= sum(&planned.judging))
    });
    assert_eq!(peaks[0].0 - peaks[1].0, weights + scoring);
    assert_eq!((peaks[0].1, peaks[1].1, peaks[1].2), (0, weights + scoring, true));
}

/// Keys and values on a GPU: 2 bytes, 512 numbers per token of the built-in model.
#[test]
fn a_gpu_has_keys_and_values_for_the_rollouts_or_the_evaluation_whichever_is_larger() {
    let n_sequences = |evaluation: &str, n_ranks: usize| {
        let settings = [
            "device=cuda",
            "rollout.problems_per_step=2",
            "rollout.group_size=3",
            "rollout.max_prompt_tokens=28",
            "rollout.max_response_tokens=40",
            "update.problems_per_minibatch=2",
            evaluation,
        ];
        let plan = Plan::resolve(Config::from_toml("", settings).unwrap()).unwrap();
        let model = plan.config.model.find().unwrap().shape().unwrap();
        resolve_for(&plan, &model, &[], None, n_ranks).kv_bytes / (2 * 512 * (28 + 40 + 32))
    };
    assert_eq!(n_sequences("evaluation={problems=5,samples=4}", 1), 20);
    assert_eq!(n_sequences("evaluation={problems=5,samples=1}", 1), 6);
    // Of several ranks each has its share of the sequences, and a step has at most 1024.
    assert_eq!(n_sequences("evaluation={problems=5,samples=4}", 3), 7);
    assert_eq!(
        [1, 2, 3].map(|n_ranks| n_sequences("evaluation={problems=500,samples=5}", n_ranks)),
        [1024, 1024, 834]
    );
}

/// A step of more rows takes more memory in addition to keys and values; the plan counts it.
#[test]
fn a_gpu_with_more_memory_samples_in_larger_steps() {
    let planned = |settings: &[&str], free: Option<u64>| {
        let plan = Plan::resolve(Config::from_toml("", settings.iter().copied()).unwrap()).unwrap();
        let model = plan.config.model.find().unwrap().shape().unwrap();
        let planned = resolve(&plan, &model, &[], free);
        (planned.step_rows, sum(&planned.sampling) - planned.kv_bytes)
    };
    let gpu = ["device=cuda", "rollout.kv_mib=64"];
    let (small, small_bytes) = planned(&gpu, None);
    let (large, large_bytes) = planned(&gpu, Some(80 << 30));
    assert_eq!((small, large), (1024, 8192));
    assert!(large_bytes > small_bytes, "{large_bytes} against {small_bytes}");
    let (between, bytes) = planned(&gpu, Some(small_bytes + 32 * (large_bytes - small_bytes) / 2));
    assert!((1024..8192).contains(&between) && bytes < large_bytes, "{between} rows");
    assert_eq!(planned(&["device=cpu"], Some(80 << 30)).0, 1024);
}

/// 512 numbers per token of the built-in model, 28 + 40 + 32 tokens, 32 sequences.
#[test]
fn a_model_that_drafts_has_keys_and_values_for_32_sequences() {
    let settings = ["rollout.max_prompt_tokens=28", "rollout.max_response_tokens=40"];
    let plan = Plan::resolve(Config::from_toml("", settings).unwrap()).unwrap();
    let model = plan.config.model.find().unwrap().shape().unwrap();
    assert_eq!(draft_kv_bytes(&plan, &model, 2), 32 * 100 * 512 * 2);
}

/// Qwen3-1.7B has 57,344 numbers of keys and values per token, 114,688 bytes on a GPU.
#[test]
fn keys_and_values_of_drafts_are_bounded_but_hold_two_sequences() {
    let model = ModelConfig::known("qwen3-1.7b").unwrap();
    let bytes = |prompt: usize, response: usize| {
        let settings = [
            format!("rollout.max_prompt_tokens={prompt}"),
            format!("rollout.max_response_tokens={response}"),
            "update.microbatch_tokens=16384".to_string(),
        ];
        let plan =
            Plan::resolve(Config::from_toml("", settings.iter().map(String::as_str)).unwrap()).unwrap();
        draft_kv_bytes(&plan, &model, 2)
    };
    assert_eq!(bytes(28, 40), 32 * 100 * 114_688);
    assert_eq!(bytes(1000, 1000), 2 << 30);
    assert_eq!(bytes(1024, 15_360), 2 * (1024 + 15_360 + 32) * 114_688);
}

#[test]
fn only_models_that_are_there_besides_the_policy_are_counted() {
    let roles = |settings: &[&str]| {
        let settings = settings.iter().copied();
        let plan = Plan::resolve(Config::from_toml("", settings).unwrap()).unwrap();
        frozen(&plan).unwrap().into_iter().map(|(role, _)| role).collect::<Vec<_>>()
    };
    let kl = "objective.kl={kind=\"k3\",beta=0.1}";
    let dasd = "objective.distillation={kind=\"dasd\"}";
    assert!(roles(&[]).is_empty());
    assert_eq!(roles(&[kl]), ["reference"], "a copy of the model");
    assert!(roles(&[kl, "model.lora.rank=4"]).is_empty(), "the model without its adapters");
    assert_eq!(roles(&[kl, "model.lora.rank=4", "reference=builtin"]), ["reference"]);
    assert_eq!(roles(&[dasd, "teacher=builtin"]), ["teacher"]);
    assert!(roles(&[dasd, "teacher=solution"]).is_empty(), "the policy itself");
    assert_eq!(roles(&["rollout.draft=builtin"]), ["draft"]);
    let scorer = "task.verifier={kind=\"reward-model\",model=\"builtin\"}";
    assert_eq!(roles(&[kl, scorer]), ["reference", "reward model"]);
}
