//! Reward models: decoders with one score for a sequence instead of logits, `*ForSequenceClassification` with one label.

use super::ModelConfig;
use super::families::Family;
use super::reader::{ObjectReader, abbreviated, token_ids};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};

/// The weight of the head, `[1, width]`.
pub const SCORE: &str = "score.weight";

const CAUSAL: &str = "ForCausalLM";
const CLASSIFIER: &str = "ForSequenceClassification";

/// The head of a reward model: the score of a sequence is `score.weight` times the normed hidden state of its last token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScoreHead {
    /// Tokens of this id at the end of a sequence are skipped, as `transformers` does, also where it is the token that ends
    /// responses.
    pub padding: Option<u32>,
}

impl ScoreHead {
    /// The head that the keys describe; `None` for a language model. `outer` has the keys of the whole file.
    pub(super) fn read(outer: &ObjectReader, keys: &ObjectReader, family: Family) -> Result<Option<Self>> {
        let Some(class) = outer.get("architectures").and_then(|classes| classes.get(0)?.as_str()) else {
            return Ok(None);
        };
        if !class.ends_with(CLASSIFIER) {
            return Ok(None);
        }
        if Some(class) != family.classifier().as_deref() {
            let problem = format!("{class} is not a reward model of the {} family", family.name());
            let hint = match family.classifier() {
                Some(class) => format!("expected {class}"),
                None => "transformers has no such class for this family".to_string(),
            };
            return Err(Error::unsupported(outer.path("architectures"), problem, hint));
        }
        // Without the key, transformers gives a model two labels.
        let n_labels = match keys.get("id2label") {
            Some(Value::Object(labels)) => labels.len(),
            Some(other) => {
                let problem = format!("is {}, expected an object", abbreviated(other));
                return Err(Error::malformed(keys.path("id2label"), problem));
            }
            None => keys.optional_whole("num_labels")?.unwrap_or(2),
        };
        if n_labels != 1 {
            let problem = format!("has {n_labels} labels, expected 1");
            let hint = "a reward model gives one score; a classifier of several labels is not read";
            return Err(Error::unsupported(keys.path("id2label"), problem, hint));
        }
        let given = keys.keys.contains_key("pad_token_id");
        let padding = token_ids(keys.location, "pad_token_id", keys.get("pad_token_id"))?.first().copied();
        // The default of transformers for these two families.
        let default = matches!(family, Family::Gemma2 | Family::Gemma3).then_some(0);
        Ok(Some(Self { padding: if given { padding } else { default } }))
    }

    /// Adds the keys that [`ScoreHead::read`] reads.
    pub(super) fn write(self, family: Family, keys: &mut Map<String, Value>) -> Result<()> {
        let class = family.classifier().ok_or_else(|| {
            let problem = format!("transformers has no {CLASSIFIER} of {}", family.name());
            Error::unsupported("config.json", problem, "train the reward model from another family")
        })?;
        keys.insert("architectures".into(), json!([class]));
        keys.insert("id2label".into(), json!({"0": "LABEL_0"}));
        keys.insert("label2id".into(), json!({"LABEL_0": 0}));
        keys.insert("num_labels".into(), json!(1));
        keys.insert("pad_token_id".into(), json!(self.padding));
        Ok(())
    }

    /// The tokens up to the one whose score is the sequence's: the last that is not padding, or the first where all are.
    pub fn scored(self, tokens: &[u32]) -> &[u32] {
        let last = tokens.iter().rposition(|token| Some(*token) != self.padding).unwrap_or(0);
        &tokens[..tokens.len().min(last + 1)]
    }
}

impl Family {
    /// The class of reward models in `transformers`; `None` if there is none.
    pub fn classifier(self) -> Option<String> {
        match self {
            Self::Granite => None,
            Self::Gemma3 => Some(format!("Gemma3Text{CLASSIFIER}")),
            other => other.architecture().strip_suffix(CAUSAL).map(|name| format!("{name}{CLASSIFIER}")),
        }
    }
}

impl ModelConfig {
    /// The class in `transformers`.
    pub fn architecture(&self) -> String {
        let classifier = self.score.and_then(|_| self.family.classifier());
        classifier.unwrap_or_else(|| self.family.architecture().to_string())
    }

    /// The same decoder with the head of a reward model. Without a padding token, the first token that ends responses
    /// pads, since `transformers` scores batches of models with a padding token only.
    #[must_use]
    pub fn with_score(self, padding: Option<u32>) -> Self {
        let padding = padding.or(self.stops.first().copied());
        Self { tied_embeddings: false, score: Some(ScoreHead { padding }), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scored_token_is_the_last_that_is_no_padding() {
        let head = ScoreHead { padding: Some(9) };
        assert_eq!(head.scored(&[1, 2, 9, 3, 9, 9]), [1, 2, 9, 3]);
        assert_eq!(head.scored(&[1, 2]), [1, 2]);
        assert_eq!(head.scored(&[9, 9]), [9]);
        assert_eq!(head.scored(&[]), [0u32; 0]);
        assert_eq!(ScoreHead { padding: None }.scored(&[9, 9]), [9, 9]);
    }
}
