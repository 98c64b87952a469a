//! `stapo verify`: compares a folder with its receipt and, on request, its signature and a replay.

mod replay;
mod signature;

use crate::commands::eval;
use crate::shared::allow_command::AllowCommand;
use crate::shared::model::Fetch;
use crate::shared::ranks::{Joined, RankFlags};
use crate::shared::units::size;
use anyhow::{Context, Result, bail};
use stapo_core::record::{self, ABSENT, AcceptedChange, Change, Experiment};
use stapo_core::settings;
use stapo_rl::run::disk::write_whole;
use stapo_rl::run::receipt::{self, Difference, Verified};
use stapo_rl::run::{FolderLock, plan_text};
use stapo_rl::untrusted::read_text;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Checks a run, an evaluation or an experiment: compares every file with the folder's receipt and, on request, checks a
/// signature and replays.
///
/// The receipt is the SHA-256 of manifest.json, which lists every file except the pages that `report` makes. Exit status
/// 0: everything is as recorded. 1: something differs, changed files were accepted, or a signature does not cover
/// everything; the output names it. 2: there is no receipt, or the folder cannot be read. A run without a receipt can
/// still be replayed. `stapo launch` replays a run with several processes.
#[derive(clap::Args)]
pub struct Args {
    /// The folder of a run, an evaluation or an experiment.
    folder: PathBuf,

    #[command(flatten)]
    replay: ReplayFlags,

    /// Ignores missing checkpoints, as in a copy without the large files.
    #[arg(long)]
    without_checkpoints: bool,

    /// Signs the receipt with this Ed25519 private key (PKCS#8 PEM, or 32 raw bytes; no one else may read the file) and
    /// writes manifest.sig, once everything is as recorded.
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,

    /// Checks manifest.sig with this Ed25519 public key (PEM, or 32 raw bytes).
    #[arg(long, value_name = "KEY")]
    key: Option<PathBuf>,

    /// With --key: exit status 0 although the folder holds parts that the signature does not cover, such as pages and
    /// evaluations that were made later. The output lists them.
    #[arg(long, requires = "key")]
    allow_unsigned: bool,

    #[command(flatten)]
    fetch: Fetch,

    #[command(flatten)]
    allow: AllowCommand,

    #[command(flatten)]
    ranks: RankFlags,
}

/// What is made again.
#[derive(clap::Args)]
struct ReplayFlags {
    /// Also replays: the last steps of a run, the first questions of an evaluation, every run of an experiment.
    #[arg(long)]
    replay: bool,

    /// How many steps, or questions of each benchmark, to replay. If no checkpoint is old enough, fewer are replayed, and the
    /// output says so.
    #[arg(long, default_value_t = 3, requires = "replay", value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,

    /// Also asks the environment again for every recorded answer, such as a tool's, and names the first that differs. Without
    /// this flag a replay takes the answers from the records.
    #[arg(long, requires = "replay")]
    live: bool,
}

/// Differences that are printed; the rest is counted.
const MAX_SHOWN: usize = 20;

pub fn run(args: &Args) -> Result<ExitCode> {
    if !args.replay.replay && args.ranks != RankFlags::default() {
        bail!("--rank: given without --replay, and only a replay is the work of several processes");
    }
    if !args.replay.replay {
        return verified(args, &Joined::alone());
    }
    Joined::work(
        &args.ranks,
        |joined| verified(args, joined),
        |joined| replay::follow(args.allow, args.replay.live, joined),
    )
}

fn verified(args: &Args, joined: &Joined) -> Result<ExitCode> {
    let receipt = receipt::verify(&args.folder).map_err(anyhow::Error::from);
    if receipt.is_err() && !args.replay.replay {
        return receipt.map(|_| ExitCode::SUCCESS);
    }
    let mut is_same = true;
    if let Ok(verified) = &receipt {
        is_same &= is_as_recorded(args, verified);
    }
    if let Some(key) = &args.key {
        is_same &= signature_is_right(&args.folder, key)?;
        let unsigned = receipt.as_ref().map_or(Ok(Vec::new()), |found| unsigned(&args.folder, found, key))?;
        for part in &unsigned {
            println!("{part}: NOT covered by the signature");
        }
        is_same &= unsigned.is_empty() || args.allow_unsigned;
    } else if args.folder.join(receipt::SIGNATURE).exists() {
        println!("signature: there is one, not checked; --key KEY checks it");
    }
    if args.replay.replay {
        is_same &= replayed(args, joined)?;
    }
    // A folder without a receipt is replayed first, and the missing receipt is the result all the same.
    receipt?;
    if let Some(key) = &args.sign {
        if !is_same {
            bail!("folder {}: not signed, since it is not as recorded", args.folder.display());
        }
        sign(&args.folder, key)?;
    }
    Ok(if is_same { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// The command that `verify --replay` replaced.
pub fn refuse_earlier_name(words: &[String]) -> Result<ExitCode> {
    let words = if words.is_empty() { "RUN".to_string() } else { words.join(" ") };
    bail!("verify-run: is now a part of stapo verify\nhint: stapo verify {words} --replay")
}

/// Prints how a folder compares with its receipt; true if it is as recorded and no changed files were accepted.
fn is_as_recorded(args: &Args, verified: &Verified) -> bool {
    println!("receipt {}", verified.receipt);
    let (absent, differences): (Vec<&Difference>, Vec<&Difference>) = verified
        .differences
        .iter()
        .partition(|found| args.without_checkpoints && found.is_absent_checkpoint());
    if args.without_checkpoints {
        println!("checkpoints: {} files are not here", absent.len());
    }
    for found in differences.iter().take(MAX_SHOWN) {
        println!("{found}");
    }
    let n_more = differences.len().saturating_sub(MAX_SHOWN);
    if n_more > 0 {
        println!("and {n_more} more");
    }
    for AcceptedChange { step, change } in &verified.accepted {
        println!("{change}: ACCEPTED after step {step} by --accept-changes");
    }
    for later in &verified.later {
        println!("{later}: made later, with a separate receipt");
    }
    let is_changed =
        |found: &&&Difference| matches!(found, Difference::Changed { .. } | Difference::State { .. });
    let n_same = verified.n_files - differences.iter().filter(is_changed).count();
    println!("{n_same} files as recorded, {} in all", size(verified.n_bytes));
    let is_edited = |accepted: &AcceptedChange| {
        accepted.change.file().is_some()
            && !(args.without_checkpoints && is_removed_checkpoint(&accepted.change))
    };
    differences.is_empty() && !verified.accepted.iter().any(is_edited)
}

fn is_removed_checkpoint(change: &Change) -> bool {
    change.after == ABSENT && change.file().is_some_and(receipt::is_of_checkpoint)
}

/// What the signature of a folder does not cover: pages and leftovers, and parts that were made later, unless the same key
/// has signed them.
fn unsigned(folder: &Path, verified: &Verified, key: &Path) -> Result<Vec<String>> {
    let mut found = verified.uncovered.clone();
    for part in &verified.later {
        let path = folder.join(part);
        let is_signed = match std::fs::read(path.join(receipt::SIGNATURE)) {
            Ok(signature) => signature::is_right(key, &receipt::signed_bytes(&path)?, &signature)?,
            Err(_) => false,
        };
        if !is_signed {
            found.push(part.clone());
        }
    }
    found.sort();
    Ok(found)
}

fn signature_is_right(folder: &Path, key: &Path) -> Result<bool> {
    let path = folder.join(receipt::SIGNATURE);
    let signature = std::fs::read(&path)
        .with_context(|| format!("{}\nhint: --sign KEY makes a signature", path.display()))?;
    let is_right = signature::is_right(key, &receipt::signed_bytes(folder)?, &signature)?;
    let says = if is_right { "made with the key of" } else { "NOT made of this manifest with the key of" };
    println!("signature: {says} {}", key.display());
    Ok(is_right)
}

fn sign(folder: &Path, key: &Path) -> Result<()> {
    let signature = signature::sign(key, &receipt::signed_bytes(folder)?)?;
    let _lock = FolderLock::take(folder)?;
    let path = folder.join(receipt::SIGNATURE);
    write_whole(&path, &signature)?;
    println!("signed: {}", path.display());
    Ok(())
}

/// Replays what the folder holds; true if nothing differs.
fn replayed(args: &Args, joined: &Joined) -> Result<bool> {
    let folder = args.folder.as_path();
    let has = |name: &str| folder.join(name).is_file();
    if joined.ranks.world() > 1 && (has("eval.json") || has("experiment.json")) {
        bail!(
            "folder {}: several processes replay a run only, and this is an evaluation or an experiment\nhint: call stapo verify --replay without launch",
            folder.display()
        );
    }
    if has("eval.json") {
        return eval::replay(folder, args.replay.steps as usize, &args.fetch, args.allow);
    }
    if has("experiment.json") {
        let path = folder.join("experiment.json");
        let text = read_text(&path).with_context(|| path.display().to_string())?;
        let experiment: Experiment = record::parse(&text).context(path.display().to_string())?;
        let mut is_same = true;
        for arm in experiment.arms.iter().filter(|arm| arm.error.is_none()) {
            println!("{}:", arm.run);
            is_same &= replayed_run(args, &inside(folder, &arm.run)?, joined)?;
        }
        return Ok(is_same);
    }
    replayed_run(args, folder, joined)
}

/// The folder of a run inside that of its experiment; a stranger's experiment may name another place.
fn inside(experiment: &Path, run: &str) -> Result<PathBuf> {
    if Path::new(run).components().all(|part| matches!(part, std::path::Component::Normal(_))) {
        return Ok(experiment.join(run));
    }
    bail!("experiment {}: names the run {run:?}, which is not inside the folder", experiment.display())
}

fn replayed_run(args: &Args, run: &Path, joined: &Joined) -> Result<bool> {
    let plan = settings::parse(&plan_text(run)?)?;
    if !plan.contains_key("objective") {
        println!("replay: none, a supervised run has no replay");
        return Ok(true);
    }
    replay::replay(run, args.replay.steps, (args.allow, args.replay.live), joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_an_experiment_lies_inside_its_folder() {
        let inside = |run: &str| inside(Path::new("exp"), run).map_err(|error| error.to_string());
        assert_eq!(inside("arm/seed-0"), Ok(PathBuf::from("exp/arm/seed-0")));
        for run in ["../other", "/etc", "arm/../../other", "./arm", ".."] {
            assert!(inside(run).unwrap_err().contains("is not inside the folder"), "{run}");
        }
    }

    #[test]
    fn only_a_checkpoint_that_was_removed_may_be_absent() {
        let weights = "checkpoints/step-000002/weights.safetensors";
        let removed = Change::of_file(weights, "1", ABSENT);
        let edited = Change::of_file(weights, "1", "2");
        let metrics = Change::of_file("metrics.jsonl", "1", ABSENT);
        assert_eq!(
            [removed, edited, metrics].map(|change| is_removed_checkpoint(&change)),
            [true, false, false]
        );
    }
}
