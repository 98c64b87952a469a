//! Signals. The first asks the command to stop after the current step, a further one to abandon a rollout where there is one, and
//! else ends the process; before a command has written anything, the first one ends it. A signal that was ignored when the
//! process started, as `nohup` and background shells do, stays ignored.

use anyhow::{Context, Result};
#[cfg(unix)]
use signal_hook::consts::SIGXFSZ;
use stapo_rl::run::StopRequest;
use std::fmt::{Debug, Formatter};
use std::io::{IsTerminal, Write, stderr, stdin};
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// What the first signal does.
const FINISHING: &str = "finishing this step and saving; Ctrl-C again ends at once";

/// For so long after a signal another one is the same request: `timeout` signals the process and then its whole group, and
/// a run of an experiment gets it from the terminal and from the experiment.
const ECHO: Duration = Duration::from_millis(200);

/// For so long after SIGTERM a rollout may continue: schedulers wait about 30 s before they kill, and saving takes time too.
const TERM_GRACE: Duration = Duration::from_secs(10);

/// What a signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// To finish the step.
    Once,
    /// To abandon the rollout.
    Urgently,
    /// To end the process at once.
    AtOnce,
}

/// Which work a command gives up when it is asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GivesUp {
    /// Whatever it does, at the first signal.
    Everything,
    /// What it does, at a further signal.
    IfUrgent,
    /// Nothing: a further signal ends the process.
    Nothing,
}

/// Shows that a signal came, by a text for the user.
type Show = Box<dyn Fn(Asked, &str) + Send>;

/// How the command takes signals.
#[derive(Default)]
struct Conduct {
    show: Option<Show>,
    gives_up: Option<Box<dyn Fn() -> GivesUp + Send>>,
    last: Option<Instant>,
}

/// Whether the command was asked to stop, and by which signal.
#[derive(Clone, Default)]
pub struct Stop {
    /// The number of the signal; 0 before the first.
    signal: Arc<AtomicI32>,
    first: Arc<OnceLock<Instant>>,
    /// Signals that were separate requests.
    n_requests: Arc<AtomicU32>,
    is_urgent: Arc<AtomicBool>,
    is_preparing: Arc<AtomicBool>,
    conduct: Arc<Mutex<Conduct>>,
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

    pub fn n_requests(&self) -> u32 {
        self.n_requests.load(Ordering::SeqCst)
    }

    /// The request to stop; urgent after a further signal, and some time after SIGTERM.
    pub fn request(&self) -> Option<StopRequest> {
        let signal = Some(self.signal()).filter(|signal| *signal != 0)?;
        let is_late = signal == SIGTERM && self.first.get().is_some_and(|first| first.elapsed() > TERM_GRACE);
        Some(StopRequest { signal, is_urgent: is_late || self.is_urgent.load(Ordering::SeqCst) })
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

    /// Shows signals by `show` instead of a line on standard error, for a command that draws on the terminal.
    pub fn show_by(&self, show: impl Fn(Asked, &str) + Send + 'static) {
        self.conduct().show = Some(Box::new(show));
    }

    /// Says which work a signal gives up, at the time of the signal.
    pub fn give_up_by(&self, gives_up: impl Fn() -> GivesUp + Send + 'static) {
        self.conduct().gives_up = Some(Box::new(gives_up));
    }

    /// Lets the first signal end the process until [`Stop::begin_work`]: nothing has been written that would have to be saved.
    pub fn prepare(&self) {
        self.is_preparing.store(true, Ordering::SeqCst);
    }

    pub fn begin_work(&self) {
        self.is_preparing.store(false, Ordering::SeqCst);
    }

    fn conduct(&self) -> MutexGuard<'_, Conduct> {
        self.conduct.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn took(&self, signal: i32) {
        let mut conduct = self.conduct();
        let is_first = self.raise(signal);
        let is_echo = |at: &Instant| at.elapsed() <= ECHO;
        if !is_first && (self.first.get().is_some_and(is_echo) || conduct.last.as_ref().is_some_and(is_echo))
        {
            return;
        }
        conduct.last = Some(Instant::now());
        self.n_requests.fetch_add(1, Ordering::SeqCst);
        let gives_up = conduct.gives_up.as_ref().map_or(GivesUp::Nothing, |gives_up| gives_up());
        let asked = if self.is_preparing.load(Ordering::SeqCst) {
            Asked::AtOnce
        } else {
            asked(is_first, self.is_urgent.load(Ordering::SeqCst), gives_up)
        };
        if asked == Asked::Urgently {
            self.is_urgent.store(true, Ordering::SeqCst);
        }
        let text = text(asked, signal, conduct.gives_up.is_some().then_some(gives_up));
        match (&conduct.show, asked) {
            (Some(show), _) => {
                if signal == SIGINT && stdin().is_terminal() {
                    undo_echo();
                }
                show(asked, &text);
            }
            (None, Asked::Once | Asked::Urgently) => eprintln!("\n{text}"),
            (None, Asked::AtOnce) => {}
        }
        if asked == Asked::AtOnce {
            std::process::exit(128 + signal);
        }
    }
}

/// What a signal asks for, from whether it is the first, whether one before it was urgent, and what the command gives up.
fn asked(is_first: bool, is_urgent: bool, gives_up: GivesUp) -> Asked {
    match gives_up {
        _ if is_first => Asked::Once,
        GivesUp::IfUrgent if !is_urgent => Asked::Urgently,
        _ => Asked::AtOnce,
    }
}

/// The message to the user; `gives_up` is absent for a command that gives up nothing.
fn text(asked: Asked, signal: i32, gives_up: Option<GivesUp>) -> String {
    match (asked, gives_up) {
        (Asked::AtOnce, _) => String::new(),
        (Asked::Urgently, _) => {
            "abandoning the rollout, which --resume samples again; Ctrl-C again ends at once".to_string()
        }
        (Asked::Once, None) => FINISHING.to_string(),
        (Asked::Once, Some(GivesUp::Everything)) => {
            "stopping: nothing was trained yet; Ctrl-C again ends at once".to_string()
        }
        (Asked::Once, Some(_)) if signal == SIGTERM => format!(
            "finishing this step and saving; a rollout that is not done in {} s is abandoned, and --resume samples it again",
            TERM_GRACE.as_secs()
        ),
        (Asked::Once, Some(_)) => {
            "finishing this step and saving; Ctrl-C again abandons a rollout".to_string()
        }
    }
}

/// Takes back the `^C` that a terminal writes, which is on a separate line below a progress bar: the bar finds its
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

/// The signals that were not ignored when the process started. Only Linux reports them; elsewhere SIGHUP keeps the meaning it
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

/// Sends a signal to a process that this one has started.
#[cfg(unix)]
pub fn pass_on(child: &Child, signal: i32) {
    use rustix::process::{Pid, Signal, kill_process};
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some((pid, signal)) = pid.zip(Signal::from_named_raw(signal)) {
        // A process that has ended needs no signal.
        let _ = kill_process(pid, signal);
    }
}

#[cfg(not(unix))]
pub fn pass_on(_child: &Child, _signal: i32) {}

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
        let stop = Stop::default();
        stop.show_by(|_, _| ());
        stop.took(SIGTERM);
        stop.took(SIGINT);
        assert_eq!((stop.n_requests(), stop.signal()), (1, SIGTERM));
    }

    #[test]
    fn a_further_signal_abandons_a_rollout_and_else_ends_the_process() {
        use GivesUp::{Everything, IfUrgent, Nothing};
        assert!([Everything, IfUrgent, Nothing].iter().all(|of| asked(true, false, *of) == Asked::Once));
        assert_eq!(asked(false, false, IfUrgent), Asked::Urgently);
        assert_eq!(asked(false, true, IfUrgent), Asked::AtOnce);
        assert!([Everything, Nothing].iter().all(|of| asked(false, false, *of) == Asked::AtOnce));
        assert!(text(Asked::Once, SIGINT, Some(IfUrgent)).len() <= 80 && FINISHING.len() <= 80);
        let announced = text(Asked::Once, SIGTERM, Some(IfUrgent));
        assert!(announced.contains("not done in 10 s is abandoned"), "{announced}");
    }

    #[test]
    fn a_request_is_urgent_after_a_second_signal() {
        let stop = Stop::default();
        stop.show_by(|_, _| ());
        stop.give_up_by(|| GivesUp::IfUrgent);
        assert_eq!(stop.request(), None);
        stop.took(SIGINT);
        assert_eq!(stop.request(), Some(StopRequest { signal: SIGINT, is_urgent: false }));
        std::thread::sleep(ECHO + Duration::from_millis(20));
        stop.took(SIGINT);
        assert_eq!(stop.request(), Some(StopRequest { signal: SIGINT, is_urgent: true }));
    }

    #[test]
    fn sigterm_is_urgent_after_its_grace() {
        for (signal, seconds, is_urgent) in [(SIGTERM, 11, true), (SIGTERM, 5, false), (SIGINT, 11, false)] {
            let stop = Stop::default();
            let Some(first) = Instant::now().checked_sub(Duration::from_secs(seconds)) else { return };
            stop.first.set(first).unwrap();
            stop.raise(signal);
            assert_eq!(stop.request(), Some(StopRequest { signal, is_urgent }), "{seconds} s");
        }
    }
}
