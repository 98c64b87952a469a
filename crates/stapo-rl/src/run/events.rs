//! `events.jsonl`: start, resume, changes, warnings and the stop of a run.

use super::clock::utc;
use super::files::write_whole;
use crate::error::{Error, Result};
use stapo_core::record::{self, Change, Event, EventKind, Extra, Record, SCHEMA, StopReason, Writer};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const EVENTS: &str = "events.jsonl";

/// The open file, to which lines are only added.
#[derive(Debug)]
pub struct EventLog {
    path: PathBuf,
    file: File,
}

impl EventLog {
    /// Opens or makes the file of a folder, without a torn last line.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(EVENTS);
        let found = read_text(folder)?;
        let whole = found.rfind('\n').map_or(0, |end| end + 1);
        if whole < found.len() {
            write_whole(&path, &found.as_bytes()[..whole])?;
        }
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(|e| Error::io(&path, e))?;
        Ok(Self { path, file })
    }

    /// Adds an event, which is on disk when the function returns.
    pub fn add(&mut self, event: &Event) -> Result<()> {
        let written = self.file.write_all(event.to_line().as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|e| Error::io(&self.path, e))
    }

    pub(super) fn moved_to(&mut self, folder: &Path) {
        self.path = folder.join(EVENTS);
    }
}

/// The events of a folder; empty where there is no such file.
pub fn read_events(folder: &Path) -> Result<Vec<Event>> {
    let text = read_text(folder)?;
    Ok(record::parse_lines(&text).map_err(|e| Error::record(&folder.join(EVENTS), &e))?.records)
}

fn read_text(folder: &Path) -> Result<String> {
    let path = folder.join(EVENTS);
    match fs::read(&path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(Error::io(&path, error)),
    }
}

/// An event of this moment.
pub fn event(event: EventKind, step: u64, text: impl Into<String>) -> Event {
    Event {
        schema: SCHEMA,
        time: utc(SystemTime::now()),
        event,
        step,
        text: text.into(),
        writer: None,
        change: None,
        plan_sha256: None,
        reason: None,
        extra: Extra::new(),
    }
}

/// The start or resume of a run by a process.
pub fn entry(kind: EventKind, step: u64, writer: &Writer) -> Event {
    Event { writer: Some(writer.clone()), ..event(kind, step, "") }
}

/// A change that was accepted or set.
pub fn changed(kind: EventKind, step: u64, change: &Change, plan_sha256: &str) -> Event {
    Event {
        change: Some(change.clone()),
        plan_sha256: Some(plan_sha256.to_string()),
        ..event(kind, step, change.to_string())
    }
}

/// The stop of a run.
pub fn stopped(reason: StopReason, step: u64, text: impl Into<String>) -> Event {
    Event { reason: Some(reason), ..event(EventKind::Stop, step, text) }
}
