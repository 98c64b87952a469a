//! `stapo init`: looks at a model and a data file, and writes a config that fits.

mod choices;
mod found;
mod from;
mod text;

use crate::shared::model::Fetch;
use crate::shared::units::{grouped, short, size};
use anyhow::{Context, Result, bail};
use choices::Choices;
use found::{Found, Wanted};
use stapo_rl::device::DeviceName;
use stapo_rl::plan::config::ModelSource;
use stapo_rl::reward::Programs;
use stapo_rl::tasks::Task;
use stapo_rl::tasks::prompting::fit_prompts;
use stapo_rl::{Config, Plan};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Writes a config for your model and your data.
///
/// Looks at both (family, size, chat template, context; fields, lengths, references), chooses values that fit, writes
/// them with comments, and names the next commands. With --from it translates the config of TRL, verl or OpenRLHF instead. It asks
/// no questions.
#[derive(clap::Args)]
pub struct Args {
    /// A Hugging Face folder, a GGUF file, a run folder (its newest checkpoint), RUN@STEP, builtin, or a name on the
    /// hub such as Qwen/Qwen3-0.6B.
    #[arg(long, value_name = "MODEL", required_unless_present = "from")]
    model: Option<String>,

    #[command(flatten)]
    fetch: Fetch,

    /// Problems with reference answers: a .jsonl, .json, .csv or .parquet file, or a pattern of such files; .gz and .zst too.
    #[arg(long, value_name = "FILE", required_unless_present = "from")]
    data: Option<PathBuf>,

    /// Translates what starts TRL, verl or OpenRLHF, and lists what it cannot translate: a YAML file (of `trl grpo --config`,
    /// or hydra's), a shell script, or a Python file with `GRPOConfig(..)`. Nothing in it is run.
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,

    /// cpu, cuda or cuda:N; by default the CPU, and with --from a GPU.
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,

    /// The field of the problem, if its name is not recognised.
    #[arg(long, value_name = "FIELD")]
    problem_field: Option<String>,

    /// The field of the reference answer, if its name is not recognised.
    #[arg(long, value_name = "FIELD")]
    answer_field: Option<String>,

    /// The config to write.
    #[arg(short, long, value_name = "FILE", default_value = "stapo.toml")]
    out: PathBuf,

    /// Overwrites an existing file.
    #[arg(long)]
    force: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.out.exists() && !args.force {
        bail!("{}: exists already\nhint: --force overwrites it, --out names another", args.out.display());
    }
    if let Some(file) = &args.from {
        return translate(args, file);
    }
    let (model, data) = args.model.clone().zip(args.data.clone()).context("--model and --data: absent")?;
    args.fetch.find(&model)?;
    let found = Found::look(&Wanted {
        model: ModelSource::named(&model),
        data,
        problem_field: args.problem_field.clone(),
        answer_field: args.answer_field.clone(),
    })?;
    let choices = Choices::fitting(&found, args.device.unwrap_or(DeviceName::Cpu), text::config)?;
    let text = text::config(&found, &choices);
    check(&text, &found)
        .context("the config that was written does not fit, which is a fault of this program")?;
    std::fs::write(&args.out, &text).with_context(|| format!("file {}", args.out.display()))?;
    print_found(&found, &choices);
    print_next(&args.out);
    Ok(ExitCode::SUCCESS)
}

/// Writes the config of another program as one of ours.
fn translate(args: &Args, file: &Path) -> Result<ExitCode> {
    let device = args.device.unwrap_or(DeviceName::Cuda { ordinal: 0 }).to_string();
    let changes = from::Changes { model: args.model.as_deref(), data: args.data.as_deref(), device };
    let translated = from::translated(file, &changes)?;
    std::fs::write(&args.out, &translated.text).with_context(|| format!("file {}", args.out.display()))?;
    from::print(&translated, &args.out);
    print_next(&args.out);
    Ok(ExitCode::SUCCESS)
}

/// Goes through everything that a run checks before its first step, but for the weights.
fn check(text: &str, found: &Found) -> Result<()> {
    let plan = Plan::resolve(Config::from_toml(text, [])?)?;
    let mut task = Task::open_with(&plan.task, Programs::Never)?;
    fit_prompts(&plan, &found.prompts.prompting(&plan.style)?, &mut task)?;
    Ok(())
}

fn print_found(found: &Found, choices: &Choices) {
    let model = &found.config;
    let chat = if found.prompts.template.is_some() { "with a chat template" } else { "no chat template" };
    line(
        "model",
        &format!(
            "{}, {} parameters, {} positions, {chat}",
            model.family.name(),
            short(model.n_parameters()),
            grouped(model.max_positions as u64)
        ),
    );
    let rows = &found.rows;
    let id = rows.id_field.as_deref().map_or("row numbers".to_string(), |field| format!("field {field:?}"));
    let reference = match rows.answer_field.as_str() {
        "" => String::new(),
        field => format!("reference in {field:?}, "),
    };
    line(
        "data",
        &format!(
            "{} rows: problem in {:?}, {}ids from {id}",
            grouped(rows.census.n_rows),
            rows.problem_field,
            reference
        ),
    );
    for (n, what) in [
        (rows.census.n_without_answer, "have no reference and are left out"),
        (rows.census.n_duplicates, "repeat an earlier problem and are left out"),
        (
            rows.census.n_unreadable,
            "have a reference that the verifier cannot read: a response must be written exactly so",
        ),
    ] {
        if n > 0 {
            line("", &format!("{} {what}", grouped(n)));
        }
    }
    let lengths = &found.lengths;
    line(
        "prompts",
        &format!("{} tokens at the median, {} at 99 %, {} at most", lengths.median, lengths.p99, lengths.max),
    );
    line("judge", &format!("mode {:?}: {}", found.mode.name(), found.mode.reason()));
    for (name, text) in
        ["memory", ""].into_iter().zip(memory_lines(choices.memory_needed, choices.memory_here))
    {
        line(name, &text);
    }
}

/// The bytes that a run needs beside those that the device has, where that is known.
fn memory_lines(needed: u64, here: Option<u64>) -> Vec<String> {
    let room = here.map_or(String::new(), |bytes| format!(" of {} available", size(bytes)));
    let mut lines = vec![format!("{}{room}", size(needed))];
    if here.is_some_and(|bytes| needed > bytes) {
        lines.push(
            "does not fit here; another --device, a smaller model, or adapters (docs/lora.md)".to_string(),
        );
    }
    lines
}

fn print_next(out: &Path) {
    let out = out.display();
    line("wrote", &out.to_string());
    line("next", &format!("stapo problems {out}    what the model will read"));
    line("", &format!("stapo plan {out}        memory and time"));
    line("", &format!("stapo train {out}"));
}

fn line(name: &str, value: &str) {
    println!("{name:<8} {value}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_does_not_fit_is_told() {
        assert_eq!(memory_lines(1024, None), ["1.0 KiB"]);
        assert_eq!(memory_lines(1024, Some(1024)), ["1.0 KiB of 1.0 KiB available"]);
        let lines = memory_lines(2048, Some(1024));
        assert_eq!((lines.len(), lines[0].as_str()), (2, "2.0 KiB of 1.0 KiB available"));
        assert!(lines[1].starts_with("does not fit here; "));
    }
}
