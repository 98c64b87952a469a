//! An open run directory, which this process alone writes.

use super::checkpoint::{Checkpoint, Provenance, Snapshot};
use super::events::{self, EventLog};
use super::lock::FolderLock;
use super::manifest;
use super::receipt;
use crate::error::{Error, Result};
use crate::run::disk::{Appended, create_folder, remove_file, rename, write_whole};
use stapo_core::record::{
    self, Best, EvalRecord, EventKind, Identity, Manifest, Record, ResponseRecord, SCHEMA, StepHash, Stepped,
    StopReason, TokenRecord, Writer,
};
use stapo_model::Simd;
use std::fs;
use std::path::{Path, PathBuf};

/// A run that this process writes: the folder is locked for as long as the value lives.
#[derive(Debug)]
pub struct Run {
    pub(super) folder: PathBuf,
    pub(super) lock: FolderLock,
    pub(super) metrics: Appended,
    pub(super) events: EventLog,
    pub(super) manifest: Manifest,
    pub(super) plan_text: String,
    pub(super) identity: Identity,
    /// The last step and its line of `metrics.jsonl`.
    pub(super) last: Option<(u64, String)>,
    /// The step of the newest good checkpoint.
    pub(super) saved: Option<u64>,
    /// The evaluation whose checkpoint is kept besides the newest ones.
    pub(super) best: Option<Best>,
    pub(super) warnings: Vec<String>,
}

/// The parts of a run folder that hold one file per recorded step.
const PARTS: [&str; 3] = ["rollouts", "tokens", "explored"];

/// The samples of evaluations on benchmarks: one file per evaluation, in runs that have benchmarks.
const BENCHMARKS: &str = "benchmarks";

/// All parts that hold one file per step.
pub(super) fn parts() -> impl Iterator<Item = &'static str> {
    PARTS.into_iter().chain([BENCHMARKS])
}

/// The best evaluation of a run, and the file that names it.
const BEST: &str = "best.json";

/// A folder in the making, under a temporary name in the folder where it will appear.
pub struct NewFolder {
    final_path: PathBuf,
    temporary: PathBuf,
    pub lock: FolderLock,
    replaces_empty: bool,
}

impl NewFolder {
    /// As `begin`, but an empty folder at `path` is no obstacle: the new folder replaces it.
    pub fn begin_in_place_of_empty(path: &Path) -> Result<Self> {
        Self::make(path, fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none()))
    }

    /// Makes `.NAME.starting` next to `path` and locks it. A `path` that exists is refused. What an interrupted start
    /// left in that folder is written anew.
    pub fn begin(path: &Path) -> Result<Self> {
        Self::make(path, false)
    }

    fn make(path: &Path, replaces_empty: bool) -> Result<Self> {
        if path.exists() && !replaces_empty {
            return Err(Error::exists(path));
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let temporary = path.with_file_name(format!(".{name}.starting"));
        create_folder(&temporary).map_err(|error| match error {
            Error::Io { source, .. } => Error::io(path, source),
            other => other,
        })?;
        let lock = FolderLock::take(&temporary)?;
        Ok(Self { final_path: path.to_owned(), temporary, lock, replaces_empty })
    }

    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Gives the folder its name, as one rename.
    pub fn appear(mut self) -> Result<FolderLock> {
        if self.final_path.exists() && !self.replaces_empty {
            return Err(Error::exists(&self.final_path));
        }
        rename(&self.temporary, &self.final_path)?;
        self.lock.moved_to(&self.final_path);
        Ok(self.lock)
    }
}

impl Run {
    /// Creates the folder of a new run. A folder that exists is refused.
    pub fn create(
        folder: &Path,
        config_text: &str,
        plan_text: &str,
        identity: Identity,
        writer: &Writer,
    ) -> Result<Self> {
        let mut new = NewFolder::begin(folder)?;
        let at = new.path().to_owned();
        for part in PARTS.into_iter().chain(["checkpoints"]) {
            create_folder(&at.join(part))?;
        }
        write_whole(&at.join("config.toml"), config_text.as_bytes())?;
        write_whole(&at.join("plan.toml"), plan_text.as_bytes())?;
        write_whole(&at.join("build.json"), build(&identity.program).to_line().as_bytes())?;
        write_whole(&at.join("metrics.jsonl"), b"")?;
        let manifest = manifest::fresh(config_text, plan_text, &identity);
        write_whole(&at.join("manifest.json"), manifest.to_line().as_bytes())?;
        write_whole(&at.join("events.jsonl"), b"")?;
        new.lock.sign(writer)?;
        let lock = new.appear()?;
        let mut run = Self {
            folder: folder.to_owned(),
            lock,
            metrics: open_metrics(folder)?,
            events: EventLog::open(folder)?,
            manifest,
            plan_text: plan_text.to_string(),
            identity,
            last: None,
            saved: None,
            best: None,
            warnings: Vec::new(),
        };
        run.events.add(&events::entry(EventKind::Start, 0, writer))?;
        if let Some(text) = run.lock.warning() {
            run.record(EventKind::Warning, &text)?;
            run.warnings.push(text);
        }
        Ok(run)
    }

    /// What the user should know about the start or the resume.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The metrics of all steps so far, without a torn last line.
    pub fn read_metrics<M: Stepped>(folder: &Path) -> Result<Vec<M>> {
        let path = folder.join("metrics.jsonl");
        let bytes = fs::read(&path).map_err(|e| Error::io(&path, e))?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(record::parse_lines(&text).map_err(|e| Error::record(&path, &e))?.records)
    }

    /// The manifest; one that is missing or damaged is derived from the other files.
    pub fn read_manifest(folder: &Path) -> Result<Manifest> {
        manifest::read(folder)
    }

    /// Adds the metrics of a step. The line is on disk when the function returns.
    pub fn add_metrics(&mut self, metrics: &impl Stepped) -> Result<()> {
        let line = metrics.to_line();
        self.metrics.add(line.as_bytes())?;
        self.metrics.sync()?;
        self.last = Some((metrics.step(), line.trim_end().to_string()));
        if let Some(sha256) = metrics.state_sha256() {
            self.add_state_hash(metrics.step(), sha256.to_string());
        }
        Ok(())
    }

    fn add_state_hash(&mut self, step: u64, sha256: String) {
        self.manifest.steps.retain(|hash| hash.step < step);
        self.manifest.steps.push(StepHash { step, sha256 });
    }

    /// The recorded hash of the state after `step`.
    pub(crate) fn state_hash(&self, step: u64) -> Option<&str> {
        let hash = self.manifest.steps.iter().rev().find(|hash| hash.step == step);
        hash.map(|hash| hash.sha256.as_str())
    }

    /// Whether the newest good checkpoint is of that step.
    pub(crate) fn is_saved(&self, step: u64) -> bool {
        self.saved == Some(step)
    }

    /// Names the evaluation whose checkpoint is kept from the next save on.
    pub(crate) fn set_best(&mut self, best: Option<Best>) {
        self.best = best;
    }

    /// The best evaluation so far.
    pub fn best(&self) -> Option<&Best> {
        self.best.as_ref()
    }

    /// The best evaluation of a run folder; `None` where there is none.
    pub fn read_best(folder: &Path) -> Result<Option<Best>> {
        let path = folder.join(BEST);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(record::parse(&text).map_err(|e| Error::record(&path, &e))?)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(&path, error)),
        }
    }

    /// Writes `best.json` and removes all but the newest `n_kept` checkpoints and the best one. The file is written before
    /// the checkpoint that it named so far is removed.
    pub(crate) fn prune(&self, step: u64, n_kept: usize) -> Result<()> {
        let path = self.folder.join(BEST);
        let text = self.best.as_ref().map(Record::to_line);
        match (&text, fs::read_to_string(&path).ok()) {
            (Some(text), found) if found.as_ref() != Some(text) => write_whole(&path, text.as_bytes())?,
            (None, Some(_)) => remove_file(&path)?,
            _ => {}
        }
        Checkpoint::prune(&self.folder, step, n_kept, self.best.as_ref().map(|best| best.step))
    }

    /// Writes a checkpoint of the state with that hash, then the manifest; only the newest `n_kept` checkpoints and the
    /// best one remain.
    pub(crate) fn save<'a>(
        &mut self,
        state_hash: String,
        snapshot: impl FnOnce(Provenance) -> Snapshot<'a>,
        n_kept: usize,
    ) -> Result<()> {
        let snapshot = snapshot(Provenance {
            state_hash: state_hash.clone(),
            metrics: self.last.as_ref().map(|(_, line)| line.clone()),
            plan: self.plan_text.clone(),
            identity: self.identity.clone(),
        });
        let step = snapshot.counters.step;
        Checkpoint::save(&self.folder, &snapshot)?;
        self.saved = Some(step);
        self.prune(step, n_kept)?;
        if step > 0 {
            self.add_state_hash(step, state_hash);
        }
        self.write_manifest()
    }

    pub(super) fn write_manifest(&self) -> Result<()> {
        write_whole(&self.folder.join("manifest.json"), self.manifest.to_line().as_bytes())
    }

    /// Lists every file in the manifest, as the last thing that is written. Returns the receipt of the run.
    pub fn seal(&self) -> Result<String> {
        receipt::seal(&self.folder, &self.manifest, &[])
    }

    /// Adds a line to `events.jsonl`.
    pub fn record(&mut self, kind: EventKind, text: &str) -> Result<()> {
        let event = events::event(kind, self.step(), text);
        self.events.add(&event)
    }

    /// Adds the stop of the run to `events.jsonl`.
    pub fn record_stop(&mut self, reason: StopReason, text: &str) -> Result<()> {
        let event = events::stopped(reason, self.step(), text);
        self.events.add(&event)
    }

    fn step(&self) -> u64 {
        self.last.as_ref().map_or(0, |(step, _)| *step)
    }

    pub fn write_responses(&self, step: u64, responses: &[ResponseRecord]) -> Result<()> {
        self.write_lines(PARTS[0], step, responses)
    }

    pub fn write_silenced(&self, step: u64, tokens: &[TokenRecord]) -> Result<()> {
        self.write_lines(PARTS[1], step, tokens)
    }

    pub fn write_explored(&self, step: u64, tokens: &[TokenRecord]) -> Result<()> {
        self.write_lines(PARTS[2], step, tokens)
    }

    /// Writes the samples of an evaluation on benchmarks after `step` steps.
    pub fn write_benchmarks(&self, step: u64, samples: &[EvalRecord]) -> Result<()> {
        if !samples.is_empty() {
            create_folder(&self.folder.join(BENCHMARKS))?;
        }
        self.write_lines(BENCHMARKS, step, samples)
    }

    fn write_lines(&self, part: &str, step: u64, records: &[impl Record]) -> Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let text: String = records.iter().map(Record::to_line).collect();
        write_whole(&self.folder.join(part).join(format!("step-{step:06}.jsonl")), text.as_bytes())
    }
}

fn build(program: &str) -> record::BuildRecord {
    record::BuildRecord {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").to_string(),
        program: program.to_string(),
        target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        features: Simd::available().into_iter().map(|level| level.name().to_string()).collect(),
        n_threads: std::thread::available_parallelism().map_or(1, usize::from),
        extra: record::Extra::new(),
    }
}

pub(super) fn open_metrics(folder: &Path) -> Result<Appended> {
    Appended::open(&folder.join("metrics.jsonl"))
}
