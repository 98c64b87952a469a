//! The state of a run: from its lock on the machine that writes it, from its events and the age of its last line elsewhere.

use serde::Serialize;
use stapo_core::record::{Event, EventKind, StopReason};
use stapo_rl::run::{describe_writer, holder};
use std::path::Path;
use std::time::Duration;

/// A run on another machine that has written nothing for so long, or for `SILENT_STEPS` of its steps, has ended.
const SILENT: Duration = Duration::from_secs(600);
const SILENT_STEPS: f64 = 5.0;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    pub kind: StatusKind,
    /// For a person: by whom, or why.
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StatusKind {
    Running,
    Done,
    Stopped,
    Died,
    Broken,
}

/// What the status of a run depends on.
pub struct Facts<'a> {
    pub folder: &'a Path,
    pub events: &'a [Event],
    pub step: u64,
    pub steps: Option<u64>,
    /// Since the last line of metrics or events.
    pub age: Duration,
    pub seconds_per_step: Option<f64>,
    /// The name of this machine.
    pub host: &'a str,
    /// Why the run cannot be read.
    pub problem: Option<&'a str>,
}

pub fn status(facts: &Facts) -> Status {
    let status_of = |kind: StatusKind, text: String| Status { kind, text };
    if let Some(problem) = facts.problem {
        return status_of(StatusKind::Broken, problem.to_string());
    }
    let last = facts
        .events
        .iter()
        .rfind(|event| matches!(event.event, EventKind::Start | EventKind::Resume | EventKind::Stop));
    let text = last.map_or(String::new(), |last| last.text.lines().next().unwrap_or_default().to_string());
    match last.map(|last| (last.event, last.reason)) {
        Some((EventKind::Stop, Some(StopReason::Done))) => return status_of(StatusKind::Done, text),
        Some((EventKind::Stop, Some(StopReason::TargetReached))) => {
            return status_of(StatusKind::Done, "target reached".into());
        }
        Some((EventKind::Stop, Some(StopReason::NoImprovement))) => {
            return status_of(StatusKind::Done, "no improvement".into());
        }
        Some((EventKind::Stop, Some(StopReason::NothingLearned))) => {
            return status_of(StatusKind::Done, "nothing learned".into());
        }
        Some((EventKind::Stop, Some(StopReason::Signal))) => {
            return status_of(StatusKind::Stopped, format!("by {text}; stapo train --resume continues it"));
        }
        Some((EventKind::Stop, _)) => return status_of(StatusKind::Died, text),
        Some(_) => {}
        // A run of a program that recorded no events.
        None if facts.steps.is_some_and(|steps| facts.step >= steps) => {
            return status_of(StatusKind::Done, text);
        }
        None => {}
    }
    if let Some(writer) = holder(facts.folder) {
        return status_of(StatusKind::Running, describe_writer(&writer));
    }
    let writer = last.and_then(|last| last.writer.as_ref());
    match writer {
        Some(writer) if writer.host != facts.host => elsewhere(facts, &writer.host),
        Some(_) => status_of(StatusKind::Died, "killed, or the machine stopped".into()),
        None => status_of(StatusKind::Stopped, "stapo train --resume continues it".into()),
    }
}

/// The status of a run that another machine writes, whose lock cannot be seen from here.
fn elsewhere(facts: &Facts, host: &str) -> Status {
    let patience =
        facts.seconds_per_step.map_or(0.0, |seconds| SILENT_STEPS * seconds).max(SILENT.as_secs_f64());
    if facts.age.as_secs_f64() < patience {
        return Status { kind: StatusKind::Running, text: format!("on {host}, as far as its files show") };
    }
    let minutes = facts.age.as_secs() / 60;
    let text =
        format!("on {host}: its files have been silent for {minutes} minutes, and no stop was recorded");
    Status { kind: StatusKind::Died, text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn event(value: &serde_json::Value) -> Event {
        let mut whole = json!({"schema": 1, "time": "2026-01-01T00:00:00Z", "step": 1});
        whole.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
        serde_json::from_value(whole).unwrap()
    }

    fn start(host: &str) -> Event {
        event(
            &json!({"event": "start", "writer": {"pid": 7, "host": host, "command": "", "started": "", "program": "", "device": "", "world": 1}}),
        )
    }

    fn kind(events: &[Event], age: u64, problem: Option<&str>) -> StatusKind {
        let folder = tempfile::tempdir().unwrap();
        let facts = Facts {
            folder: folder.path(),
            events,
            step: 1,
            steps: Some(4),
            age: Duration::from_secs(age),
            seconds_per_step: Some(300.0),
            host: "here",
            problem,
        };
        status(&facts).kind
    }

    #[test]
    fn the_last_start_or_stop_decides_and_then_the_lock_or_the_age() {
        let stop = |reason: &str| event(&json!({"event": "stop", "reason": reason, "text": "SIGTERM"}));
        let warning = event(&json!({"event": "warning", "text": "w"}));
        assert_eq!(kind(&[start("here"), stop("done"), warning.clone()], 0, None), StatusKind::Done);
        assert_eq!(kind(&[start("here"), stop("target_reached")], 0, None), StatusKind::Done);
        assert_eq!(kind(&[start("here"), stop("no_improvement")], 0, None), StatusKind::Done);
        assert_eq!(kind(&[start("here"), stop("nothing_learned")], 0, None), StatusKind::Done);
        assert_eq!(kind(&[start("here"), stop("signal")], 0, None), StatusKind::Stopped);
        assert_eq!(kind(&[start("here"), stop("error")], 0, None), StatusKind::Died);
        assert_eq!(kind(&[start("here"), warning], 0, None), StatusKind::Died);
        assert_eq!(kind(&[stop("done"), start("here")], 0, None), StatusKind::Died);
        assert_eq!(kind(&[start("there")], 60, None), StatusKind::Running);
        // Five steps of 300 s are longer than ten minutes.
        assert_eq!(kind(&[start("there")], 1400, None), StatusKind::Running);
        assert_eq!(kind(&[start("there")], 1499, None), StatusKind::Running);
        assert_eq!(kind(&[start("there")], 1500, None), StatusKind::Died);
        assert_eq!(kind(&[], 0, None), StatusKind::Stopped);
        assert_eq!(kind(&[stop("done")], 0, Some("no plan")), StatusKind::Broken);
    }

    #[test]
    fn a_held_lock_is_a_running_process() {
        let folder = tempfile::tempdir().unwrap();
        let lock = stapo_rl::run::FolderLock::take(folder.path()).unwrap();
        let facts = |events| Facts {
            folder: folder.path(),
            events,
            step: 1,
            steps: Some(4),
            age: Duration::from_secs(9999),
            seconds_per_step: None,
            host: "here",
            problem: None,
        };
        let events = [start("here")];
        assert_eq!(status(&facts(&events)).kind, StatusKind::Running);
        drop(lock);
        assert_eq!(status(&facts(&events)).kind, StatusKind::Died);
        let silent = status(&facts(&[start("there")])).text;
        assert!(silent.starts_with("on there: its files have been silent for 166 minutes"), "{silent}");
    }

    #[test]
    fn a_status_says_why_a_run_ended() {
        use StatusKind::{Died, Done, Stopped};
        let folder = tempfile::tempdir().unwrap();
        let end = |events: &[Event], step: u64| {
            let facts = Facts {
                folder: folder.path(),
                events,
                step,
                steps: Some(4),
                age: Duration::ZERO,
                seconds_per_step: None,
                host: "here",
                problem: None,
            };
            let Status { kind, text } = status(&facts);
            (kind, text)
        };
        let stop = |reason: &str| event(&json!({"event": "stop", "reason": reason, "text": "SIGTERM\nmore"}));
        for (reason, kind, text) in [
            ("done", Done, "SIGTERM"),
            ("target_reached", Done, "target reached"),
            ("no_improvement", Done, "no improvement"),
            ("nothing_learned", Done, "nothing learned"),
            ("signal", Stopped, "by SIGTERM; stapo train --resume continues it"),
            ("error", Died, "SIGTERM"),
        ] {
            assert_eq!(end(&[start("here"), stop(reason)], 4), (kind, text.to_string()), "{reason}");
        }
        // A program that recorded no events leaves its steps alone.
        assert_eq!([3, 4, 5].map(|step| end(&[], step).0), [Stopped, Done, Done]);
        assert_eq!(end(&[start("here")], 4).0, Died, "a run that was killed at its last step has no end");
    }
}
