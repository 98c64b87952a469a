//! Exact numbers of costs, predictions and memory plans. The tests beside the formulas compare predictions with measurements,
//! within some percent, which a lost term or a wrong factor can pass. Here every number is held to nine digits: where a formula
//! is meant to change, the test prints the lines that `pinned.tsv` then has.

use super::cost::{Costs, DecodeRows, Tokens};
use super::sampling::{SamplingWork, simulate};
use super::{EpisodeMeans, Lengths, Links, Machine, Prediction, RowCounts, RunShape, SupervisedShape, World};
use crate::learn::pretrain::PretrainConfig;
use crate::plan::config::{Config, Plan, States};
use crate::plan::memory::{self, MemoryPlan, TrainedModel};
use stapo_core::settings::RawConfig;
use stapo_model::ModelConfig;
use stapo_model::decoder::{QuantisedBase, Recompute};
use std::collections::BTreeMap;
use std::fmt::Write;

const RECOMPUTED: [Recompute; 3] = [Recompute::Nothing, Recompute::Inputs, Recompute::Layers];
const QUANTISED: QuantisedBase = QuantisedBase {
    n_weights: 1_409_286_144,
    n_bytes: 845_709_312,
    n_joined: 9_000_000,
    n_unpacked: 27_000_000,
};

/// Named numbers.
#[derive(Default)]
struct Numbers(Vec<(String, f64)>);

impl Numbers {
    fn add(&mut self, subject: &str, named: &[(&str, f64)]) {
        self.0.extend(named.iter().map(|(name, value)| (format!("{subject}: {name}"), *value)));
    }

    fn predicted(&mut self, what: &str, predicted: &Prediction) {
        let phases = predicted.phases;
        let list: Vec<(&str, f64)> = phases.list().map(|phase| (phase.name, phase.seconds)).to_vec();
        self.add(what, &list);
        self.add(
            what,
            &[
                ("sampled", predicted.n_sampled),
                ("trained", predicted.n_trained),
                ("running", predicted.most_running as f64),
                ("saved", predicted.n_saved_tokens),
                ("seconds", predicted.seconds()),
                ("rolled out", phases.rolled_out()),
                ("sampling rate", predicted.sampled_per_second().unwrap()),
                ("training rate", predicted.trained_per_second()),
            ],
        );
        if let Some(step) = predicted.ranks {
            let exchange = step.exchange;
            self.add(
                what,
                &[
                    ("rollout mean", step.rollout_mean),
                    ("idle", step.idle_share),
                    ("gradients", exchange.gradients),
                    ("fold", exchange.fold),
                    ("exposed", exchange.exposed),
                    ("weights", exchange.weights),
                    ("responses", exchange.responses),
                    ("bytes", exchange.bytes_sent),
                ],
            );
        }
    }

    /// Compares the numbers whose names begin with `part` in the table with those found.
    fn check(self, part: &str) {
        let table = include_str!("pinned.tsv").lines().filter_map(|line| line.split_once('\t'));
        let mut expected: BTreeMap<&str, f64> = table
            .filter(|(name, _)| name.starts_with(part))
            .map(|(name, value)| (name, value.parse().unwrap()))
            .collect();
        let mut wrong = String::new();
        for (name, found) in &self.0 {
            let name = format!("{part} {name}");
            let is_same = expected
                .remove(name.as_str())
                .is_some_and(|value| (found - value).abs() <= 1e-9 * value.abs().max(found.abs()));
            if !is_same {
                writeln!(wrong, "{name}\t{found:e}").unwrap();
            }
        }
        assert!(
            wrong.is_empty() && expected.is_empty(),
            "other numbers:\n{wrong}no longer: {:?}",
            expected.keys()
        );
    }
}

fn plan(set: &[&str]) -> Plan {
    Plan::resolve(Config::from_toml("", set.iter().copied()).unwrap()).unwrap()
}

fn model(name: &str) -> ModelConfig {
    ModelConfig::known(name).unwrap()
}

#[test]
fn costs_of_models_and_machines() {
    let mut numbers = Numbers::default();
    for (name, machine, n_adapter, quantised) in [
        ("qwen3-1.7b", "h200", None, None),
        ("qwen3-1.7b", "h200", Some(17_000_000), Some(QUANTISED)),
        ("gemma-3-270m", "rtx4090", None, None),
        ("qwen3.5-9b", "a100", None, None),
        ("qwen2.5-0.5b", "cpu", Some(1_000_000), None),
    ] {
        let (shape, machine) = (model(name), Machine::by_name(machine).unwrap());
        let costs = Costs { model: &shape, n_adapter, quantised, machine: &machine };
        let subject = format!("{name} {} {}", machine.name, n_adapter.unwrap_or(0));
        for length in [200.0, 3000.0, 40_000.0] {
            let tokens = Tokens { all: 64.0 * length, scored: 48.0 * length, length };
            for recompute in RECOMPUTED {
                numbers.add(
                    &format!("{subject} {length} {recompute:?}"),
                    &[
                        ("products", costs.training_products(tokens, recompute)),
                        ("backward numbers", costs.elementwise_backward(tokens.all, recompute)),
                        ("training", costs.training(tokens, 5.0, recompute)),
                    ],
                );
            }
            numbers.add(
                &format!("{subject} {length}"),
                &[
                    ("attention", costs.attention_forward(tokens)),
                    ("its backward", costs.attention_backward(tokens)),
                    ("forward numbers", costs.elementwise_forward(tokens.all)),
                    ("logits", costs.training_logits(tokens.scored)),
                    ("scoring", costs.scoring(tokens, 5.0)),
                    ("prefill", costs.prefill(tokens)),
                ],
            );
        }
        for (n_sequences, own_keys, shared_keys) in
            [(1.0, 100.0, 50.0), (500.0, 90_000.0, 4000.0), (1e6, 2e6, 3e6)]
        {
            let rows = DecodeRows { n_sequences, own_keys, shared_keys };
            numbers.add(&format!("{subject} {n_sequences}"), &[("decoding", costs.decode_step(rows))]);
        }
        numbers.add(
            &subject,
            &[
                ("trained", costs.n_trained() as f64),
                ("optimizer", costs.optimizer_step(States::F32)),
                ("8-bit optimizer", costs.optimizer_step(States::EightBit)),
                ("key", costs.key_bytes()),
                ("key of a set", costs.set_key_bytes()),
            ],
        );
    }
    numbers.check("cost");
}

#[test]
fn lengths_links_and_machines() {
    let mut numbers = Numbers::default();
    let lengths = Lengths { prompt_mean: 100.0, response_mean: 290.0, response_limit: 700, spread: 0.7 };
    let responses: Vec<String> = lengths.responses(9).iter().map(ToString::to_string).collect();
    assert_eq!(responses.join(" "), "78 121 158 196 238 290 360 469 700");
    numbers.add(
        "lengths",
        &[
            ("attention", lengths.attention_length()),
            ("forced", lengths.forced(500.0, 0.7).response_mean),
            ("forced far", lengths.forced(3000.0, 0.3).response_mean),
        ],
    );
    let links = Machine::by_name("h200").unwrap().links;
    for (n_ranks, n_nodes) in [(7, Some(2)), (24, None), (3, Some(1))] {
        let world = World::new(n_ranks, n_nodes, links);
        numbers.add(
            &format!("{n_ranks} ranks of {} machines", world.n_nodes),
            &[("exchange", world.exchange(5e9, 30.0)), ("gather", world.gather(5e9))],
        );
    }
    let cores = Machine::cpu(6);
    let a100 = Machine::by_name("a100").unwrap();
    numbers.add(
        "machine",
        &[
            ("products of 6 cores", cores.products.per_second),
            ("attention of 6 cores", cores.attention_forward[3].1),
            ("its backward", cores.attention_backward[0].1),
            ("hashes of an A100", a100.state_hash.per_second),
            ("bandwidth of an A100", a100.bandwidth.per_second),
            ("backward of an A100", a100.attention_backward[2].1),
        ],
    );
    numbers.check("part");
}

#[test]
fn rollouts() {
    let mut numbers = Numbers::default();
    let lengths = Lengths { prompt_mean: 150.0, response_mean: 60.0, response_limit: 200, spread: 0.6 };
    let wide = SamplingWork { n_groups: 7, group_size: 4, lengths, kv_bytes: 4 << 30, max_sequences: 1024 };
    for (what, name, n_ranks, work) in [
        ("all at once", "qwen3-1.7b", 1, wide),
        ("three ranks", "qwen3-1.7b", 3, wide),
        ("more ranks than problems", "qwen3-1.7b", 12, wide),
        ("little memory", "qwen3-1.7b", 1, SamplingWork { kv_bytes: 60 << 20, ..wide }),
        ("few sequences", "qwen3-1.7b", 2, SamplingWork { max_sequences: 3, ..wide }),
        ("windows", "gemma-3-270m", 1, SamplingWork { kv_bytes: 3 << 20, ..wide }),
        ("states", "qwen3.5-9b", 1, SamplingWork { kv_bytes: 300 << 20, ..wide }),
        (
            "short",
            "qwen3-0.6b",
            1,
            SamplingWork { lengths: Lengths { response_limit: 70, ..lengths }, ..wide },
        ),
        (
            "large groups",
            "qwen3-0.6b",
            2,
            SamplingWork {
                n_groups: 3,
                group_size: 9_000,
                max_sequences: 50,
                lengths: Lengths { response_limit: 4, response_mean: 2.0, ..lengths },
                ..wide
            },
        ),
    ] {
        let (shape, machine) = (model(name), Machine::by_name("h200").unwrap());
        let costs = Costs { model: &shape, n_adapter: None, quantised: None, machine: &machine };
        let done = simulate(&costs, &work, n_ranks);
        numbers.add(
            what,
            &[
                ("slowest", done.slowest_seconds),
                ("mean", done.mean_seconds),
                ("running", done.most_running as f64),
            ],
        );
    }
    numbers.check("rollout");
}

const STEP: [&str; 9] = [
    "device=cuda",
    "steps=50",
    "rollout.problems_per_step=9",
    "rollout.group_size=4",
    "rollout.max_prompt_tokens=512",
    "rollout.max_response_tokens=1024",
    "update.problems_per_minibatch=4",
    "update.microbatch_tokens=1600",
    "evaluation={every_steps=8,problems=5,samples=3}",
];

#[test]
fn training_runs() {
    let mut numbers = Numbers::default();
    let base = [&STEP[..], &["record={state_hash_every_steps=3,checkpoint_every_steps=20}"]].concat();
    let with = |more: &[&'static str]| plan(&[&base[..], more].concat());
    let means = EpisodeMeans { turns: 4.0, observation: 3.0, answer_seconds: 0.02, at_once: 16 };
    let h200 = Machine::by_name("h200").unwrap();
    let one = World::one(h200.links);
    let kl = "objective={preset=\"grpo\",kl={kind=\"k3\",beta=0.04}}";
    let lora = "model.lora={rank=16}";
    let reference = [("reference", model("qwen3-0.6b"))];
    let drafting = [("draft", model("qwen3-0.6b"))];
    let policy = model("qwen3-1.7b");
    let shape = |plan| RunShape {
        plan,
        model: &policy,
        frozen: &[],
        quantised: None,
        machine: &h200,
        lengths: Lengths { prompt_mean: 100.0, response_mean: 30.0, response_limit: 90, spread: 0.5 },
        episodes: None,
        kv_bytes: 8 << 30,
        recompute: Recompute::Nothing,
        world: one,
    };
    let plain = with(&[]);
    let referenced = with(&[kl]);
    let adapted = with(&[kl, lora, "update.recompute=\"layers\""]);
    let eight = with(&["update.states=\"8bit\"", "update.share_prompts=false", "evaluation.every_steps=0"]);
    let reused = with(&["update.reuse={max=2}", "record.state_hash_every_steps=0"]);
    let ranked = World::new(4, None, h200.links);
    let far = World::new(6, Some(3), Links { host: h200.links.host, ..h200.links.at(3e9) });
    for (what, shape) in [
        ("plain", shape(&plain)),
        ("reference", RunShape { frozen: &reference, recompute: Recompute::Layers, ..shape(&referenced) }),
        ("draft", RunShape { frozen: &drafting, ..shape(&plain) }),
        (
            "adapters",
            RunShape { quantised: Some(QUANTISED), recompute: Recompute::Inputs, ..shape(&adapted) },
        ),
        ("8 bits", shape(&eight)),
        ("reuse", shape(&reused)),
        ("episodes", RunShape { episodes: Some(means), ..shape(&plain) }),
        ("4 ranks", RunShape { world: ranked, ..shape(&plain) }),
        ("6 ranks", RunShape { world: far, episodes: Some(means), ..shape(&referenced) }),
        ("adapters of 6 ranks", RunShape { world: far, ..shape(&adapted) }),
        ("8 bits of 4 ranks", RunShape { world: ranked, ..shape(&eight) }),
    ] {
        numbers.predicted(what, &shape.simulate());
    }
    numbers.check("run");
}

#[test]
fn supervised_runs() {
    let mut numbers = Numbers::default();
    let machine = Machine::by_name("h200").unwrap();
    let shape = model("qwen3-1.7b");
    for (what, defaults, set) in [
        ("dpo", PretrainConfig::preferring(), &["evaluation.every_steps=7"][..]),
        ("adapters", PretrainConfig::preferring(), &["model.lora={rank=16}"]),
        ("ranking", PretrainConfig::ranking(), &["record.checkpoint_every_steps=9"]),
        (
            "sft",
            PretrainConfig::fine_tuning(),
            &["epochs=2", "update.batch_tokens=100000", "update.recompute=\"layers\""],
        ),
        ("steps", PretrainConfig::fine_tuning(), &["steps=33", "evaluation.every_steps=0"]),
    ] {
        let set = [&["device=cuda"], set].concat();
        let config = PretrainConfig::with_defaults(&defaults, &RawConfig::new("", set).unwrap()).unwrap();
        let rows = RowCounts { n_learned: 6410, n_held_out: 640, tokens_mean: 1000.0 };
        let shape = SupervisedShape { config: &config, model: &shape, machine: &machine, rows };
        let predicted = shape.simulate();
        let list: Vec<(&str, f64)> = predicted.phases.map(|phase| (phase.name, phase.seconds)).to_vec();
        numbers.add(what, &list);
        numbers.add(
            what,
            &[
                ("steps", predicted.n_steps as f64),
                ("tokens", predicted.step_tokens),
                ("before", predicted.before),
                ("seconds", predicted.seconds()),
            ],
        );
        for part in shape.memory().unwrap() {
            numbers.add(what, &[(part.name, part.bytes as f64)]);
        }
    }
    numbers.check("supervised");
}

#[test]
fn memory_plans() {
    let mut numbers = Numbers::default();
    let mut add = |what: &str, planned: &MemoryPlan| {
        for part in planned.parts() {
            numbers.add(what, &[(part.name, part.bytes as f64)]);
        }
        let recompute = RECOMPUTED.iter().position(|recompute| *recompute == planned.recompute).unwrap();
        numbers.add(
            what,
            &[
                ("kv", planned.kv_bytes as f64),
                ("rows", planned.step_rows as f64),
                ("recompute", recompute as f64),
                ("region", planned.region_bytes() as f64),
                ("peak", planned.peak_bytes() as f64),
            ],
        );
    };
    let judge = |more: &str| format!("task.verifier={{kind=\"judge\",model=\"builtin\"{more}}}");
    let (yes, letter) = (judge(",read=\"yes-no\",max_prompt_tokens=6000"), judge(",read=\"letter\""));
    let scorer = "task.verifier={kind=\"reward-model\",model=\"builtin\",max_tokens=5000}";
    let lora = "model.lora={rank=16}";
    let cpu = "device=cpu";
    let shapes = ["qwen3-1.7b", "qwen3-8b", "gemma-3-270m", "qwen3.5-9b"].map(model);
    let [small, large, windows, states] = &shapes;
    let others = [("reference", shapes[1].clone()), ("draft", shapes[2].clone())];
    let judges = [("judge", shapes[0].clone())];
    let scorers = [("reward model", shapes[0].clone())];
    for (what, set, model, frozen, free, n_ranks) in [
        ("plain", &[][..], small, &[][..], Some(80 << 30), 1),
        ("unknown memory", &[], small, &[], None, 1),
        ("tight", &["rollout.problems_per_step=512"], small, &[], Some(40 << 30), 1),
        ("too little", &[], large, &[], Some(40 << 30), 1),
        ("4 ranks", &["update.share_prompts=false"], large, &others, Some(80 << 30), 4),
        ("8 bits", &["update.states=\"8bit\""], large, &others, Some(80 << 30), 1),
        ("adapters", &[lora], small, &others, Some(40 << 30), 1),
        ("adapters of 3 ranks", &[lora], large, &[], Some(40 << 30), 3),
        ("windows", &["rollout.kv_mib=512"], windows, &[], Some(20 << 30), 1),
        ("states", &[], states, &[], Some(139 << 30), 1),
        ("judge", &[&yes], small, &judges, Some(80 << 30), 1),
        ("judge that writes", &[&letter], small, &judges, Some(80 << 30), 1),
        ("reward model", &[scorer], small, &scorers, Some(80 << 30), 1),
        ("cpu", &[cpu], small, &others, None, 1),
        ("cpu of 2 ranks", &[cpu, "update.microbatch_tokens=2000"], small, &[], None, 2),
        ("adapters of a cpu", &[cpu, lora], small, &[], None, 1),
        ("judge of a cpu", &[cpu, &letter], small, &judges, None, 1),
    ] {
        let set = [&STEP[..], set].concat();
        add(what, &memory::resolve_for(&plan(&set), model, frozen, free, n_ranks));
    }
    let quantised = TrainedModel { config: small, quantised: Some(QUANTISED) };
    let set = [&STEP[..], &["model.lora={rank=16,base=\"quantised\"}"]].concat();
    add("quantised", &memory::resolve(&plan(&set), quantised, &[], Some(24 << 30)));
    numbers.check("memory");
}
