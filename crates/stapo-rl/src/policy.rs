//! A policy with its tokenizer: tokens in and out of text.

use crate::config::Model;
use crate::error::Result;
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
