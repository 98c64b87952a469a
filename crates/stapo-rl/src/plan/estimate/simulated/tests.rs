use super::*;
use crate::plan::config::Config;

fn plan(text: &str) -> Plan {
    Plan::resolve(Config::from_toml(text, []).unwrap()).unwrap()
}

const KV_BYTES: u64 = 32 << 30;

fn simulate(plan: &Plan, model: &ModelConfig, machine: &str, lengths: (f64, f64)) -> Prediction {
    let (prompt_mean, response_mean) = lengths;
    let response_limit = plan.config.rollout.max_response_tokens;
    let lengths = Lengths { prompt_mean, response_mean, response_limit, spread: 0.5 };
    let machine = &Machine::by_name(machine).unwrap();
    let recompute = Recompute::Nothing;
    let world = World::one(machine.links);
    RunShape {
        plan,
        model,
        frozen: &[],
        quantised: None,
        machine,
        lengths,
        episodes: None,
        kv_bytes: KV_BYTES,
        recompute,
        world,
    }
    .simulate()
}

fn near(what: &str, predicted: f64, measured: f64, share: f64) {
    let error = predicted / measured - 1.0;
    assert!(error.abs() <= share, "{what}: predicted {predicted:.3}, measured {measured:.3}, {error:+.3}");
}

/// A run on one H200 by an earlier program: 128 problems x 8 responses of 290 tokens by Qwen2.5-0.5B, of which sampling
/// took 1.8 s and the update 4.1 s of a step. The other settings are assumed.
const REAL_RUN: &str = r#"
    steps = 100
    device = "cuda"
    rollout = { problems_per_step = 128, group_size = 8, max_prompt_tokens = 512, max_response_tokens = 1024 }
    update = { problems_per_minibatch = 32, microbatch_tokens = 32768, share_prompts = false }
    evaluation = { every_steps = 10, problems = 256, samples = 1 }
    record = { state_hash_every_steps = 20, checkpoint_every_steps = 20 }
"#;

#[test]
fn a_real_run_on_an_h200_is_predicted_within_a_quarter() {
    let model = ModelConfig::known("qwen2.5-0.5b").unwrap();
    let predicted = simulate(&plan(REAL_RUN), &model, "h200", (100.0, 290.0));
    near("sampling", predicted.phases.rolled_out(), 1.8, 0.25);
    near("update", predicted.phases.learned(), 4.1, 0.25);
}

/// `bench_gpu update`: 1,024 responses of 287 tokens after prompts of 9, by random weights of Qwen2.5-0.5B.
#[test]
fn a_measured_step_on_an_h200_is_predicted_within_a_quarter() {
    let model = ModelConfig::known("qwen2.5-0.5b").unwrap();
    let text = REAL_RUN.replace("microbatch_tokens = 32768", "microbatch_tokens = 16384");
    let phases = simulate(&plan(&text), &model, "h200", (9.0, 287.0)).phases;
    near("sampling", phases.rolled_out(), 2.11, 0.25);
    near("update", phases.learned(), 2.95, 0.25);
}

/// `bench/train/beside_trl.py`: 0.445 s a step on two quiet cores, evaluations and checkpoints aside.
#[test]
fn the_built_in_run_is_predicted_within_a_quarter() {
    let plan = plan("objective = { preset = \"justrl\" }\nsteps = 12\nevaluation = { every_steps = 0 }");
    let model = crate::unpack_builtin().unwrap();
    let model = stapo_model::Pretrained::read_config(model.path()).unwrap();
    let phases = simulate(&plan, &model, "cpu", (9.0, 28.5)).phases;
    near("step", phases.total() - phases.evaluate - phases.checkpoint, 0.445, 0.25);
}

#[test]
fn every_setting_that_costs_is_counted() {
    let model = ModelConfig::known("qwen3-1.7b").unwrap();
    let base = plan(REAL_RUN);
    let at = |plan: &Plan| simulate(plan, &model, "h200", (100.0, 290.0)).phases;
    let before = at(&base);
    let changed = |change: &dyn Fn(&mut Config)| {
        let mut config = base.config.clone();
        change(&mut config);
        at(&Plan::resolve(config).unwrap())
    };
    let unhashed = changed(&|c| c.record.state_hash_every_steps = 0);
    assert!(before.record > 0.0 && unhashed.record == 0.0);
    let hashed_often = changed(&|c| c.record.state_hash_every_steps = 1);
    near("hashes", hashed_often.record, 20.0 * before.record, 1e-9);
    let one_minibatch = changed(&|c| c.update.problems_per_minibatch = 128);
    assert!(before.calibrate > 0.0 && one_minibatch.calibrate == 0.0);
    let reused = changed(&|c| {
        c.update.reuse = Some(crate::plan::config::Reuse { max: 2, ..crate::plan::config::Reuse::default() });
    });
    near("reuse", reused.update, 2.0 * before.update, 1e-9);
    let seldom = changed(&|c| c.record.checkpoint_every_steps = 100);
    assert!(seldom.checkpoint < before.checkpoint);
    let shared = changed(&|c| c.update.share_prompts = None);
    assert!(before.update > 1.15 * shared.update && before.rollout == shared.rollout);
    let evaluated = changed(&|c| c.evaluation.samples = 64);
    assert!(evaluated.evaluate > 3.0 * before.evaluate);
    // Before the first step, after every tenth and after the last: 11 evaluations.
    let later = changed(&|c| c.evaluation.at_start = false);
    near("evaluations", later.evaluate, 10.0 / 11.0 * before.evaluate, 1e-9);
}

#[test]
fn a_reference_costs_a_scoring_pass_and_recomputation_a_forward_pass() {
    let text =
        format!("objective = {{ preset = \"grpo\", kl = {{ kind = \"k3\", beta = 0.04 }} }}\n{REAL_RUN}");
    let plan = plan(&text);
    let model = ModelConfig::known("qwen3-1.7b").unwrap();
    let lengths = Lengths { prompt_mean: 100.0, response_mean: 290.0, response_limit: 1024, spread: 0.5 };
    let machine = &Machine::by_name("h200").unwrap();
    let alone = RunShape {
        plan: &plan,
        model: &model,
        frozen: &[],
        quantised: None,
        machine,
        lengths,
        episodes: None,
        kv_bytes: KV_BYTES,
        recompute: Recompute::Nothing,
        world: World::one(machine.links),
    };
    let both = RunShape { frozen: &[("reference", model.clone())], ..alone }.simulate().phases;
    assert_eq!(alone.simulate().phases.score, 0.0);
    // A forward pass has a third of the operations of a training pass.
    assert!(both.score > 0.2 * both.update && both.score < 0.5 * both.update);
    let recomputed = RunShape { recompute: Recompute::Layers, ..alone }.simulate().phases;
    assert!(recomputed.update > 1.15 * both.update && recomputed.rollout == both.rollout);
    // Of 290 tokens, 3 * 40 are given: fewer are decoded and trained, all are read.
    let means = EpisodeMeans { turns: 4.0, observation: 40.0, answer_seconds: 0.2, at_once: 64 };
    let answered = RunShape { episodes: Some(means), ..alone }.simulate();
    near("sampled tokens", answered.n_sampled, 1024.0 * 170.0, 1e-9);
    let single = alone.simulate().phases;
    assert!(answered.phases.rollout < single.rollout && answered.phases.update > 0.7 * single.update);
    near(
        "waiting",
        answered.phases.environment,
        (1024.0 * 4.0 * 0.2_f64 / 64.0 - answered.phases.rollout).max(0.8),
        1e-9,
    );
    let slow = RunShape { episodes: Some(EpisodeMeans { at_once: 1, ..means }), ..alone }.simulate().phases;
    assert!(slow.environment > 700.0 && slow.evaluate > answered.phases.evaluate);
}

#[test]
fn long_prompts_that_are_shared_cost_a_quarter_and_less() {
    let text =
        REAL_RUN.replace("problems_per_step = 128", "problems_per_step = 8").replace("= 512", "= 8192");
    let [whole, shared] = [", share_prompts = false", ""].map(|setting| {
        let text =
            text.replace(", share_prompts = false", setting).replace("minibatch = 32", "minibatch = 8");
        let model = ModelConfig::known("qwen3-1.7b").unwrap();
        simulate(&plan(&text), &model, "h200", (8192.0, 256.0))
    });
    assert_eq!((whole.n_saved_tokens, shared.n_saved_tokens), (0.0, 8.0 * 7.0 * 8192.0));
    assert!(whole.phases.update > 4.0 * shared.phases.update);
}
