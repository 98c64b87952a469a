//! The errors of a run that come from inputs, files and devices. Programming mistakes panic instead.

use crate::plan::config::PlanError;
use crate::tasks::TaskError;
use stapo_core::ObjectiveError;
use stapo_core::batch::SequenceTooLong;
use stapo_core::record::{Change, RecordError};
use stapo_core::stats::StatsError;
use stapo_model::OutOfMemory;
use stapo_model::generate::RequestError;
use stapo_model::optimizer::GradientError;
use stapo_model::ranks::RankError;
use std::path::{Path, PathBuf};
use thiserror::Error;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, Error)]
pub enum Error {
    #[error("{}: {source}{}", path.display(), io_hint(source))]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: {problem}", path.display())]
    Record { path: PathBuf, problem: RecordError },
    #[error("folder {}: exists already\nhint: {remedy}", folder.display())]
    Exists { folder: PathBuf, remedy: String },
    #[error("folder {}: {by} is writing it\nhint: wait for that process, or stop it", folder.display())]
    Locked { folder: PathBuf, by: String },
    #[error(
        "run folder {}: {}\nhint: {}--accept-changes continues with what is there and records it",
        folder.display(),
        changed(changes),
        plan.as_ref().map_or(String::new(), |plan| format!("put back what changed (the run's plan is in {}); ", plan.display()))
    )]
    Changed { folder: PathBuf, changes: Vec<Change>, plan: Option<PathBuf> },
    #[error("checkpoint {}: its model {}\nhint: put back what changed", folder.display(), changed(changes))]
    ChangedModel { folder: PathBuf, changes: Vec<Change> },
    #[error("run folder {}: {problem}\nhint: {remedy}", folder.display())]
    NoRun { folder: PathBuf, problem: String, remedy: String },
    #[error(
        "run {}: {problem}\nhint: `stapo runs` lists the runs here, and `stapo train` makes one",
        folder.display()
    )]
    NotARun { folder: PathBuf, problem: String },
    #[error("file {}: response {number}: {problem}", path.display())]
    Response { path: PathBuf, number: usize, problem: String },
    #[error("{}: {problem}", path.display())]
    Metrics { path: PathBuf, problem: String },
    #[error(
        "{}: holds no evaluation; compare reads two folders that `stapo eval` wrote\nhint: stapo eval --model {model} --out evals/NAME makes one",
        folder.display()
    )]
    NoEvaluation { folder: PathBuf, model: String },
    #[error(
        "{} and {} share no benchmark with two questions under one decoding\nhint: evaluate both with the same --benchmarks and --decoding",
        a.display(),
        b.display()
    )]
    NothingShared { a: PathBuf, b: PathBuf },
    #[error(transparent)]
    Stats(#[from] StatsError),
    #[error("checkpoint {}: {problem}", path.display())]
    Checkpoint { path: PathBuf, problem: String },
    #[error("model {name}: {problem}\nhint: {remedy}")]
    NoModel { name: String, problem: String, remedy: String },
    #[error(
        "model {id}: neither a file or folder here, nor fetched from the hub before\nhint: stapo fetch model {id}{} gets it; --fetch gets it where it is needed",
        at_revision(revision)
    )]
    NotFetched { id: String, revision: String },
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Task(#[from] TaskError),
    #[error(transparent)]
    Model(#[from] stapo_model::Error),
    #[error("{reason}")]
    NoTokenizer { reason: String },
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    #[error(
        "{device}: the run needs {needed_mib} MiB, {free_mib} MiB are free\nhint: set update.recompute=inputs or layers, or lower update.microbatch_tokens or rollout.kv_mib; stapo plan shows the parts"
    )]
    DoesNotFit { device: String, needed_mib: u64, free_mib: u64 },
    #[error("signal {signal} asked this run to stop, and what was being sampled is abandoned")]
    Abandoned { signal: i32 },
    #[error("problem {problem_id}: {source}")]
    Request { problem_id: String, source: RequestError },
    #[error(
        "config.rollout.max_prompt_tokens: {n_long} of {n_known} prompts are longer than {limit} tokens; the longest, of problem {problem_id:?}, has {n_tokens}\nhint: raise it to {n_tokens}, or leave such problems out with rollout.long_prompts=drop"
    )]
    LongPrompts { n_long: usize, n_known: usize, problem_id: String, n_tokens: usize, limit: usize },
    #[error(
        "problem {problem_id:?}: the tokenizer turns its prompt into no token\nhint: stapo problems shows the prompts; the tokenizer may know none of these characters"
    )]
    EmptyPrompt { problem_id: String },
    #[error(
        "every prompt has characters that the model's tokenizer has no token for: {characters}; that of problem {problem_id:?} is the first\nhint: leave them out of the template and of the problems; the built-in model reads arithmetic such as 12+30="
    )]
    UnseenPrompts { characters: String, problem_id: String },
    #[error(
        "data file {}: every row has characters that the model's tokenizer has no token for: {characters}\nhint: leave them out, or train a model whose tokenizer knows them; the built-in model reads arithmetic such as 12+30=",
        path.display()
    )]
    UnseenRows { path: PathBuf, characters: String },
    #[error("problem {problem_id:?}: {source}")]
    Prompt { problem_id: String, source: Box<Error> },
    #[error(
        "problem {problem_id}: its prompt has {n_tokens} tokens, the limit is {limit}\nhint: raise rollout.max_prompt_tokens, or leave such problems out with rollout.long_prompts=drop"
    )]
    PromptTooLong { problem_id: String, n_tokens: usize, limit: usize },
    #[error(
        "problem {problem_id}: the teacher's prompt has {n_tokens} tokens, with a response of {n_response} more than the {limit} that fit\nhint: shorten teacher.template, raise update.microbatch_tokens, or leave problems with such solutions out of the data"
    )]
    TeacherPrompt { problem_id: String, n_tokens: usize, n_response: usize, limit: usize },
    #[error(
        "rollout file {}: {problem}\nhint: `stapo problems CONFIG --json` lists the problems in the order a run draws them; rollout.group_size responses belong to each",
        path.display()
    )]
    Rollouts { path: PathBuf, problem: String },
    #[error(
        "checkpoint state {key}: {problem}\nhint: the checkpoint was written by another program; continue from an earlier one"
    )]
    LoopState { key: &'static str, problem: String },
    #[error(
        "data file {}: {n_long} of {n_rows} rows have more than {limit} tokens; the longest, row {number}, has {n_tokens}\nhint: raise update.microbatch_tokens as far as the model's positions go{}",
        path.display(),
        or_drop(*n_long < *n_rows)
    )]
    LongRows { path: PathBuf, n_long: usize, n_rows: usize, number: u64, n_tokens: usize, limit: usize },
    #[error(
        "data file {}, row {number}: makes fewer than two tokens, so there is nothing to learn\nhint: leave the row out; or the model's tokenizer knows none of its characters",
        path.display()
    )]
    EmptyRow { path: PathBuf, number: u64 },
    #[error("data file {}, row {number}: {source}", path.display())]
    TextRow { path: PathBuf, number: u64, source: Box<Error> },
    #[error(
        "example {position}: {n_tokens} tokens, expected 2 to {limit}\nhint: raise update.microbatch_tokens, or shorten the text"
    )]
    BadExample { position: u64, n_tokens: usize, limit: usize },
    #[error("step {step}{}: {source}{}", in_microbatch(*microbatch), objective_hint(source))]
    Objective { step: u64, microbatch: Option<usize>, source: ObjectiveError },
    #[error(
        "step {step}{}: {source}\nhint: no weight was changed by it; start again with a lower update.learning_rate, or look at rollouts/ for what the model wrote",
        in_microbatch(*microbatch)
    )]
    Gradient { step: u64, microbatch: Option<usize>, source: GradientError },
    #[error(
        "step {step}: {part} {tensor}: element {element} is not a finite number\nhint: nothing of this step was saved; the previous checkpoint is intact. Lower update.learning_rate, or look at the rewards"
    )]
    NotFinite { step: u64, part: &'static str, tensor: String, element: usize },
    #[error(transparent)]
    Packing(#[from] SequenceTooLong),
    #[error(transparent)]
    Rank(#[from] RankError),
    #[error("benchmark {name}: {problem}\nhint: {remedy}")]
    Benchmark { name: String, problem: String, remedy: String },
    #[error("config.{key}: {problem}\nhint: {remedy}")]
    Misfit { key: &'static str, problem: String, remedy: &'static str },
    #[error(
        "step {step}: the replayed batch has another token at place {token_idx} of problem {problem_id:?}, sample {sample_idx}, than the run recorded\nhint: `stapo verify --replay` names what differs"
    )]
    OtherReplay { step: u64, problem_id: String, sample_idx: usize, token_idx: usize },
    #[error("step {step}: canary {canary}: {problem}\nhint: {remedy}")]
    Canary { step: u64, canary: &'static str, problem: String, remedy: &'static str },
}

impl Error {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Error::Io { path: path.to_owned(), source }
    }

    /// A folder that cannot be made because it exists.
    pub fn exists(folder: &Path) -> Self {
        let shown = folder.display();
        let other = "choose another folder with --out";
        let can_go_on = ["plan.toml", "eval.json"].iter().any(|file| folder.join(file).is_file());
        let remedy =
            if can_go_on { format!("continue with --resume {shown}, or {other}") } else { other.to_string() };
        Error::Exists { folder: folder.to_owned(), remedy }
    }

    /// A folder that holds no run.
    pub(crate) fn no_run(folder: &Path, problem: String) -> Self {
        let remedy = "name the folder of a run, or start one with --out".to_string();
        Error::NoRun { folder: folder.to_owned(), problem, remedy }
    }

    pub(crate) fn no_model(name: &str, problem: String, remedy: String) -> Self {
        Error::NoModel { name: name.to_string(), problem, remedy }
    }

    pub(crate) fn record(path: &Path, problem: &RecordError) -> Self {
        Error::Record { path: path.to_owned(), problem: problem.clone() }
    }
}

fn at_revision(revision: &str) -> String {
    if revision == "main" { String::new() } else { format!(" --revision {revision}") }
}

/// How many changes an error lists.
const LISTED: usize = 8;

fn changed(changes: &[Change]) -> String {
    let mut lines = vec!["changed since it was saved".to_string()];
    lines.extend(changes.iter().take(LISTED).map(ToString::to_string));
    if changes.len() > LISTED {
        lines.push(format!("and {} more", changes.len() - LISTED));
    }
    lines.join("\n  ")
}

fn in_microbatch(microbatch: Option<usize>) -> String {
    microbatch.map_or(String::new(), |place| format!(", micro-batch {}", place + 1))
}

fn objective_hint(source: &ObjectiveError) -> &'static str {
    match source {
        ObjectiveError::Advantage { .. } | ObjectiveError::Reward { .. } => {
            "\nhint: nothing of this step was saved; the rewards are too large for their differences to be numbers"
        }
        _ => "",
    }
}

/// Leaving out long rows helps where others are left.
fn or_drop(are_some_left: bool) -> &'static str {
    if are_some_left {
        ", or leave such rows out with data.long_rows=drop"
    } else {
        "; no row is short enough"
    }
}

fn io_hint(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::StorageFull => {
            "\nhint: free some space, then continue with --resume; what was written is intact"
        }
        std::io::ErrorKind::FileTooLarge => {
            "\nhint: raise the limit on the size of files (ulimit -f), then continue with --resume; what was written is intact"
        }
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            "\nhint: choose a folder you may write to with --out"
        }
        _ => "",
    }
}
