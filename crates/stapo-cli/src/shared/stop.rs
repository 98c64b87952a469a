//! Signals: the first asks the command to stop after the current step, the second ends the process. A signal that was
//! ignored when the process started, as `nohup` and background shells do, stays ignored.

use anyhow::{Context, Result};
#[cfg(unix)]
use signal_hook::consts::SIGXFSZ;
use std::fmt::{Debug, Formatter};
use std::io::{IsTerminal, Write, stderr, stdin};
#[cfg(unix)]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// What the first signal does.
pub const FINISHING: &str = "finishing this step and saving; Ctrl-C again ends at once";

/// For so long after the first signal another one is the same request: `timeout` signals the process and then its whole group, and
/// a run of an experiment is told by the terminal and by the experiment.
const ECHO: Duration = Duration::from_millis(200);

/// Which signal came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// The first, after which the command finishes its step.
    Once,
    /// A further one, after which the process ends at once.
    Again,
}

/// Shows that a signal came.
type Show = Box<dyn Fn(Asked) + Send>;

/// Whether the command was asked to stop, and by which signal.
#[derive(Clone, Default)]
pub struct Stop {
    /// The number of the signal; 0 before the first.
    signal: Arc<AtomicI32>,
    first: Arc<OnceLock<Instant>>,
    show: Arc<Mutex<Option<Show>>>,
}

impl Debug for Stop {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stop").field("signal", &self.signal()).finish_non_exhaustive()
    }
}

impl Stop {
    pub fn is_raised(&self) -> bool {
        self.signal.load(Ordering::SeqCst) != 0
    }

    /// Asks to stop as that signal does; true for the first to ask.
    pub fn raise(&self, signal: i32) -> bool {
        self.first.get_or_init(Instant::now);
        self.signal.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    pub fn signal(&self) -> i32 {
        self.signal.load(Ordering::SeqCst)
    }

    /// `SIGINT (Ctrl-C)`, `SIGTERM`, `SIGHUP`.
    pub fn name(&self) -> String {
        match self.signal() {
            SIGHUP => "SIGHUP".to_string(),
            SIGINT => "SIGINT (Ctrl-C)".to_string(),
            SIGTERM => "SIGTERM".to_string(),
            other => format!("signal {other}"),
        }
    }

    /// The exit status of a command that a signal ended: 128 + the signal.
    pub fn exit_status(&self) -> u8 {
        (128 + self.signal()) as u8
    }

    /// Shows signals by `show` in place of a line on standard error, for a command that draws on the terminal.
    pub fn show_by(&self, show: impl Fn(Asked) + Send + 'static) {
        *self.show.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(show));
    }

    fn took(&self, signal: i32) {
        let is_first = self.raise(signal);
        let since_first = self.first.get().map_or(Duration::ZERO, Instant::elapsed);
        let Some(asked) = asked(is_first, since_first) else { return };
        match (&*self.show.lock().unwrap_or_else(PoisonError::into_inner), asked) {
            (Some(show), _) => {
                if signal == SIGINT && stdin().is_terminal() {
                    undo_echo();
                }
                show(asked);
            }
            (None, Asked::Once) => eprintln!("\n{FINISHING}"),
            (None, Asked::Again) => {}
        }
        if asked == Asked::Again {
            std::process::exit(128 + signal);
        }
    }
}

/// What a signal asks for; `None` where it is the first request once more.
fn asked(is_first: bool, since_first: Duration) -> Option<Asked> {
    if is_first { Some(Asked::Once) } else { (since_first > ECHO).then_some(Asked::Again) }
}

/// Takes back the `^C` that a terminal writes, which stands on a line of its own below a progress bar: the bar finds its
/// lines by counting from the cursor.
fn undo_echo() {
    // A terminal that is gone shows nothing.
    let _ = stderr().write_all(b"\r\x1b[2K\x1b[1A");
}

/// Lets a write beyond the limit on the size of files (`ulimit -f`) fail with an error that names the file. Without a handler the
/// signal ends the process without a word.
#[cfg(unix)]
pub fn let_writes_fail_at_the_limit_of_files() {
    // Where no handler can be set, the process ends as it would have.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

#[cfg(not(unix))]
pub fn let_writes_fail_at_the_limit_of_files() {}

/// A stop that SIGINT, SIGTERM and SIGHUP raise.
#[cfg(unix)]
pub fn on_signals() -> Result<Stop> {
    let stop = Stop::default();
    let raised = stop.clone();
    let mut signals = signal_hook::iterator::Signals::new(heeded()).context("signal handlers")?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || signals.forever().for_each(|signal| raised.took(signal)))
        .context("signal handlers")?;
    Ok(stop)
}

/// A stop that Ctrl-C raises.
#[cfg(not(unix))]
pub fn on_signals() -> Result<Stop> {
    let stop = Stop::default();
    let raised = stop.clone();
    ctrlc::set_handler(move || raised.took(SIGINT)).context("Ctrl-C handler")?;
    Ok(stop)
}

/// The signals that were not ignored when the process started. Only Linux tells; elsewhere SIGHUP keeps the meaning it
/// had, so that `nohup` works there too.
#[cfg(unix)]
fn heeded() -> Vec<i32> {
    match std::fs::read_to_string("/proc/self/status") {
        Ok(status) => [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&n| !is_ignored(&status, n)).collect(),
        Err(_) => vec![SIGINT, SIGTERM],
    }
}

/// Whether the line `SigIgn` of `/proc/self/status` has the bit of the signal.
#[cfg(unix)]
fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

/// Ties this process to the one that started it through standard input: a line with a number stops the command as the
/// signal of that number does, and the end of the input, which comes when the other process has ended in any way, ends
/// this process at once.
pub fn tie_to_parent(stop: &Stop) -> Result<()> {
    let stop = stop.clone();
    let watch = move || {
        for line in stdin().lines().map_while(Result::ok) {
            stop.raise(line.trim().parse().unwrap_or(SIGTERM));
        }
        std::process::exit(128 + SIGTERM);
    };
    std::thread::Builder::new().name("parent".into()).spawn(watch).context("watching the parent")?;
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_mask() {
        let status = "Name:\tstapo\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000003\n";
        assert_eq!([SIGHUP, SIGINT, SIGTERM].map(|n| is_ignored(status, n)), [true, true, false]);
        assert!(!is_ignored("Name:\tstapo\n", SIGHUP), "a status without the line ignores nothing");
    }

    #[test]
    fn the_first_signal_names_the_stop() {
        let stop = Stop::default();
        assert!(!stop.is_raised() && stop.raise(SIGTERM) && !stop.raise(SIGINT));
        assert_eq!((stop.name().as_str(), stop.exit_status()), ("SIGTERM", 143));
    }

    #[test]
    fn a_signal_that_comes_twice_at_once_is_one_request() {
        let cases = [(true, Duration::ZERO), (false, Duration::ZERO), (false, ECHO), (false, ECHO * 2)];
        let asked = cases.map(|(is_first, since)| asked(is_first, since));
        assert_eq!(asked, [Some(Asked::Once), None, None, Some(Asked::Again)]);
    }
}
