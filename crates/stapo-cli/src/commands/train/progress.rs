//! What happens inside a step: the line of the current phase, on a terminal and elsewhere.

use crate::shared::clock::span;
use crate::shared::units::short;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use stapo_rl::run::meter::{Meter, Moment};
use std::fmt::Write as _;
use std::io::{Write as _, stderr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the live view is redrawn.
const TICK: Duration = Duration::from_millis(250);
/// The longest silence where no terminal shows the live view.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// A bar over the steps with a clock, the message below it, and the current phase as the last line.
pub fn bar(steps: u64, done: u64, meter: Arc<Meter>) -> ProgressBar {
    let clock = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        // Writing to a string in memory does not fail.
        let _ = out.write_str(&span(state.elapsed()));
    };
    let phase = move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
        let _ = out.write_str(&phase_text(&meter));
    };
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} steps  {clock}  {prefix}\n{msg}{phase}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .with_key("clock", clock)
        .with_key("phase", phase);
    let bar = ProgressBar::new(steps).with_style(style).with_position(done);
    bar.enable_steady_tick(TICK);
    bar
}

/// The current phase with its progress: `rollout 187/256 responses 12.3k tokens 880 tokens/s 14 s`.
pub fn phase_text(meter: &Meter) -> String {
    meter.now().map_or("starting".to_string(), |moment| work_text(&moment))
}

fn work_text(moment: &Moment) -> String {
    let work = moment.work;
    let mut text = moment.phase.name().to_string();
    if work.n_all > 0 {
        let _ = write!(text, " {}/{} responses", work.n_done, work.n_all);
    }
    if work.n_tokens > 0 {
        let rate = work.n_tokens as f64 / work.seconds.max(1e-3);
        let _ = write!(text, " {} tokens {} tokens/s", short(work.n_tokens), short(rate as u64));
    }
    let _ = write!(text, " {}", span(Duration::from_secs_f64(work.seconds)));
    text
}

/// A time left, without seconds from ten minutes on and without minutes from ten hours on.
pub fn left_text(left: Duration) -> String {
    let minutes = left.as_secs() / 60;
    match minutes {
        0..10 => span(left),
        10..60 => format!("{minutes} min"),
        60..600 => format!("{} h {} min", minutes / 60, minutes % 60),
        _ => format!("{} h", minutes / 60),
    }
}

/// Prints lines on standard error, and the current phase when no line came for [`HEARTBEAT`].
pub struct Heartbeat {
    last_said: Arc<Mutex<Instant>>,
    /// Ends the thread when it is dropped.
    ends: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    pub fn start(meter: Arc<Meter>) -> Self {
        let last_said = Arc::new(Mutex::new(Instant::now()));
        let (ends, ended) = channel();
        let said = Arc::clone(&last_said);
        let beat = move || {
            while ended.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
                if said.elapsed() >= HEARTBEAT
                    && let Some(moment) = meter.now()
                {
                    *said = Instant::now();
                    let _ = writeln!(stderr(), "{}", line(&moment));
                }
            }
        };
        // Without a thread there are no lines inside a step, and the lines of steps come all the same.
        let thread = std::thread::Builder::new().name("heartbeat".into()).spawn(beat).ok();
        Self { last_said, ends: Some(ends), thread }
    }

    pub fn say(&self, text: &str) {
        let mut said = self.last_said.lock().unwrap_or_else(PoisonError::into_inner);
        *said = Instant::now();
        // A failed write is ignored: a closed standard error must not end the run.
        let _ = writeln!(stderr(), "{text}");
    }
}

/// The current phase on a separate line.
fn line(moment: &Moment) -> String {
    match moment.step {
        0 => format!("before step 1 {}", work_text(moment)),
        step => format!("step {step} {}", work_text(moment)),
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.ends = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing more to say.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_rl::run::meter::{Phase, Work};

    #[test]
    fn a_phase_says_what_it_counts_and_fits_80_columns() {
        let moment = |phase, seconds, n_tokens, n_done, n_all| Moment {
            step: 12,
            phase,
            work: Work { seconds, n_tokens, n_done, n_all },
        };
        let rollout = moment(Phase::Rollout, 14.2, 12_345, 187, 256);
        assert_eq!(line(&rollout), "step 12 rollout 187/256 responses 12.3k tokens 869 tokens/s 14 s");
        assert_eq!(work_text(&moment(Phase::Checkpoint, 3.0, 0, 0, 0)), "checkpoint 3 s");
        let long = Moment { step: 1000, ..moment(Phase::Evaluate, 3599.0, 949_940_000, 1024, 2048) };
        assert!(line(&long).len() <= 80, "{}", line(&long));
        let before = Moment { step: 0, ..moment(Phase::Evaluate, 1.0, 0, 0, 8) };
        assert_eq!(line(&before), "before step 1 evaluate 0/8 responses 1 s");
        assert_eq!(phase_text(&Meter::default()), "starting");
    }

    #[test]
    fn a_time_left_is_as_exact_as_it_is_known() {
        let texts = [59, 599, 600, 3661, 35_999, 36_000].map(|s| left_text(Duration::from_secs(s)));
        assert_eq!(texts, ["59 s", "9 min 59 s", "10 min", "1 h 1 min", "9 h 59 min", "10 h"]);
    }
}
