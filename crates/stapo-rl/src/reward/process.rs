//! A verifier's process behind its launcher: output is read by line, with limits on time and memory. Dropping the
//! process ends it with all its descendants.

use crate::reward::spec::{CommandSpec, ProcessLimits};
use crate::run::restart;
use crate::tasks::error::TaskError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use stapo_sandbox::launcher::{self, Launch, Report};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The most lines in the queue. A program that writes more blocks on its full pipe.
const MAX_WAITING_LINES: usize = 1024;
/// How many of the last bytes of standard error an error message quotes.
const MAX_COMPLAINT_BYTES: usize = 1000;
/// The longest line of a launcher's report.
const MAX_REPORT_BYTES: usize = 1 << 14;
/// How long a launcher may take to start a program.
const LAUNCH_TIME: Duration = Duration::from_secs(60);
/// How long a launcher may take to end a program with its descendants.
const END_TIME: Duration = Duration::from_secs(12);
/// Environment variables that every verifier gets; so are all that begin with `LC_`.
const ENVIRONMENT: [&str; 5] = ["PATH", "HOME", "LANG", "TMPDIR", "TZ"];

/// What a program that is or starts a Python interpreter gets besides: it imports neither from the folder of its script or
/// the current folder (Python 3.11 and later) nor from the user's packages, and neither reads nor writes caches of bytecode.
const PYTHON: [(&str, &str); 4] = [
    ("PYTHONSAFEPATH", "1"),
    ("PYTHONNOUSERSITE", "1"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("PYTHONPYCACHEPREFIX", "/dev/null"),
];

/// Why no line arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Silence {
    TimedOut,
    Ended,
    TooLong,
}

pub(crate) struct Process {
    launcher: Child,
    /// The requests of whole calls, written by a thread, so that full pipes in both directions cannot deadlock. `None`
    /// after the end.
    requests: Option<Sender<Vec<u8>>>,
    /// Tells the writing thread to give up a program that does not read.
    is_over: Arc<AtomicBool>,
    lines: Receiver<Result<Vec<u8>, Silence>>,
    /// What the program wrote before the launcher's report.
    early: Option<Result<Vec<u8>, Silence>>,
    output_has_ended: bool,
    /// Samples that were sent before the current call.
    pub(crate) n_sent: u64,
    complaint: Arc<Mutex<Vec<u8>>>,
    complaint_reader: Option<JoinHandle<()>>,
}

impl Process {
    /// A running program, and what it shares with this machine because the machine cannot keep it apart.
    pub(crate) fn start(spec: &CommandSpec) -> Result<(Self, Vec<String>), TaskError> {
        let refuse = |problem: String, remedy: &str| TaskError::Verifier {
            program: spec.program.display().to_string(),
            place: "at the start".into(),
            problem,
            remedy: remedy.into(),
        };
        let ProcessLimits { network, shared_tmp, memory_mib, file_mib, open_files, .. } = spec.limits;
        let (program, args) = (spec.program.clone(), spec.args.clone());
        let mut launch =
            Launch { program, args, network, shared_tmp, memory_mib, file_mib, open_files, isolated: true };
        let mut not_isolated = None;
        loop {
            let mut process = Self::spawn(&launch, &spec.limits)
                .map_err(|problem| refuse(problem, "the launcher is the program that restart::set named"))?;
            let line = match process.next_line(Instant::now() + LAUNCH_TIME) {
                Err(silence @ (Silence::Ended | Silence::TimedOut)) => {
                    let problem = format!("the launcher did not report ({silence:?}){}", process.end());
                    return Err(refuse(problem, "the program may be slow to load; try again"));
                }
                line => line,
            };
            match line.as_ref().ok().and_then(|line| serde_json::from_slice(line).ok()) {
                Some(Report::Started { mut shared }) => {
                    shared.extend(not_isolated);
                    return Ok((process, shared));
                }
                Some(Report::Refused { problem }) => {
                    let remedy = "verifier.program: a path to an executable file, or a name on the PATH";
                    return Err(refuse(problem, remedy));
                }
                Some(Report::NotIsolated { problem }) if launch.isolated => {
                    not_isolated = Some(format!("the network and /tmp ({problem})"));
                    launch.isolated = false;
                }
                // A program that runs and writes unasked; the first call to judge reports the line.
                _ => {
                    process.early = Some(line);
                    return Ok((process, not_isolated.into_iter().collect()));
                }
            }
        }
    }

    fn spawn(launch: &Launch, limits: &ProcessLimits) -> Result<Self, String> {
        let mut command = restart::command().map_err(|error| error.to_string())?;
        let argument = serde_json::to_string(launch).map_err(|error| error.to_string())?;
        command.arg(launcher::SUBCOMMAND).arg(argument);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let is_passed = |name: &str| {
            ENVIRONMENT.contains(&name)
                || name.starts_with("LC_")
                || limits.env.iter().any(|passed| passed == name)
        };
        let passed = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_passed));
        command.env_clear().envs(passed).envs(PYTHON);
        // The launcher has its own process group. Ctrl-C then does not end the program, whose verdicts the trainer may
        // still need.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut launcher = command
            .spawn()
            .map_err(|error| format!("launcher {}: {error}", command.get_program().display()))?;
        let stdin = launcher.stdin.take();
        let stdout = launcher.stdout.take();
        let stderr = launcher.stderr.take();
        let (requests, request_queue) = channel();
        let (line_queue, lines) = sync_channel(MAX_WAITING_LINES);
        let complaint = Arc::new(Mutex::new(Vec::new()));
        let is_over = Arc::new(AtomicBool::new(false));
        // The threads end when the pipes close. They are not joined: a process that cannot be killed, as one in a
        // blocked system call, may keep a pipe open.
        if let Some(stdin) = stdin {
            let is_over = Arc::clone(&is_over);
            rustix::io::ioctl_fionbio(&stdin, true).map_err(|error| format!("standard input: {error}"))?;
            thread::spawn(move || write_requests(stdin, &request_queue, &is_over));
        }
        if let Some(stdout) = stdout {
            let max_line_bytes = limits.max_line_bytes;
            thread::spawn(move || read_lines(stdout, &line_queue, max_line_bytes));
        }
        let complaint_reader = stderr.map(|stderr| {
            let complaint = Arc::clone(&complaint);
            thread::spawn(move || keep_the_end(stderr, &complaint))
        });
        Ok(Self {
            launcher,
            requests: Some(requests),
            is_over,
            lines,
            early: None,
            output_has_ended: false,
            n_sent: 0,
            complaint,
            complaint_reader,
        })
    }

    /// Queues bytes for standard input. For a process that has ended, `next_line` gives `Silence::Ended`.
    pub(crate) fn send(&self, bytes: Vec<u8>) {
        if let Some(requests) = &self.requests {
            let _ = requests.send(bytes);
        }
    }

    /// The next line, without the line break.
    pub(crate) fn next_line(&mut self, deadline: Instant) -> Result<Vec<u8>, Silence> {
        if let Some(early) = self.early.take() {
            return early;
        }
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => Err(Silence::TimedOut),
            Err(RecvTimeoutError::Disconnected) => {
                self.output_has_ended = true;
                Err(Silence::Ended)
            }
        }
    }

    /// Whether the process ended by itself; known after `end`.
    pub(crate) fn has_ended(&self) -> bool {
        self.output_has_ended
    }

    /// Ends the process. Returns the exit status, if the process had ended by itself, and the end of its standard
    /// error.
    pub(crate) fn end(&mut self) -> String {
        let mut status = None;
        // The output of a process that exits closes a moment before the exit. Waiting distinguishes an exit from a
        // program that only closed its output.
        let patience = if self.output_has_ended { Duration::from_secs(1) } else { Duration::ZERO };
        wait_until(patience, || {
            status = self.launcher.try_wait().ok().flatten();
            status.is_some()
        });
        self.kill();
        wait_until(Duration::from_secs(1), || {
            self.complaint_reader.as_ref().is_none_or(JoinHandle::is_finished)
        });
        let complaint = self.complaint.lock().unwrap_or_else(PoisonError::into_inner);
        let complaint = String::from_utf8_lossy(&complaint);
        let status = status.map(|status| format!(" ({status})")).unwrap_or_default();
        match complaint.trim() {
            "" => status,
            said => format!("{status}; its standard error ends: {said:?}"),
        }
    }

    /// Closes the standard input, upon which the launcher ends the program with its descendants and then itself.
    fn kill(&mut self) {
        self.requests = None;
        self.is_over.store(true, Ordering::Relaxed);
        wait_until(END_TIME, || !matches!(self.launcher.try_wait(), Ok(None)));
        // A launcher that still runs is stuck; the signal reaches the launcher and the program. An error means that the
        // group has ended already.
        let _ = rustix::process::kill_process_group(
            rustix::process::Pid::from_child(&self.launcher),
            rustix::process::Signal::KILL,
        );
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Checks `is_so` repeatedly for up to `patience`, at least once.
fn wait_until(patience: Duration, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !is_so() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(2));
    }
}

/// Writes requests until the sender is gone, the pipe is closed, or the process `is_over`. Returning closes the pipe.
fn write_requests(mut stdin: ChildStdin, queue: &Receiver<Vec<u8>>, is_over: &AtomicBool) {
    while let Ok(bytes) = queue.recv() {
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            if is_over.load(Ordering::Relaxed) {
                return;
            }
            match stdin.write(rest) {
                Ok(n_bytes) => rest = &rest[n_bytes..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The pipe is full: the thread waits until the program has read, and looks up now and then.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let a_moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                    let _ = poll(&mut [PollFd::new(&stdin, PollFlags::OUT)], Some(&a_moment));
                }
                Err(_) => return,
            }
        }
    }
}

/// Queues lines until the output ends, a line is too long, or the receiver is dropped.
fn read_lines(stdout: impl Read, queue: &SyncSender<Result<Vec<u8>, Silence>>, limit: usize) {
    let mut reader = BufReader::new(stdout);
    // The first line is the launcher's.
    let mut max_line_bytes = limit.max(MAX_REPORT_BYTES);
    loop {
        let mut line = Vec::new();
        let n_bytes =
            reader.by_ref().take(max_line_bytes as u64 + 1).read_until(b'\n', &mut line).unwrap_or(0);
        let is_whole = line.pop_if(|byte| *byte == b'\n').is_some();
        let message = if is_whole || (n_bytes > 0 && n_bytes <= max_line_bytes) {
            Ok(line)
        } else if n_bytes == 0 {
            return;
        } else {
            Err(Silence::TooLong)
        };
        let is_last = message.is_err();
        if queue.send(message).is_err() || is_last {
            return;
        }
        max_line_bytes = limit;
    }
}

fn keep_the_end(mut stderr: impl Read, complaint: &Mutex<Vec<u8>>) {
    let mut chunk = [0; 4096];
    while let Ok(n_bytes @ 1..) = stderr.read(&mut chunk) {
        let mut kept = complaint.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend_from_slice(&chunk[..n_bytes]);
        let surplus = kept.len().saturating_sub(MAX_COMPLAINT_BYTES);
        kept.drain(..surplus);
    }
}
