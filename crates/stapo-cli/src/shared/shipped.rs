//! The configs and experiments that are part of the program, by name.

use crate::shared::terminal::wrapped;
use anyhow::{Context, Result, bail};
use stapo_core::settings::suggest;
use stapo_rl::untrusted::read_text;
use std::io::ErrorKind;
use std::path::Path;

/// A shipped text: its name and content.
pub type Shipped = (&'static str, &'static str);

macro_rules! shipped {
    ($folder:literal: $($name:literal),+ $(,)?) => {
        [$(($name, include_str!(concat!("../../../../", $folder, "/", $name, ".toml")))),+]
    };
}

/// The configs of `stapo train`.
pub const CONFIGS: [Shipped; 8] = shipped!("configs": "stapo", "grpo", "justrl", "entropy20", "dapo", "qwen3-1.7b", "qwen3-8b", "qwen3-14b");

/// The config of `stapo train` without one, whatever files lie in the working folder.
pub const DEFAULT_CONFIG: &str = CONFIGS[0].1;

/// The experiments of `stapo experiment`.
pub const EXPERIMENTS: [Shipped; 20] = shipped!(
    "experiments": "main-quick", "main", "ablation-mask", "ablation-tau", "falsify", "transfer", "dgg", "dasd", "thresholds",
    "lora", "lora-gsm8k", "stability", "stability-stale", "stability-arms", "scale", "gsm8k", "gsm8k-short",
    "gsm8k-human", "math", "math-short",
);

/// The text of a file, or of the shipped text of that name. A file that exists comes first.
pub fn read(what: &str, name: &Path, shipped: &[Shipped]) -> Result<String> {
    match read_text(name) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        read => return read.with_context(|| format!("{what} {}", name.display())),
    }
    let asked = name.to_string_lossy();
    if let Some((_, text)) = shipped.iter().find(|(name, _)| *name == asked) {
        return Ok((*text).to_string());
    }
    let names: Vec<&str> = shipped.iter().map(|(name, _)| *name).collect();
    bail!(
        "{what} {asked}: no such file, and no shipped {what} has this name\nhint: {}",
        suggest(&asked, &names)
    )
}

/// Prints the names of shipped texts with the first line of each, which is a comment.
pub fn print(shipped: &[Shipped]) {
    let width = shipped.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    for (name, text) in shipped {
        let about = text.lines().next().unwrap_or_default().trim_start_matches("# ");
        println!("{name:<width$}{}", wrapped(about, width, 80));
    }
}
