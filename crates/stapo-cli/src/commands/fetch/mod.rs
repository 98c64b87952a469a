//! `stapo fetch`

mod hub;
mod timed;

use crate::shared::terminal::plain;
use anyhow::{Context, Result, bail};
use hub::{Hub, Listing, Repo, RepoKind};
use indicatif::{ProgressBar, ProgressStyle};
use stapo_rl::evaluation::{Benchmark, KNOWN};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Fetches benchmarks, data sets and models from the Hugging Face hub.
///
/// Honours HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_DOWNLOAD_TIMEOUT; files land in the usual cache. A transfer that breaks off
/// goes on from there; a file whose content does not have the hash the hub names is thrown away.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// The questions of the known benchmarks, each as NAME.jsonl or NAME.parquet.
    Benchmarks {
        /// By default all that are known.
        names: Vec<String>,
        /// Where they go: what `stapo eval --data` reads.
        #[arg(long, value_name = "DIR", default_value = "data")]
        to: PathBuf,
    },
    /// The jsonl and parquet files of a data set; prints their paths.
    Dataset(RepoArgs),
    /// Weights, config and tokenizer of a model; prints the folder to give as --model.
    Model(RepoArgs),
}

#[derive(clap::Args)]
struct RepoArgs {
    /// OWNER/NAME.
    id: String,
    #[arg(long, default_value = "main")]
    revision: String,
    /// Only this file; may be repeated. For a model with several GGUF files, name one.
    #[arg(long)]
    file: Vec<String>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let hub = Hub::from_env()?;
    match &args.what {
        What::Benchmarks { names, to } => benchmarks(&hub, names, to)?,
        What::Dataset(args) => {
            for path in fetch(&hub, RepoKind::Dataset, args, is_rows)? {
                println!("{}", path.display());
            }
        }
        What::Model(args) => {
            let paths = fetch(&hub, RepoKind::Model, args, is_model_file)?;
            let config = paths.iter().find(|path| path.file_name().is_some_and(|name| name == "config.json"));
            let shown = config.and_then(|path| path.parent()).or(paths.first().map(PathBuf::as_path));
            println!("{}", shown.context("nothing was fetched")?.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn is_rows(file: &str) -> bool {
    [".jsonl", ".parquet"].iter().any(|end| file.ends_with(end))
}

/// Weights, config and tokenizer files. Pickles and Python files are left out, since loading them would execute code.
fn is_model_file(file: &str) -> bool {
    let names = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ];
    names.contains(&file) || (file.ends_with(".safetensors") && !file.contains('/'))
}

fn fetch(hub: &Hub, kind: RepoKind, args: &RepoArgs, is_wanted: fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let repo = Repo { kind, id: args.id.clone(), revision: args.revision.clone() };
    let listing = hub.list(&repo)?;
    let wanted: Vec<String> = if args.file.is_empty() {
        listing.files.iter().filter(|file| is_wanted(file)).cloned().collect()
    } else {
        args.file.clone()
    };
    if let Some(file) = wanted.iter().find(|file| !listing.files.contains(file)) {
        bail!("{} {file}: not in the repository\nhint: it holds {}", repo.id, listing.files.join(", "));
    }
    if wanted.is_empty() {
        bail!(
            "{}: holds nothing this program reads\nhint: name files with --file; it holds {}",
            repo.id,
            listing.files.join(", ")
        );
    }
    wanted.iter().map(|file| fetch_file(hub, &repo, &listing, file)).collect()
}

fn fetch_file(hub: &Hub, repo: &Repo, listing: &Listing, file: &str) -> Result<PathBuf> {
    let bar = ProgressBar::new(0);
    let template = "{msg} {bar:25} {bytes}/{total_bytes} {bytes_per_sec} {eta} left";
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(plain(file));
    let path = hub.fetch(repo, &listing.commit, file, &|have, size| {
        bar.set_length(size);
        bar.set_position(have);
    });
    bar.finish_and_clear();
    path
}

fn benchmarks(hub: &Hub, names: &[String], to: &Path) -> Result<()> {
    for name in names {
        if !KNOWN.iter().any(|known| known.name == name) {
            let all: Vec<&str> = KNOWN.iter().map(|known| known.name).collect();
            bail!("benchmark {name}: unknown\nhint: one of {}", all.join(", "));
        }
    }
    let is_asked = |name: &str| names.is_empty() || names.iter().any(|n| n == name);
    std::fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    for known in KNOWN.iter().filter(|known| is_asked(known.name)) {
        let repo =
            Repo { kind: RepoKind::Dataset, id: known.repository.to_string(), revision: "main".into() };
        let listing = hub.list(&repo)?;
        let file = questions_file(&listing.files).with_context(|| {
            format!("{}: no file of test questions among {}", repo.id, listing.files.join(", "))
        })?;
        let fetched = fetch_file(hub, &repo, &listing, file)?;
        let extension = if file.ends_with(".parquet") { "parquet" } else { "jsonl" };
        let path = to.join(format!("{}.{extension}", known.name));
        std::fs::copy(&fetched, &path).with_context(|| path.display().to_string())?;
        let n = Benchmark::open(known.name, to, None)?.problems.len();
        let note = if n == known.n_questions {
            String::new()
        } else {
            format!(" (the paper's set has {})", known.n_questions)
        };
        println!("{:<10} {n} questions{note}  {}", known.name, path.display());
    }
    Ok(())
}

/// The file of questions to evaluate on: the first whose name contains `test`, else the first file of rows.
fn questions_file(files: &[String]) -> Option<&String> {
    let rows = || files.iter().filter(|file| is_rows(file));
    rows().find(|file| file.contains("test")).or_else(|| rows().next())
}
