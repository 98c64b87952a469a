//! The files next to the weights: tokenizer, chat template, stop tokens.

use super::folder::{self, TAKEN_OVER};
use super::other_parts::OtherParts;
use crate::error::{Error, Result};
use crate::pretrained::Pretrained;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// A file next to the weights.
#[derive(Debug, Clone)]
pub struct Companion {
    name: &'static str,
    content: Content,
}

#[derive(Debug, Clone)]
enum Content {
    Text(String),
    Bytes(Vec<u8>),
    CopyOf(PathBuf),
    OtherParts(OtherParts),
}

impl Companion {
    /// Reads the file into memory, so that the folder it comes from may be removed.
    pub fn load(&mut self) -> Result<()> {
        if let Content::CopyOf(from) = &self.content {
            self.content = Content::Bytes(std::fs::read(from).map_err(|e| Error::io(from, e))?);
        }
        Ok(())
    }

    /// The parts of a multimodal model besides its language model.
    pub(super) fn other_parts(&self) -> Option<&OtherParts> {
        match &self.content {
            Content::OtherParts(parts) => Some(parts),
            _ => None,
        }
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(self.name);
        match &self.content {
            Content::Text(text) => folder::write_file(&path, text.as_bytes()),
            Content::Bytes(bytes) => folder::write_file(&path, bytes),
            Content::CopyOf(from) => folder::copy_file(from, &path),
            // These are written with the weights.
            Content::OtherParts(_) => Ok(()),
        }
    }

    fn object(name: &'static str, value: &Value) -> Self {
        Self { name, content: Content::Text(format!("{value:#}\n")) }
    }
}

impl Pretrained {
    /// The files to export with this model's weights, or with those of a model trained from it.
    pub fn companions(&self) -> Result<Vec<Companion>> {
        if let Some(folder) = self.folder() {
            let copies = TAKEN_OVER.into_iter().map(|name| (name, folder.join(name)));
            let present = copies.filter(|(_, path)| path.is_file());
            let copies = present.map(|(name, path)| Companion { name, content: Content::CopyOf(path) });
            // A reward model is written without the other parts of a multimodal model, for which it has no class.
            let parts = if self.config.score.is_some() { None } else { OtherParts::find(folder)? };
            let parts = parts.map(|parts| Companion { name: "", content: Content::OtherParts(parts) });
            return Ok(copies.chain(parts).collect());
        }
        let tokenizer = self.tokenizer()?;
        let special_tokens = self.special_tokens()?;
        let mut keys = Map::new();
        keys.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
        keys.insert("model_max_length".into(), json!(self.config.max_positions));
        keys.insert("clean_up_tokenization_spaces".into(), json!(false));
        for (name, text) in &special_tokens {
            keys.insert(name.clone(), json!(text));
        }
        if let Some(template) = self.chat_template()? {
            keys.insert("chat_template".into(), json!(template.source()));
        }
        let padding = special_tokens.get("pad_token").and_then(|text| tokenizer.id_of(text));
        let generation = json!({
            "bos_token_id": self.config.bos,
            "eos_token_id": self.config.stops,
            "pad_token_id": padding,
        });
        Ok(vec![
            Companion { name: "tokenizer.json", content: Content::Text(tokenizer.to_json()?) },
            Companion::object("tokenizer_config.json", &Value::Object(keys)),
            Companion::object("generation_config.json", &generation),
        ])
    }
}
