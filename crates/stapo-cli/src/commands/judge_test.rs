//! `stapo judge-test`: known tricks against a judge.

use crate::shared::model::Fetch;
use crate::shared::option::{positive, threads};
use crate::shared::prompts::chat_arguments;
use crate::shared::run_folder::{self, Use};
use crate::shared::units::percent;
use anyhow::{Context, Result};
use serde_json::{Map, Value};
use stapo_core::Problem;
use stapo_rl::device::DeviceName;
use stapo_rl::lab::panel::{self, PanelRow};
use stapo_rl::policy::identity;
use stapo_rl::reward::{JudgeReading, JudgeSpec, RuleSpec, VerifierSpec};
use stapo_rl::rollout::ModelJudge;
use stapo_rl::tasks::{RowsSpec, Task, TaskSpec};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Asks a judge about responses that are known to fool judges, and shows how many it calls right.
///
/// The panel has empty answers, openers, claims, prompt injection, long and confident texts, copied questions, other
/// languages and special tokens, and a right answer as control. The grader's rule judges the same responses.
#[derive(clap::Args)]
pub struct Args {
    /// The judge: a Hugging Face folder, a GGUF file, a run folder, RUN@STEP, builtin, or a name on the hub.
    #[arg(long, value_name = "MODEL")]
    model: String,

    /// Adds the adapter of this folder, in PEFT's format, to the judge.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,

    /// A file with the judge's prompt, a Jinja template over problem, response and reference.
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,

    /// The judge's system message.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// Variables of the judge's chat template, as JSON: '{"enable_thinking": false}'.
    #[arg(long, value_name = "JSON", value_parser = chat_arguments)]
    chat_arguments: Option<Map<String, Value>>,

    /// How the verdict is read: yes-no, letter or number.
    #[arg(long, value_name = "HOW", default_value = "yes-no", value_parser = reading)]
    read: JudgeReading,

    /// The word for right, if the verdict is read as yes-no.
    #[arg(long, value_name = "WORD", default_value = "Yes")]
    yes: String,
    /// The word for wrong, if the verdict is read as yes-no.
    #[arg(long, value_name = "WORD", default_value = "No")]
    no: String,

    /// Questions with answers instead of those of the panel: rows as in a training task.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,

    /// Only the first N questions.
    #[arg(long, value_name = "N", value_parser = positive)]
    limit: Option<usize>,

    /// JSON lines: one per response, then one per trick.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    fetch: Fetch,

    /// cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    device: DeviceName,

    /// Threads on the CPU; all cores by default.
    #[arg(long, value_parser = threads)]
    threads: Option<usize>,
}

fn reading(text: &str) -> std::result::Result<JudgeReading, String> {
    serde_json::from_value(text.into()).map_err(|_| "expected yes-no, letter or number".to_string())
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let spec = judge(args)?;
    let problems = problems(args)?;
    let device = run_folder::device(args.device, args.threads, Use::Reading)?;
    let judge = ModelJudge::open(&spec, &device)?;
    let started = Instant::now();
    let verdicts = panel::ask(&judge, RuleSpec::default(), &problems)?;
    let seconds = started.elapsed().as_secs_f64();
    let rows = panel::rows(&verdicts)?;
    if args.json {
        for verdict in &verdicts {
            println!("{}", serde_json::to_string(verdict)?);
        }
        for row in &rows {
            println!("{}", serde_json::to_string(row)?);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let files = identity::of_verifier("judge", &VerifierSpec::Judge(spec.clone()))?;
    let weights = files.iter().find(|file| file.name.starts_with("judge weights"));
    let hash = weights.map_or(String::new(), |file| format!(", weights {}", &file.sha256[..12]));
    println!("judge {}{hash}: {} responses to {} questions", spec.model, verdicts.len(), problems.len());
    show(&rows);
    println!("{:.1} s per 1,000 verdicts", 1000.0 * seconds / verdicts.len().max(1) as f64);
    Ok(ExitCode::SUCCESS)
}

fn judge(args: &Args) -> Result<JudgeSpec> {
    let template = args.template.as_ref().map(|path| {
        let text = stapo_rl::untrusted::read_text(path);
        text.with_context(|| format!("--template {}", path.display()))
    });
    Ok(JudgeSpec {
        adapter: args.adapter.clone(),
        template: template.transpose()?,
        system: args.system.clone(),
        chat_arguments: args.chat_arguments.clone().unwrap_or_default(),
        read: args.read,
        yes: args.yes.clone(),
        no: args.no.clone(),
        ..JudgeSpec::new(&args.fetch.find(&args.model)?.pinned.to_string())
    })
}

fn problems(args: &Args) -> Result<Vec<Problem>> {
    let n = args.limit.unwrap_or(usize::MAX);
    let Some(path) = &args.data else { return Ok(panel::questions().into_iter().take(n).collect()) };
    let template = Some("{{ problem }}".to_string());
    let rows = RowsSpec { held_out_share: 1.0, template, ..RowsSpec::new(path) };
    Ok(Task::open(&TaskSpec::of_file(rows))?.held_out(n))
}

fn show(rows: &[PanelRow]) {
    println!("\n{:<22} {:>9}  {:<22} by the rule", "called right, %", "responses", "by the judge");
    for row in rows {
        let name = if row.is_right { format!("{} (control)", row.trick) } else { row.trick.to_string() };
        let (judge, rule) = (percent(&row.judge), percent(&row.rule));
        println!("{name:<22} {:>9}  {judge:<22} {rule}", row.n_responses);
    }
    println!(
        "\nEvery response but those of the control lacks the right answer: what is called\nright among them is a false positive. 95 % intervals, clustered by question."
    );
}
