//! The keys of a file of texts.

use crate::plan::config::FreeTable;
use crate::tasks::DataPath;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toml::Table;

/// Files of conversations, of prompts with responses, or of texts alone. Fields not given are recognised by the names
/// that common data sets use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileTexts {
    /// The file, a pattern such as `data/*.parquet`, or a list of these. The content of a file says its format: Parquet,
    /// JSON lines, a JSON array, or CSV by its name; texts also compressed with gzip or zstd.
    pub path: DataPath,
    /// At most this many rows of each entry of `path` are read, the first ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rows: Option<u64>,
    /// The share of rows, chosen by the hash of their texts, that are not learned from. Their loss is computed where the run
    /// evaluates, and the checkpoint with the lowest one is kept as the best.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub held_out_share: f64,
    /// The field of a list of messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages_field: Option<String>,
    /// The field of the prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_field: Option<String>,
    /// The field of the response; without `prompt_field`, the field of a text that has a loss as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_field: Option<String>,
    /// The field of the better response, for `stapo prefer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen_field: Option<String>,
    /// The field of the worse response, for `stapo prefer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejected_field: Option<String>,
    /// The field that says by how much the better response is better, a number, for `stapo rm`; `margin` where rows have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub margin_field: Option<String>,
    /// The field that says whether a single response is good, for `stapo prefer` with the loss `kto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_field: Option<String>,
    /// Renders prompts and responses with the model's chat template. Lists of messages are always rendered.
    #[serde(default)]
    pub chat: bool,
    /// Further variables of the chat template.
    #[serde(default)]
    #[schemars(with = "FreeTable")]
    pub chat_arguments: Table,
    /// The system message of conversations without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// What happens to rows with more tokens than a micro-batch or the model takes.
    #[serde(default)]
    pub long_rows: LongRows,
}

impl FileTexts {
    /// The keys of rows that are made and not read.
    pub(super) fn generated(held_out_share: f64) -> Self {
        FileTexts {
            path: DataPath::default(),
            max_rows: None,
            held_out_share,
            messages_field: None,
            prompt_field: None,
            response_field: None,
            chosen_field: None,
            rejected_field: None,
            label_field: None,
            margin_field: None,
            chat: false,
            chat_arguments: Table::new(),
            system: None,
            long_rows: LongRows::Refuse,
        }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_zero(share: &f64) -> bool {
    *share == 0.0
}

/// How rows that are too long are treated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LongRows {
    /// The run is refused before its first step, and the error names their number and the longest.
    #[default]
    Refuse,
    /// Such rows are left out and counted.
    Drop,
}
