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
pub const CONFIGS: [Shipped; 10] = shipped!("configs": "stapo", "grpo", "justrl", "entropy20", "dapo", "tools", "hybrid", "qwen3-1.7b", "qwen3-8b", "qwen3-14b");

/// The config of `stapo train` without one, whatever files lie in the working folder.
pub const DEFAULT_CONFIG: &str = CONFIGS[0].1;

/// The experiments of `stapo experiment`.
pub const EXPERIMENTS: [Shipped; 33] = shipped!(
    "experiments": "main-quick", "main", "ablation-mask", "ablation-tau", "falsify", "transfer", "dgg", "dasd", "thresholds",
    "lora", "lora-gsm8k", "stability", "stability-stale", "stability-arms", "stability-builtin", "scale", "copying", "gsm8k",
    "gsm8k-short", "gsm8k-human", "gsm8k-1.5b", "long-0.5b", "rising-probe", "rising", "rising-builtin", "rising-starts", "math", "math-short",
    "math-1.5b", "code", "code-1.5b", "base-arithmetic", "base-gsm8k",
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

/// Prints the names of shipped texts with the first sentence of each.
pub fn print(shipped: &[Shipped]) {
    let width = shipped.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    for (name, text) in shipped {
        println!("{name:<width$}{}", wrapped(&first_sentence(text), width, 80));
    }
}

/// The comment at the start of a text, up to its first full stop or question mark.
fn first_sentence(text: &str) -> String {
    let comment: Vec<&str> = text.lines().map_while(|line| line.strip_prefix("# ")).collect();
    let mut words = Vec::new();
    for word in comment.iter().flat_map(|line| line.split_whitespace()) {
        words.push(word);
        if word.ends_with(['.', '?']) {
            break;
        }
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shipped_text_is_told_by_a_whole_sentence() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments");
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), EXPERIMENTS.len(), "every file is shipped");
        for (name, text) in EXPERIMENTS {
            let about = first_sentence(text);
            let n_stops = about.matches(". ").count() + about.matches("? ").count();
            assert!(about.ends_with(['.', '?']) && n_stops == 0, "{name}: {about}");
        }
        assert_eq!(
            first_sentence("# Rates of 0.5 and\n# more. Other.\nname = 1\n"),
            "Rates of 0.5 and more."
        );
    }
}
