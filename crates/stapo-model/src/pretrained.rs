//! A model on disk, whatever its format: a Hugging Face folder or a GGUF file.

use crate::chat::{ChatTemplate, SpecialTokens};
use crate::config::{ModelConfig, token_ids};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::json;
use crate::tokenizer::{MAX_TOKENIZER_JSON, Tokenizer};
use crate::weights::Weights;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

pub(crate) const MAX_CONFIG_JSON: u64 = 16 << 20;
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// Largest relative difference (root mean square) of two copies of one matrix. Two quantisations of one matrix differ
/// by a few percent, two different matrices by more than 100 %.
const MAX_COPY_DIFFERENCE: f64 = 0.25;

/// An opened model. Config and weights fit each other; no weight has been read yet.
#[derive(Debug)]
pub struct Pretrained {
    /// `stops` come from `generation_config.json` where that file names any.
    pub config: ModelConfig,
    pub weights: Weights,
    /// Tensors in the files that the model does not use.
    pub ignored: Vec<String>,
    origin: Origin,
}

/// Where the model was opened from.
#[derive(Debug)]
enum Origin {
    Folder(PathBuf),
    Gguf(Gguf),
}

impl Pretrained {
    /// The shape of a model, for which a `config.json` is enough, named itself or by its folder.
    pub fn read_config(path: &Path) -> Result<ModelConfig> {
        if path.join("config.json").exists() {
            folder_config(path)
        } else if is_json(path) && path.is_file() {
            file_config(path)
        } else {
            Ok(Self::open(path)?.config)
        }
    }

    /// Whether there are weights at a path that [`Pretrained::read_config`] takes; they are not opened.
    pub fn has_weights(path: &Path) -> bool {
        let is_weights = |path: &Path| {
            path.extension().is_some_and(|extension| extension == "safetensors" || extension == "gguf")
        };
        match std::fs::read_dir(path) {
            Ok(entries) => entries.flatten().any(|entry| is_weights(&entry.path())),
            Err(_) => path.is_file() && !is_json(path),
        }
    }

    /// Opens a Hugging Face folder, a safetensors file inside such a folder, a GGUF file, or a folder with one GGUF
    /// file.
    pub fn open(path: &Path) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
        let origin = if metadata.is_file() && Gguf::is_magic(path) {
            Origin::Gguf(Gguf::open(path)?)
        } else if metadata.is_dir() && !path.join("config.json").exists() {
            Origin::Gguf(Gguf::open(&only_gguf(path)?)?)
        } else if metadata.is_dir() {
            Origin::Folder(path.to_owned())
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            Origin::Folder(path.parent().unwrap_or(Path::new("")).to_owned())
        } else {
            let hint = "expected a Hugging Face folder, a .safetensors file in one, or a GGUF file";
            return Err(Error::unsupported(path.display(), "is not a model that can be read", hint));
        };
        let (config, weights) = match &origin {
            Origin::Gguf(gguf) => {
                let config = gguf.config()?;
                let weights = gguf.weights(&config)?;
                (config, weights)
            }
            Origin::Folder(folder) => {
                let config = folder_config(folder)?;
                let weights = Weights::open(path)?.in_common_form(&config)?;
                (config, weights)
            }
        };
        let ignored = weights.check(&config)?;
        Ok(Self { config, weights, ignored, origin })
    }

    /// The tokenizer; refused if the tokenizer has ids beyond the model's vocabulary.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let (location, tokenizer) = match &self.origin {
            Origin::Gguf(gguf) => (gguf.location().to_owned(), gguf.tokenizer()?),
            Origin::Folder(folder) => {
                let path = folder.join("tokenizer.json");
                if !path.exists() {
                    let hint = "a tokenizer.model alone is not read; save the tokenizer with transformers' fast tokenizer";
                    return Err(Error::missing(folder.display(), "no tokenizer.json", hint));
                }
                let bytes = json::read_bytes(&path, MAX_TOKENIZER_JSON)?;
                let location = path.display().to_string();
                let tokenizer = Tokenizer::for_vocabulary(&location, &bytes, self.config.vocabulary)?;
                (location, tokenizer)
            }
        };
        tokenizer.check_vocabulary(&location, self.config.vocabulary)?;
        Ok(tokenizer)
    }

    /// The chat template; `None` for models without one.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>> {
        let (location, source, special_tokens) = match &self.origin {
            Origin::Gguf(gguf) => {
                (gguf.location().to_owned(), gguf.chat_template()?.map(str::to_owned), gguf.special_tokens()?)
            }
            Origin::Folder(folder) => {
                let keys = tokenizer_config(folder)?;
                (folder.display().to_string(), folder_template(folder, &keys)?, special_tokens(&keys))
            }
        };
        source.map(|source| ChatTemplate::new(&location, &source, special_tokens)).transpose()
    }

    /// Ties embedding and head: the copy with more bits replaces the other. In many models embedding and head are one
    /// matrix, of which quantisers keep two copies of different precision. Refused where the two matrices differ too
    /// much to be copies.
    pub fn tie_embeddings(&mut self) -> Result<()> {
        if self.config.tied_embeddings {
            return Ok(());
        }
        let difference = self.embedding_difference()?;
        if !are_copies(difference) {
            let problem = format!("embedding and head differ by {:.0} % of their size", 100.0 * difference);
            return Err(Error::mismatch(
                self.weights.location(),
                problem,
                "the model was not tied; convert it as it is",
            ));
        }
        self.weights.keep_finer(EMBEDDING, HEAD);
        self.config.tied_embeddings = true;
        Ok(())
    }

    /// Gives a language model the head of a reward model, which the files do not have, instead of its head. The tokenizer's padding
    /// token pads, or the first token that ends responses. Refused for a family without such models.
    pub fn add_score(&mut self) -> Result<()> {
        if self.config.family.classifier().is_none() {
            let problem =
                format!("transformers has no reward models of the family {}", self.config.family.name());
            return Err(Error::unsupported(self.weights.location(), problem, "start from another family"));
        }
        let padding = self.special_tokens()?.get("pad_token").cloned();
        let padding = padding.and_then(|token| Some(self.tokenizer().ok()?.id_of(&token)));
        self.config = self.config.clone().with_score(padding.flatten());
        Ok(())
    }

    /// Root mean square of embedding minus head, relative to the root mean square of the head.
    fn embedding_difference(&self) -> Result<f64> {
        let shape = [self.config.vocabulary, self.config.width];
        let read = |name: &str| {
            let mut numbers = vec![0.0; shape[0] * shape[1]];
            self.weights.read_f32(name, &shape, &mut numbers).map(|()| numbers)
        };
        Ok(relative_difference(&read(EMBEDDING)?, &read(HEAD)?))
    }

    /// The Hugging Face folder, if the model is one; export copies its tokenizer files.
    pub(crate) fn folder(&self) -> Option<&Path> {
        match &self.origin {
            Origin::Folder(folder) => Some(folder),
            Origin::Gguf(_) => None,
        }
    }

    pub(crate) fn special_tokens(&self) -> Result<SpecialTokens> {
        match &self.origin {
            Origin::Gguf(gguf) => gguf.special_tokens(),
            Origin::Folder(folder) => Ok(special_tokens(&tokenizer_config(folder)?)),
        }
    }

    /// `Hugging Face` or `GGUF`.
    pub fn format(&self) -> &'static str {
        match &self.origin {
            Origin::Folder(_) => "Hugging Face",
            Origin::Gguf(_) => "GGUF",
        }
    }
}

/// The one GGUF file of a folder without `config.json`.
fn only_gguf(folder: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io(folder, e))?;
    let mut found: Vec<_> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "gguf"))
        .collect();
    found.sort();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Error::missing(
            folder.display(),
            "no config.json and no GGUF file",
            "expected the folder of a model",
        )),
        several => {
            let problem = format!("no config.json and {} GGUF files", several.len());
            Err(Error::mismatch(folder.display(), problem, "name one of the files"))
        }
    }
}

fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

fn file_config(path: &Path) -> Result<ModelConfig> {
    let keys = json::read_object(path, MAX_CONFIG_JSON)?;
    ModelConfig::from_hugging_face(&path.display().to_string(), &keys)
}

fn folder_config(folder: &Path) -> Result<ModelConfig> {
    let mut config = file_config(&folder.join("config.json"))?;
    let path = folder.join("generation_config.json");
    if path.exists() {
        let location = path.display().to_string();
        let keys = json::read_object(&path, MAX_CONFIG_JSON)?;
        let stops = token_ids(&location, "eos_token_id", keys.get("eos_token_id"))?;
        if !stops.is_empty() {
            config.stops = stops;
            config.validate(&location)?;
        }
    }
    Ok(config)
}

/// The keys of `tokenizer_config.json`; empty if there is no such file.
fn tokenizer_config(folder: &Path) -> Result<Map<String, Value>> {
    object_in(folder, "tokenizer_config.json")
}

/// The keys of a file of a folder; empty if there is no such file.
fn object_in(folder: &Path, name: &str) -> Result<Map<String, Value>> {
    let path = folder.join(name);
    if path.exists() { json::read_object(&path, MAX_CONFIG_JSON) } else { Ok(Map::new()) }
}

/// `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`: a text, or a list of named templates, of which
/// `default` is taken. Else `chat_template` in `chat_template.json`.
fn folder_template(folder: &Path, keys: &Map<String, Value>) -> Result<Option<String>> {
    let path = folder.join("chat_template.jinja");
    if path.exists() {
        let bytes = json::read_bytes(&path, MAX_CONFIG_JSON)?;
        return String::from_utf8(bytes)
            .map(Some)
            .map_err(|_| Error::malformed(path.display(), "is not UTF-8"));
    }
    let text = match keys.get("chat_template") {
        Some(Value::Array(named)) => named
            .iter()
            .find(|entry| entry.get("name").is_some_and(|name| name == "default"))
            .and_then(|entry| entry.get("template")),
        other => other,
    };
    if let Some(text) = text.and_then(Value::as_str) {
        return Ok(Some(text.to_owned()));
    }
    // Where processors of multimodal models keep it.
    let keys = object_in(folder, "chat_template.json")?;
    Ok(keys.get("chat_template").and_then(Value::as_str).map(str::to_owned))
}

/// The keys that end in `_token`, such as `bos_token`; each is a string or an object with `content`.
fn special_tokens(keys: &Map<String, Value>) -> SpecialTokens {
    let text = |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned);
    keys.iter()
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, value)| Some((name.clone(), text(value)?)))
        .collect()
}

fn relative_difference(embedding: &[f32], head: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let apart: f64 = embedding.iter().zip(head).map(|(e, h)| square(e - h)).sum();
    (apart / head.iter().map(|&h| square(h)).sum::<f64>()).sqrt()
}

/// Whether two matrices with this relative difference, which may be no number, are copies.
fn are_copies(difference: f64) -> bool {
    difference <= MAX_COPY_DIFFERENCE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_differ_by_no_more_than_their_limit() {
        assert_eq!(relative_difference(&[3.0, 5.0, 1.0], &[3.0, 4.0, 0.0]), 2.0_f64.sqrt() / 5.0);
        assert!(are_copies(0.0) && are_copies(MAX_COPY_DIFFERENCE));
        assert!(!are_copies(1.001 * MAX_COPY_DIFFERENCE) && !are_copies(f64::NAN));
    }

    #[test]
    fn weights_are_found_without_being_opened() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("config.json"), "{}").unwrap();
        assert!(!Pretrained::has_weights(folder.path()) && !Pretrained::has_weights(&at("config.json")));
        assert!(!Pretrained::has_weights(&at("nothing.gguf")));
        for name in ["model.safetensors", "model.gguf"] {
            std::fs::write(at(name), "").unwrap();
            assert!(Pretrained::has_weights(folder.path()) && Pretrained::has_weights(&at(name)), "{name}");
            std::fs::remove_file(at(name)).unwrap();
        }
        std::fs::write(at("pytorch_model.bin"), "").unwrap();
        assert!(!Pretrained::has_weights(folder.path()), "a pickle is not read");
    }

    #[test]
    fn special_tokens_are_texts_or_objects_with_a_text() {
        let keys = serde_json::json!({
            "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null,
            "tokenizer_class": "x", "add_bos_token": true, "extra_special_tokens": ["<a>"],
        });
        let found = special_tokens(keys.as_object().unwrap());
        let expected = [("bos_token", "<s>"), ("eos_token", "</s>")];
        assert_eq!(found, expected.map(|(name, text)| (name.to_string(), text.to_string())).into());
    }

    #[test]
    fn a_template_is_its_own_file_or_a_key_of_the_tokenizer_or_of_the_processor() {
        let folder = tempfile::tempdir().unwrap();
        let found = || folder_template(folder.path(), &tokenizer_config(folder.path()).unwrap()).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(found(), None);
        for (name, text, expected) in [
            ("chat_template.json", r#"{"chat_template": "processor"}"#, "processor"),
            (
                "tokenizer_config.json",
                r#"{"chat_template": [{"name": "default", "template": "tokenizer"}]}"#,
                "tokenizer",
            ),
            ("chat_template.jinja", "file", "file"),
        ] {
            write(name, text);
            assert_eq!(found().as_deref(), Some(expected), "{name} comes first");
        }
    }

    /// The head of a new reward model pads with the token of the tokenizer, or with what ends a response.
    #[test]
    fn a_new_reward_model_pads_with_a_token_of_its_tokenizer() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/formats/qwen2-bpe.gguf");
        let mut model = Pretrained::open(&path).unwrap();
        let (folder, tokenizer) = (tempfile::tempdir().unwrap(), model.tokenizer().unwrap());
        let stop = model.config.stops[0];
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("tokenizer.json", &tokenizer.to_json().unwrap());
        model.origin = Origin::Folder(folder.path().to_owned());
        let mut padding = |special_tokens: &str| {
            write("tokenizer_config.json", special_tokens);
            model.add_score().unwrap();
            model.config.score.unwrap().padding
        };
        assert_eq!(padding(r##"{"pad_token": "#", "eos_token": "%"}"##), tokenizer.id_of("#"));
        assert_eq!(padding(r#"{"eos_token": "%"}"#), Some(stop));
        let config = &model.config;
        assert!(!config.tied_embeddings && config.tensors().last().unwrap().name == crate::config::SCORE);
        assert_eq!(config.architecture(), "Qwen2ForSequenceClassification");
        model.config.family = crate::config::Family::Granite;
        assert!(
            model.add_score().unwrap_err().to_string().contains("no reward models of the family granite")
        );
    }
}
