//! Signals: the first asks the command to stop after the current step, the second ends the process. A signal that was
//! ignored when the process started, as `nohup` and background shells do, stays ignored.

use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// Whether the command was asked to stop, and by which signal.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// The number of the signal; 0 before the first.
    signal: Arc<AtomicI32>,
}

impl Stop {
    pub fn is_raised(&self) -> bool {
        self.signal.load(Ordering::SeqCst) != 0
    }

    /// Asks to stop as that signal does; true for the first to ask.
    pub fn raise(&self, signal: i32) -> bool {
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

    fn took(&self, signal: i32) {
        if !self.raise(signal) {
            std::process::exit(128 + signal);
        }
        eprintln!("\nfinishing this step and saving; Ctrl-C again ends at once");
    }
}

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
        for line in std::io::stdin().lines().map_while(std::result::Result::ok) {
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
}
