//! `stapo fetch`

use crate::shared::hub::{Hub, Repo, RepoKind, fetch_file, fetch_model, fetch_repository, is_rows};
use anyhow::{Context, Result, bail};
use stapo_rl::lab::evaluation::{Benchmark, KNOWN};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Fetches benchmarks, data sets and models from the Hugging Face hub.
///
/// Files go into the cache of Hugging Face's programs; HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and
/// HF_HUB_DOWNLOAD_TIMEOUT have their usual meaning. An interrupted transfer continues where it stopped. A file whose
/// hash is not the hub's is deleted.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Fetches the questions of the known benchmarks, each as NAME.jsonl or NAME.parquet.
    Benchmarks {
        /// Names of benchmarks; by default all.
        names: Vec<String>,
        /// The folder to write, which `stapo eval --data` reads.
        #[arg(short, long, alias = "to", value_name = "DIR", default_value = "data")]
        out: PathBuf,
    },
    /// Fetches the jsonl and parquet files of a data set and prints their paths.
    Dataset(RepoArgs),
    /// Fetches weights, config and tokenizer of a model and prints the folder. Commands then find it as `--model OWNER/NAME`.
    Model(RepoArgs),
}

#[derive(clap::Args)]
struct RepoArgs {
    /// OWNER/NAME.
    id: String,
    /// Branch, tag or commit.
    #[arg(long, default_value = "main")]
    revision: String,
    /// Only this file; may be repeated. For a model with several GGUF files, name one.
    #[arg(long)]
    file: Vec<String>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.what {
        What::Benchmarks { names, out } => benchmarks(names, out)?,
        What::Dataset(args) => {
            let repo = Repo::new(RepoKind::Dataset, &args.id, &args.revision)?;
            for path in fetch_repository(&Hub::from_env()?, &repo, &args.file, is_rows)? {
                println!("{}", path.display());
            }
        }
        What::Model(args) => {
            println!("{}", fetch_model(&args.id, &args.revision, &args.file)?.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn benchmarks(names: &[String], out: &Path) -> Result<()> {
    for name in names {
        if !KNOWN.iter().any(|known| known.name == name) {
            let all: Vec<&str> = KNOWN.iter().map(|known| known.name).collect();
            bail!("benchmark {name}: unknown\nhint: one of {}", all.join(", "));
        }
    }
    let is_asked = |name: &str| names.is_empty() || names.iter().any(|n| n == name);
    let hub = Hub::from_env()?;
    std::fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    for known in KNOWN.iter().filter(|known| is_asked(known.name)) {
        let repo = Repo::new(RepoKind::Dataset, known.repository, "main")?;
        let listing = hub.list(&repo)?;
        let file = questions_file(&listing.files).with_context(|| {
            format!("{}: no file of test questions among {}", known.repository, listing.files.join(", "))
        })?;
        let fetched = fetch_file(&hub, &repo, &listing, file)?;
        let extension = if file.ends_with(".parquet") { "parquet" } else { "jsonl" };
        let path = out.join(format!("{}.{extension}", known.name));
        std::fs::copy(&fetched, &path).with_context(|| path.display().to_string())?;
        let n = Benchmark::n_questions(known.name, out)?;
        let note =
            if n == known.n_questions { String::new() } else { format!(" (expected {})", known.n_questions) };
        println!("{:<10} {n} questions{note}  {}", known.name, path.display());
    }
    Ok(())
}

/// The file of questions to evaluate on: the first whose name contains `test`, else the first file of rows.
fn questions_file(files: &[String]) -> Option<&String> {
    let rows = || files.iter().filter(|file| is_rows(file));
    rows().find(|file| file.contains("test")).or_else(|| rows().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_questions_are_taken_before_any_other_rows() {
        let chosen = |files: &[&str]| {
            let files: Vec<String> = files.iter().map(ToString::to_string).collect();
            questions_file(&files).cloned()
        };
        assert_eq!(
            chosen(&["test.py", "train.jsonl", "data/test-0.parquet", "test2.csv"]).unwrap(),
            "data/test-0.parquet"
        );
        assert_eq!(chosen(&["README.md", "a.jsonl", "b.jsonl"]).unwrap(), "a.jsonl");
        assert_eq!(chosen(&["test.json.py", "README.md"]), None);
    }
}
