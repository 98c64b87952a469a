//! Finding the model that a config or a command line names.
//!
//! One name serves everywhere. In this order it is: the word `builtin`, `builtin-tools` or `builtin-hybrid`; a run folder, for its newest good checkpoint; a
//! Hugging Face folder or a GGUF file; `RUN@STEP`, a run's checkpoint of that step; `OWNER/NAME`, a model of the Hugging
//! Face hub that was fetched before, or `OWNER/NAME@REVISION`. Nothing here reaches for the network.

use crate::error::{Error, Result};
use crate::plan::config::{BaseStorage, Config, LoraConfig, ModelSource, Plan, PlanError, TeacherSource};
use crate::policy::adapters;
use crate::policy::builtin::BuiltinModel;
use crate::policy::hub_cache;
use crate::run::{Checkpoint, Run, RunKind, check_tree};
use stapo_model::decoder::{LoraSpec, QuantisedBase};
use stapo_model::{ModelConfig, Pretrained};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use toml::Table;

/// A model that is on this machine.
#[derive(Debug)]
pub struct FoundModel {
    /// The model by a name that stays: with the step of a run's checkpoint, or the commit of a hub's repository.
    pub pinned: ModelSource,
    /// Why newer checkpoints of a run were refused.
    pub refused: Vec<Error>,
    /// The model itself, or the one from which the run of `checkpoint` started: its config, tokenizer and chat template
    /// are those of the checkpoint.
    pub base: BaseModel,
    /// The run's checkpoint that holds the weights, or the adapters of `lora`. It stays readable when a trainer removes its
    /// folder.
    pub checkpoint: Option<Arc<Checkpoint>>,
    /// The adapters of the run of `checkpoint`.
    pub lora: Option<LoraSpec>,
    /// How a GPU is to hold frozen weights below adapters: as that run held them, unless it is set otherwise.
    pub base_storage: BaseStorage,
    /// The checkpoint that holds the frozen weights below `lora`, where they are an earlier run's.
    pub frozen: Option<Arc<Checkpoint>>,
    /// The checkpoint before the first step of a run of which this is the model: it has the hashes of the model, and no copy.
    pub start: Option<Arc<Checkpoint>>,
    /// The longest sequence that the plan of the model's run allows, from which `LongRoPE` takes its factors.
    pub longest: Option<usize>,
}

/// A model that is no run's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BaseModel {
    Builtin(BuiltinModel),
    /// A Hugging Face folder or a GGUF file.
    Files(PathBuf),
    /// Random weights of a published shape, with the files of the built-in model next to them.
    Random {
        shape: String,
        seed: u64,
    },
}

/// The files of a model; those of the built-in model lie in a folder that is removed with this value.
pub struct ModelFiles {
    pub path: PathBuf,
    unpacked: Option<TempDir>,
}

impl ModelFiles {
    /// Whether the files are removed with this value.
    pub fn are_temporary(&self) -> bool {
        self.unpacked.is_some()
    }
}

/// Where a name leads; no checkpoint has been opened.
enum Located {
    Base { base: BaseModel, pinned: ModelSource },
    Run { run: PathBuf, step: Option<u64> },
}

/// How many runs may lead from one to the next, each trained from the one before.
const MAX_RUNS: usize = 64;

/// What a name may be, for messages.
const FORMS: &str = "a model is a Hugging Face folder, a GGUF file, a run folder, RUN@STEP, builtin, builtin-tools, builtin-hybrid, or a name on the hub such as Qwen/Qwen3-0.6B";

impl ModelSource {
    /// Finds the model. A run's checkpoint is found only where its hashes are right.
    pub fn find(&self) -> Result<FoundModel> {
        match locate(self)? {
            Located::Base { base, pinned } => Ok(FoundModel {
                pinned,
                refused: Vec::new(),
                base,
                checkpoint: None,
                lora: None,
                base_storage: BaseStorage::default(),
                frozen: None,
                start: None,
                longest: None,
            }),
            Located::Run { run, step } => FoundModel::of_run(&run, step),
        }
    }

    /// The shape of the model, without opening a checkpoint.
    pub fn shape(&self) -> Result<ModelConfig> {
        match locate(self)? {
            Located::Base { base, .. } => base.shape(),
            Located::Run { run, .. } => start_of_run(&run)?.base.shape(),
        }
    }
}

impl FoundModel {
    /// The newest good checkpoint of a run, or that of a step.
    fn of_run(run: &Path, step: Option<u64>) -> Result<Self> {
        let (checkpoint, refused) = match step {
            None => Checkpoint::newest_weights(run)?,
            Some(step) => (Some(Checkpoint::open_weights(&checkpoint_at(run, step)?)?), Vec::new()),
        };
        let Some(checkpoint) = checkpoint else {
            let problem = refused.first().map_or("no checkpoint".to_string(), |first| {
                format!("no good checkpoint among {}: {first}", refused.len())
            });
            let remedy = "name another run, or another model".to_string();
            return Err(Error::NoRun { folder: run.to_owned(), problem, remedy });
        };
        if checkpoint.is_start() {
            return Ok(Self { refused, ..Self::before_first_step(run, checkpoint)? });
        }
        let step = checkpoint.counters.step;
        let start = start_of_run(run)?;
        Ok(Self {
            pinned: ModelSource::named(&format!("{}@{step}", run.display())),
            refused,
            base: start.base,
            checkpoint: Some(Arc::new(checkpoint)),
            base_storage: start.lora.as_ref().map_or(BaseStorage::default(), LoraConfig::base_storage),
            lora: start.lora.as_ref().map(LoraConfig::spec),
            frozen: start.frozen,
            start: None,
            longest: Some(start.longest),
        })
    }

    /// The model that a run started from. One that is not there any more is refused; whoever loads it compares its hashes.
    fn before_first_step(run: &Path, checkpoint: Checkpoint) -> Result<Self> {
        let started = model_of_run(run)?;
        let found = started.model.find().map_err(|error| Error::Checkpoint {
            path: checkpoint.path.clone(),
            problem: format!("is the model that the run started from, of which it has no copy: {error}"),
        })?;
        let pinned = ModelSource::named(&format!("{}@0", run.display()));
        Ok(Self { pinned, start: Some(Arc::new(checkpoint)), longest: Some(started.longest), ..found })
    }

    /// The model for sequences of that many tokens, or of its run's where those are longer.
    #[must_use]
    pub fn for_sequences_of(self, longest: usize) -> Self {
        Self { longest: self.longest.max(Some(longest)), ..self }
    }

    /// The layers that adapters of a run on this model would lie on, quantised as its file has them. Refuses a model whose
    /// weights are not those of a GGUF file with quantised layers.
    pub fn quantised_base(&self, lora: &LoraSpec) -> Result<QuantisedBase> {
        let refuse = |problem: &str| {
            let remedy = "leave it out: it is for a GGUF file whose layers are quantised";
            let problem = format!("quantised, but {problem}");
            Err(Error::Misfit { key: "model.lora.base", problem, remedy })
        };
        let BaseModel::Files(path) = &self.base else {
            return refuse("the model is no file");
        };
        let is_trained = self.frozen.is_some() || (self.checkpoint.is_some() && self.lora.is_none());
        if is_trained {
            return refuse("the weights are those of a run, which no file holds quantised");
        }
        let Pretrained { config, weights, .. } = &Pretrained::open(path)?;
        Ok(QuantisedBase::stored(config, lora, weights)?)
    }

    /// The training steps that a run's checkpoint has seen; `None` for a model that is no run's.
    pub fn step(&self) -> Option<u64> {
        self.checkpoint_of_run().map(|checkpoint| checkpoint.counters.step)
    }

    /// The folder of the run whose checkpoint this is; `None` for a model that is no run's.
    pub fn run(&self) -> Option<&Path> {
        self.checkpoint_of_run()?.path.parent()?.parent()
    }

    /// The run's checkpoint that this is the model of.
    fn checkpoint_of_run(&self) -> Option<&Checkpoint> {
        self.start.as_deref().or(self.checkpoint.as_deref())
    }

    /// The base model by a name for other programs: that of the hub, or its path.
    pub fn base_name(&self) -> String {
        match &self.base {
            BaseModel::Builtin(model) => model.name().to_string(),
            BaseModel::Files(path) => hub_cache::name_of(path).unwrap_or_else(|| path.display().to_string()),
            BaseModel::Random { shape, .. } => format!("random {shape}"),
        }
    }

    /// The files of the base model.
    pub fn files(&self) -> Result<ModelFiles> {
        self.base.files()
    }

    /// The shape of the model, for which a folder's `config.json` is enough.
    pub fn shape(&self) -> Result<ModelConfig> {
        self.base.shape()
    }
}

fn unpacked(model: BuiltinModel) -> Result<ModelFiles> {
    let folder = model.unpack()?;
    Ok(ModelFiles { path: folder.path().to_owned(), unpacked: Some(folder) })
}

impl BaseModel {
    fn files(&self) -> Result<ModelFiles> {
        match self {
            BaseModel::Files(path) => Ok(ModelFiles { path: path.clone(), unpacked: None }),
            BaseModel::Builtin(model) => unpacked(*model),
            BaseModel::Random { .. } => unpacked(BuiltinModel::Base),
        }
    }

    fn shape(&self) -> Result<ModelConfig> {
        let config = Pretrained::read_config(&self.files()?.path)?;
        let BaseModel::Random { shape, .. } = self else { return Ok(config) };
        let unknown = || {
            let known: Vec<&str> = ModelConfig::known_names().collect();
            let remedy = format!("model.shape is one of {}", known.join(", "));
            Error::no_model(shape, "is no known shape".to_string(), remedy)
        };
        let known = ModelConfig::known(shape).ok_or_else(unknown)?;
        Ok(ModelConfig { stops: config.stops, ..known })
    }
}

impl Plan {
    /// Replaces the names of models by names that stay, so that the plan says which checkpoint or commit a run started
    /// from, and writes out the keys of adapters. `find` finds a model, as [`ModelSource::find`] does.
    pub fn pin_models<E: From<Error>>(
        &mut self,
        mut find: impl FnMut(&ModelSource) -> std::result::Result<FoundModel, E>,
    ) -> std::result::Result<(), E> {
        let config = &mut self.config;
        for source in std::iter::once(&mut config.model).chain(&mut config.reference) {
            *source = find(source)?.pinned;
        }
        if let Some(source) = config.teacher.as_ref().and_then(TeacherSource::model) {
            config.teacher = Some(find(&source)?.pinned.into());
        }
        if let Some(draft) = &mut config.rollout.draft {
            *draft = find(&ModelSource::named(draft))?.pinned.to_string();
        }
        // The prompt is written out too, so that the plan has every word that the judge reads.
        for verifier in self.verifiers_mut() {
            if let Some(model) = verifier.model_mut() {
                *model = find(&ModelSource::named(model))?.pinned.to_string();
            }
            if let Some(judge) = verifier.judge_mut() {
                judge.template = Some(judge.template().to_string());
            }
        }
        Ok(self.pin_adapters()?)
    }

    /// Writes out the keys of adapters, those of the folder that the run starts from where it names one.
    pub fn pin_adapters(&mut self) -> Result<()> {
        if let Some(lora) = &mut self.config.lora {
            adapters::pin(lora)?;
        }
        Ok(())
    }
}

/// Whether the path is a run folder. A checkpoint, which keeps a copy of its run's plan, is none.
pub fn is_run(path: &Path) -> bool {
    let has = |file: &str| path.join(file).symlink_metadata().is_ok();
    has("plan.toml") && !has("checkpoint.json")
}

fn locate(source: &ModelSource) -> Result<Located> {
    let base = |base, pinned| Ok(Located::Base { base, pinned });
    let named = |path: &str| BuiltinModel::ALL.into_iter().find(|model| model.name() == path);
    let name = match source {
        ModelSource::Builtin => return base(BaseModel::Builtin(BuiltinModel::Base), ModelSource::Builtin),
        ModelSource::Random { shape, seed } => {
            return base(BaseModel::Random { shape: shape.clone(), seed: *seed }, source.clone());
        }
        ModelSource::Path { path } => path,
    };
    if let Some(model) = named(name) {
        return base(BaseModel::Builtin(model), source.clone());
    }
    let path = Path::new(name);
    if is_run(path) {
        check_tree(path)?;
        let exported = path.join("model");
        if exported.join("config.json").is_file()
            && RunKind::of_plan(&plan_of_run(path)?.1) == RunKind::Supervised
        {
            // A finished pretraining run has exported its model. The folder of the same name in a training run is what
            // somebody exported at some step.
            let pinned = ModelSource::named(&exported.display().to_string());
            return base(BaseModel::Files(exported), pinned);
        }
        return Ok(Located::Run { run: path.to_owned(), step: None });
    }
    if let Some((run, step)) = checkpoint_of(path) {
        check_tree(run)?;
        return Ok(Located::Run { run: run.to_owned(), step: Some(step) });
    }
    if path.try_exists().map_err(|e| Error::io(path, e))? {
        refuse_adapter(path)?;
        return base(BaseModel::Files(path.to_owned()), source.clone());
    }
    let (before, after) = name.rsplit_once('@').unwrap_or((name, ""));
    if !after.is_empty() && is_run(Path::new(before)) {
        check_tree(Path::new(before))?;
        let step = step_named(name, Path::new(before), after)?;
        return Ok(Located::Run { run: before.into(), step: Some(step) });
    }
    if hub_cache::is_repository(before)
        && !is_local(before)
        && (after.is_empty() || hub_cache::is_revision(after))
    {
        let revision = if after.is_empty() { "main" } else { after };
        let missing = || Error::NotFetched { id: before.to_string(), revision: revision.to_string() };
        let (folder, commit) = hub_cache::model(before, revision).ok_or_else(missing)?;
        return base(BaseModel::Files(folder), ModelSource::named(&format!("{before}@{commit}")));
    }
    let remedy = hub_cache::likely_name(before).map_or(FORMS.to_string(), |hub| {
        format!("on the hub this is likely {hub}: --model {hub} --fetch fetches it first; {FORMS}")
    });
    Err(Error::no_model(name, "no such file or folder".to_string(), remedy))
}

/// Whether a name of the form `OWNER/NAME` is a path below a folder that is here, or below one that holds models by habit.
fn is_local(name: &str) -> bool {
    let Some((folder, _)) = name.split_once('/') else { return false };
    ["models", "runs", "data"].contains(&folder) || Path::new(folder).is_dir()
}

/// Refuses a folder with an adapter in PEFT's format instead of a model, and names its base.
fn refuse_adapter(folder: &Path) -> Result<()> {
    let config = folder.join("adapter_config.json");
    if folder.join("config.json").exists() || !config.exists() {
        return Ok(());
    }
    let text = stapo_model::files::read_text(&config).map_err(|e| Error::io(&config, e))?;
    let base = serde_json::from_str::<serde_json::Value>(&text)
        .ok()
        .and_then(|config| Some(config.get("base_model_name_or_path")?.as_str()?.to_string()))
        .filter(|base| !base.is_empty());
    let (shown, base) = (folder.display(), base.unwrap_or_else(|| "BASE".to_string()));
    let problem = format!("is an adapter in PEFT's format, whose base model is {base}");
    let remedy = format!(
        "--model {base} --adapter {shown} reads with it; to train it on: model = {{ path = {base:?}, lora = {{ adapter = \"{shown}\" }} }}"
    );
    Err(Error::no_model(&shown.to_string(), problem, remedy))
}

/// The step that is after `@`: a number, or `best` for the step that `best.json` names.
fn step_named(name: &str, run: &Path, step: &str) -> Result<u64> {
    if step == "best" {
        let best = Run::read_best(run)?.map(|best| best.step);
        return best.ok_or_else(|| {
            let problem = "no best.json, so no evaluation has named a best checkpoint".to_string();
            Error::no_model(name, problem, format!("name a step, as in {}@40", run.display()))
        });
    }
    step.parse().map_err(|_| {
        let problem = format!("{step:?} is no step");
        Error::no_model(name, problem, format!("write a number, as in {}@40, or best", run.display()))
    })
}

/// The run and the step of a checkpoint's folder, `RUN/checkpoints/step-000040`.
fn checkpoint_of(path: &Path) -> Option<(&Path, u64)> {
    let run = path.parent().filter(|folder| folder.ends_with("checkpoints"))?.parent()?;
    is_run(run).then_some((run, step_of(path)?))
}

fn step_of(checkpoint: &Path) -> Option<u64> {
    checkpoint.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

/// The folder of the checkpoint of a step.
fn checkpoint_at(run: &Path, step: u64) -> Result<PathBuf> {
    let paths = Checkpoint::list(run)?;
    let steps: Vec<String> =
        paths.iter().filter_map(|path| step_of(path)).map(|step| step.to_string()).collect();
    let found = paths.into_iter().find(|path| step_of(path) == Some(step));
    found.ok_or_else(|| Error::NoRun {
        folder: run.to_owned(),
        problem: format!("no checkpoint of step {step}, only of {}", steps.join(", ")),
        remedy: "name one of these; record.keep_checkpoints says how many a run keeps".to_string(),
    })
}

/// What lies below the checkpoint of a run.
struct StartOfRun {
    base: BaseModel,
    /// The adapters that the run trains, and the earlier run's checkpoint with the weights below them.
    lora: Option<LoraConfig>,
    frozen: Option<Arc<Checkpoint>>,
    /// The longest sequence of the run.
    longest: usize,
}

/// What a run's plan says about its model.
struct ModelOfRun {
    model: ModelSource,
    lora: Option<LoraConfig>,
    longest: usize,
}

/// The model from which a run started, through all the runs that lead to it. The weights below adapters are those of the
/// last run without adapters.
fn start_of_run(run: &Path) -> Result<StartOfRun> {
    let mut run = run.to_owned();
    let ModelOfRun { model: mut source, lora, longest } = model_of_run(&run)?;
    let mut frozen = None;
    for _ in 0..MAX_RUNS {
        match locate(&source)? {
            Located::Base { base, .. } => return Ok(StartOfRun { base, lora, frozen, longest }),
            Located::Run { run: earlier, step } => {
                let below = model_of_run(&earlier)?;
                if lora.is_some() && frozen.is_none() && below.lora.is_none() {
                    frozen = FoundModel::of_run(&earlier, step)?.checkpoint;
                }
                (run, source) = (earlier, below.model);
            }
        }
    }
    let problem = format!("more than {MAX_RUNS} runs, each trained from the one before");
    Err(Error::NoRun { folder: run, problem, remedy: "export a checkpoint and name its folder".to_string() })
}

/// The model that a run's plan names, and the adapters that the run trains, with all keys written out.
fn model_of_run(run: &Path) -> Result<ModelOfRun> {
    let (text, plan) = plan_of_run(run)?;
    if RunKind::of_plan(&plan) == RunKind::Supervised {
        let problem = "is a pretraining run, of which only the finished model can be used".to_string();
        let remedy = format!("the model is in {} when the run is done", run.join("model").display());
        return Err(Error::NoRun { folder: run.to_owned(), problem, remedy });
    }
    let config = Config::from_toml(&text, [])?;
    // A plan that was not pinned may leave the rank to the adapter that the run started from.
    let pinned = |mut lora: LoraConfig| {
        if lora.rank.is_none() {
            adapters::pin(&mut lora)?;
        }
        Ok::<_, Error>(lora)
    };
    let longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens;
    Ok(ModelOfRun { model: config.model, lora: config.lora.map(pinned).transpose()?, longest })
}

/// The text of a run's plan, and its table.
fn plan_of_run(run: &Path) -> Result<(String, Table)> {
    let path = run.join("plan.toml");
    let text = stapo_model::files::read_text(&path).map_err(|e| Error::io(&path, e))?;
    let plan = stapo_core::settings::parse(&text).map_err(PlanError::from)?;
    Ok((text, plan))
}

#[cfg(test)]
mod tests;
