//! The text of the config, with a comment on every choice.

use super::choices::Choices;
use super::found::{Found, JudgeMode};
use stapo_rl::plan::config::{ModelSource, Recompute};
use stapo_rl::reward::CodeStyle;
use toml::Value;

pub fn config(found: &Found, choices: &Choices) -> String {
    [
        head(found, choices),
        task(found, choices),
        rollout(found, choices),
        update(choices),
        evaluation(choices),
    ]
    .join("\n")
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn head(found: &Found, choices: &Choices) -> String {
    let stem = found.data.file_stem().unwrap_or_default().to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = stem.chars().map(|c| if is_plain(c) { c } else { '-' }).collect();
    let name = if name.is_empty() || name.starts_with('.') { "own".to_string() } else { name };
    let model = match &found.model {
        ModelSource::Builtin | ModelSource::Random { .. } => "{ kind = \"builtin\" }".to_string(),
        ModelSource::Path { path } => format!("{{ kind = \"path\", path = {} }}", quoted(path)),
    };
    format!(
        "# Written by stapo init. Every key: docs/reference/config.md. Check with: stapo problems FILE, stapo plan FILE
name = {}
seed = 0
# Rollout batches: about two passes over the data, at most 200.
steps = {}
device = \"{}\"
# To train adapters instead of all weights, add lora = {{ rank = 32 }} to the table and take ten times the
# learning rate.
model = {model}
# The algorithm; `stapo objective --list` names others.
objective = {{ preset = \"stapo\" }}
",
        quoted(&name),
        choices.steps,
        choices.device
    )
}

fn task(found: &Found, choices: &Choices) -> String {
    let rows = &found.rows;
    let is_code = matches!(found.mode, JudgeMode::Tests(_));
    let mut lines = vec![
        "[task]".to_string(),
        format!("kind = {}", quoted(found.kind())),
        format!("path = {}", quoted(&found.data.to_string_lossy())),
        format!("problem_field = {}", quoted(&rows.problem_field)),
    ];
    if !rows.answer_field.is_empty() {
        lines.push(format!("answer_field = {}", quoted(&rows.answer_field)));
    }
    if let Some(splits) = found.only.get("split") {
        lines.push("# The file names its splits; the other rows are left for evaluation.".to_string());
        lines.push(format!("only = {{ split = {} }}", Value::from(splits.clone())));
    }
    if let Some(field) = &rows.id_field {
        lines.push(format!("id_field = {}", quoted(field)));
    }
    if rows.census.n_without_answer > 0 {
        let n = rows.census.n_without_answer;
        lines.push(format!("# {n} rows have no reference answer; \"refuse\" stops at the first."));
        lines.push("missing_answers = \"drop\"".to_string());
    }
    lines.push(match found.template.as_str() {
        "{{ problem }}=" => {
            "# What the model is asked. The built-in model reads no words and continues after the sign."
                .to_string()
        }
        _ => format!(
            "# What the model is asked. The instruction is there because the judge reads {}.",
            if is_code { "a program" } else { "\\boxed{}" }
        ),
    });
    lines.push(format!("template = {}", quoted(&found.template)));
    if found.chat {
        lines.push("# The system message of conversations without one.".to_string());
        lines.push("# system = \"You are a helpful assistant.\"".to_string());
    }
    lines.push(format!("# The judge: {}.", found.mode.reason()));
    if is_code {
        lines.push("# The reward of a program that passes some tests: reward = \"share\".".to_string());
    } else {
        lines.push(
            "# A program of yours: verifier = { kind = \"command\", program = \"./judge.py\" }".to_string(),
        );
    }
    let mut form = "";
    if found.mode == JudgeMode::Math {
        lines.push(
            "# Answers are worked out: 60 + 180 is wrong if the reference is 240; with form = \"any\" it is right."
                .to_string(),
        );
        form = ", form = \"worked-out\"";
    }
    lines.push(match found.mode {
        JudgeMode::Tests(CodeStyle::Block) => "verifier = { kind = \"code\" }".to_string(),
        JudgeMode::Tests(_) => "verifier = { kind = \"code\", style = \"whole\" }".to_string(),
        rule => format!("verifier = {{ kind = \"rule\", mode = {}{form} }}", quoted(rule.name())),
    });
    lines.push("# The share of problems that training never sees, for evaluation.".to_string());
    lines.push(format!("held_out_share = {}", choices.held_out_share));
    lines.join("\n") + "\n"
}

fn rollout(found: &Found, choices: &Choices) -> String {
    let lengths = &found.lengths;
    let chat = if found.chat {
        "# Prompts are rendered with the model's chat template; false for a base model.\nchat = true
# Variables of the template, such as { enable_thinking = false }.\nchat_arguments = {}"
    } else {
        "# The model has no chat template, so prompts are plain text.\nchat = false"
    };
    let long = if choices.drops_long_prompts {
        "# A few prompts are much longer; \"refuse\" stops before the first step instead.\nlong_prompts = \"drop\""
    } else {
        "# A longer prompt stops the run before its first step; \"drop\" leaves it out.\nlong_prompts = \"refuse\""
    };
    format!(
        "[rollout]
problems_per_step = {}
# Responses to each problem; an advantage compares them.
group_size = {}
temperature = 1.0
# Prompts have {} tokens at the median, {} at 99 %, {} at most.
max_prompt_tokens = {}
{long}
# The model takes {} positions for prompt and response together.
max_response_tokens = {}
# Memory for keys and values; less means fewer responses at once, never other results.
kv_mib = {}
{chat}
# Texts that end a response, beside the model's stop tokens.
stop = {}
",
        choices.problems_per_step,
        choices.group_size,
        lengths.median,
        lengths.p99,
        lengths.max,
        choices.max_prompt_tokens,
        found.config.max_positions,
        choices.max_response_tokens,
        choices.kv_mib,
        // The prompt opened a block, which ends the program.
        if found.mode == JudgeMode::Tests(CodeStyle::Whole) { "[\"\\n```\"]" } else { "[]" },
    )
}

fn update(choices: &Choices) -> String {
    let recompute = match choices.recompute {
        Recompute::Nothing => "nothing",
        Recompute::Inputs => "inputs",
        Recompute::Layers => "layers",
    };
    format!(
        "[update]
# Problems of one optimizer step.
problems_per_minibatch = {}
# Tokens of one forward and backward pass, and what is computed again to save memory (\"nothing\", \"inputs\", \"layers\").
microbatch_tokens = {}
recompute = \"{recompute}\"
learning_rate = {:e}
",
        choices.problems_per_minibatch, choices.microbatch_tokens, choices.learning_rate
    )
}

fn evaluation(choices: &Choices) -> String {
    format!(
        "[evaluation]
# Held-out accuracy every so many steps, on so many problems.
every_steps = 10
problems = {}
samples = 1
",
        choices.evaluation_problems
    )
}
