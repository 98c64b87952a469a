//! `events.jsonl`: start, resume, changes, warnings and the stop of a run.

use super::clock::utc;
use crate::error::{Error, Result};
use crate::run::disk::{Appended, write_whole};
use stapo_core::record::{
    self, Change, Event, EventKind, Extra, FileHash, Record, RecordError, SCHEMA, StopReason, Writer,
};
use std::fs;
use std::path::Path;
use std::time::SystemTime;

const EVENTS: &str = "events.jsonl";

/// The open file, to which lines are only added.
#[derive(Debug)]
pub struct EventLog {
    lines: Appended,
    /// True after a failed write, which may have left part of a line.
    torn: bool,
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
        Ok(Self { lines: Appended::open(&path)?, torn: false })
    }

    /// The file as this process wrote it.
    pub fn written(&self) -> FileHash {
        self.lines.written()
    }

    /// Adds an event, which is on disk when the function returns.
    pub fn add(&mut self, event: &Event) -> Result<()> {
        let line = event.to_line();
        let line = if self.torn { format!("\n{line}") } else { line };
        let written = self.lines.add(line.as_bytes());
        self.torn = written.is_err();
        written.and_then(|()| self.lines.sync())
    }
}

/// The events of a folder; empty if there is no such file. A line that cannot be read is a warning that says so: what
/// happened before and after stays readable.
pub fn read_events(folder: &Path) -> Result<Vec<Event>> {
    let text = read_text(folder)?;
    let numbered =
        (1..).zip(text.split_inclusive('\n')).filter(|(_, line)| line.ends_with('\n') && line.len() > 1);
    let unreadable = |number: usize, error: &RecordError| Event {
        time: String::new(),
        ..event(EventKind::Warning, 0, format!("{EVENTS}, line {number} cannot be read: {error}"))
    };
    Ok(numbered
        .map(|(number, line)| record::parse(line).unwrap_or_else(|error| unreadable(number, &error)))
        .collect())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_cannot_be_read_is_a_warning_with_its_number_and_a_torn_one_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        assert!(read_events(at).unwrap().is_empty(), "no file");
        let line = |step| event(EventKind::Warning, step, "text").to_line();
        let text = format!("{}\n{}garbage\n{}{{\"schema\"", line(1), line(2), line(3));
        fs::write(at.join(EVENTS), &text).unwrap();
        let found = read_events(at).unwrap();
        assert_eq!(found.iter().map(|event| event.step).collect::<Vec<_>>(), [1, 2, 0, 3]);
        assert!(found[2].text.starts_with("events.jsonl, line 4 cannot be read"), "{}", found[2].text);
        let mut log = EventLog::open(at).unwrap();
        log.add(&event(EventKind::Warning, 4, "text")).unwrap();
        assert_eq!(read_events(at).unwrap().last().unwrap().step, 4);
        let written = fs::read(at.join(EVENTS)).unwrap();
        assert_eq!(
            log.written(),
            super::super::hashes::hash_bytes(EVENTS, &written),
            "as this process knows it"
        );
    }
}
