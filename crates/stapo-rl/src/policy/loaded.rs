//! A model in memory: weights, tokenizer, chat template, and the tokens that end a response.

use crate::error::{Error, Result};
use crate::plan::config::{BaseStorage, LoraConfig, ModelSource, Plan, PromptStyle, States};
use crate::policy::adapters::{self, Adapters, Adapting};
use crate::policy::found::{BaseModel, FoundModel};
use crate::policy::hashes::{below_adapters, beside_weights, of_files_beside, of_found, of_frozen, of_start};
use crate::run::Checkpoint;
use crate::tasks::prompting::Prompting;
use serde_json::{Map, Value};
use stapo_core::record::{Change, changed_inputs};
use stapo_model::decoder::{LoraSpec, Policy, PolicySpec};
use stapo_model::export::Companion;
use stapo_model::generate::StopTexts;
use stapo_model::{ChatTemplate, Device, Message, Pretrained, SCORE, Tokenizer};
use std::path::Path;

/// A model that can sample, score and learn.
pub struct LoadedModel {
    pub policy: Policy,
    /// The reason, for a model whose files hold no tokenizer.
    tokenizer: std::result::Result<Tokenizer, String>,
    pub template: Option<ChatTemplate>,
    /// Tokens that end a response.
    pub stops: Vec<u32>,
    /// The tokenizer's files, which are exported with the weights; empty for a model without a tokenizer.
    pub companions: Vec<Companion>,
}

/// The head that a model is opened with.
#[derive(Clone, Copy)]
enum Head {
    /// Of a language model.
    Tokens,
    /// Of a reward model.
    Score,
    /// Of a reward model in training: a language model is given a new one, drawn from the seed.
    NewScore(u64),
}

impl Head {
    /// Refuses a model with another head, or gives it the head that is wanted.
    fn fit(self, found: Option<&FoundModel>, pretrained: &mut Pretrained) -> Result<()> {
        let refuse = |problem: &str, remedy: &str| {
            let name = found.map_or(String::new(), |found| found.pinned.to_string());
            Err(Error::no_model(&name, problem.to_string(), remedy.to_string()))
        };
        let is_reward_model = pretrained.config.score.is_some();
        let is_of_run = found.is_some_and(|found| found.checkpoint.is_some());
        match self {
            Head::Tokens if is_reward_model => {
                refuse("is a reward model, which scores texts and writes none", "name a language model")
            }
            Head::Tokens => Ok(()),
            Head::Score | Head::NewScore(_) if is_of_run => refuse(
                "is a checkpoint of a run",
                "a reward model is read from a folder: RUN/model of a finished stapo rm, or what stapo export writes",
            ),
            Head::Score if !is_reward_model => refuse(
                &format!("is a language model: it has no {SCORE}"),
                "stapo rm trains a reward model from it",
            ),
            Head::NewScore(_) if !is_reward_model => Ok(pretrained.add_score()?),
            Head::Score | Head::NewScore(_) => Ok(()),
        }
    }
}

/// The standard deviation of random weights.
const RANDOM_DEVIATION: f64 = 0.02;

/// How many 8-bit moments have a scale in common.
const BLOCK_OF_8BIT_STATES: usize = 256;

impl LoadedModel {
    /// Opens the model of a config. A model without a tokenizer is refused.
    pub fn open(source: &ModelSource, device: &Device) -> Result<Self> {
        Self::open_found(&source.find()?, None, device)
    }

    /// Opens a model that was found, with the adapter of a folder in PEFT's format where one is given. A model without a
    /// tokenizer is refused.
    pub fn open_found(found: &FoundModel, adapter: Option<&Path>, device: &Device) -> Result<Self> {
        Self::read(found, (Head::Tokens, adapting(adapter)?), device, tokenizer_of)
    }

    /// Opens a reward model that was found, which may be without a tokenizer. A language model is refused.
    pub fn open_reward_model(found: &FoundModel, device: &Device) -> Result<Self> {
        Self::read(found, (Head::Score, Adapting::AsFound), device, tokenizer_or_reason)
    }

    /// As [`LoadedModel::open_to_train`] to train a reward model, which a language model becomes by a new head.
    pub fn open_to_rank(
        found: &FoundModel,
        lora: Option<&LoraConfig>,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let opened = (Head::NewScore(seed), Adapting::Training(lora.cloned(), seed));
        Self::read(found, opened, device, tokenizer_of)
    }

    /// Opens a model to train all of its weights, or the adapters of `lora`. A model without a tokenizer is refused.
    pub fn open_to_train(
        found: &FoundModel,
        lora: Option<&LoraConfig>,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        Self::read(found, (Head::Tokens, Adapting::Training(lora.cloned(), seed)), device, tokenizer_of)
    }

    /// As [`LoadedModel::open_found`], of a model that may be without a tokenizer: such a model samples and scores tokens,
    /// but no text.
    pub fn open_tokens_or_text(found: &FoundModel, adapter: Option<&Path>, device: &Device) -> Result<Self> {
        Self::read(found, (Head::Tokens, adapting(adapter)?), device, tokenizer_or_reason)
    }

    /// Opens a Hugging Face folder or a GGUF file. A model without a tokenizer is refused.
    pub fn open_path(path: &Path, device: &Device) -> Result<Self> {
        let mut pretrained = Pretrained::open(path)?;
        Head::Tokens.fit(None, &mut pretrained)?;
        let tokenizer = pretrained.tokenizer()?;
        Self::load(&pretrained, Ok(tokenizer), (None, BaseStorage::default()), device)
    }

    /// Reads the base model, and the weights of a run's checkpoint over it. A checkpoint whose base model has another
    /// tokenizer, config or chat template than the run had is refused, and adapters whose base has other weights.
    fn read(
        found: &FoundModel,
        (head, adapting): (Head, Adapting),
        device: &Device,
        tokenizer: impl FnOnce(&Pretrained) -> Result<std::result::Result<Tokenizer, String>>,
    ) -> Result<Self> {
        check_unchanged(found)?;
        let storage = storage_of_base(found, &adapting);
        let adapters = Adapters::for_model(&found.pinned.to_string(), found.lora.as_ref(), adapting)?;
        let lora = adapters.spec.as_ref();
        adapters.check(&found.shape()?)?;
        found.shape()?.check_device(device)?;
        // The CPU holds all weights in f32.
        let storage = if device.is_async() { storage } else { BaseStorage::default() };
        if let (Some(lora), BaseStorage::Quantised) = (lora, storage) {
            found.quantised_base(lora)?;
        }
        let files = found.files()?;
        let mut pretrained = Pretrained::open(&files.path)?;
        let has_score = pretrained.config.score.is_some();
        head.fit(Some(found), &mut pretrained)?;
        let mut model = match &found.base {
            // A checkpoint that holds all weights is written over the model's, which are not read.
            _ if found.checkpoint.is_some() && found.lora.is_none() => {
                let config = found.shape()?;
                let policy = Policy::zeros(device, PolicySpec { config: &config, lora })
                    .map_err(stapo_model::Error::OutOfMemory)?;
                Self::with_policy(&pretrained, tokenizer(&pretrained)?, policy)?
            }
            BaseModel::Random { seed, .. } => {
                let config = found.shape()?;
                let spec = PolicySpec { config: &config, lora };
                let policy = Policy::noise(device, spec, *seed, RANDOM_DEVIATION)?;
                Self::with_policy(&pretrained, tokenizer(&pretrained)?, policy)?
            }
            BaseModel::Builtin(_) | BaseModel::Files(_) => {
                Self::load(&pretrained, tokenizer(&pretrained)?, (lora, storage), device)?
            }
        };
        if files.are_temporary() {
            model.companions.iter_mut().try_for_each(Companion::load)?;
        }
        if let (Head::NewScore(seed), false) = (head, has_score) {
            model.policy.start_score(seed, RANDOM_DEVIATION);
        }
        adapters.start(&mut model.policy)?;
        if let Some(frozen) = &found.frozen {
            frozen.restore_base(&mut model.policy)?;
        }
        match &found.checkpoint {
            Some(checkpoint) if found.lora.is_some() => checkpoint.restore_weights(&mut model.policy)?,
            Some(checkpoint) => checkpoint.restore_base(&mut model.policy)?,
            None => {}
        }
        // A run's policy is read as it was trained.
        if let Some(longest) = found.longest {
            model.policy.fit_longest(longest);
        }
        Ok(model)
    }

    fn load(
        pretrained: &Pretrained,
        tokenizer: std::result::Result<Tokenizer, String>,
        (lora, storage): (Option<&LoraSpec>, BaseStorage),
        device: &Device,
    ) -> Result<Self> {
        let spec = PolicySpec { config: &pretrained.config, lora };
        let policy = match storage {
            BaseStorage::Bf16 => Policy::load(device, spec, &pretrained.weights)?,
            BaseStorage::Quantised => Policy::load_quantised(device, spec, &pretrained.weights)?,
        };
        Self::with_policy(pretrained, tokenizer, policy)
    }

    fn with_policy(
        pretrained: &Pretrained,
        tokenizer: std::result::Result<Tokenizer, String>,
        policy: Policy,
    ) -> Result<Self> {
        let companions = if tokenizer.is_ok() { pretrained.companions()? } else { Vec::new() };
        Ok(Self {
            tokenizer,
            template: pretrained.chat_template()?,
            stops: pretrained.config.stops.clone(),
            companions,
            policy,
        })
    }

    /// The first weight that is not a finite number, by tensor and element.
    pub fn first_not_finite(&self) -> Option<(String, usize)> {
        self.policy.tensors().find_map(|(spec, values)| {
            let element = values.to_vec().iter().position(|value| !value.is_finite())?;
            Some((spec.name.clone(), element))
        })
    }

    /// The tokenizer, or the error that says why the model has none.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().map_err(|reason| Error::NoTokenizer { reason: reason.clone() })
    }

    /// The text of tokens, without special tokens; `None` for a model without a tokenizer.
    pub fn text(&self, tokens: &[u32]) -> Result<Option<String>> {
        Ok(self.tokenizer.as_ref().ok().map(|tokenizer| tokenizer.decode(tokens)).transpose()?)
    }

    /// The text of one token, special or not; `None` for a model without a tokenizer.
    pub fn token_text(&self, token: u32) -> Result<Option<String>> {
        Ok(self.tokenizer.as_ref().ok().map(|tokenizer| tokenizer.decode_all(&[token])).transpose()?)
    }

    /// Checks that the model can do what a plan asks for.
    pub fn check(&self, plan: &Plan) -> Result<()> {
        let refuse = |key, problem, remedy| Err(Error::Misfit { key, problem, remedy });
        let longest = plan.longest_sequence();
        let limit = self.policy.config().position_limit();
        if longest > limit {
            let problem = format!(
                "with the longest prompt that makes {longest} tokens, the model has {limit} positions"
            );
            return refuse(
                "rollout.max_response_tokens",
                problem,
                "lower it, or rollout.max_prompt_tokens, until both fit",
            );
        }
        if plan.config.update.states == States::EightBit
            && let Some((spec, start)) = self.policy.first_unaligned_tensor(BLOCK_OF_8BIT_STATES)
        {
            let problem = format!(
                "8bit keeps states in blocks of {BLOCK_OF_8BIT_STATES}, and {} begins at element {start} of what it is stored in",
                spec.name
            );
            return refuse("update.states", problem, "states = \"f32\"");
        }
        if self.stops.is_empty() {
            let problem = "the model names no token that ends a response".to_string();
            return refuse("model", problem, "add eos_token_id to its generation_config.json");
        }
        Ok(())
    }

    /// Turns problems into tokens in the given style.
    pub fn prompting<'a>(&'a self, style: &'a PromptStyle) -> Result<Prompting<'a>> {
        Prompting::new(self.tokenizer()?, self.template.as_ref(), style)
    }

    /// The texts that end a response, for this model's tokens.
    pub fn stop_texts<'a>(&'a self, style: &'a PromptStyle) -> Result<StopTexts<'a>> {
        Ok(StopTexts::new(self.tokenizer()?, &style.stop))
    }

    /// The tokens of a conversation, with further variables of the template; `None` for a model without a chat template.
    pub fn encode_chat(
        &self,
        messages: &[Message],
        arguments: &Map<String, Value>,
    ) -> Result<Option<Vec<u32>>> {
        let Some(template) = &self.template else { return Ok(None) };
        let text = template.prompt(messages, arguments)?;
        Ok(Some(self.tokenizer()?.encode_rendered(&text)?))
    }
}

/// Refuses a model whose files are not those that the run of its checkpoint had.
fn check_unchanged(found: &FoundModel) -> Result<()> {
    let recorded = |checkpoint: &Checkpoint| {
        let inputs = checkpoint.provenance.as_ref().map(|by| by.identity.inputs.clone());
        inputs.map(|inputs| (checkpoint.path.clone(), inputs))
    };
    let refuse_changes = |folder, changes: Vec<Change>| {
        if changes.is_empty() { Ok(()) } else { Err(Error::ChangedModel { folder, changes }) }
    };
    if let Some((folder, inputs)) = found.start.as_deref().and_then(recorded) {
        refuse_changes(folder, changed_inputs(&of_start(inputs), &of_found(found)?))?;
    }
    let Some((folder, inputs)) = found.checkpoint.as_deref().and_then(recorded) else { return Ok(()) };
    let changes = match &found.lora {
        Some(_) => changed_inputs(&below_adapters(inputs), &of_frozen(found)?),
        None => changed_inputs(&beside_weights(inputs), &of_files_beside(found)?),
    };
    refuse_changes(folder, changes)
}

fn tokenizer_of(pretrained: &Pretrained) -> Result<std::result::Result<Tokenizer, String>> {
    Ok(Ok(pretrained.tokenizer()?))
}

/// The tokenizer, or the reason why the files hold none.
fn tokenizer_or_reason(pretrained: &Pretrained) -> Result<std::result::Result<Tokenizer, String>> {
    match pretrained.tokenizer() {
        Ok(tokenizer) => Ok(Ok(tokenizer)),
        Err(missing @ stapo_model::Error::Missing { .. }) => Ok(Err(missing.to_string())),
        Err(other) => Err(other.into()),
    }
}

fn adapting(adapter: Option<&Path>) -> Result<Adapting> {
    adapter.map_or(Ok(Adapting::AsFound), adapters::open)
}

/// How a GPU holds the frozen weights: as the config says, or as the model was found.
fn storage_of_base(found: &FoundModel, adapting: &Adapting) -> BaseStorage {
    match adapting {
        Adapting::AsFound | Adapting::With(_) => found.base_storage,
        Adapting::Training(lora, _) => lora.as_ref().map_or(BaseStorage::default(), LoraConfig::base_storage),
    }
}
