//! `stapo plan`

mod episodes;
mod json;
mod measure;
mod planned;
pub mod supervised;
mod text;

use crate::shared::allow_command::AllowCommand;
use crate::shared::machine::free_disk;
use crate::shared::option::{positive, threads};
use crate::shared::run_folder;
use anyhow::{Context, Result, bail};
use planned::{Here, ModelShapes, OnOne, Planned};
use stapo_rl::Plan;
use stapo_rl::device::DeviceName;
use stapo_rl::plan::config::ModelSource;
use stapo_rl::plan::disk::DiskPlan;
use stapo_rl::plan::estimate::{
    self, Lengths, Machine, Measurement, Processor, Remedy, RunShape, SPREAD, World,
};
use stapo_rl::plan::memory::{self, MemoryPlan, TrainedModel};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Estimates a run before you start it: steps, tokens, memory and time by phase. The exit status is 1 if the run does not
/// fit.
///
/// If this machine has the config's device, weights and data, times are measured here. Otherwise they are simulated from
/// the rates of a machine: with --machine and --model you need no GPU, no weights and no data.
#[derive(clap::Args)]
pub struct Args {
    /// A TOML file, a shipped config by name, or a run folder; by default the built-in run. Configs of sft, prefer and rm
    /// are simulated.
    config: Option<PathBuf>,

    /// Changes one value of the config, as in rollout.group_size=16; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Plans for another model: a folder, a config.json, a GGUF file, or a known name such as qwen3-1.7b.
    #[arg(long)]
    model: Option<String>,

    /// cpu, cuda or cuda:N, instead of the config's.
    #[arg(long, value_name = "DEVICE", conflicts_with = "machine")]
    device: Option<DeviceName>,

    /// Simulates the run on a named machine.
    #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(Machine::all().iter().map(|machine| machine.name)))]
    machine: Option<String>,

    /// Simulates the run over several GPUs, one rank each.
    #[arg(long, value_name = "N", value_parser = positive)]
    gpus: Option<usize>,

    /// How many machines hold the GPUs; by default as few as possible.
    #[arg(long, value_name = "N", value_parser = positive, requires = "gpus")]
    nodes: Option<usize>,

    /// GB/s that a GPU sends to any other, instead of the machine's links.
    #[arg(long, value_name = "GB/s", value_parser = positive, requires = "gpus")]
    link: Option<usize>,

    /// Mean tokens of a prompt; a quarter of rollout.max_prompt_tokens by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    mean_prompt: Option<usize>,

    /// Mean tokens of a response (of an episode, with the tokens given between turns); a third of rollout.max_response_tokens by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    mean_response: Option<usize>,

    /// Mean turns of an episode; half of episode.max_turns by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    mean_turns: Option<usize>,

    /// Mean tokens that an episode is given after a turn; half of episode.max_observation_tokens by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    mean_observation: Option<usize>,

    /// Mean milliseconds of an answer of the environment; a tenth of its limit of time by default.
    #[arg(long, value_name = "MS", value_parser = positive)]
    mean_answer: Option<usize>,

    /// Mean tokens of a row of sft, prefer or rm (of a pair, with both responses); a quarter of the bytes by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    mean_row: Option<usize>,

    /// Simulates the run without measuring anything here.
    #[arg(long)]
    no_measure: bool,

    /// One JSON object: bytes, tokens, seconds.
    #[arg(long)]
    json: bool,

    /// Threads; all cores by default.
    #[arg(long, value_parser = threads)]
    threads: Option<usize>,

    #[command(flatten)]
    allow: AllowCommand,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let named = args.machine.as_deref().and_then(Machine::by_name);
    let mut set = args.set.clone();
    set.extend(args.device.map(|device| format!("device={device}")));
    if let Some(machine) = &named {
        let device = if machine.processor == Processor::Cpu { "cpu" } else { "cuda" };
        set.push(format!("device={device}"));
    }
    if let Some(text) = supervised::config_text(args.config.as_deref())? {
        return supervised::run(args, &text, &set);
    }
    let (_, mut plan) = run_folder::read_plan(args.config.as_deref(), &set, |source| {
        planned::known_shape(&args.model.as_deref().map_or_else(|| source.clone(), ModelSource::named))
    })?;
    plan.pin_adapters()?;
    let mut assumed = Vec::new();
    let shapes = ModelShapes::find(&plan, args.model.as_deref(), &mut assumed)?;
    let here = Here::look(plan.device());
    let machine = named.unwrap_or_else(|| here.machine(plan.device(), args.threads, &mut assumed));
    if let Some(max_dim) = machine.max_head_dim() {
        shapes.model.check_head_dim(max_dim).with_context(|| format!("machine {}", machine.name))?;
    }
    let memory_bytes =
        if named.is_some() { machine.memory_bytes } else { here.memory_bytes.or(machine.memory_bytes) };
    let lengths = lengths(args, &plan)?;
    let world = world(args, &machine)?;
    let memory = memory_on(&plan, &shapes, memory_bytes, world.n_ranks);
    let shape = RunShape {
        plan: &plan,
        model: &shapes.model,
        frozen: &shapes.frozen,
        quantised: shapes.quantised(&plan),
        machine: &machine,
        lengths,
        episodes: episodes::means(args, &plan)?,
        kv_bytes: memory.kv_bytes,
        recompute: memory.recompute,
        world,
    };
    let fits = planned::fits(memory.peak_bytes(), memory_bytes) != Some(false);
    let planning = Planning { args, shapes: &shapes, shape, memory, memory_bytes, assumed };
    let is_simulation = named.is_some() || args.model.is_some() || args.no_measure || world.n_ranks > 1;
    let obstacle = match fits {
        _ if is_simulation => None,
        false => Some("the run does not fit".to_string()),
        true => here.obstacle(&plan, &shapes),
    };
    if is_simulation || obstacle.is_some() {
        let note = obstacle.map(|obstacle| format!("times are simulated, not measured: {obstacle}"));
        return Ok(show(args, &planning.planned(note, None)));
    }
    let note = "times are simulated so far, and measured next".to_string();
    let estimate = planning.planned(Some(note), None);
    if !args.json {
        text::print(&estimate);
    }
    let measured = measure::run(args, &planning.shape, &estimate)?;
    let planned = planning.planned(None, Some(measured));
    if !args.json {
        println!("");
        text::print_times(&planned);
        return Ok(ExitCode::SUCCESS);
    }
    Ok(show(args, &planned))
}

/// Prints a plan. The exit status is 1 where the run does not fit.
fn show(args: &Args, planned: &Planned) -> ExitCode {
    if args.json {
        println!("{:#}", json::object(planned));
    } else {
        text::print(planned);
    }
    if planned.fits() == Some(false) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// What is known before anything is measured.
struct Planning<'a> {
    args: &'a Args,
    shapes: &'a ModelShapes,
    shape: RunShape<'a>,
    memory: MemoryPlan,
    memory_bytes: Option<u64>,
    assumed: Vec<String>,
}

impl<'a> Planning<'a> {
    /// The plan, simulated or corrected by what was measured, with a note on how its times were found.
    fn planned(&self, note: Option<String>, measured: Option<Measurement>) -> Planned<'a> {
        let Self { args, shapes, memory_bytes, .. } = *self;
        let (plan, world) = (self.shape.plan, self.shape.world);
        let lengths = known_lengths(args, self.shape.lengths, measured.as_ref());
        let episodes = self.shape.episodes.map(|means| episodes::known(args, means, measured.as_ref()));
        let shape = RunShape { lengths, episodes, ..self.shape };
        let prediction =
            measured.as_ref().map_or_else(|| shape.simulate(), |measured| measured.correct(&shape));
        let mut assumed: Vec<String> = self.assumed.iter().cloned().chain(note).collect();
        let given = [args.mean_prompt, args.mean_response];
        planned::assume_lengths(&mut assumed, plan, lengths, given, measured.as_ref());
        if let Some(means) = &shape.episodes {
            episodes::assume(&mut assumed, args, means, measured.as_ref());
        }
        planned::assume_settings(&mut assumed, plan);
        if let Some(ranks) = &prediction.ranks {
            planned::assume_ranks(&mut assumed, ranks);
        }
        Planned {
            on_one: (world.n_ranks > 1).then(|| on_one(&shape, shapes, memory_bytes)),
            memory: self.memory.clone(),
            disk: DiskPlan::for_weights(plan, self.shape.n_trained()),
            disk_free: args.machine.is_none().then(|| free_disk(Path::new("runs"))).flatten(),
            remedy: memory_bytes.and_then(|bytes| remedy(plan, shapes, bytes, world.n_ranks)),
            plan,
            shapes,
            machine: self.shape.machine,
            memory_bytes,
            prediction,
            measured,
            assumed,
        }
    }
}

/// The memory that a run has to fit: that of a GPU. Main memory is no limit, because the system may swap.
fn limit(plan: &Plan, memory_bytes: Option<u64>) -> Option<u64> {
    memory_bytes.filter(|_| plan.device() != DeviceName::Cpu)
}

/// What a rank takes of the memory of its device.
fn memory_on(plan: &Plan, shapes: &ModelShapes, memory_bytes: Option<u64>, n_ranks: usize) -> MemoryPlan {
    let model = TrainedModel { config: &shapes.model, quantised: shapes.quantised(plan) };
    memory::resolve_for(plan, model, &shapes.frozen, limit(plan, memory_bytes), n_ranks)
}

/// What to change where a run does not fit `memory_bytes`.
fn remedy(plan: &Plan, shapes: &ModelShapes, memory_bytes: u64, n_ranks: usize) -> Option<Remedy> {
    let total = |plan: &Plan| memory_on(plan, shapes, Some(memory_bytes), n_ranks).peak_bytes();
    estimate::remedy(plan, (&shapes.model, shapes.least_base(plan)), memory_bytes, total)
        .filter(|remedy| !remedy.changes.is_empty())
}

/// The ranks that the command line asks for.
fn world(args: &Args, machine: &Machine) -> Result<World> {
    let n_ranks = args.gpus.unwrap_or(1);
    if machine.processor == Processor::Cpu && n_ranks > 1 {
        bail!(
            "--gpus {n_ranks}: the plan's device is a CPU\nhint: name the machine, as in --machine h200, or set device=cuda"
        );
    }
    if let Some(nodes) = args.nodes.filter(|nodes| *nodes > n_ranks) {
        bail!(
            "--nodes {nodes}: more machines than the {n_ranks} GPUs of --gpus\nhint: raise --gpus, or leave --nodes out"
        );
    }
    let links = args.link.map_or(machine.links, |rate| machine.links.at(rate as f64 * 1e9));
    Ok(World::new(n_ranks, args.nodes, links))
}

/// The same run on one GPU, with the memory that it has there.
fn on_one(shape: &RunShape, shapes: &ModelShapes, memory_bytes: Option<u64>) -> OnOne {
    let memory = memory_on(shape.plan, shapes, memory_bytes, 1);
    let alone = RunShape {
        kv_bytes: memory.kv_bytes,
        recompute: memory.recompute,
        world: World::one(shape.world.links),
        ..*shape
    };
    OnOne {
        step_seconds: alone.simulate().phases.total(),
        fits: planned::fits(memory.peak_bytes(), memory_bytes) != Some(false),
    }
}

/// The mean lengths that the command line gives, or shares of the config's limits.
fn lengths(args: &Args, plan: &Plan) -> Result<Lengths> {
    let rollout = &plan.config.rollout;
    let given = [
        ("--mean-prompt", args.mean_prompt, "rollout.max_prompt_tokens", rollout.max_prompt_tokens),
        ("--mean-response", args.mean_response, "rollout.max_response_tokens", rollout.max_response_tokens),
    ];
    for (option, mean, key, limit) in given {
        if let Some(mean) = mean.filter(|mean| *mean > limit) {
            bail!(
                "{option} {mean}: above {key}, {limit}\nhint: lower the one, or raise the other with --set"
            );
        }
    }
    let or_share = |mean: Option<usize>, limit: usize, share: usize| {
        mean.map_or((limit as f64 / share as f64).max(1.0), |mean| mean as f64)
    };
    let lengths = Lengths {
        prompt_mean: or_share(args.mean_prompt, rollout.max_prompt_tokens, planned::PROMPT_SHARE),
        response_mean: or_share(args.mean_response, rollout.max_response_tokens, planned::RESPONSE_SHARE),
        response_limit: rollout.max_response_tokens,
        spread: SPREAD,
    };
    Ok(match rollout.lengths {
        Some(forced) => lengths.forced(forced.mean, forced.sigma),
        None => lengths,
    })
}

/// The lengths with measured values instead of those that were not given.
fn known_lengths(args: &Args, lengths: Lengths, measured: Option<&Measurement>) -> Lengths {
    let Some(measured) = measured else { return lengths };
    let mut known = lengths;
    if args.mean_prompt.is_none() {
        known.prompt_mean = measured.prompt_mean;
    }
    if args.mean_response.is_none() && measured.knows_lengths(lengths.response_limit) {
        known.response_mean = measured.response_mean.max(1.0);
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use stapo_rl::plan::estimate::EpisodeMeans;

    #[derive(Parser)]
    struct Given {
        #[command(flatten)]
        args: Args,
    }

    fn given(words: &[&str]) -> Args {
        Given::parse_from([&["plan"], words].concat()).args
    }

    /// A measured step of responses to 96 tokens, of which none was cut.
    pub(super) fn measurement() -> Measurement {
        Measurement {
            n_problems: 2,
            response_limit: 96,
            rollout_seconds: 1.0,
            environment_seconds: 0.0,
            update_seconds: 1.0,
            n_sampled: 100.0,
            n_trained: 100.0,
            prompt_mean: 7.0,
            response_mean: 40.0,
            turns_mean: 3.0,
            given_mean: 20.0,
            truncated_share: 0.0,
        }
    }

    #[test]
    fn measured_lengths_replace_those_that_were_not_given() {
        let assumed = Lengths { prompt_mean: 16.0, response_mean: 32.0, response_limit: 96, spread: 0.5 };
        let known = |words: &[&str], measured: &Measurement| {
            let known = known_lengths(&given(words), assumed, Some(measured));
            (known.prompt_mean, known.response_mean)
        };
        let mut measured = measurement();
        assert_eq!(known(&[], &measured), (7.0, 40.0));
        assert_eq!(known(&["--mean-prompt", "9"], &measured), (16.0, 40.0));
        assert_eq!(known(&["--mean-response", "9"], &measured), (7.0, 32.0));
        // Of responses that were cut earlier than the run cuts them, the mean is not known.
        (measured.truncated_share, measured.response_limit) = (0.5, 95);
        assert_eq!(known(&[], &measured), (7.0, 32.0));
        (measured.response_mean, measured.response_limit) = (0.5, 96);
        assert_eq!(known(&[], &measured), (7.0, 1.0));
    }

    #[test]
    fn measured_turns_replace_those_that_were_not_given() {
        let assumed = EpisodeMeans { turns: 2.5, observation: 128.0, answer_seconds: 3.0, at_once: 8 };
        let known = |words: &[&str], measured: &Measurement| {
            let known = episodes::known(&given(words), assumed, Some(measured));
            (known.turns, known.observation)
        };
        let mut measured = measurement();
        // Twenty tokens in two answers.
        assert_eq!(known(&[], &measured), (3.0, 10.0));
        assert_eq!(known(&["--mean-turns", "9"], &measured), (2.5, 10.0));
        assert_eq!(known(&["--mean-observation", "9"], &measured), (3.0, 128.0));
        measured.turns_mean = 1.0;
        assert_eq!(known(&[], &measured), (1.0, 128.0));
        let means = assumed;
        let said = |words: &[&str], measured: Option<&Measurement>| {
            let mut said = Vec::new();
            episodes::assume(&mut said, &given(words), &means, measured);
            said.len()
        };
        assert_eq!((said(&[], None), said(&[], Some(&measured))), (4, 1));
        assert_eq!(
            [["--mean-turns", "2"], ["--mean-observation", "2"], ["--mean-answer", "2"]]
                .map(|words| said(&words, None)),
            [3; 3]
        );
        let mut said = Vec::new();
        let at_once = EpisodeMeans { answer_seconds: 0.0, ..means };
        episodes::assume(&mut said, &given(&[]), &at_once, None);
        assert_eq!(said.len(), 3, "an environment that answers at once is not assumed to take time");
    }

    #[test]
    fn the_world_has_as_many_machines_as_it_needs_or_as_it_is_given() {
        let machine = Machine::by_name("h100").unwrap();
        let found = |words: &[&str]| {
            world(&given(words), &machine)
                .map(|world| (world.n_ranks, world.n_nodes, world.links.within.per_second))
                .map_err(|error| error.to_string())
        };
        let usual = machine.links.within.per_second;
        assert_eq!(found(&[]), Ok((1, 1, usual)));
        assert_eq!(found(&["--gpus", "16"]), Ok((16, 2, usual)));
        assert_eq!(found(&["--gpus", "4", "--nodes", "4"]), Ok((4, 4, usual)));
        assert_eq!(found(&["--gpus", "2", "--link", "50"]), Ok((2, 1, 50e9)));
        assert!(
            found(&["--gpus", "2", "--nodes", "3"])
                .unwrap_err()
                .contains("--nodes 3: more machines than the 2")
        );
        let cpu = Machine::cpu(8);
        assert!(world(&given(&["--gpus", "2"]), &cpu).err().unwrap().to_string().contains("device is a CPU"));
        assert!(world(&given(&["--gpus", "1"]), &cpu).is_ok());
    }

    #[test]
    fn a_mean_may_be_as_long_as_the_limit() {
        let settings = ["rollout.max_prompt_tokens=100", "rollout.max_response_tokens=90"];
        let plan = Plan::resolve(stapo_rl::Config::from_toml("", settings).unwrap()).unwrap();
        let found = |words: &[&str]| {
            lengths(&given(words), &plan)
                .map(|lengths| (lengths.prompt_mean, lengths.response_mean))
                .map_err(|error| error.to_string())
        };
        assert_eq!(found(&[]), Ok((25.0, 30.0)));
        assert_eq!(found(&["--mean-prompt", "100", "--mean-response", "90"]), Ok((100.0, 90.0)));
        assert!(
            found(&["--mean-prompt", "101"]).unwrap_err().contains("above rollout.max_prompt_tokens, 100")
        );
        assert!(
            found(&["--mean-response", "91"]).unwrap_err().contains("above rollout.max_response_tokens, 90")
        );
    }

    #[test]
    fn means_of_episodes_are_given_in_turns_tokens_and_milliseconds() {
        let game = [
            "task={kind=\"guess\",low=1,high=9}",
            "environment={kind=\"guess\"}",
            "episode={max_turns=4,max_observation_tokens=64}",
        ];
        let plan = |settings: &[&str]| {
            Plan::resolve(stapo_rl::Config::from_toml("", settings.iter().copied()).unwrap()).unwrap()
        };
        let found = |words: &[&str], settings: &[&str]| {
            episodes::means(&given(words), &plan(settings))
                .map(|means| means.map(|means| (means.turns, means.observation, means.answer_seconds)))
                .map_err(|error| error.to_string())
        };
        let words = ["--mean-turns", "4", "--mean-observation", "64", "--mean-answer", "250"];
        assert_eq!(found(&words, &game), Ok(Some((4.0, 64.0, 0.25))));
        assert!(found(&["--mean-turns", "5"], &game).unwrap_err().contains("above episode.max_turns, 4"));
        let said = found(&["--mean-observation", "65"], &game).unwrap_err();
        assert!(said.contains("above episode.max_observation_tokens, 64"), "{said}");
        assert_eq!(found(&[], &[]), Ok(None));
        assert!(
            found(&["--mean-answer", "9"], &[])
                .unwrap_err()
                .contains("--mean-answer: given, and the config has no")
        );
    }
}
