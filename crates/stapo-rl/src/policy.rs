//! A policy with its tokenizer: tokens in and out of text.

use crate::config::{Model, Plan};
use crate::error::{Error, Result};
use stapo_model::decoder::Policy;
use stapo_model::export::Companion;
use stapo_model::{ChatTemplate, Device, Message, Pretrained, Tokenizer};
use std::path::Path;

/// A model opened for training.
pub struct Student {
    pub policy: Policy,
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
    /// Tokens that end a response.
    pub stops: Vec<u32>,
    /// Tokenizer files, to go out with the weights.
    pub companions: Vec<Companion>,
}

impl Student {
    /// Opens the model of a config; `base` is where the built-in one is unpacked.
    pub fn open(model: &Model, base: &Path, device: &Device) -> Result<Self> {
        match model {
            Model::Builtin => {
                crate::builtin::unpack(base)?;
                Self::open_path(base, device)
            }
            Model::Path { path } => Self::open_path(Path::new(path), device),
        }
    }

    pub fn open_path(path: &Path, device: &Device) -> Result<Self> {
        let pretrained = Pretrained::open(path)?;
        let tokenizer = pretrained.tokenizer()?;
        let policy = Policy::load(device, &pretrained.config, &pretrained.weights)?;
        Ok(Self {
            policy,
            tokenizer,
            template: pretrained.chat_template()?,
            stops: pretrained.config.stops.clone(),
            companions: pretrained.companions()?,
        })
    }

    /// Whether this model can do what a plan asks of it.
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
        let (longest, limit) =
            (rollout.max_prompt_tokens + rollout.max_response_tokens, self.policy.config().max_positions);
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

    /// The tokens of a prompt, through the chat template where `chat` says so.
    pub fn encode(&self, prompt: &str, chat: bool) -> Result<Vec<u32>> {
        match self.template.as_ref().filter(|_| chat) {
            Some(template) => {
                let message = Message { role: "user".into(), content: prompt.into() };
                let text = template.prompt(&[message], &serde_json::Map::new())?;
                Ok(self.tokenizer.encode_rendered(&text)?)
            }
            None => Ok(self.tokenizer.encode(prompt)?),
        }
    }
}
