//! Going on with a run: the folder is locked, read and compared before a byte of it changes.

use super::answers;
use super::checkpoint::Checkpoint;
use super::events::{self, EventLog, read_events};
use super::folder::{Run, open_metrics};
use super::journal::{self, Journal, parts};
use super::lock::FolderLock;
use super::manifest;
use super::plan_keys::{Freedom, differences, freedom};
use super::receipt::{self, Reviewed};
use super::saving::Spare;
use super::tree::check_tree;
use crate::error::{Error, Result};
use crate::plan::config::Schedule;
use crate::run::disk::{remove_file, sha256_hex, write_whole};
use stapo_core::record::{
    self, AcceptedChange, Change, EpisodeRecord, Event, EventKind, Identity, Record, StepHash, Stepped,
    Writer, changed_inputs,
};
use stapo_core::settings;
use std::fs;
use std::path::{Path, PathBuf};

/// A run folder that is about to continue. Until [`Reopening::commit`] nothing in the folder has changed.
pub struct Reopening {
    folder: PathBuf,
    lock: FolderLock,
    /// The newest good checkpoint; `None` for a start that was interrupted before its first.
    pub checkpoint: Option<Checkpoint>,
    /// Why newer checkpoints were refused.
    pub refused: Vec<Error>,
    /// The plan with which the run continues.
    pub plan_text: String,
    /// Whether answers of environments are kept for the steps that are made again.
    keeps_answers: bool,
    plan_found: String,
    /// What differs from the checkpoint and has to be accepted.
    changes: Vec<Change>,
    /// Records that differ from what the checkpoint sealed, those included that were accepted before.
    records: Vec<Change>,
    /// Keys of the plan that may change.
    settings: Vec<Change>,
    /// What the user should know.
    warnings: Vec<String>,
}

/// A text of a plan with every key that this program knows.
pub type Complete<'a> = &'a dyn Fn(&str) -> Result<String>;

impl Reopening {
    /// Locks the folder and finds the checkpoint to continue from. The plan is compared with that of the checkpoint.
    pub fn open(folder: &Path, complete: Complete) -> Result<Self> {
        check_tree(folder)?;
        let path = folder.join("plan.toml");
        if !folder.is_dir() || fs::symlink_metadata(&path).is_err() && !folder.join("checkpoints").is_dir() {
            return Err(Error::no_run(folder, "no plan.toml, so this is no run folder".into()));
        }
        let lock = FolderLock::take(folder)?;
        let (checkpoint, refused) = Checkpoint::newest(folder)?;
        let plan_found = match (fs::read_to_string(&path), &checkpoint) {
            (Ok(text), _) => text,
            (Err(error), Some(checkpoint)) => {
                return Err(lost_plan(folder, checkpoint, &error.to_string()));
            }
            (Err(error), None) => return Err(Error::io(&path, error)),
        };
        if checkpoint.is_none() {
            refuse_lost_checkpoints(folder, &refused)?;
        }
        let mut reopening = Self {
            folder: folder.to_owned(),
            lock,
            checkpoint,
            refused,
            plan_text: plan_found.clone(),
            keeps_answers: false,
            plan_found,
            changes: Vec::new(),
            records: Vec::new(),
            settings: Vec::new(),
            warnings: Vec::new(),
        };
        reopening.compare_files()?;
        reopening.compare_plan(complete)?;
        Ok(reopening)
    }

    /// Steps that the run has made.
    pub fn step(&self) -> u64 {
        self.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.counters.step)
    }

    /// Keeps the answers of environments in steps that are made again, and returns them.
    pub(crate) fn keep_answers(&mut self) -> Result<Vec<EpisodeRecord>> {
        self.keeps_answers = true;
        answers::recorded_answers(&self.folder, self.step())
    }

    /// Refuses a last step below the steps that the run has made, and another last step where the learning rates follow
    /// from it: `n_updates` are the optimizer steps that the run had planned.
    pub(crate) fn check_steps(
        &self,
        steps: u64,
        schedule: Schedule,
        n_updates: impl Fn(u64) -> u64,
    ) -> Result<()> {
        let step = self.step();
        if steps < step {
            let problem = format!("{steps} is below the {step} steps that the run has made");
            return Err(Error::Misfit { key: "steps", problem, remedy: "set it to that number or above" });
        }
        let found = settings::parse(&self.plan_found).ok();
        let planned = found.and_then(|plan| u64::try_from(plan.get("steps")?.as_integer()?).ok());
        let Some(planned) = planned.filter(|planned| *planned != steps && schedule.follows_the_plan()) else {
            return Ok(());
        };
        Err(Error::Misfit {
            key: "update.schedule.total_steps",
            problem: format!(
                "absent, so the learning rates follow from steps, which changes from {planned} to {steps}; the run was planned with a total of {}",
                n_updates(planned)
            ),
            remedy: "give the total number of optimizer steps: --set update.schedule.total_steps=N; with the total of the plan they stay as they were and end at their lowest",
        })
    }

    /// Compares the files of the folder with its receipt, and the records with what the checkpoint has sealed, which is all
    /// that a killed run has. The plan is compared key by key.
    fn compare_files(&mut self) -> Result<()> {
        let accepted = manifest::accepted(&self.folder)?;
        let Reviewed { mut changes, same } = receipt::review(&self.folder, self.checkpoint.as_ref())?;
        let provenance = self.checkpoint.as_ref().and_then(|checkpoint| checkpoint.provenance.as_ref());
        if let Some(provenance) = provenance {
            let (sealed, last) = (&provenance.records, provenance.metrics.as_deref());
            self.records = journal::changes(&self.folder, self.step(), sealed, last, &same)?;
        }
        changes.retain(|change| change.file() != Some("plan.toml"));
        for change in &self.records {
            let is_known = changes.contains(change) || accepted.iter().any(|known| known.change == *change);
            changes.extend((!is_known).then(|| change.clone()));
        }
        self.changes.extend(changes);
        Ok(())
    }

    fn compare_plan(&mut self, complete: Complete) -> Result<()> {
        let found = sha256_hex(self.plan_found.as_bytes());
        let Some(checkpoint) = &self.checkpoint else {
            // Before the first checkpoint the manifest holds the plan's hash. A damaged manifest holds nothing.
            match manifest::written(&self.folder) {
                None => self.warnings.push(
                    "manifest.json is damaged and there is no checkpoint, so changes of plan, data and model cannot be found".into(),
                ),
                Some(manifest) => {
                    let started = manifest.inputs.into_iter().find(|input| input.name == "plan");
                    let started = started.filter(|started| started.sha256 != found);
                    let change = |before| Change { name: "plan.toml".into(), before, after: found.clone() };
                    self.changes.extend(started.map(|started| change(started.sha256)));
                }
            }
            return Ok(());
        };
        let Some(provenance) = &checkpoint.provenance else {
            self.warnings.push(format!(
                "checkpoint {}: was made by a program that recorded no identity, so changes of plan, data and model cannot be found",
                checkpoint.path.display()
            ));
            return Ok(());
        };
        let differ = differences(&provenance.plan, &complete(&provenance.plan)?, &self.plan_found)
            .map_err(|error| lost_plan(&self.folder, checkpoint, &error.to_string()))?;
        let is_recorded =
            read_events(&self.folder)?.iter().any(|event| event.plan_sha256.as_ref() == Some(&found));
        for change in differ {
            match freedom(&change) {
                Freedom::Free => self.settings.push(change),
                Freedom::Recorded if is_recorded => {}
                Freedom::Recorded | Freedom::Identity => self.changes.push(change),
            }
        }
        Ok(())
    }

    /// Goes on with another plan. Keys that a resume may change are recorded; the others have to be accepted.
    pub fn set(&mut self, plan_text: String, complete: Complete) -> Result<()> {
        // Complete on both sides: keys of an earlier program may have other names today.
        let before = complete(&self.plan_found)?;
        let differ =
            differences(&before, &before, &plan_text).map_err(crate::plan::config::PlanError::from)?;
        for change in differ {
            match freedom(&change) {
                Freedom::Identity => self.changes.push(change),
                Freedom::Recorded | Freedom::Free => self.settings.push(change),
            }
        }
        self.plan_text = plan_text;
        Ok(())
    }

    /// Compares the inputs and the program with those of the checkpoint, and refuses what changed unless changes are
    /// accepted. The device is a key of the plan and was compared with it.
    pub fn compare(&mut self, identity: &Identity, accept_changes: bool) -> Result<()> {
        let before = match &self.checkpoint {
            Some(checkpoint) => checkpoint.provenance.as_ref().map(|by| by.identity.clone()),
            None => started_identity(&self.folder),
        };
        if let Some(before) = before {
            self.changes.extend(changed_inputs(&before.inputs, &identity.inputs));
            if before.program != identity.program {
                self.warnings.push(format!(
                    "the run was made by stapo {}, this is stapo {}; the results may differ",
                    before.program, identity.program
                ));
            }
        }
        if self.changes.is_empty() || accept_changes {
            return Ok(());
        }
        let plan = self.checkpoint.as_ref().map(|checkpoint| checkpoint.path.join("plan.toml"));
        Err(Error::Changed { folder: self.folder.clone(), changes: self.changes.clone(), plan })
    }

    /// Makes the folder that of a run at its checkpoint: later metrics and records are removed, changes recorded.
    pub fn commit<M: Stepped>(mut self, identity: Identity, writer: &Writer) -> Result<Run> {
        let step = self.step();
        let (metrics, last) = self.metrics_up_to::<M>(step)?;
        self.warnings.extend(self.lock.warning());
        let mut manifest = manifest::read(&self.folder)?;
        self.lock.sign(writer)?;
        // What is accepted is on disk before the receipt that speaks against it is withdrawn, and before anything changes.
        manifest.accepted = manifest::accepted(&self.folder)?;
        let accepted = self.changes.iter().map(|change| AcceptedChange { step, change: change.clone() });
        manifest.accepted.extend(accepted);
        if manifest.files.take().is_some() || !self.changes.is_empty() {
            write_whole(&self.folder.join("manifest.json"), manifest.to_line().as_bytes())?;
        }
        receipt::withdraw(&self.folder)?;
        let mut log = EventLog::open(&self.folder)?;
        for event in self.happened(step, writer) {
            log.add(&event)?;
        }
        if self.plan_text != self.plan_found {
            write_whole(&self.folder.join("plan.toml"), self.plan_text.as_bytes())?;
        }
        let path = self.folder.join("metrics.jsonl");
        if fs::read_to_string(&path).ok().as_ref() != Some(&metrics) {
            write_whole(&path, metrics.as_bytes())?;
        }
        answers::carry_over(&self.folder, step, self.keeps_answers)?;
        remove_later_records(&self.folder, step)?;
        let provenance = self.checkpoint.as_ref().and_then(|checkpoint| checkpoint.provenance.as_ref());
        let sealed = provenance.map_or(&[][..], |provenance| &provenance.records);
        journal::cut(&self.folder, step, sealed, &self.records)?;
        let config_text = fs::read_to_string(self.folder.join("config.toml")).unwrap_or_default();
        let kept: Vec<StepHash> = manifest.steps.iter().filter(|hash| hash.step <= step).cloned().collect();
        manifest.inputs = manifest::inputs(&config_text, &self.plan_text, &identity);
        manifest.steps = manifest::recorded_hashes(&self.folder, &kept, step)?;
        manifest.program.clone_from(&identity.program);
        manifest.device.clone_from(&identity.device);
        // The start of a run that continues from another model is another start.
        let is_kept = |checkpoint: &Checkpoint| !checkpoint.is_start() || self.changes.is_empty();
        let saved = self.checkpoint.as_ref().filter(|checkpoint| is_kept(checkpoint));
        let saved = saved.map(|checkpoint| checkpoint.counters.step);
        let run = Run {
            metrics: open_metrics(&self.folder)?,
            journal: Journal::open(&self.folder)?,
            folder: self.folder,
            lock: self.lock,
            events: log,
            manifest,
            plan_text: self.plan_text,
            identity,
            last,
            saved,
            best: None,
            in_flight: None,
            in_parts: None,
            buffer: Spare::None,
            warnings: self.warnings,
        };
        run.write_manifest()?;
        Ok(run)
    }

    /// The events of the resume, in order.
    fn happened(&self, step: u64, writer: &Writer) -> Vec<Event> {
        let plan = sha256_hex(self.plan_text.as_bytes());
        let entry = events::entry(EventKind::Resume, step, writer);
        let refused = self
            .refused
            .iter()
            .map(|error| events::event(EventKind::CheckpointRefused, step, error.to_string()));
        let changes =
            self.changes.iter().map(|change| events::changed(EventKind::Accepted, step, change, &plan));
        let settings =
            self.settings.iter().map(|change| events::changed(EventKind::Setting, step, change, &plan));
        let warnings =
            self.warnings.iter().map(|text| events::event(EventKind::Warning, step, text.as_str()));
        std::iter::once(entry).chain(refused).chain(changes).chain(settings).chain(warnings).collect()
    }

    /// The text of `metrics.jsonl` up to a step, and the line of that step. Where only that line is missing or
    /// different, it comes from the checkpoint; where more is missing, the run is refused.
    fn metrics_up_to<M: Stepped>(&mut self, step: u64) -> Result<(String, Option<(u64, String)>)> {
        let path = self.folder.join("metrics.jsonl");
        let text = match fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(Error::io(&path, error)),
        };
        let records: Vec<M> = record::parse_lines(&text).map_err(|e| Error::record(&path, &e))?.records;
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let mut kept: Vec<&str> =
            lines.zip(&records).filter(|(_, metrics)| metrics.step() <= step).map(|(line, _)| line).collect();
        let steps = records.iter().map(Stepped::step).filter(|found| *found <= step);
        let n_right = steps.zip(1..).take_while(|(found, expected)| found == expected).count() as u64;
        let sealed = self.checkpoint.as_ref().and_then(|checkpoint| checkpoint.provenance.as_ref());
        let sealed = sealed.and_then(|provenance| provenance.metrics.as_deref());
        let is_whole = n_right == step && kept.len() as u64 == step;
        let lacks_the_last = n_right + 1 == step && kept.len() as u64 + 1 == step;
        if let (true, Some(line)) = (lacks_the_last, sealed) {
            self.warnings.push(format!(
                "{}: step {step} was missing and is taken from its checkpoint",
                path.display()
            ));
            kept.push(line);
        } else if !is_whole {
            let problem =
                format!("metrics.jsonl has {n_right} steps in order, the checkpoint is of step {step}");
            return Err(Error::NoRun {
                folder: self.folder.clone(),
                problem,
                remedy: "put the file back; or move newer checkpoints out of checkpoints/, and the run continues from an older one".into(),
            });
        } else if let (Some(line), Some(last)) = (sealed, kept.last_mut())
            && *last != line
        {
            self.warnings.push(format!(
                "{}: step {step} was changed and is taken from its checkpoint",
                path.display()
            ));
            *last = line;
        }
        let last = kept.last().map(|line| (step, (*line).to_string()));
        Ok((kept.iter().flat_map(|line| [line, "\n"]).collect(), last))
    }
}

/// The inputs and the program that the manifest of an interrupted start names.
fn started_identity(folder: &Path) -> Option<Identity> {
    let manifest = manifest::written(folder)?;
    let inputs = manifest
        .inputs
        .into_iter()
        .filter(|input| !["config", "plan", "program"].contains(&input.name.as_str()));
    Some(Identity { program: manifest.program, device: manifest.device, inputs: inputs.collect() })
}

fn lost_plan(folder: &Path, checkpoint: &Checkpoint, problem: &str) -> Error {
    let remedy = match checkpoint.provenance {
        Some(_) => {
            format!("the plan of the run is in {}: copy it back", checkpoint.path.join("plan.toml").display())
        }
        None => "put the plan of the run back".to_string(),
    };
    Error::NoRun { folder: folder.to_owned(), problem: format!("plan.toml: {problem}"), remedy }
}

/// Refuses a run that had checkpoints of which none can be read.
fn refuse_lost_checkpoints(folder: &Path, refused: &[Error]) -> Result<()> {
    let n_lines = fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default().lines().count();
    let problem = match (refused, n_lines) {
        ([], 0) => return Ok(()),
        ([], n) => format!("metrics of {n} steps, but no checkpoint"),
        ([first, ..], _) => format!("no good checkpoint among {}: {first}", refused.len()),
    };
    let folder = folder.to_owned();
    let remedy = format!(
        "nothing was changed; put a checkpoint back, or start the same plan again: stapo train {} --out OTHER",
        folder.join("plan.toml").display()
    );
    Err(Error::NoRun { folder, problem, remedy })
}

/// Removes the records of steps that the run will make again.
fn remove_later_records(folder: &Path, step: u64) -> Result<()> {
    for part in parts() {
        let Ok(entries) = fs::read_dir(folder.join(part)) else { continue };
        for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
            let number = path
                .file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.strip_prefix("step-")?.strip_suffix(".jsonl")?.parse::<u64>().ok());
            if number.is_some_and(|number| number > step) {
                remove_file(&path)?;
            }
        }
    }
    Ok(())
}
