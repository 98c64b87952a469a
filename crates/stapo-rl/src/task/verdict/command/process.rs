//! A child process whose output is read by line, with limits on time and memory. Dropping the process ends and reaps it.

use crate::task::TaskError;
use crate::task::verifier_spec::CommandSpec;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The most lines in the queue. A program that writes more blocks on its full pipe.
const MAX_WAITING_LINES: usize = 1024;
/// How many of the last bytes of standard error an error message quotes.
const MAX_COMPLAINT_BYTES: usize = 1000;

/// Why no line arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Silence {
    TimedOut,
    Ended,
    TooLong,
}

pub(super) struct Process {
    child: Child,
    /// The requests of whole calls. A thread writes the requests, so that full pipes in both directions cannot deadlock.
    requests: Sender<Vec<u8>>,
    lines: Receiver<Result<Vec<u8>, Silence>>,
    output_has_ended: bool,
    /// Samples that were sent before the current call.
    pub(super) n_sent: u64,
    complaint: Arc<Mutex<Vec<u8>>>,
    complaint_reader: Option<JoinHandle<()>>,
}

impl Process {
    pub(super) fn start(spec: &CommandSpec) -> Result<Self, TaskError> {
        let mut command = Command::new(&spec.program);
        command.args(&spec.args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The program has its own process group. Ctrl-C then does not end the program, whose verdicts the trainer may still
        // need, and one signal to the group ends the program with all its children.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(|error| TaskError::Verifier {
            program: spec.program.display().to_string(),
            place: "at the start".into(),
            problem: error.to_string(),
            remedy: "verifier.program: a path to an executable file, or a name on the PATH".into(),
        })?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        let (requests, request_queue) = channel();
        let (line_queue, lines) = sync_channel(MAX_WAITING_LINES);
        let complaint = Arc::new(Mutex::new(Vec::new()));
        // The threads end when the pipes close. The threads are not joined, because a descendant of the program may keep a
        // pipe open.
        if let Some(stdin) = stdin {
            thread::spawn(move || write_requests(stdin, &request_queue));
        }
        if let Some(stdout) = stdout {
            let max_line_bytes = spec.max_line_bytes;
            thread::spawn(move || read_lines(stdout, &line_queue, max_line_bytes));
        }
        let complaint_reader = stderr.map(|stderr| {
            let complaint = Arc::clone(&complaint);
            thread::spawn(move || keep_the_end(stderr, &complaint))
        });
        Ok(Self { child, requests, lines, output_has_ended: false, n_sent: 0, complaint, complaint_reader })
    }

    /// Queues bytes for standard input. For a process that has ended, `next_line` gives `Silence::Ended`.
    pub(super) fn send(&self, bytes: Vec<u8>) {
        let _ = self.requests.send(bytes);
    }

    /// The next line, without the line break.
    pub(super) fn next_line(&mut self, deadline: Instant) -> Result<Vec<u8>, Silence> {
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => Err(Silence::TimedOut),
            Err(RecvTimeoutError::Disconnected) => {
                self.output_has_ended = true;
                Err(Silence::Ended)
            }
        }
    }

    /// Ends the process. Returns the exit status, if the process had ended by itself, and the end of its standard error.
    pub(super) fn end(&mut self) -> String {
        let mut status = None;
        // The output of a process that exits closes a moment before the exit. Waiting distinguishes an exit from a program that
        // only closed its output.
        wait_until(self.output_has_ended, || {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        });
        self.kill();
        wait_until(true, || self.complaint_reader.as_ref().is_none_or(JoinHandle::is_finished));
        let complaint = self.complaint.lock().unwrap_or_else(PoisonError::into_inner);
        let complaint = String::from_utf8_lossy(&complaint);
        let status = status.map(|status| format!(" ({status})")).unwrap_or_default();
        match complaint.trim() {
            "" => status,
            said => format!("{status}; its standard error ends: {said:?}"),
        }
    }

    fn kill(&mut self) {
        #[cfg(unix)]
        if let Some(group) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            // An error means that the group has ended already.
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Checks `is_so` once, or, with `may_take_time`, repeatedly for up to a second.
fn wait_until(may_take_time: bool, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(u64::from(may_take_time));
    while !is_so() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(2));
    }
}

fn write_requests(mut stdin: ChildStdin, queue: &Receiver<Vec<u8>>) {
    while let Ok(bytes) = queue.recv() {
        if stdin.write_all(&bytes).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

/// Queues lines until the output ends, a line is too long, or the receiver is dropped.
fn read_lines(stdout: impl Read, queue: &SyncSender<Result<Vec<u8>, Silence>>, max_line_bytes: usize) {
    let mut reader = BufReader::new(stdout);
    loop {
        let mut line = Vec::new();
        let limit = max_line_bytes as u64 + 1;
        let n_bytes = reader.by_ref().take(limit).read_until(b'\n', &mut line).unwrap_or(0);
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
