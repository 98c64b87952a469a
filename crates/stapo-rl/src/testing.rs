//! What tests of several modules share.

use serde_json::json;
use stapo_core::record::Metrics;
use std::path::{Path, PathBuf};

/// A chat template in the characters of the built-in model: `(system)question=answer<|end|>`. With the variable `shout`
/// each question has another sign.
pub const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'system' %}({{ m.content }}){% elif m.role == 'user' %}\
     {{ m.content }}{{ '+=' if shout else '=' }}{% else %}{{ m.content }}<|end|>:{% endif %}{% endfor %}\
     {% if add_generation_prompt %}so {% endif %}";

/// A copy of the built-in model in `folder`, with a chat template.
pub fn chat_model(folder: &Path, template: &str) -> PathBuf {
    let model = folder.join("model");
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/base");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(base).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(model.join("chat_template.jinja"), template).unwrap();
    model
}

/// Metrics of a step.
pub fn metrics(step: u64, eval_accuracy: f64, entropy_mean: f64) -> Metrics {
    serde_json::from_value(json!({
        "schema": 1, "step": step, "reward_mean": 0.0, "accuracy": 0.5, "eval_accuracy": eval_accuracy,
        "response_tokens_mean": 30.0, "truncated_share": 0.0, "entropy_mean": entropy_mean,
        "entropy_quantiles": {"q05": 0.0, "q25": 0.0, "q50": 0.0, "q75": 0.0, "q95": 1.0},
        "n_tokens": 1000, "n_kept": 999, "n_candidates": 2, "n_silenced": 1, "tau_h": null, "clip_fraction": 0.0,
        "ratio_min": 1.0, "ratio_max": 1.0, "loss": 0.0, "learning_rate": 1e-4, "gradient_norm": 1.0,
        "silenced_gradient_share": 0.0, "quadrants": [], "exactness_max_abs": 0.0,
        "tokens_per_second": {"rollout": 1.0, "update": 1.0}
    }))
    .unwrap()
}
