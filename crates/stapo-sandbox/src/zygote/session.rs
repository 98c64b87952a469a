//! A program that a zygote forked: what it says and prints, and its limits.

use super::{Zygote, wait_for, write_line};
use crate::value::MAX_LINE_BYTES;
use crate::{End, Outcome};
use rustix::net::{SendFlags, send};
use serde::Deserialize;
use serde_json::Value;
use std::io::{self, Error, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long the kernel may take to end a program.
const END_TIME: Duration = Duration::from_secs(20);
/// Signals: a forbidden system call, a file over its limit.
const SIGSYS: i32 = 31;
const SIGXFSZ: i32 = 25;
/// Errors of the system: a file over its limit, a full file system.
const FULL: [i64; 2] = [27, 28];

/// What the zygote says when a child has ended.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EndReport {
    signal: Option<i32>,
    exit: Option<i32>,
    cpu_seconds: f64,
    is_clean: bool,
}

/// What came from a child.
pub(crate) enum Received {
    Line(Vec<u8>),
    Ended,
}

/// A child of the zygote. Limits are watched while the pool waits for it.
pub(crate) struct Session<'a> {
    zygote: &'a mut Zygote,
    channel: Option<UnixStream>,
    /// Standard output and standard error, until they end.
    outputs: [Option<OwnedFd>; 2],
    printed: [Vec<u8>; 2],
    /// Bytes of the channel that are no whole line yet.
    unread: Vec<u8>,
    /// The most that is read of both outputs together.
    output_bytes: usize,
    deadline: Instant,
    /// The limit at which the pool ended the child; `Finished` where nothing more was wanted from it.
    stopped: Option<End>,
    /// The exception that the child reported: type, text and number of the system's error.
    raised: Option<(String, String, Option<i64>)>,
    report: Option<EndReport>,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        zygote: &'a mut Zygote,
        channel: UnixStream,
        outputs: [OwnedFd; 2],
        deadline: Instant,
    ) -> Self {
        Self {
            output_bytes: zygote.limits.output_bytes,
            zygote,
            channel: Some(channel),
            outputs: outputs.map(Some),
            printed: [Vec::new(), Vec::new()],
            unread: Vec::new(),
            deadline,
            stopped: None,
            raised: None,
            report: None,
        }
    }

    /// Lets the child print as many bytes more as a test expects.
    pub(crate) fn expecting(mut self, expected: &str) -> Self {
        self.output_bytes += expected.len();
        self
    }

    /// Sends a line. One that a child does not read is lost, and the child's end, or its limit, is what is received next.
    pub(crate) fn send(&self, message: &Value) {
        if let Some(channel) = &self.channel {
            let _ = write_line(channel, message);
        }
    }

    /// The next line, or the child's end.
    pub(crate) fn receive(&mut self) -> io::Result<Received> {
        let received = self.try_receive();
        if received.is_err() {
            self.zygote.is_fit = false;
        }
        received
    }

    fn try_receive(&mut self) -> io::Result<Received> {
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let mut line: Vec<u8> = self.unread.drain(..=end).collect();
                line.pop();
                return Ok(Received::Line(line));
            }
            let is_silent = self.channel.is_none() && self.outputs.iter().all(Option::is_none);
            if self.report.is_some() && is_silent {
                return Ok(Received::Ended);
            }
            let control = self.zygote.control.as_fd();
            let mut watched = vec![control];
            watched.extend(self.channel.as_ref().map(AsFd::as_fd));
            watched.extend(self.outputs.iter().flatten().map(AsFd::as_fd));
            // The socket of a zygote that has reported is quiet; nothing may be expected of it.
            let skipped = usize::from(self.report.is_some());
            let ready = match wait_for(&watched[skipped..], self.deadline) {
                // The child has ended, and something that a build left holds its output.
                Err(error) if error.kind() == ErrorKind::TimedOut && self.report.is_some() => {
                    self.zygote.is_fit = false;
                    self.channel = None;
                    self.outputs = [None, None];
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::TimedOut && self.stopped.is_none() => {
                    self.stop(End::WallTime);
                    continue;
                }
                ready => ready?,
            };
            let mut ready = ready.into_iter();
            let zygote_is_ready = skipped == 0 && ready.next() == Some(true);
            if self.channel.is_some() && ready.next() == Some(true) {
                self.read_channel()?;
            }
            for idx in 0..2 {
                if self.outputs[idx].is_some() && ready.next() == Some(true) {
                    self.read_output(idx)?;
                }
            }
            if zygote_is_ready {
                let report = self.zygote.hear(self.deadline)?;
                let report: EndReport = serde_json::from_value(report).map_err(Error::other)?;
                self.zygote.is_fit &= report.is_clean;
                self.report = Some(report);
            }
        }
    }

    fn read_channel(&mut self) -> io::Result<()> {
        let Some(channel) = &mut self.channel else { return Ok(()) };
        let mut piece = [0; 1 << 14];
        match channel.read(&mut piece) {
            Ok(0) => self.channel = None,
            Ok(n_bytes) => self.unread.extend_from_slice(&piece[..n_bytes]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => self.channel = None,
            Err(error) => return Err(error),
        }
        if self.channel.is_none() && self.report.is_none() {
            // A child without a channel can answer nothing more; one that is a command closes it at once.
            self.unread.clear();
        }
        if self.unread.len() > MAX_LINE_BYTES {
            self.unread.clear();
            self.channel = None;
            self.stop(End::Output);
        }
        Ok(())
    }

    fn read_output(&mut self, idx: usize) -> io::Result<()> {
        let Some(output) = &self.outputs[idx] else { return Ok(()) };
        let mut piece = [0; 1 << 14];
        let n_bytes = rustix::io::read(output, &mut piece)?;
        if n_bytes == 0 {
            self.outputs[idx] = None;
            return Ok(());
        }
        let limit = self.output_bytes;
        let room = limit - self.printed.iter().map(Vec::len).sum::<usize>().min(limit);
        self.printed[idx].extend_from_slice(&piece[..n_bytes.min(room)]);
        if n_bytes > room {
            self.printed[idx].extend_from_slice(format!("\n... (cut at {limit} bytes)").as_bytes());
            // Nothing more is read: a child that writes on is blocked until it is killed.
            self.outputs = [None, None];
            self.stop(End::Output);
        }
        Ok(())
    }

    /// Ends the child; the first reason counts.
    fn stop(&mut self, reason: End) {
        if self.report.is_none() && self.stopped.is_none() {
            let _ = send(&self.zygote.control, b"kill", SendFlags::NOSIGNAL);
            self.stopped = Some(reason);
            self.deadline = Instant::now() + END_TIME;
        }
    }

    /// Notes the exception that a line reports; false for another line.
    pub(crate) fn note_raised(&mut self, line: &[u8]) -> bool {
        let message: Value = serde_json::from_slice(line).unwrap_or_default();
        let Some([Value::String(kind), Value::String(text), number]) =
            message["raised"].as_array().map(Vec::as_slice)
        else {
            return false;
        };
        self.raised = Some((kind.clone(), text.clone(), number.as_i64()));
        true
    }

    /// Ends a child of which nothing more is wanted.
    pub(crate) fn finish(mut self) -> io::Result<Outcome> {
        self.stop(End::Finished);
        self.outcome()
    }

    /// Waits for the child's end.
    pub(crate) fn outcome(mut self) -> io::Result<Outcome> {
        while let Received::Line(line) = self.receive()? {
            if self.stopped.is_none() {
                self.note_raised(&line);
            }
        }
        let [stdout, stderr] = &self.printed;
        let cpu_seconds = self.report.as_ref().map_or(0.0, |report| report.cpu_seconds);
        Ok(Outcome {
            end: self.end(),
            stdout: String::from_utf8_lossy(stdout).into_owned(),
            stderr: String::from_utf8_lossy(stderr).into_owned(),
            cpu_seconds,
        })
    }

    fn end(&self) -> End {
        let Some(report) = &self.report else { return End::WallTime };
        if report.cpu_seconds > self.zygote.limits.cpu_seconds {
            return End::CpuTime;
        }
        if let Some(stopped) = &self.stopped {
            return stopped.clone();
        }
        match (report.signal, &self.raised) {
            (Some(SIGSYS), _) => End::Processes,
            (Some(SIGXFSZ), _) => End::FileSize,
            // A kill that did not come from the pool is the kernel's, for lack of memory.
            (Some(9), _) => End::Memory,
            (Some(signal), _) => End::Signal(signal),
            (None, Some((kind, _, _))) if kind == "MemoryError" => End::Memory,
            (None, Some((_, _, Some(number)))) if FULL.contains(number) => End::FileSize,
            (None, Some((kind, text, _))) if text.is_empty() => End::Raised(kind.clone()),
            (None, Some((kind, text, _))) => End::Raised(format!("{kind}: {text}")),
            (None, None) => match report.exit {
                Some(0) => End::Finished,
                status => End::Exited(status.unwrap_or(1)),
            },
        }
    }
}

impl Drop for Session<'_> {
    /// A session that was left, as after an error, leaves the zygote without a child.
    fn drop(&mut self) {
        self.stop(End::Finished);
        while self.report.is_none() {
            if self.receive().is_err() {
                return;
            }
        }
    }
}
