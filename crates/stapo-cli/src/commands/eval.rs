//! `stapo eval` and `stapo compare`

mod asking;
mod bar;
mod opening;
mod replay;
mod runs;
mod show;

pub use replay::replay;

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::model::{Base, Fetch};
use crate::shared::option::{KvMemory, positive, threads, trimmed};
use crate::shared::program::PROGRAM;
use crate::shared::prompts::chat_arguments;
use crate::shared::ranks::{self, Joined, RankFlags};
use crate::shared::run_folder::Use;
use crate::shared::stop::{self, Stop};
use anyhow::{Result, bail};
use asking::Asking;
use bar::{Tally, bar, show_signals};
use opening::{decodings, inputs, open_benchmarks, open_finite, second_verifier};
use serde_json::{Map, Value};
use stapo_core::Problem;
use stapo_core::record::{FileHash, SCHEMA, StopReason};
use stapo_rl::LoadedModel;
use stapo_rl::device::DeviceName;
use stapo_rl::inference::EngineMemory;
use stapo_rl::lab::evaluation::{
    Benchmark, Decoding, Done, EvalEvent, EvalFolder, EvalPlan, EvalRow, Evaluation, InterruptedEval,
    compare_folders, expanded, rows,
};
use stapo_rl::policy::found::is_run;
use stapo_rl::policy::identity;
use stapo_rl::ranks::agree_on_inputs;
use stapo_rl::reward::{Programs, VerifierSpec};
use stapo_rl::run::receipt;
use stapo_rl::tasks::prompting;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

/// Evaluates a model on benchmarks: avg@k, pass@k and maj@k with intervals clustered by question.
///
/// Ctrl-C saves what is done. --resume continues, and the table is that of an uninterrupted evaluation.
#[derive(clap::Args)]
pub struct Args {
    /// A Hugging Face folder, a GGUF file, a run folder (its newest checkpoint), RUN@STEP, builtin, or a name on the
    /// hub such as Qwen/Qwen3-0.6B.
    #[arg(long, value_name = "MODEL", default_value = "builtin")]
    model: String,

    /// Adds the adapter of this folder, in PEFT's format, to the model.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,

    #[command(flatten)]
    base: Base,

    #[command(flatten)]
    fetch: Fetch,

    /// `all` (the six of the paper), or names and files, with commas or blanks between them: aime24, aime25, amc23,
    /// math500, minerva, olympiad, gsm8k, math, humaneval, mbpp, arithmetic, countdown, questions.jsonl, questions.csv, questions.parquet.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', num_args = 1.., value_parser = trimmed, default_value = "arithmetic")]
    benchmarks: Vec<String>,

    /// Where benchmark files are, as NAME.jsonl or NAME.parquet.
    #[arg(long, default_value = "data")]
    data: PathBuf,

    /// `paper` (1:1 and 0.7:0.9), `greedy`, or TEMPERATURE:TOP_P.
    #[arg(long, value_delimiter = ',', num_args = 1.., value_parser = trimmed, default_value = "1:1")]
    decoding: Vec<String>,

    /// Samples per question; by default the paper's 32 (AIME, AMC) and 4.
    #[arg(long, value_parser = positive)]
    samples: Option<usize>,

    /// Only the first N questions of each benchmark.
    #[arg(long, value_name = "N", value_parser = positive)]
    limit: Option<usize>,

    /// Longest response, within the model's limit. By default that of the run that is evaluated, or 20480 for another model.
    #[arg(long, value_parser = positive)]
    max_tokens: Option<usize>,

    /// Prompt as a Jinja template over `problem`; by default that of a run (evaluation.benchmark_template), or the problem and the
    /// paper's instruction.
    #[arg(long)]
    template: Option<String>,

    /// The system message of conversations without one; by default that of a run (task.system).
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// Renders prompts with the model's chat template; by default as the run that is evaluated did. --chat=false does not.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    chat: Option<bool>,

    /// Variables of the chat template, as JSON: '{"enable_thinking": false}'; by default those of a run.
    #[arg(long, value_name = "JSON", value_parser = chat_arguments)]
    chat_arguments: Option<Map<String, Value>>,

    /// Ends a response at this text too; may be repeated. By default the texts of a run.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,

    /// Tools that the policy may call, by name: calculator, python, finish, search:FILE; or the table of an environment as in
    /// a config. By default those of the run that is evaluated; `none` turns them off.
    #[arg(long, value_name = "TOOLS")]
    tools: Option<String>,

    /// Turns of an episode, at most, with tools; by default as the run, or 4.
    #[arg(long, value_name = "N", value_parser = positive)]
    max_turns: Option<usize>,

    /// Judges every sample by a second verifier too and reports where it disagrees with the benchmark's rule: a mode such
    /// as boxed-exact, a program with its arguments that reads and writes JSON lines, or a table as in a config.
    #[arg(long, value_name = "VERIFIER")]
    verifier: Option<String>,

    /// Judges every sample by this model in addition to the benchmark's rule, and reports where they disagree. --verifier
    /// takes a judge with other settings as a table: '{kind="judge", model="..", read="letter"}'.
    #[arg(long, value_name = "MODEL", conflicts_with = "verifier")]
    judge: Option<String>,

    #[command(flatten)]
    allow: AllowCommand,

    /// Seed of sampling.
    #[arg(long, default_value_t = 0)]
    seed: u64,

    #[command(flatten)]
    kv: KvMemory,

    /// The folder to write; by default evals/TIME.
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Continues an interrupted evaluation; all other settings come from its folder.
    #[arg(long, value_name = "DIR", conflicts_with_all = OF_THE_FOLDER)]
    resume: Option<PathBuf>,

    /// Continues although the model or a benchmark file changed since the evaluation began, and records the change.
    #[arg(long, requires = "resume")]
    accept_changes: bool,

    /// The table as one JSON array on standard output.
    #[arg(long)]
    json: bool,

    /// cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    device: DeviceName,

    /// Threads on the CPU; all cores by default.
    #[arg(long, value_parser = threads)]
    threads: Option<usize>,

    #[command(flatten)]
    ranks: RankFlags,
}

/// The flags that an evaluation keeps in its folder, so that a resumed one takes none of them.
const OF_THE_FOLDER: [&str; 21] = [
    "out",
    "model",
    "adapter",
    "benchmarks",
    "data",
    "decoding",
    "samples",
    "limit",
    "max_tokens",
    "template",
    "system",
    "chat",
    "chat_arguments",
    "stop",
    "tools",
    "max_turns",
    "verifier",
    "judge",
    "seed",
    "kv_memory",
    "kv_mib",
];

/// Compares two evaluations question by question, or the responses of two training runs step by step.
#[derive(clap::Args)]
pub struct CompareArgs {
    /// Folder of the first evaluation or run, the baseline.
    a: PathBuf,
    /// Folder of the second.
    b: PathBuf,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let stop = stop::on_signals()?;
    ranks::work_until_asked(
        &args.ranks,
        &stop,
        |joined| lead(args, joined, &stop),
        |joined| follow_lead(args, joined, &stop),
    )
}

/// What every rank but the first does: it samples its share of the questions of rank 0's plan.
fn follow_lead(args: &Args, joined: &Joined, stop: &Stop) -> Result<ExitCode> {
    let plan: EvalPlan = serde_json::from_slice(&joined.ranks.broadcast(&[])?)?;
    // A program that the user of this rank did not name is started only where it is known.
    let programs = if args.verifier == plan.verifier { Programs::Allowed } else { args.allow.of_run() };
    let questions = Questions::open(args, &plan, joined, programs)?;
    stop.show_by(|_, _| ());
    stop.begin_work();
    let done: Done = serde_json::from_slice(&joined.ranks.broadcast(&[])?)?;
    questions.ask(&plan, &done, joined, stop, |_| Ok(()))?;
    Ok(if stop.is_raised() { ExitCode::from(stop.exit_status()) } else { ExitCode::SUCCESS })
}

/// The model and the questions that it is asked.
struct Questions {
    model: LoadedModel,
    step: Option<u64>,
    benchmarks: Vec<Benchmark>,
    /// The files of the model, of the benchmarks and of a second verifier.
    inputs: Vec<FileHash>,
    /// What the user should know.
    warnings: Vec<String>,
}

impl Questions {
    /// Opens what a plan names, which all ranks find to be the same.
    fn open(args: &Args, plan: &EvalPlan, joined: &Joined, programs: Programs) -> Result<Self> {
        joined.agree_on_program(args.device)?;
        let device = joined.device(args.device, args.threads, Use::Reading)?;
        let mut found = opening::find(plan, &args.fetch)?;
        args.base.set(&mut found, args.device)?;
        let (model, model_files) = open_finite(&found, plan.adapter.as_deref(), &device)?;
        let benchmarks = open_benchmarks(plan, programs, &device)?;
        let problems: Vec<&Problem> = benchmarks.iter().flat_map(|benchmark| &benchmark.problems).collect();
        let unseen = model.prompting(&plan.style())?.unseen(&problems)?;
        let mut warnings: Vec<String> =
            unseen.iter().map(|found| prompting::warning(found, &problems)).collect();
        warnings.extend(benchmarks.iter().flat_map(Benchmark::warnings));
        warnings.dedup();
        let inputs = inputs(plan, model_files, &benchmarks)?;
        agree_on_inputs(&*joined.ranks, &inputs)?;
        Ok(Self { model, step: found.step(), benchmarks, inputs, warnings })
    }

    /// Asks this rank's share of the questions. Returns the signal that ended the evaluation, on rank 0.
    fn ask(
        &self,
        plan: &EvalPlan,
        done: &Done,
        joined: &Joined,
        stop: &Stop,
        take: impl FnMut(EvalEvent) -> stapo_rl::Result<()>,
    ) -> Result<Option<i32>> {
        let (style, episode) = (plan.style(), plan.episode());
        let sampling =
            plan.sampling((&style, &episode), (joined.ranks.rank(), joined.ranks.world()), self.step);
        let decodings = &decodings(&plan.decodings)?;
        let Self { model, benchmarks, .. } = self;
        let evaluation = Evaluation { model, benchmarks, decodings, sampling, done };
        let asked = || stop.is_raised().then(|| stop.signal());
        Ok(evaluation.run_on(&*joined.ranks, &mut EngineMemory::new(), &asked, take)?)
    }
}

/// What a process that evaluates alone does, and rank 0 of several.
fn lead(args: &Args, joined: &Joined, stop: &Stop) -> Result<ExitCode> {
    let Opened { mut folder, plan, done, questions } = match &args.resume {
        Some(path) => reopen(args, path, joined)?,
        None => begin(args, joined)?,
    };
    stop.begin_work();
    for text in folder.lock_warning().iter().chain(&questions.warnings) {
        eprintln!("warning: {text}");
    }
    folder.record_warnings(&questions.warnings)?;
    joined.ranks.broadcast(&serde_json::to_vec(&done)?)?;
    let decodings = decodings(&plan.decodings)?;
    let benchmarks = &questions.benchmarks;
    let n_all: usize =
        decodings.len() * benchmarks.iter().map(|b| b.problems.len() * b.n_samples).sum::<usize>();
    let bar = bar(n_all, done.len(), args.json);
    show_signals(stop, &bar);
    let mut tally = Tally::default();
    let evaluated = questions.ask(&plan, &done, joined, stop, |event| {
        match event {
            EvalEvent::Asked | EvalEvent::Waits => {}
            EvalEvent::Token => tally.add_token(),
            EvalEvent::Finished(record) => {
                folder.add(&record)?;
                tally.add(record.verdict);
                bar.inc(1);
            }
        }
        bar.set_message(tally.text());
        Ok(())
    });
    bar.finish_and_clear();
    let asked = match evaluated {
        Ok(asked) => asked,
        Err(error) => {
            // Where the event cannot be written, the error that ended the evaluation is shown all the same.
            let _ = folder.record_stop(StopReason::Error, &error.to_string());
            return Err(error);
        }
    };
    if let Some(signal) = asked {
        stop.raise(signal);
        folder.record_stop(StopReason::Signal, &stop.name())?;
        let at = folder.folder().display();
        eprintln!("stopped; continue with: stapo eval --resume {at}");
        return Ok(ExitCode::from(stop.exit_status()));
    }
    finish(args, &mut folder, &plan, benchmarks, &decodings)?;
    Ok(ExitCode::SUCCESS)
}

/// Sorts the samples, in an order that depends on nothing but the settings, writes and shows the table, and seals the
/// folder.
fn finish(
    args: &Args,
    folder: &mut EvalFolder,
    plan: &EvalPlan,
    benchmarks: &[Benchmark],
    decodings: &[Decoding],
) -> Result<()> {
    let position = |decoding: &str, benchmark: &str| {
        let benchmark = benchmarks.iter().position(|known| known.name == benchmark);
        (decodings.iter().position(|known| known.name == decoding), benchmark)
    };
    let questions = question_places(benchmarks);
    let samples = folder.sort_samples(|sample| {
        let question = questions.get(&(sample.benchmark.as_str(), sample.problem_id.as_str())).copied();
        (position(&sample.decoding, &sample.benchmark), question, sample.sample_idx)
    })?;
    let mut rows = rows(&samples)?;
    rows.sort_by_key(|row: &EvalRow| position(&row.decoding, &row.benchmark));
    folder.write_table(&rows)?;
    folder.record_stop(StopReason::Done, "")?;
    let sealed = folder.seal(plan)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
        return Ok(());
    }
    show::prompting(plan);
    show::table(&rows);
    show::agreement(plan.verifier.as_deref(), &rows, &samples);
    println!("\nsamples and verdicts: {}", folder.folder().display());
    println!("receipt {}: stapo verify {}", receipt::short(&sealed), folder.folder().display());
    Ok(())
}

/// The place of every question in its benchmark, by the names of both.
fn question_places(benchmarks: &[Benchmark]) -> HashMap<(&str, &str), usize> {
    let mut places = HashMap::new();
    for benchmark in benchmarks {
        let numbered = benchmark.problems.iter().enumerate();
        places.extend(numbered.map(|(idx, problem)| ((benchmark.name.as_str(), problem.id.as_str()), idx)));
    }
    places
}

/// An evaluation that can continue.
struct Opened {
    folder: EvalFolder,
    plan: EvalPlan,
    done: Done,
    questions: Questions,
}

fn begin(args: &Args, joined: &Joined) -> Result<Opened> {
    let found = args.fetch.find(&args.model)?;
    let asking = Asking::choose(args, &found)?;
    let mut plan = EvalPlan {
        schema: SCHEMA,
        model: found.pinned.to_string(),
        adapter: args.adapter.clone(),
        weights: Vec::new(),
        benchmarks: args.benchmarks.iter().flat_map(|name| expanded(name)).collect(),
        data: args.data.clone(),
        decodings: args.decoding.clone(),
        n_samples: args.samples,
        limit: args.limit,
        max_tokens: asking.max_tokens,
        template: asking.template,
        system: asking.system,
        chat: asking.style.chat,
        chat_arguments: asking.style.chat_arguments,
        stop: asking.style.stop,
        prompting_of: asking.run,
        verifier: second_verifier(args.verifier.as_deref(), args.judge.as_deref(), &args.fetch)?,
        environment: asking.environment,
        episode: asking.episode,
        seed: args.seed,
        kv_mib: args.kv.mib()?,
        inputs: Vec::new(),
        device: identity::device_kind(args.device),
        program: PROGRAM.to_string(),
        seal: String::new(),
    };
    if !plan.chat && args.chat_arguments.is_some() {
        bail!("--chat-arguments: has no effect without --chat\nhint: add --chat, or leave it out");
    }
    if let Some(system) = plan.system.as_ref().filter(|_| !plan.chat) {
        bail!(
            "system message {system:?}: has no effect without --chat\nhint: add --chat, or leave --system out"
        );
    }
    if let Some(template) = args.template.as_ref().filter(|template| !template.contains("{{")) {
        bail!("--template {template:?}: shows no problem\nhint: {{{{ problem }}}} inserts the problem");
    }
    // Benchmarks and decodings are checked before the folder is made, so that a bad name leaves no folder behind.
    decodings(&plan.decodings)?;
    joined.ranks.broadcast(&serde_json::to_vec(&plan)?)?;
    let questions = Questions::open(args, &plan, joined, Programs::Allowed)?;
    plan.weights = questions.inputs.iter().filter(|file| file.name.starts_with("weights")).cloned().collect();
    plan.inputs.clone_from(&questions.inputs);
    let stamp = || Path::new("evals").join(crate::shared::clock::stamp(SystemTime::now()));
    let folder = args.out.clone().unwrap_or_else(stamp);
    let folder = EvalFolder::create(&folder, &plan, &joined.writer(args.device))?;
    if let Some(text) = &plan.verifier {
        allow_command::record([&VerifierSpec::named(text)?]);
    }
    allow_command::record_environment(plan.environment.as_ref());
    Ok(Opened { folder, plan, done: Done::new(), questions })
}

fn reopen(args: &Args, path: &Path, joined: &Joined) -> Result<Opened> {
    let interrupted = InterruptedEval::open(path)?;
    joined.ranks.broadcast(&serde_json::to_vec(&interrupted.plan)?)?;
    let questions = Questions::open(args, &interrupted.plan, joined, args.allow.of_run())?;
    let device_kind = identity::device_kind(args.device);
    let writer = joined.writer(args.device);
    let (folder, plan, done, warnings) =
        interrupted.resume(&questions.inputs, &device_kind, args.accept_changes, &writer)?;
    for text in warnings {
        eprintln!("warning: {text}");
    }
    Ok(Opened { folder, plan, done, questions })
}

pub fn run_compare(args: &CompareArgs) -> Result<ExitCode> {
    if is_run(&args.a) && is_run(&args.b) {
        return runs::compare(&args.a, &args.b, args.json);
    }
    let compared = compare_folders(&args.a, &args.b)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&compared)?);
    } else {
        show::comparison(&args.a, &args.b, &compared);
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests;
