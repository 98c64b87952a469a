//! The folder of an evaluation: `eval.json` (the settings), `samples.jsonl` (the judged samples), `table.json` (the
//! results), `events.jsonl`, `manifest.json` with `manifest.sha256` once it is complete, and `lock`.

use super::{Done, EvalSampling, sample_key};
use crate::error::{Error, Result};
use crate::plan::config::{EpisodeConfig, PromptStyle};
use crate::run::disk::{Appended, sha256_hex, write_whole};
use crate::run::{EventLog, FolderLock, NewFolder, accepted_changes, check_tree, events, receipt};
use crate::tasks::EnvironmentSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stapo_core::record::{
    self, Change, EvalRecord, EventKind, FileHash, Record, SCHEMA, StopReason, Writer, changed_inputs,
};
use stapo_model::files;
use stapo_model::generate::EngineSettings;
use std::path::{Path, PathBuf};

/// The settings of an evaluation: everything that a sample depends on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalPlan {
    pub schema: u32,
    /// The model as named on the command line.
    pub model: String,
    /// The folder of the adapter that the model was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<PathBuf>,
    pub weights: Vec<FileHash>,
    pub benchmarks: Vec<String>,
    pub data: PathBuf,
    pub decodings: Vec<String>,
    /// Samples per question, instead of each benchmark's own number.
    pub n_samples: Option<usize>,
    /// Only this many questions of each benchmark, from the first on.
    pub limit: Option<usize>,
    pub max_tokens: usize,
    pub template: Option<String>,
    /// The system message of conversations without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    pub chat: bool,
    /// Further variables of the chat template.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub chat_arguments: Map<String, Value>,
    /// Texts that end a response.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// The run whose settings of prompts and responses apply where the command line gave none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompting_of: Option<String>,
    /// A second verifier in addition to the rules of the benchmarks, as named on the command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verifier: Option<String>,
    /// What answers the policy's turns. Without an environment a response is one turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<EnvironmentSpec>,
    /// The limits of episodes, where there is an environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub episode: Option<EpisodeConfig>,
    pub seed: u64,
    pub kv_mib: usize,
    /// The files of the model and of the benchmarks; empty in evaluations of programs that recorded only the weights.
    #[serde(default)]
    pub inputs: Vec<FileHash>,
    /// `cpu` or `cuda`; empty in evaluations of programs that did not record it.
    #[serde(default)]
    pub device: String,
    /// Version and commit.
    #[serde(default)]
    pub program: String,
    /// A hash of the other keys; empty in evaluations of programs that had none.
    #[serde(default)]
    pub seal: String,
}

impl EvalPlan {
    pub fn style(&self) -> PromptStyle {
        let Self { chat, chat_arguments, stop, .. } = self.clone();
        PromptStyle { chat, chat_arguments, stop }
    }

    /// The limits of episodes.
    pub fn episode(&self) -> EpisodeConfig {
        self.episode.clone().unwrap_or_default()
    }

    /// How samples are taken in the plan's style, by one rank of several (`share`) from a policy of that many training steps.
    pub fn sampling<'a>(
        &self,
        (style, episode): (&'a PromptStyle, &'a EpisodeConfig),
        share: (usize, usize),
        step: Option<u64>,
    ) -> EvalSampling<'a> {
        let Self { seed, max_tokens, kv_mib, .. } = *self;
        let step_rows = EngineSettings::default().max_rows;
        EvalSampling { seed, max_tokens, style, kv_bytes: kv_mib << 20, step_rows, share, step, episode }
    }

    fn expected_seal(&self) -> String {
        let unsealed = Self { seal: String::new(), ..self.clone() };
        sha256_hex(serde_json::to_string(&unsealed).expect("a plan is JSON").as_bytes())
    }

    /// The text of `eval.json`.
    fn to_sealed_text(&self) -> String {
        let sealed = Self { seal: self.expected_seal(), ..self.clone() };
        format!("{}\n", serde_json::to_string_pretty(&sealed).expect("a plan is JSON"))
    }

    /// What differs between the recorded inputs and those on disk.
    fn changes(&self, inputs: &[FileHash]) -> Vec<Change> {
        if !self.inputs.is_empty() {
            return changed_inputs(&self.inputs, inputs);
        }
        // Evaluations that recorded only the weights gave all weight files one name.
        let weights = inputs.iter().filter(|input| input.name.starts_with("weights"));
        let weights: Vec<FileHash> =
            weights.map(|input| FileHash { name: "weights".to_string(), ..input.clone() }).collect();
        changed_inputs(&self.weights, &weights)
    }
}

/// The open folder of an evaluation, which this process alone writes.
#[derive(Debug)]
pub struct EvalFolder {
    folder: PathBuf,
    lock: FolderLock,
    samples: Appended,
    events: EventLog,
}

impl EvalFolder {
    /// Creates the folder. One that holds something is refused.
    pub fn create(folder: &Path, plan: &EvalPlan, writer: &Writer) -> Result<Self> {
        let mut new = NewFolder::begin(folder)?;
        write_whole(&new.path().join("eval.json"), plan.to_sealed_text().as_bytes())?;
        write_whole(&new.path().join("samples.jsonl"), b"")?;
        write_whole(&new.path().join("events.jsonl"), b"")?;
        new.lock.sign(writer)?;
        let lock = new.appear()?;
        let mut created = Self::opened(folder, lock)?;
        created.events.add(&events::entry(EventKind::Start, 0, writer))?;
        Ok(created)
    }

    fn opened(folder: &Path, lock: FolderLock) -> Result<Self> {
        let samples = Appended::open(&folder.join("samples.jsonl"))?;
        Ok(Self { folder: folder.to_owned(), lock, samples, events: EventLog::open(folder)? })
    }

    /// The settings of an evaluation; settings that were changed by hand are refused.
    pub fn read_plan(folder: &Path) -> Result<EvalPlan> {
        check_tree(folder)?;
        let path = folder.join("eval.json");
        let refuse = |problem: String| Error::NoRun {
            folder: folder.to_owned(),
            problem,
            remedy: "an evaluation is a folder that `stapo eval` made".into(),
        };
        if path.symlink_metadata().is_err() {
            return Err(refuse("no eval.json, so this is no evaluation".to_string()));
        }
        let text = files::read_text(&path).map_err(|e| Error::io(&path, e))?;
        let plan: EvalPlan = serde_json::from_str(&text).map_err(|e| refuse(format!("eval.json: {e}")))?;
        if plan.schema > SCHEMA {
            return Err(refuse(format!("eval.json has schema {}, this program reads {SCHEMA}", plan.schema)));
        }
        if !plan.seal.is_empty() && plan.seal != plan.expected_seal() {
            let remedy = "put the file back, or evaluate again with another --out".into();
            let problem = "eval.json was changed after it was written: its seal does not fit".into();
            return Err(Error::NoRun { folder: folder.to_owned(), problem, remedy });
        }
        Ok(plan)
    }

    /// All samples so far, without a torn last line.
    pub fn read_samples(folder: &Path) -> Result<Vec<EvalRecord>> {
        let path = folder.join("samples.jsonl");
        let text = files::read_lines(&path).map_err(|e| Error::io(&path, e))?;
        Ok(record::parse_lines(&text).map_err(|e| Error::record(&path, &e))?.records)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What to tell the user about a file system without locks.
    pub fn lock_warning(&self) -> Option<String> {
        self.lock.warning()
    }

    pub fn add(&mut self, sample: &EvalRecord) -> Result<()> {
        self.samples.add(sample.to_line().as_bytes())
    }

    /// Lists every file in the manifest, as the last thing that is written. Returns the receipt of the evaluation.
    pub fn seal(&self, plan: &EvalPlan) -> Result<String> {
        let mut manifest = receipt::plain_manifest(plan.inputs.clone(), &plan.program, &plan.device);
        manifest.accepted = accepted_changes(&self.folder)?;
        receipt::seal(&self.folder, &manifest, &[], &[self.events.written()])
    }

    /// Adds what the user should know to `events.jsonl`.
    pub fn record_warnings(&mut self, warnings: &[String]) -> Result<()> {
        warnings
            .iter()
            .try_for_each(|text| self.events.add(&events::event(EventKind::Warning, 0, text.as_str())))
    }

    /// Adds the end of the evaluation to `events.jsonl`.
    pub fn record_stop(&mut self, reason: StopReason, text: &str) -> Result<()> {
        self.events.add(&events::stopped(reason, 0, text))
    }

    /// Brings the samples into the order of `key`, which does not depend on interruptions, and returns the samples.
    pub fn sort_samples<K: Ord>(&self, key: impl Fn(&EvalRecord) -> K) -> Result<Vec<EvalRecord>> {
        let mut samples = Self::read_samples(&self.folder)?;
        if !samples.is_sorted_by_key(&key) {
            samples.sort_by_key(&key);
            let text: String = samples.iter().map(Record::to_line).collect();
            write_whole(&self.folder.join("samples.jsonl"), text.as_bytes())?;
        }
        Ok(samples)
    }

    /// Writes the table as JSON.
    pub fn write_table(&self, rows: &[super::EvalRow]) -> Result<()> {
        let text = serde_json::to_string_pretty(rows).expect("numbers and names are JSON");
        write_whole(&self.folder.join("table.json"), format!("{text}\n").as_bytes())
    }
}

/// An interrupted evaluation that has been locked; nothing in its folder has changed.
pub struct InterruptedEval {
    pub plan: EvalPlan,
    folder: PathBuf,
    lock: FolderLock,
    samples: Vec<EvalRecord>,
}

impl InterruptedEval {
    pub fn open(folder: &Path) -> Result<Self> {
        EvalFolder::read_plan(folder)?;
        let lock = FolderLock::take(folder)?;
        let plan = EvalFolder::read_plan(folder)?;
        Ok(Self { plan, folder: folder.to_owned(), lock, samples: EvalFolder::read_samples(folder)? })
    }

    /// Goes on with the files of the model and the benchmarks that are there. What changed is refused by name, unless
    /// changes are accepted. A torn last line of the samples is removed. Returns also what the user should know.
    pub fn resume(
        self,
        inputs: &[FileHash],
        device: &str,
        accept_changes: bool,
        writer: &Writer,
    ) -> Result<(EvalFolder, EvalPlan, Done, Vec<String>)> {
        let Self { mut plan, folder, mut lock, samples } = self;
        let mut changes = plan.changes(inputs);
        changes.extend(receipt::review(&folder, None)?.changes);
        if !plan.device.is_empty() && plan.device != device {
            let before = plan.device.clone();
            changes.push(Change { name: "device".into(), before, after: device.to_string() });
        }
        if !changes.is_empty() && !accept_changes {
            return Err(Error::Changed { folder, changes, plan: None });
        }
        let mut warnings: Vec<String> = lock.warning().into_iter().collect();
        if plan.inputs.is_empty() {
            warnings.push("the evaluation recorded only the weights, so changes of tokenizer, template and benchmarks cannot be found".into());
        }
        if !plan.program.is_empty() && plan.program != writer.program {
            let (before, after) = (&plan.program, &writer.program);
            warnings.push(format!("the evaluation was begun by stapo {before}, this is stapo {after}"));
        }
        lock.sign(writer)?;
        // What is accepted is on disk before the receipt that speaks against it is withdrawn.
        let mut log = EventLog::open(&folder)?;
        for change in &changes {
            log.add(&events::changed(EventKind::Accepted, 0, change, ""))?;
        }
        receipt::withdraw_with_manifest(&folder)?;
        let text: String = samples.iter().map(Record::to_line).collect();
        write_whole(&folder.join("samples.jsonl"), text.as_bytes())?;
        let mut opened = EvalFolder::opened(&folder, lock)?;
        opened.events.add(&events::entry(EventKind::Resume, 0, writer))?;
        for text in &warnings {
            opened.events.add(&events::event(EventKind::Warning, 0, text.as_str()))?;
        }
        if !changes.is_empty() {
            plan.inputs = inputs.to_vec();
            plan.device = device.to_string();
            write_whole(&folder.join("eval.json"), plan.to_sealed_text().as_bytes())?;
        }
        Ok((opened, plan, samples.iter().map(sample_key).collect(), warnings))
    }
}
