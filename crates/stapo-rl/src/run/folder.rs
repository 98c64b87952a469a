//! An open run directory, which this process alone writes.

use super::checkpoint::{Checkpoint, Provenance, Snapshot, StateSource, TOKEN};
use super::events::{self, EventLog};
use super::image::Image;
use super::journal::{JOURNAL, Journal, METRICS, OPTIONAL_PARTS, PARTS};
use super::lock::FolderLock;
use super::manifest;
use super::new_folder::NewFolder;
use super::parts::{PartOrder, absolute, fresh_token};
use super::receipt;
use super::saving::{InFlight, Source, Spare};
use super::state::{Counters, LoopState};
use crate::error::{Error, Result};
use crate::plan::config::Keeping;
use crate::run::disk::{Appended, create_folder, remove_file, write_whole};
use stapo_core::record::{
    self, Best, EventKind, FileHash, Identity, Manifest, Record, SCHEMA, StepHash, Stepped, StopReason,
    Writer,
};
use stapo_model::decoder::Policy;
use stapo_model::optimizer::Optimizer;
use stapo_model::{Device, HostBuffer, Simd};
use std::fs;
use std::path::{Path, PathBuf};

/// A run that this process writes: the folder is locked for as long as the value lives.
#[derive(Debug)]
pub struct Run {
    pub(super) folder: PathBuf,
    pub(super) lock: FolderLock,
    pub(super) metrics: Appended,
    pub(super) journal: Journal,
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
    /// The checkpoint that is being written.
    pub(super) in_flight: Option<InFlight>,
    /// The checkpoint whose state all ranks are writing.
    pub(super) in_parts: Option<InParts>,
    /// Host memory that the next checkpoint is copied to.
    pub(super) buffer: Spare,
    pub(super) warnings: Vec<String>,
}

/// The weights and moments of a checkpoint to write.
pub(crate) enum ToSave<'a> {
    /// Those of the model that the run started from, whose state has this hash.
    Start {
        state_hash: String,
    },
    Copied(Image),
    /// They are read from all ranks while the trainer waits.
    Streamed(&'a Policy, &'a Optimizer),
}

/// What a run continues from, besides weights and moments.
type Resumable<'a> = (Counters, &'a LoopState);

/// A checkpoint whose state is being written in parts.
#[derive(Debug)]
pub(super) struct InParts {
    snapshot: Snapshot,
    keeping: Keeping,
    best: Option<Best>,
}

/// The best evaluation of a run, and the file that names it.
const BEST: &str = "best.json";

impl Run {
    /// Creates the folder of a new run. A folder that holds something is refused.
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
        write_whole(&at.join(METRICS), b"")?;
        write_whole(&at.join(JOURNAL), b"")?;
        let manifest = manifest::fresh(config_text, plan_text, &identity);
        write_whole(&at.join("manifest.json"), manifest.to_line().as_bytes())?;
        write_whole(&at.join("events.jsonl"), b"")?;
        new.lock.sign(writer)?;
        let lock = new.appear()?;
        let mut run = Self {
            folder: folder.to_owned(),
            lock,
            metrics: open_metrics(folder)?,
            journal: Journal::open(folder)?,
            events: EventLog::open(folder)?,
            manifest,
            plan_text: plan_text.to_string(),
            identity,
            last: None,
            saved: None,
            best: None,
            in_flight: None,
            in_parts: None,
            buffer: Spare::None,
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
        self.journal.add_step(metrics.step())?;
        self.last = Some((metrics.step(), line.trim_end().to_string()));
        if let Some(sha256) = metrics.state_sha256() {
            self.add_state_hash(metrics.step(), sha256.to_string());
        }
        Ok(())
    }

    fn add_state_hash(&mut self, step: u64, sha256: String) {
        let steps = &mut self.manifest.steps;
        steps.retain(|hash| hash.step != step);
        // Steps may have been made while the checkpoint of this one was written.
        let idx = steps.partition_point(|hash| hash.step < step);
        steps.insert(idx, StepHash { step, sha256 });
    }

    /// The recorded hash of the state after `step`.
    pub(crate) fn state_hash(&self, step: u64) -> Option<&str> {
        let hash = self.manifest.steps.iter().rev().find(|hash| hash.step == step);
        hash.map(|hash| hash.sha256.as_str())
    }

    /// Whether the newest good checkpoint is of that step, or will be.
    pub(crate) fn is_saved(&self, step: u64) -> bool {
        self.saved == Some(step) || self.step_in_flight() == Some(step)
    }

    /// The step of the checkpoint that is being written.
    pub fn step_in_flight(&self) -> Option<u64> {
        let in_parts = self.in_parts.as_ref().map(|in_parts| in_parts.snapshot.counters.step);
        in_parts.or(self.in_flight.as_ref().map(|in_flight| in_flight.step))
    }

    /// Names the evaluation whose checkpoint is kept from the next save on.
    pub(crate) fn set_best(&mut self, best: Option<Best>) {
        self.best = best;
    }

    /// The best evaluation so far.
    pub fn best(&self) -> Option<&Best> {
        self.best.as_ref()
    }

    /// The best evaluation of a run folder; `None` if there is none.
    pub fn read_best(folder: &Path) -> Result<Option<Best>> {
        let path = folder.join(BEST);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(record::parse(&text).map_err(|e| Error::record(&path, &e))?)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(&path, error)),
        }
    }

    /// Writes `best.json` and removes the checkpoints, and what of them, that are not to be kept. A checkpoint that is being
    /// written is waited for.
    pub(crate) fn prune(&mut self, step: u64, keeping: Keeping) -> Result<()> {
        self.settle()?;
        self.prune_beside(step, keeping, self.best.as_ref())
    }

    /// The file is written before the checkpoint that it named so far is removed.
    fn prune_beside(&self, step: u64, keeping: Keeping, best: Option<&Best>) -> Result<()> {
        let path = self.folder.join(BEST);
        let text = best.map(Record::to_line);
        match (&text, fs::read_to_string(&path).ok()) {
            (Some(text), found) if found.as_ref() != Some(text) => write_whole(&path, text.as_bytes())?,
            (None, Some(_)) => remove_file(&path)?,
            _ => {}
        }
        Checkpoint::prune(&self.folder, step, keeping, best.map(|best| best.step))
    }

    /// Begins to make the memory that copies of the state will take, where a copy to prepared memory is faster.
    pub(crate) fn prepare_buffer(&mut self, device: &Device, n_bytes: usize) {
        if device.is_async() {
            self.buffer = Spare::begin(device, n_bytes);
        }
    }

    /// The memory that was prepared or that an earlier checkpoint had, for a copy of the state.
    pub(crate) fn take_buffer(&mut self) -> Option<HostBuffer> {
        self.buffer.take()
    }

    /// Writes a checkpoint, then the manifest; only what is to be kept remains. A state that has been copied is written while the
    /// caller continues, and [`Run::settle`] waits for it; the first checkpoint of a run is waited for here, since metrics without
    /// any checkpoint cannot be gone on from. One that is still being written is waited for first.
    pub(crate) fn save(&mut self, resumable: Resumable, state: ToSave, keeping: Keeping) -> Result<()> {
        self.settle()?;
        let mut snapshot = self.snapshot(resumable)?;
        let (step, best) = (snapshot.counters.step, self.best.clone());
        let state_hash = match state {
            ToSave::Copied(image) => {
                let source = Source::Image(image);
                self.in_flight = Some(InFlight::begin(&self.folder, snapshot, source, keeping, best)?);
                return if self.saved.is_none() { self.settle() } else { Ok(()) };
            }
            ToSave::Start { state_hash } => {
                snapshot.provenance.state_hash = state_hash;
                snapshot.write(&self.folder, &StateSource::Start)?
            }
            ToSave::Streamed(policy, optimizer) => {
                snapshot.write(&self.folder, &StateSource::Streamed(policy, optimizer))?
            }
        };
        self.take_saved(step, state_hash, keeping, best.as_ref())
    }

    /// What a checkpoint of the present state says besides weights and moments.
    fn snapshot(&mut self, (counters, loop_state): Resumable) -> Result<Snapshot> {
        self.journal.add_step(self.step())?;
        let recorded = self.state_hash(counters.step).unwrap_or_default().to_string();
        let provenance = Provenance {
            state_hash: recorded,
            records: vec![self.metrics.written(), self.journal.synced()?],
            metrics: self.last.as_ref().map(|(_, line)| line.clone()),
            plan: self.plan_text.clone(),
            identity: self.identity.clone(),
        };
        Ok(Snapshot { counters, loop_state: loop_state.clone(), provenance })
    }

    /// Begins a checkpoint whose state all ranks write: makes the files, and says where they are. [`Run::seal_parts`] follows
    /// when all have written, [`Run::save`] where one of them cannot.
    pub(crate) fn begin_parts(
        &mut self,
        resumable: Resumable,
        (policy, optimizer): (&Policy, &Optimizer),
        keeping: Keeping,
    ) -> Result<PartOrder> {
        self.settle()?;
        let snapshot = self.snapshot(resumable)?;
        let (folder, n_head_bytes) = snapshot.make_files(&self.folder, policy, optimizer)?;
        let token = fresh_token();
        write_whole(&folder.join(TOKEN), token.as_bytes())?;
        self.in_parts = Some(InParts { snapshot, keeping, best: self.best.clone() });
        let folder = absolute(&folder)?;
        // Metrics without any checkpoint cannot be gone on from.
        Ok(PartOrder { folder, n_head_bytes, token, is_waited_for: self.saved.is_none() })
    }

    /// Forgets a checkpoint that not all ranks can write to.
    pub(crate) fn forget_parts(&mut self) {
        self.in_parts = None;
    }

    /// Begins to hash and seal the checkpoint whose state all ranks have written.
    pub(crate) fn seal_parts(&mut self) -> Result<()> {
        let Some(InParts { snapshot, keeping, best }) = self.in_parts.take() else { return Ok(()) };
        self.in_flight = Some(InFlight::begin(&self.folder, snapshot, Source::Written, keeping, best)?);
        Ok(())
    }

    /// Follows a checkpoint that is whole.
    fn take_saved(
        &mut self,
        step: u64,
        state_hash: String,
        keeping: Keeping,
        best: Option<&Best>,
    ) -> Result<()> {
        self.saved = Some(step);
        self.prune_beside(step, keeping, best)?;
        if step > 0 {
            self.add_state_hash(step, state_hash);
        }
        self.write_manifest()
    }

    /// Waits for the checkpoint that is being written, and does what follows it.
    pub fn settle(&mut self) -> Result<()> {
        let Some(mut in_flight) = self.in_flight.take() else { return Ok(()) };
        let Some((written, buffer)) = in_flight.land() else { return Ok(()) };
        self.buffer = buffer.map_or(Spare::None, Spare::Ready);
        self.take_saved(in_flight.step, written?, in_flight.keeping, in_flight.best.as_ref())
    }

    /// As [`Run::settle`], where nothing is left to wait for.
    pub(crate) fn settle_if_landed(&mut self) -> Result<()> {
        if self.in_flight.as_ref().is_some_and(InFlight::has_landed) { self.settle() } else { Ok(()) }
    }

    pub(super) fn write_manifest(&self) -> Result<()> {
        write_whole(&self.folder.join("manifest.json"), self.manifest.to_line().as_bytes())
    }

    /// Lists every file in the manifest, as the last thing that is written. Returns the receipt of the run. Metrics, records
    /// and events that are not as this run wrote them are refused.
    pub fn seal(&self) -> Result<String> {
        let written = self.journal.written().chain([self.metrics.written(), self.events.written()]);
        let written: Vec<FileHash> = written.collect();
        receipt::seal(&self.folder, &self.manifest, &[], &written)
    }

    /// Adds a line to `events.jsonl`.
    pub fn record(&mut self, kind: EventKind, text: &str) -> Result<()> {
        let event = events::event(kind, self.step(), text);
        self.events.add(&event)
    }

    /// Adds a warning to `events.jsonl`, unless this process has added it before.
    pub(crate) fn warn_once(&mut self, text: &str) -> Result<()> {
        if self.warnings.iter().any(|known| known == text) {
            return Ok(());
        }
        self.warnings.push(text.to_string());
        self.record(EventKind::Warning, text)
    }

    /// Adds the stop of the run to `events.jsonl`.
    pub fn record_stop(&mut self, reason: StopReason, text: &str) -> Result<()> {
        let event = events::stopped(reason, self.step(), text);
        self.events.add(&event)
    }

    fn step(&self) -> u64 {
        self.last.as_ref().map_or(0, |(step, _)| *step)
    }

    /// Writes a file of a step, by its name in the folder.
    pub(crate) fn write_record(&mut self, name: &str, text: &str) -> Result<()> {
        let path = self.folder.join(name);
        if let Some(part) = OPTIONAL_PARTS.into_iter().find(|part| name.starts_with(part)) {
            create_folder(&self.folder.join(part))?;
        }
        write_whole(&path, text.as_bytes())?;
        self.journal.note(name, text.as_bytes());
        Ok(())
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
    Appended::open(&folder.join(METRICS))
}
