//! A warm interpreter inside a jail, and the programs that it forks.

use crate::interpreter::Interpreter;
use crate::jail::{Jail, Report, SUBCOMMAND, for_command, for_program};
use crate::value::MAX_LINE_BYTES;
use crate::{Clock, End, Layers, Level, Limits, Outcome, SandboxError, Settings};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    recv, send, sendmsg, socketpair,
};
use rustix::pipe::{PipeFlags, pipe_with};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{self, Error, ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ZYGOTE: &str = include_str!("python/zygote.py");
const TESTER: &str = include_str!("python/tester.py");
/// How long an interpreter may take to start, imports included.
const START_TIME: Duration = Duration::from_secs(120);
/// How long the kernel may take to end a program.
const END_TIME: Duration = Duration::from_secs(20);
/// Signals: a forbidden system call, a file over its limit.
const SIGSYS: i32 = 31;
const SIGXFSZ: i32 = 25;
/// Errors of the system: a file over its limit, a full file system.
const FULL: [i64; 2] = [27, 28];

/// Starts this program again, as launcher.
pub(crate) type Starter = dyn Fn() -> io::Result<Command> + Send + Sync;

/// What an interpreter is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Programs,
    Tests,
}

/// A zygote and its launcher. Dropping it closes the socket, upon which the zygote ends, and with it all it forked.
pub(crate) struct Zygote {
    launcher: Child,
    control: OwnedFd,
    limits: Limits,
    pub layers: Layers,
    /// A folder of this machine to write in, where the jail has no private `/tmp`.
    scratch: Option<PathBuf>,
    /// False once a program left something behind that cannot be removed, or the zygote no longer answers.
    pub is_fit: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EndReport {
    signal: Option<i32>,
    exit: Option<i32>,
    cpu_seconds: f64,
    is_clean: bool,
}

impl Zygote {
    /// Starts an interpreter at the strongest level that this machine gives.
    pub(crate) fn start(
        settings: &Settings,
        interpreter: &Interpreter,
        role: Role,
        starter: &Starter,
    ) -> Result<Self, SandboxError> {
        let mut missing = Vec::new();
        for level in [Level::Namespaces, Level::Filters, Level::None] {
            if level < settings.strongest || (level == Level::None && !settings.unsafe_code) {
                continue;
            }
            match Self::start_at(settings, interpreter, role, level, starter)? {
                Ok(mut zygote) => {
                    zygote.layers.without_namespaces = missing.into_iter().next();
                    return Ok(zygote);
                }
                Err(problem) => missing.push(problem),
            }
        }
        Err(SandboxError::new(
            format!("this machine cannot keep programs of a model apart: {}", missing.join("; ")),
            "allow user namespaces, or use a kernel with seccomp and Landlock (5.13 and later); --unsafe-code runs programs with limits only",
        ))
    }

    /// The inner error says what this machine lacks for the level.
    fn start_at(
        settings: &Settings,
        interpreter: &Interpreter,
        role: Role,
        level: Level,
        starter: &Starter,
    ) -> Result<Result<Self, String>, SandboxError> {
        let remedy = "run `stapo doctor`, and the interpreter by hand";
        let failed =
            |what: &str, error: &dyn std::fmt::Display| SandboxError::new(format!("{what}: {error}"), remedy);
        let needs_scratch = level != Level::Namespaces && settings.language.is_some();
        let scratch = needs_scratch
            .then(scratch_folder)
            .transpose()
            .map_err(|error| failed("scratch folder", &error))?;
        let jail = jail(settings, interpreter, role, level, scratch.clone())
            .map_err(|problem| failed("filters of system calls", &problem))?;
        let flags = SocketFlags::CLOEXEC;
        let (control, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|error| failed("socket", &error))?;
        let argument = serde_json::to_string(&jail).map_err(|error| failed("jail", &error))?;
        let mut command = starter().map_err(|error| failed("launcher", &error))?;
        command.arg(SUBCOMMAND).arg(argument);
        command.stdin(Stdio::from(theirs)).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C in a terminal reaches the trainer alone.
        let mut launcher = command.process_group(0).spawn().map_err(|error| failed("launcher", &error))?;
        // The command holds the zygote's end of the socket.
        drop(command);
        let deadline = Instant::now() + START_TIME;
        let report = launcher.stdout.take().map(|out| first_line(out, deadline)).transpose();
        let report = report.map_err(|error| failed("launcher", &error))?.unwrap_or_default();
        let layers = match serde_json::from_slice(&report) {
            Ok(Report::Started(layers)) => layers,
            Ok(Report::WithoutLevel(problem)) => {
                let _ = launcher.wait();
                return Ok(Err(problem));
            }
            Ok(Report::Refused(problem)) => return Err(failed("interpreter", &problem)),
            Err(_) => return Err(failed("launcher", &complaint(&mut launcher))),
        };
        let mut zygote = Self { launcher, control, limits: settings.limits, layers, scratch, is_fit: true };
        match zygote.hear(deadline) {
            Ok(hello) if hello.get("ready").is_some() => Ok(Ok(zygote)),
            Ok(hello) => {
                let problem = hello["error"].as_str().unwrap_or("an unknown greeting").to_string();
                Err(SandboxError::new(problem, "imports: modules that the interpreter has"))
            }
            Err(error) => {
                let complaint = complaint(&mut zygote.launcher);
                Err(failed("interpreter", &format!("{error}; {complaint}")))
            }
        }
    }

    /// The folder in which a program may write; `None` where there is none.
    pub(crate) fn writes(&self) -> Option<PathBuf> {
        match self.layers.level {
            Level::Namespaces => Some("/tmp".into()),
            _ => self.scratch.clone(),
        }
    }

    /// Forks a child that handles the request. What the child leaves in `/tmp` stays where `keeps`.
    pub(crate) fn begin(&mut self, request: &Value, keeps: bool) -> io::Result<Session<'_>> {
        let begun = self.try_begin(request, keeps);
        if begun.is_err() {
            self.is_fit = false;
        }
        let (channel, outputs) = begun?;
        let deadline = Instant::now() + self.limits.wall();
        Ok(Session {
            zygote: self,
            channel: Some(channel),
            outputs: outputs.map(Some),
            printed: [Vec::new(), Vec::new()],
            unread: Vec::new(),
            deadline,
            stopped: None,
            raised: None,
            report: None,
        })
    }

    fn try_begin(&mut self, request: &Value, keeps: bool) -> io::Result<(UnixStream, [OwnedFd; 2])> {
        let (channel, theirs) = UnixStream::pair()?;
        let (out, out_end) = pipe_with(PipeFlags::CLOEXEC)?;
        let (errors, errors_end) = pipe_with(PipeFlags::CLOEXEC)?;
        let descriptors = [theirs.as_fd(), out_end.as_fd(), errors_end.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        let message: &[u8] = if keeps { b"run and keep" } else { b"run" };
        sendmsg(&self.control, &[IoSlice::new(message)], &mut ancillary, SendFlags::NOSIGNAL)?;
        channel.set_write_timeout(Some(self.limits.wall()))?;
        // A child that has ended already is found when its report comes.
        let _ = write_line(&channel, request);
        Ok((channel, [out, errors]))
    }

    /// The next message of the zygote.
    fn hear(&mut self, deadline: Instant) -> io::Result<Value> {
        wait_for(&[self.control.as_fd()], deadline)?;
        let mut buffer = vec![0; 4096];
        let (n_bytes, _) = recv(&self.control, buffer.as_mut_slice(), RecvFlags::empty())?;
        if n_bytes == 0 {
            return Err(Error::new(ErrorKind::UnexpectedEof, "the interpreter ended"));
        }
        serde_json::from_slice(&buffer[..n_bytes]).map_err(Error::other)
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        // Without the socket the zygote ends by itself; one that is stuck is killed with its launcher's group.
        let (closed, _) =
            match socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None) {
                Ok(pair) => pair,
                Err(_) => return kill_group(&mut self.launcher),
            };
        self.control = closed;
        let deadline = Instant::now() + Duration::from_secs(2);
        while Instant::now() < deadline {
            if !matches!(self.launcher.try_wait(), Ok(None)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        kill_group(&mut self.launcher);
        if let Some(scratch) = &self.scratch {
            let _ = std::fs::remove_dir_all(scratch);
        }
    }
}

fn kill_group(launcher: &mut Child) {
    if matches!(launcher.try_wait(), Ok(None)) {
        let group = rustix::process::Pid::from_child(launcher);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = launcher.wait();
    }
}

/// The launcher's description of an interpreter.
fn jail(
    settings: &Settings,
    interpreter: &Interpreter,
    role: Role,
    level: Level,
    scratch: Option<PathBuf>,
) -> Result<Jail, String> {
    let writes = if level == Level::Namespaces { Some(PathBuf::from("/tmp")) } else { scratch.clone() };
    let config = json!({
        "imports": if role == Role::Programs { settings.imports.clone() } else { Vec::new() },
        "limits": settings.limits,
        "seed": settings.seed,
        "clock": if settings.clock == Clock::Frozen { "frozen" } else { "real" },
        "writes": writes,
        "has_seccomp": level != Level::None,
        "filters": { "program": for_program()?, "command": for_command()? },
    });
    let source = match role {
        Role::Programs => format!("{ZYGOTE}\nmain()\n"),
        Role::Tests => format!("{ZYGOTE}\n{TESTER}\nmain()\n"),
    };
    let home = writes.unwrap_or_else(|| "/".into()).display().to_string();
    let env = [
        ("PYTHONHASHSEED", "0"),
        ("PYTHONNOUSERSITE", "1"),
        ("PYTHONSAFEPATH", "1"),
        ("PYTHONUTF8", "1"),
        ("PYTHONDONTWRITEBYTECODE", "1"),
        ("LC_ALL", "C.UTF-8"),
        ("TZ", "UTC"),
        ("OMP_NUM_THREADS", "1"),
        ("OPENBLAS_NUM_THREADS", "1"),
        ("MKL_NUM_THREADS", "1"),
        ("HOME", &home),
        ("TMPDIR", &home),
    ];
    Ok(Jail {
        program: interpreter.executable.clone(),
        args: vec!["-s".into(), "-B".into(), "-c".into(), source, config.to_string()],
        env: env.map(|(name, value)| (name.to_string(), value.to_string())).to_vec(),
        level,
        reads: interpreter.reads.clone(),
        tmp_mib: settings.limits.tmp_mib,
        scratch,
    })
}

/// A folder of this machine for one interpreter.
fn scratch_folder() -> io::Result<PathBuf> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("stapo-sandbox-{}-{number}", std::process::id()));
    std::fs::create_dir(&folder)?;
    folder.canonicalize()
}

fn write_line(mut channel: &UnixStream, message: &Value) -> io::Result<()> {
    let mut line = message.to_string().into_bytes();
    line.push(b'\n');
    channel.write_all(&line)
}

/// Waits until one of the descriptors can be read; the error of a deadline is `TimedOut`.
fn wait_for(descriptors: &[BorrowedFd], deadline: Instant) -> io::Result<Vec<bool>> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut watched: Vec<PollFd> =
            descriptors.iter().map(|descriptor| PollFd::new(descriptor, PollFlags::IN)).collect();
        match poll(&mut watched, Some(&left)) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(0) => return Err(ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(watched.iter().map(|one| !one.revents().is_empty()).collect()),
        }
    }
}

fn first_line(mut out: impl Read + AsFd, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut piece = [0; 4096];
    while !line.ends_with(b"\n") {
        wait_for(&[out.as_fd()], deadline)?;
        match out.read(&mut piece)? {
            0 => break,
            n_bytes => line.extend_from_slice(&piece[..n_bytes]),
        }
    }
    Ok(line)
}

/// The end of what an interpreter that did not start wrote to its standard error.
fn complaint(launcher: &mut Child) -> String {
    let mut text = Vec::new();
    if let Some(errors) = &mut launcher.stderr {
        let deadline = Instant::now() + Duration::from_secs(2);
        let mut piece = [0; 4096];
        while text.len() < 1 << 16 && wait_for(&[errors.as_fd()], deadline).is_ok() {
            match errors.read(&mut piece) {
                Ok(n_bytes @ 1..) => text.extend_from_slice(&piece[..n_bytes]),
                _ => break,
            }
        }
    }
    let text = String::from_utf8_lossy(&text);
    let last = text.trim().lines().rev().take(3).collect::<Vec<_>>();
    let last = last.into_iter().rev().collect::<Vec<_>>().join(" / ");
    if last.is_empty() { "no message".into() } else { last }
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
    deadline: Instant,
    /// The limit at which the pool ended the child; `Finished` where nothing more was wanted from it.
    stopped: Option<End>,
    /// The exception that the child reported: type, text and number of the system's error.
    raised: Option<(String, String, Option<i64>)>,
    report: Option<EndReport>,
}

impl Session<'_> {
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
        let mut piece = [0; 1 << 16];
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
        let mut piece = [0; 1 << 16];
        let n_bytes = rustix::io::read(output, &mut piece)?;
        if n_bytes == 0 {
            self.outputs[idx] = None;
            return Ok(());
        }
        let limit = self.zygote.limits.output_bytes;
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
