//! The model that a command line names.

use crate::shared::hub::fetch_model;
use crate::shared::option::threads;
use crate::shared::run_folder::{self, Use};
use anyhow::{Result, bail};
use stapo_rl::device::DeviceName;
use stapo_rl::model_files::ModelConfig;
use stapo_rl::plan::config::{BaseStorage, ModelSource};
use stapo_rl::{Error, FoundModel, LoadedModel, Plan};
use std::path::PathBuf;

/// The flags of commands that open a model to read it.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// A Hugging Face folder, a GGUF file, a run folder (its newest checkpoint), RUN@STEP, builtin, or a name on the
    /// hub such as Qwen/Qwen3-0.6B.
    #[arg(long, value_name = "MODEL")]
    model: String,

    /// Adds the adapter of this folder, in PEFT's format, to the model.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,

    #[command(flatten)]
    base: Base,

    #[command(flatten)]
    fetch: Fetch,

    /// cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    device: DeviceName,

    /// Threads on the CPU; all cores by default.
    #[arg(long, value_parser = threads)]
    threads: Option<usize>,
}

impl ModelArgs {
    /// Opens the model, with or without a tokenizer, for sequences of `longest` tokens. A reward model is refused.
    pub fn open(&self, longest: usize) -> Result<LoadedModel> {
        self.open_found(self.fetch.find(&self.model)?.for_sequences_of(longest))
    }

    /// As [`ModelArgs::open`], and opens a reward model as one.
    pub fn open_with_either_head(&self, longest: usize) -> Result<LoadedModel> {
        let found = self.fetch.find(&self.model)?.for_sequences_of(longest);
        if self.adapter.is_some() || found.shape()?.score.is_none() {
            return self.open_found(found);
        }
        let device = run_folder::device(self.device, self.threads, Use::Reading)?;
        Ok(LoadedModel::open_reward_model(&found, &device)?)
    }

    fn open_found(&self, mut found: FoundModel) -> Result<LoadedModel> {
        self.base.set(&mut found, self.device)?;
        let device = run_folder::device(self.device, self.threads, Use::Reading)?;
        Ok(LoadedModel::open_tokens_or_text(&found, self.adapter.as_deref(), &device)?)
    }
}

/// The flag of commands that open a model with adapters to read it.
#[derive(clap::Args)]
pub struct Base {
    /// How a GPU stores the weights below adapters: bf16, or quantised to keep the blocks of a GGUF file; by default as the
    /// run was trained.
    #[arg(long, value_name = "STORAGE", value_parser = base_storage)]
    base: Option<BaseStorage>,
}

impl Base {
    /// Sets what the flag says.
    pub fn set(&self, found: &mut FoundModel, device: DeviceName) -> Result<()> {
        let Some(base) = self.base else { return Ok(()) };
        if base == BaseStorage::Quantised && device == DeviceName::Cpu {
            bail!(
                "--base quantised: is for a GPU; the CPU holds weights in f32\nhint: --device cuda, or leave it out"
            );
        }
        found.base_storage = base;
        Ok(())
    }
}

fn base_storage(text: &str) -> std::result::Result<BaseStorage, String> {
    match text {
        "bf16" => Ok(BaseStorage::Bf16),
        "quantised" => Ok(BaseStorage::Quantised),
        _ => Err("expected bf16 or quantised".to_string()),
    }
}

/// The flag of commands that open models.
#[derive(clap::Args)]
pub struct Fetch {
    /// Fetches models that are named as on the hub, OWNER/NAME, and are not on this machine.
    #[arg(long)]
    fetch: bool,
}

impl Fetch {
    /// Finds the model of that name: `builtin`, a folder or file, a run, `RUN@STEP`, or a name on the hub.
    pub fn find(&self, name: &str) -> Result<FoundModel> {
        self.find_source(&ModelSource::named(name))
    }

    /// Finds the models of a plan and replaces their names by names that stay.
    pub fn pin(&self, plan: &mut Plan) -> Result<()> {
        plan.pin_models(|source| self.find_source(source))
    }

    /// The shape of a model, which is fetched where that is asked for. `None` if it cannot be read; whoever opens the
    /// model says why.
    pub fn shape(&self, source: &ModelSource) -> Option<ModelConfig> {
        if let (true, Err(Error::NotFetched { id, revision })) = (self.fetch, source.shape()) {
            fetch_model(&id, &revision, &[]).ok()?;
        }
        source.shape().ok()
    }

    fn find_source(&self, source: &ModelSource) -> Result<FoundModel> {
        let found = match source.find() {
            Err(Error::NotFetched { id, revision }) if self.fetch => {
                fetch_model(&id, &revision, &[])?;
                source.find()?
            }
            found => found?,
        };
        for error in &found.refused {
            eprintln!("warning: {error}; taking the checkpoint before");
        }
        Ok(found)
    }
}
