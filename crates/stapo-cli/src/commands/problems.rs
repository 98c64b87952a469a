//! `stapo problems`

use crate::shared::option::positive;
use crate::shared::run_folder;
use crate::shared::terminal::output;
use anyhow::{Result, anyhow};
use serde_json::json;
use stapo_core::Problem;
use stapo_rl::reward::Programs;
use stapo_rl::tasks::prompting::{PromptModel, Prompting, fit_prompts};
use stapo_rl::tasks::{EnvironmentSpec, Mistakes, Split, Task};
use stapo_rl::{Error, Plan};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Shows the problems of a config: the exact text that the model reads, its number of tokens and the reference, in the
/// order of a run.
#[derive(clap::Args)]
pub struct Args {
    /// A TOML file, a shipped config by name, or a run folder; by default the built-in run.
    config: Option<PathBuf>,

    /// Changes one value of the config, as in task.max_operators=5; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Problems of training, or those that training never sees.
    #[arg(long, value_enum, default_value_t = Which::Train)]
    split: Which,

    /// How many problems to show.
    #[arg(short, default_value_t = 10, value_parser = positive)]
    n: usize,

    /// Shows a worked solution of each (arithmetic, countdown, and files with task.solution_field).
    #[arg(long)]
    solutions: bool,

    /// Shows the task's prompts without opening the model: not rendered, and without numbers of tokens.
    #[arg(long)]
    no_model: bool,

    /// JSON lines: id, prompt, reference, and text and prompt_tokens as the model gets them.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Which {
    Train,
    HeldOut,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let (_, plan) = run_folder::read_plan(args.config.as_deref(), &args.set, |source| source.shape().ok())?;
    // Nothing is judged or called, so no program has a reason to start, whosever the config is.
    let mut task = open_task(&plan)?;
    let model = if args.no_model {
        None
    } else {
        let hint = "hint: --no-model shows the prompts without the model";
        Some(PromptModel::open(&plan.config.model).map_err(|error| anyhow!("{error}\n{hint}"))?)
    };
    let tools = task.tool_schemas().cloned();
    let prompting = model.as_ref().map(|model| model.prompting(&plan.style)).transpose()?;
    let prompting = prompting.map(|prompting| prompting.with_tools(tools.as_ref()));
    if let Some(prompting) = &prompting {
        match fit_prompts(&plan, prompting, &mut task) {
            Ok(left_out) => left_out.iter().for_each(|text| eprintln!("warning: {text}")),
            // Prompts that a run refuses are shown all the same, so that they can be looked at.
            Err(refused @ (Error::LongPrompts { .. } | Error::UnseenPrompts { .. })) => {
                eprintln!("warning: {refused}");
            }
            Err(other) => return Err(other.into()),
        }
    }
    let problems = match args.split {
        Which::HeldOut => task.held_out(args.n),
        Which::Train => (0..args.n as u64)
            .map(|position| task.problem(plan.config.seed, Split::Train, position))
            .collect::<Result<_, _>>()?,
    };
    let mut out = std::io::BufWriter::new(output());
    for problem in problems {
        let solution = if args.solutions { Some(task.solution(&problem, &Mistakes::NONE)?) } else { None };
        let asked = model.as_ref().zip(prompting.as_ref());
        let asked = asked.map(|(model, prompting)| asked_of(model, prompting, &problem)).transpose()?;
        if args.json {
            write_json(&mut out, &problem, asked, solution)?;
        } else {
            write_text(&mut out, &problem, asked, solution)?;
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// The task, with the tools that its prompts list unless a tool would start a program.
fn open_task(plan: &Plan) -> Result<Task> {
    let tools = plan.config.environment.as_ref().filter(|spec| matches!(spec, EnvironmentSpec::Tools(_)));
    let programs = tools.map(EnvironmentSpec::programs).unwrap_or_default();
    if let Some((name, _)) = programs.first() {
        eprintln!(
            "warning: prompts are shown without their list of tools, because {name} is a program that would have to start"
        );
    }
    let tools = tools.filter(|_| programs.is_empty());
    Ok(Task::with_environment(&plan.task, [], tools, Programs::Never)?)
}

/// What the model gets: the text with special tokens written out, and its tokens.
struct Asked {
    text: String,
    tokens: Vec<u32>,
}

fn asked_of(model: &PromptModel, prompting: &Prompting, problem: &Problem) -> Result<Asked> {
    let tokens = prompting.tokens(problem)?;
    Ok(Asked { text: model.tokenizer.decode_all(&tokens)?, tokens })
}

fn write_json(
    out: &mut impl Write,
    problem: &Problem,
    asked: Option<Asked>,
    solution: Option<String>,
) -> Result<()> {
    let mut line = json!(problem);
    if let Some(asked) = asked {
        line["text"] = asked.text.into();
        line["prompt_tokens"] = asked.tokens.into();
    }
    if let Some(solution) = solution {
        line["solution"] = solution.into();
    }
    Ok(writeln!(out, "{line}")?)
}

fn write_text(
    out: &mut impl Write,
    problem: &Problem,
    asked: Option<Asked>,
    solution: Option<String>,
) -> Result<()> {
    let Problem { id, earlier_turns, prompt, reference } = problem;
    if let Some(asked) = asked {
        writeln!(out, "--- {id}: {} tokens, reference {reference}", asked.tokens.len())?;
        writeln!(out, "{}", asked.text)?;
    } else {
        writeln!(out, "--- {id}: reference {reference}")?;
        for turn in earlier_turns {
            writeln!(out, "[{}] {}", turn.role, turn.content)?;
        }
        writeln!(out, "{prompt}")?;
    }
    if let Some(solution) = solution {
        writeln!(out, "    {solution}")?;
    }
    Ok(())
}
