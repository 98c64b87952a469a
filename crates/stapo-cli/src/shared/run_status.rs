//! Who writes a run, or how it ended.

use stapo_core::record::{Event, EventKind, StopReason};
use stapo_rl::run::{describe_writer, holder, read_events};
use std::path::Path;

/// `running, process 4711 on host`, `done`, `resumable, stopped by SIGTERM`, `died: ...`. A process that was killed left
/// no word, and its lock is free. `n_steps` are the steps with metrics, `steps` those of the plan.
pub fn run_status(folder: &Path, n_steps: u64, steps: u64) -> String {
    if let Some(writer) = holder(folder) {
        return format!("running, {}", describe_writer(&writer));
    }
    let events = read_events(folder).unwrap_or_default();
    let Some(last) = last_turn(&events) else {
        return if n_steps >= steps { "done".to_string() } else { "resumable".to_string() };
    };
    let text = last.text.lines().next().unwrap_or_default();
    match (last.event, last.reason) {
        (EventKind::Stop, Some(StopReason::Done)) => "done".to_string(),
        (EventKind::Stop, Some(StopReason::TargetReached)) => "done, target reached".to_string(),
        (EventKind::Stop, Some(StopReason::NoImprovement)) => "done, no improvement".to_string(),
        (EventKind::Stop, Some(StopReason::NothingLearned)) => "done, nothing learned".to_string(),
        (EventKind::Stop, Some(StopReason::Signal)) => format!("resumable, stopped by {text}"),
        (EventKind::Stop, _) => format!("died: {text}"),
        _ => "died: killed, or the machine stopped".to_string(),
    }
}

/// The last start, resumption or stop; `None` for a run of a program that recorded no events.
pub fn last_turn(events: &[Event]) -> Option<&Event> {
    events.iter().rfind(|event| matches!(event.event, EventKind::Start | EventKind::Resume | EventKind::Stop))
}

/// Whether a run came to its end: to its last step, its target accuracy or the end of its patience. Arguments as in [`run_status`].
pub fn has_ended(events: &[Event], n_steps: u64, steps: u64) -> bool {
    use StopReason::{Done, NoImprovement, NothingLearned, TargetReached};
    match last_turn(events) {
        None => n_steps >= steps,
        Some(last) => {
            last.event == EventKind::Stop
                && matches!(last.reason, Some(Done | TargetReached | NoImprovement | NothingLearned))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_events_is_done_with_its_last_step() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!([3, 4, 5].map(|n| run_status(folder.path(), n, 4)), ["resumable", "done", "done"]);
        assert_eq!([3, 4, 5].map(|n| has_ended(&[], n, 4)), [false, true, true]);
    }

    #[test]
    fn a_run_says_how_it_ended() {
        let folder = tempfile::tempdir().unwrap();
        let writer = r#""writer": {"pid": 7, "host": "h", "command": "", "started": "", "program": "", "device": "", "world": 1}"#;
        let event = |what: &str| {
            format!("{{\"schema\": 1, \"time\": \"2026-01-01T00:00:00Z\", \"step\": 1, {what}}}\n")
        };
        let start = event(&format!("\"event\": \"start\", {writer}"));
        let status = |events: &str| {
            std::fs::write(folder.path().join("events.jsonl"), events).unwrap();
            run_status(folder.path(), 4, 4)
        };
        for (reason, expected) in [
            ("done", "done"),
            ("target_reached", "done, target reached"),
            ("no_improvement", "done, no improvement"),
            ("nothing_learned", "done, nothing learned"),
            ("signal", "resumable, stopped by SIGTERM"),
            ("error", "died: SIGTERM"),
        ] {
            let stop = event(&format!(
                "\"event\": \"stop\", \"reason\": \"{reason}\", \"text\": \"SIGTERM\\nmore\""
            ));
            let warning = event("\"event\": \"warning\", \"text\": \"w\"");
            assert_eq!(status(&(start.clone() + &stop + &warning)), expected);
            let ended = || has_ended(&read_events(folder.path()).unwrap(), 4, 4);
            assert_eq!(ended(), expected.starts_with("done"), "{reason}");
            assert_eq!(
                status(&(stop + &start)),
                "died: killed, or the machine stopped",
                "the last turn counts"
            );
            assert!(!ended(), "the last turn counts");
        }
    }
}
