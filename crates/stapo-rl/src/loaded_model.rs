//! A model in memory: weights, tokenizer, chat template, and the tokens that end a response.

use crate::config::{ModelSource, Plan};
use crate::error::{Error, Result};
use stapo_model::decoder::Policy;
use stapo_model::export::Companion;
use stapo_model::{ChatTemplate, Device, Message, Pretrained, Tokenizer};
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

/// The standard deviation of random weights.
const RANDOM_DEVIATION: f64 = 0.02;

impl LoadedModel {
    /// Opens the model of a config. The built-in model is unpacked to a temporary folder, which is removed.
    pub fn open(source: &ModelSource, device: &Device) -> Result<Self> {
        match source {
            ModelSource::Builtin => {
                let unpacked = crate::builtin::unpack()?;
                let mut model = Self::open_path(unpacked.path(), device)?;
                // The files beside the weights are kept in memory, because the folder does not outlive this function.
                model.companions.iter_mut().try_for_each(Companion::load)?;
                Ok(model)
            }
            ModelSource::Path { path } => Self::open_path(Path::new(path), device),
            ModelSource::Random { seed, .. } => {
                let config = crate::memory::shape(source)?;
                let beside = Self::open(&ModelSource::Builtin, device)?;
                let policy = Policy::noise(device, &config, *seed, RANDOM_DEVIATION)?;
                Ok(Self { policy, stops: config.stops, ..beside })
            }
        }
    }

    /// Opens a Hugging Face folder or a GGUF file. A model without a tokenizer is refused.
    pub fn open_path(path: &Path, device: &Device) -> Result<Self> {
        let pretrained = Pretrained::open(path)?;
        let tokenizer = pretrained.tokenizer()?;
        Self::load(&pretrained, Ok(tokenizer), device)
    }

    /// Loads a model that may be without a tokenizer: such a model samples and scores tokens, but no text.
    pub fn load_tokens_or_text(pretrained: &Pretrained, device: &Device) -> Result<Self> {
        let tokenizer = match pretrained.tokenizer() {
            Ok(tokenizer) => Ok(tokenizer),
            Err(missing @ stapo_model::Error::Missing { .. }) => Err(missing.to_string()),
            Err(other) => return Err(other.into()),
        };
        Self::load(pretrained, tokenizer, device)
    }

    fn load(
        pretrained: &Pretrained,
        tokenizer: std::result::Result<Tokenizer, String>,
        device: &Device,
    ) -> Result<Self> {
        let companions = if tokenizer.is_ok() { pretrained.companions()? } else { Vec::new() };
        Ok(Self {
            tokenizer,
            template: pretrained.chat_template()?,
            stops: pretrained.config.stops.clone(),
            companions,
            policy: Policy::load(device, &pretrained.config, &pretrained.weights)?,
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
        let rollout = &plan.config.rollout;
        let refuse = |key, problem, remedy| Err(Error::Misfit { key, problem, remedy });
        if rollout.chat && self.template.is_none() {
            let problem = "true, but the model has no chat template".to_string();
            return refuse(
                "rollout.chat",
                problem,
                "set it to false, or add chat_template.jinja to the model",
            );
        }
        let longest = rollout.max_prompt_tokens + rollout.max_response_tokens;
        let limit = self.policy.config().max_positions;
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
        if self.stops.is_empty() {
            let problem = "the model names no token that ends a response".to_string();
            return refuse("model", problem, "add eos_token_id to its generation_config.json");
        }
        Ok(())
    }

    /// The tokens of a prompt; with `chat`, the prompt is a user's message that the chat template renders.
    pub fn encode(&self, prompt: &str, chat: bool) -> Result<Vec<u32>> {
        if chat {
            let message = Message { role: "user".into(), content: prompt.into() };
            if let Some(tokens) = self.encode_chat(&[message])? {
                return Ok(tokens);
            }
        }
        Ok(self.tokenizer()?.encode(prompt)?)
    }

    /// The tokens of a conversation; `None` for a model without a chat template.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Option<Vec<u32>>> {
        let Some(template) = &self.template else { return Ok(None) };
        let text = template.prompt(messages, &serde_json::Map::new())?;
        Ok(Some(self.tokenizer()?.encode_rendered(&text)?))
    }
}
