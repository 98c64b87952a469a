//! What a plan is made of: the models' shapes, this machine, and what had to be assumed.

use crate::shared::units::grouped;
use anyhow::{Result, bail};
use stapo_rl::Plan;
use stapo_rl::device::{DeviceName, cuda};
use stapo_rl::model_files::{ModelConfig, Pretrained, QuantisedBase};
use stapo_rl::plan::config::{BaseStorage, LoraConfig, ModelSource, TeacherSource};
use stapo_rl::plan::disk::DiskPlan;
use stapo_rl::plan::estimate::{Lengths, Machine, Measurement, Prediction, RankedStep, Remedy};
use stapo_rl::plan::host::HostMemory;
use stapo_rl::plan::memory::{self, MemoryPart, MemoryPlan};
use std::path::Path;

/// The parts of the limits that replace mean lengths that were not given.
pub const PROMPT_SHARE: usize = 4;
pub const RESPONSE_SHARE: usize = 3;

/// Everything that is shown.
pub struct Planned<'a> {
    pub plan: &'a Plan,
    pub shapes: &'a ModelShapes,
    pub machine: &'a Machine,
    pub memory: MemoryPlan,
    pub disk: DiskPlan,
    /// Free on the disk where runs are written; `None` for another machine, and if the system does not report it.
    pub disk_free: Option<u64>,
    /// Memory of the machine, where known.
    pub memory_bytes: Option<u64>,
    /// What to change where the run does not fit; `None` if it fits, or where nothing helps.
    pub remedy: Option<Remedy>,
    pub prediction: Prediction,
    pub measured: Option<Measurement>,
    /// The run on one GPU, where several are asked for.
    pub on_one: Option<OnOne>,
    pub assumed: Vec<String>,
}

/// The same run on one GPU.
#[derive(Debug, Clone, Copy)]
pub struct OnOne {
    pub step_seconds: f64,
    pub fits: bool,
}

/// What memory is used for at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryPhase {
    Sampling,
    Update,
    Checkpoint,
}

impl MemoryPhase {
    pub const ALL: [Self; 3] = [Self::Sampling, Self::Update, Self::Checkpoint];

    pub fn name(self) -> &'static str {
        match self {
            Self::Sampling => "sampling",
            Self::Update => "update",
            Self::Checkpoint => "checkpoint",
        }
    }

    /// Whether the phase reads or writes the part.
    fn uses(self, part: &MemoryPart) -> bool {
        match part.name {
            "keys, values" => self == Self::Sampling,
            "gradients" | "activations" | "DeltaNet's chunks" => self == Self::Update,
            "logits" => self != Self::Checkpoint,
            _ => true,
        }
    }
}

impl Planned<'_> {
    /// Whether a phase uses a part; a judge whose weights the host keeps has a separate turn.
    pub fn uses(&self, phase: MemoryPhase, part: &MemoryPart) -> bool {
        phase.uses(part) && !self.memory.judging.contains(part)
    }

    /// Bytes of the parts that a phase uses.
    pub fn used_bytes(&self, phase: MemoryPhase) -> u64 {
        self.memory.parts().filter(|part| self.uses(phase, part)).map(|part| part.bytes).sum()
    }

    pub fn total_bytes(&self) -> u64 {
        self.memory.peak_bytes()
    }

    pub fn fits(&self) -> Option<bool> {
        fits(self.total_bytes(), self.memory_bytes)
    }

    /// Of the work that the ranks could do in the time of a step, the share that one GPU would do in a step. Above 1 where
    /// one GPU lacks memory for that many sequences at once.
    pub fn efficiency(&self) -> Option<f64> {
        let n_ranks = self.prediction.ranks?.world.n_ranks as f64;
        Some(self.on_one?.step_seconds / self.prediction.phases.total() / n_ranks)
    }

    /// Response tokens of the whole run if every response has the greatest length.
    pub fn most_tokens(&self) -> u64 {
        let rollout = &self.plan.config.rollout;
        let per_step = rollout.problems_per_step * rollout.group_size * rollout.max_response_tokens;
        self.plan.config.steps * per_step as u64
    }
}

/// Whether there is room for what is needed; `None` where the room is not known.
pub fn fits(needed: u64, room: Option<u64>) -> Option<bool> {
    room.map(|room| needed <= room)
}

/// The shapes of the models that a plan names.
pub struct ModelShapes {
    /// The trained model, as it was named.
    pub name: String,
    pub model: ModelConfig,
    /// Frozen models by their roles.
    pub frozen: Vec<(&'static str, ModelConfig)>,
    /// The layers of the model that can stay quantised below adapters.
    quantised: Option<QuantisedBase>,
    /// Whether the weights of all of them are here.
    pub has_weights: bool,
}

impl ModelShapes {
    /// The shapes of the plan's models, with `model` instead of the one in training where given.
    pub fn find(plan: &Plan, model: Option<&str>, assumed: &mut Vec<String>) -> Result<Self> {
        let config = &plan.config;
        let trained = model.map_or_else(|| config.model.clone(), ModelSource::named);
        let reference = config.reference.clone().unwrap_or_else(|| trained.clone());
        let needs_copy = plan.objective.needs_reference() && !plan.has_free_reference();
        let reference = needs_copy.then_some(reference);
        let teacher = config.teacher.as_ref().and_then(TeacherSource::model);
        let mut has_weights = true;
        let mut shape = |source: &ModelSource| -> Result<ModelConfig> {
            let (shape, is_here) = shape(source)?;
            if !is_here && model.is_none() {
                assumed.push(format!("the shape of {source}, whose files are not here, by its name"));
            }
            has_weights &= is_here;
            Ok(shape)
        };
        let model = shape(&trained)?;
        let quantised = quantised(plan, &trained, &model)?;
        let is_quantised = storage(plan) == BaseStorage::Quantised;
        let mut frozen = Vec::new();
        let draft = config.rollout.draft.as_deref().map(ModelSource::named);
        let roles = [("reference", reference), ("teacher", teacher), (memory::DRAFT, draft)];
        let roles = roles.into_iter().filter_map(|(role, source)| Some((role, source?)));
        for (role, source) in roles.chain(plan.verifying_model()) {
            frozen.push((role, if source == trained { model.clone() } else { shape(&source)? }));
        }
        if is_quantised && !has_weights {
            assumed.push("layers in Q4_K, of a file that is not here (model.lora.base)".to_string());
        }
        Ok(Self { name: trained.to_string(), model, frozen, quantised, has_weights })
    }
}

impl ModelShapes {
    /// The layers that stay quantised in a run of this plan (`model.lora.base`).
    pub fn quantised(&self, plan: &Plan) -> Option<QuantisedBase> {
        self.quantised.filter(|_| storage(plan) == BaseStorage::Quantised)
    }

    /// The storage of the weights below adapters that takes the least memory.
    pub fn least_base(&self, plan: &Plan) -> BaseStorage {
        if self.quantised.is_some() { BaseStorage::Quantised } else { storage(plan) }
    }
}

fn storage(plan: &Plan) -> BaseStorage {
    plan.config.lora.as_ref().map_or(BaseStorage::default(), LoraConfig::base_storage)
}

/// The layers of the trained model that can stay quantised on a GPU: those of its file, where that is here. Refuses a plan
/// with `model.lora.base` on another model.
fn quantised(plan: &Plan, source: &ModelSource, model: &ModelConfig) -> Result<Option<QuantisedBase>> {
    let lora = plan.config.lora.as_ref().filter(|_| plan.device() != DeviceName::Cpu);
    let Some(lora) = lora.map(LoraConfig::spec) else { return Ok(None) };
    let is_asked = storage(plan) == BaseStorage::Quantised;
    match source.find() {
        Ok(found) if is_asked => Ok(Some(found.quantised_base(&lora)?)),
        Ok(found) => Ok(found.quantised_base(&lora).ok()),
        Err(_) => Ok(is_asked.then(|| QuantisedBase::assumed(model, &lora))),
    }
}

/// The shape of a model by its files, or by its name where they are not here.
pub fn known_shape(source: &ModelSource) -> Option<ModelConfig> {
    source.shape().ok().or_else(|| ModelConfig::known(&source.to_string()))
}

/// The shape of a model, and whether its weights are here. A model that is here wins over a known name.
pub fn shape(source: &ModelSource) -> Result<(ModelConfig, bool)> {
    let name = source.to_string();
    match source.find() {
        Ok(found) => {
            let has_weights = found.checkpoint.is_some() || Pretrained::has_weights(&found.files()?.path);
            Ok((found.shape()?, has_weights))
        }
        Err(error) if Path::new(&name).exists() => Err(error.into()),
        Err(error) => {
            let Some(shape) = ModelConfig::known(&name) else {
                let known: Vec<&str> = ModelConfig::known_names().collect();
                bail!("{error}; without files, --model takes one of {}", known.join(", "))
            };
            Ok((shape, false))
        }
    }
}

/// The machine that the command runs on, as far as the plan's device is concerned.
pub struct Here {
    /// The name of the GPU in the driver's words.
    gpu: Option<String>,
    /// Main memory and swap that are left, or all memory of the plan's GPU.
    pub memory_bytes: Option<u64>,
    /// What keeps this machine from computing on the plan's device.
    missing: Option<String>,
}

impl Here {
    pub fn look(device: DeviceName) -> Self {
        match device {
            DeviceName::Cpu => {
                let memory_bytes = HostMemory::find().map(|memory| memory.usable());
                Self { gpu: None, memory_bytes, missing: None }
            }
            DeviceName::Cuda { ordinal } => {
                let found = cuda::probe();
                let gpu = found.gpus.get(ordinal);
                let first_line = |text: String| text.lines().next().unwrap_or_default().to_string();
                let absent = || gpu.is_none().then(|| format!("there is no GPU {ordinal} here"));
                Self {
                    gpu: gpu.map(|gpu| gpu.name.clone()),
                    memory_bytes: gpu.map(|gpu| gpu.memory_bytes as u64),
                    missing: found.obstacle().map(first_line).or_else(absent),
                }
            }
        }
    }

    /// The machine whose rates a simulation takes, where the command line names none.
    pub fn machine(&self, device: DeviceName, threads: Option<usize>, assumed: &mut Vec<String>) -> Machine {
        if device == DeviceName::Cpu {
            let here = || std::thread::available_parallelism().map_or(1, usize::from);
            return Machine::cpu(threads.unwrap_or_else(here));
        }
        let known = self.gpu.as_deref().and_then(Machine::of_gpu);
        known.unwrap_or_else(|| {
            let machine = Machine::all()[0];
            let gpu = self.gpu.clone().unwrap_or_else(|| "no GPU here".to_string());
            assumed.push(format!("rates and memory of {} ({gpu}); --machine names another", machine.name));
            machine
        })
    }

    /// What keeps the command from measuring.
    pub fn obstacle(&self, plan: &Plan, shapes: &ModelShapes) -> Option<String> {
        if let Some(missing) = &self.missing {
            return Some(missing.clone());
        }
        if !shapes.has_weights {
            return Some(format!("the weights of {} are not here", shapes.name));
        }
        let rows = plan.task.rows()?;
        let is_here = rows.path.files().is_ok_and(|files| files.iter().all(|file| file.path.exists()));
        (!is_here).then(|| format!("the data {} are not here", rows.path))
    }
}

/// Says which lengths were assumed: those that were neither given nor measured.
pub fn assume_lengths(
    assumed: &mut Vec<String>,
    plan: &Plan,
    lengths: Lengths,
    given: [Option<usize>; 2],
    measured: Option<&Measurement>,
) {
    let rollout = &plan.config.rollout;
    if given[0].is_none() && measured.is_none() {
        assumed.push(format!(
            "prompts of {:.0} tokens, a quarter of rollout.max_prompt_tokens; --mean-prompt N says better",
            lengths.prompt_mean
        ));
    }
    let is_known = measured.is_some_and(|measured| measured.knows_lengths(rollout.max_response_tokens));
    if given[1].is_none() && !is_known && rollout.lengths.is_none() {
        assumed.push(format!(
            "responses of {} tokens, a third of rollout.max_response_tokens; --mean-response N says better",
            grouped(lengths.response_mean.round() as u64)
        ));
    }
    if let Some(measured) = measured.filter(|measured| is_known && measured.truncated_share > 0.0) {
        let percent = 100.0 * measured.truncated_share;
        assumed
            .push(format!("{percent:.0} % of the measured responses reached the limit, and the estimate assumes the same for the rest of the run"));
    }
    assumed.push(format!(
        "lengths that are spread by {} in the logarithm up to the limit and stay so during the run",
        lengths.spread
    ));
}

/// Says what is assumed about several ranks.
pub fn assume_ranks(assumed: &mut Vec<String>, ranks: &RankedStep) {
    let links = &ranks.world.links;
    let mut rates = vec![("within a machine", links.within)];
    if ranks.world.n_nodes > 1 {
        rates.push(("between machines", links.between));
    }
    rates.push(("between hosts", links.host));
    for (place, rate) in rates {
        let gigabytes = rate.per_second / 1e9;
        assumed.push(format!(
            "{gigabytes:.0} GB/s from each GPU {place}, {}: {}",
            rate.origin.word(),
            rate.origin.source()
        ));
    }
    assumed.push("problems of unknown lengths, dealt out in turn".to_string());
}

/// Says what the settings of the plan leave open.
pub fn assume_settings(assumed: &mut Vec<String>, plan: &Plan) {
    let config = &plan.config;
    if config.rollout.max_redraws > 0 {
        assumed.push("no group is redrawn (rollout.max_redraws)".to_string());
    }
    if config.update.reuse.is_some() {
        assumed.push(format!("every rollout batch is used {} times (update.reuse)", plan.max_uses()));
    }
    if plan.rewards.iter().any(|reward| reward.verifier.program().is_some()) {
        assumed.push("the verifier program takes no time".to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::plan::tests::measurement;
    use stapo_rl::Config;

    fn plan(settings: &[&str]) -> Plan {
        Plan::resolve(Config::from_toml("", settings.iter().copied()).unwrap()).unwrap()
    }

    #[test]
    fn what_fills_the_room_fits() {
        assert_eq!([7, 8, 9].map(|needed| fits(needed, Some(8))), [Some(true), Some(true), Some(false)]);
        assert_eq!(fits(9, None), None);
    }

    /// What the command line names is nothing that was assumed.
    #[test]
    fn the_shape_of_a_model_that_is_not_here_is_assumed_unless_it_was_named() {
        let plan = plan(&["model.path=Qwen/Qwen3-1.7B-Base", "device=cuda"]);
        let assumed = |model: Option<&str>| {
            let mut assumed = Vec::new();
            let shapes = ModelShapes::find(&plan, model, &mut assumed).unwrap();
            (shapes.name, shapes.has_weights, assumed.len())
        };
        assert_eq!(assumed(None), ("Qwen/Qwen3-1.7B-Base".to_string(), false, 1));
        assert_eq!(assumed(Some("qwen3-8b")), ("qwen3-8b".to_string(), false, 0));
        assert_eq!(assumed(Some("builtin")), ("builtin".to_string(), true, 0));
    }

    #[test]
    fn a_phase_uses_what_it_reads_or_writes() {
        let used = |name: &'static str| {
            let part = MemoryPart { name, bytes: 1 };
            MemoryPhase::ALL.map(|phase| phase.uses(&part))
        };
        assert_eq!(MemoryPhase::ALL.map(MemoryPhase::name), ["sampling", "update", "checkpoint"]);
        assert_eq!(used("keys, values"), [true, false, false]);
        assert_eq!((used("gradients"), used("activations")), ([false, true, false], [false, true, false]));
        assert_eq!((used("logits"), used("weights")), ([true, true, false], [true; 3]));
    }

    #[test]
    fn settings_that_a_plan_cannot_follow_are_assumed() {
        let assumed = |settings: &[&str]| {
            let mut assumed = Vec::new();
            assume_settings(&mut assumed, &plan(settings));
            assumed
        };
        assert_eq!(assumed(&[]), [""; 0]);
        assert_eq!(
            assumed(&["update.reuse={max=3}"]),
            ["every rollout batch is used 3 times (update.reuse)"]
        );
        let redrawn = ["objective.preset=dapo", "rollout.max_redraws=2"];
        assert_eq!(assumed(&redrawn), ["no group is redrawn (rollout.max_redraws)"]);
    }

    /// The words of assumptions that say what to give instead, or how much of something there is.
    #[test]
    fn only_lengths_that_were_neither_given_nor_measured_are_assumed() {
        let plan = plan(&["rollout.max_response_tokens=96"]);
        let lengths = Lengths { prompt_mean: 5.0, response_mean: 32.0, response_limit: 96, spread: 0.5 };
        let said = |given: [Option<usize>; 2], measured: Option<&Measurement>| {
            let mut assumed = Vec::new();
            assume_lengths(&mut assumed, &plan, lengths, given, measured);
            assert!(assumed.pop().unwrap().starts_with("lengths that are spread by 0.5 in"));
            assumed
                .iter()
                .map(|text| text.split([',', '%']).next().unwrap().trim().to_string())
                .collect::<Vec<String>>()
        };
        let [prompts, responses] = ["prompts of 5 tokens", "responses of 32 tokens"].map(String::from);
        assert_eq!(said([None, None], None), vec![prompts.clone(), responses.clone()]);
        assert_eq!(said([None, Some(9)], None), vec![prompts]);
        assert_eq!(said([Some(9), None], None), vec![responses.clone()]);
        let mut measured = measurement();
        assert_eq!(said([None, None], Some(&measured)), Vec::<String>::new());
        measured.truncated_share = 0.25;
        assert_eq!(said([None, None], Some(&measured)), vec!["25".to_string()]);
        measured.response_limit = 95;
        assert_eq!(said([None, None], Some(&measured)), vec![responses]);
    }

    #[test]
    fn settings_that_a_plan_does_not_simulate_are_told() {
        let said = |settings: &[&str]| {
            let mut assumed = Vec::new();
            assume_settings(&mut assumed, &plan(settings));
            assumed.concat()
        };
        assert_eq!(said(&[]), "");
        assert_eq!(said(&["rollout.max_redraws=1"]), "no group is redrawn (rollout.max_redraws)");
        let two = r#"rewards=[{name="a",verifier={kind="rule"}},{name="b",verifier={kind="command",program="sh"}}]"#;
        assert_eq!(said(&[two]), "the verifier program takes no time");
    }
}
