//! A warm interpreter inside a jail.

mod session;

pub(crate) use session::{Received, Session};

use crate::interpreter::Interpreter;
use crate::jail::{Jail, Report, SUBCOMMAND, for_command, for_program};
use crate::{Clock, Layers, Level, Limits, SandboxError, Settings};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags,
    SocketType, recv, sendmsg, shutdown, socketpair,
};
use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::{Value, json};
use std::io::{self, Error, ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const CODEC: &str = include_str!("python/codec.py");
const ZYGOTE: &str = include_str!("python/zygote.py");
const TESTER: &str = include_str!("python/tester.py");
/// How long an interpreter may take to start, imports included.
const START_TIME: Duration = Duration::from_secs(120);

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
    /// False once a program left something that cannot be removed, or the zygote no longer answers.
    pub is_fit: bool,
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
                    let problem =
                        missing.first().map(|problem: &String| problem.trim_start_matches("namespaces: "));
                    zygote.layers.without_namespaces = problem.map(str::to_string);
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
            report => {
                let complaint = complaint(&mut launcher);
                kill_group(&mut launcher);
                return match report {
                    Ok(Report::WithoutLevel(problem)) => Ok(Err(problem)),
                    Ok(Report::Refused(problem)) => Err(failed("interpreter", &problem)),
                    _ => Err(failed("launcher", &complaint)),
                };
            }
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

    /// The folder in which a program may write; `None` if there is none.
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
        Ok(Session::new(self, channel, outputs, deadline))
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
        let _ = shutdown(&self.control, Shutdown::Both);
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
        Role::Programs => format!("{CODEC}\n{ZYGOTE}\nmain()\n"),
        Role::Tests => format!("{CODEC}\n{ZYGOTE}\n{TESTER}\nmain()\n"),
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
