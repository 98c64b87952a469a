//! `stapo launch`

use crate::shared::option::positive;
use crate::shared::stop::{self, GivesUp, Stop, pass_on};
use anyhow::{Context, Result, bail};
use stapo_rl::ranks::TOKEN;
use stapo_rl::run::restart;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Starts several processes of this program on this machine, which train or evaluate together.
///
/// The result has the same bits as that of a single process. If another program starts the processes (torchrun, srun,
/// mpirun, a Kubernetes indexed job), stapo train reads its environment variables and needs no launch.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("processes").required(true).args(["gpus", "ranks"]))]
pub struct Args {
    /// How many GPUs: one process for each.
    #[arg(long, value_name = "N", value_parser = positive)]
    gpus: Option<usize>,

    /// How many processes on the CPU, which share its cores.
    #[arg(long, value_name = "N", value_parser = positive)]
    ranks: Option<usize>,

    /// The port of rank 0; by default a free one.
    #[arg(long)]
    port: Option<u16>,

    /// What to start: train, eval or verify --replay, with its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

const COMMANDS: [&str; 3] = ["train", "eval", "verify"];

pub fn run(args: &Args) -> Result<ExitCode> {
    let name = args.command.first().map(String::as_str).unwrap_or_default();
    if !COMMANDS.contains(&name) {
        bail!(
            "launch {name}: expected one of {}\nhint: stapo launch --ranks 2 train ...",
            COMMANDS.join(", ")
        );
    }
    if name == "verify" && !args.command.iter().any(|word| word == "--replay") {
        bail!(
            "launch verify: several processes replay steps and do nothing else of verify\nhint: add --replay, or call stapo verify without launch"
        );
    }
    let stop = stop::on_signals()?;
    // Every rank reports what it does, rank 0 on this terminal.
    stop.show_by(|_, _| ());
    stop.give_up_by(|| GivesUp::IfUrgent);
    let world = args.gpus.or(args.ranks).unwrap_or(1);
    let command = words_of_ranks(name, args.command.clone(), args.gpus.is_some());
    let port = args.port.map_or_else(free_port, Ok)?;
    let token = token()?;
    let mut ranks = Vec::new();
    for rank in (0..world).take_while(|_| !stop.is_raised()) {
        let started = Rank::start(&command, rank, world, port, &token);
        ranks.push(started.with_context(|| format!("starting rank {rank}"))?);
    }
    let (statuses, ended) = watch(&mut ranks, &stop)?;
    let code = exit_code(&ended, stop.signal());
    let stderrs = ranks.into_iter().filter_map(|rank| rank.stderr);
    let texts = stderrs.map(|stderr| stderr.join().unwrap_or_default());
    for text in errors_of_others(texts, &statuses) {
        eprintln!("{text}");
    }
    Ok(ExitCode::from(code))
}

/// The words of each rank's command: those that were given, and the device of a rank on a GPU.
fn words_of_ranks(name: &str, mut command: Vec<String>, on_gpus: bool) -> Vec<String> {
    if on_gpus && lacks_device(name, &command) {
        command.push("--device=cuda".into());
    }
    command
}

/// Whether a command takes a device and names none. A run that continues or is replayed has its device in its folder; an
/// evaluation gets its device every time.
fn lacks_device(name: &str, command: &[String]) -> bool {
    let has = |flag: &str| command.iter().any(|word| word == flag || word.starts_with(&format!("{flag}=")));
    let takes_device = name == "eval" || (name == "train" && !has("--resume"));
    takes_device && !has("--device")
}

/// One process of several.
struct Rank {
    child: Child,
    /// Collects what a rank other than the first writes to standard error.
    stderr: Option<JoinHandle<String>>,
}

impl Rank {
    fn start(command: &[String], rank: usize, world: usize, port: u16, token: &str) -> Result<Self> {
        let mut child = restart::command()?;
        child.args(command);
        let numbers =
            [("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world)];
        child.envs(numbers.map(|(name, number)| (name, number.to_string())));
        child.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).env(TOKEN, token);
        child.env(LAUNCHED, "1").env_remove("TORCHELASTIC_RUN_ID").stdin(Stdio::null());
        if rank > 0 {
            child.stdout(Stdio::null()).stderr(Stdio::piped());
        }
        apart(&mut child);
        let mut child = child.spawn()?;
        let stderr = child.stderr.take().map(|mut stderr| {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = stderr.read_to_end(&mut bytes);
                String::from_utf8_lossy(&bytes).trim().to_string()
            })
        });
        Ok(Self { child, stderr })
    }
}

/// Set for processes that `launch` started: they end with it.
pub const LAUNCHED: &str = "STAPO_LAUNCHED";

/// A signal from the terminal reaches the launcher alone, which passes it on.
#[cfg(unix)]
fn apart(command: &mut Command) {
    std::os::unix::process::CommandExt::process_group(command, 0);
}

#[cfg(not(unix))]
fn apart(_command: &mut Command) {}

/// Ends this process when the launcher that started it has ended in any way.
#[cfg(target_os = "linux")]
pub fn end_with_launcher() {
    use rustix::process::{Signal, set_parent_process_death_signal};
    if std::env::var_os(LAUNCHED).is_some() {
        // A system that refuses lets the processes continue to their end.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
    }
}

#[cfg(not(target_os = "linux"))]
pub fn end_with_launcher() {}

/// The longest wait for rank 0 after another rank has failed: rank 0 may have to write the end of the run.
const GRACE: Duration = Duration::from_secs(30);
/// The longest wait for a rank that has nothing to write, after rank 0 has failed, or that was stopped by a signal and so
/// cannot end.
const SHORT_GRACE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(20);

/// Waits for all ranks. Every signal is passed on to all of them. Returns all statuses, and those of ranks that were not given up:
/// another rank's status says why a rank was.
fn watch(ranks: &mut [Rank], stop: &Stop) -> Result<(Vec<ExitStatus>, Vec<ExitStatus>)> {
    let mut given_up = vec![false; ranks.len()];
    let mut statuses: Vec<Option<ExitStatus>> = vec![None; ranks.len()];
    let mut n_passed_on = 0;
    let mut failed_at: [Option<Instant>; 2] = [None, None];
    while statuses.iter().any(Option::is_none) {
        for (rank, status) in ranks.iter_mut().zip(&mut statuses).filter(|(_, status)| status.is_none()) {
            *status = rank.child.try_wait().context("waiting for a rank")?;
        }
        let n_requests = stop.n_requests();
        if n_requests != n_passed_on {
            n_passed_on = n_requests;
            let left = ranks.iter().zip(&statuses).filter(|(_, status)| status.is_none());
            left.for_each(|(rank, _)| pass_on(&rank.child, stop.signal()));
        }
        for (at, has_failed) in failed_at.iter_mut().zip(failures(&statuses)) {
            if has_failed {
                at.get_or_insert_with(Instant::now);
            }
        }
        let waited = failed_at.map(|at| at.map_or(Duration::ZERO, |at| at.elapsed()));
        for ((rank, given_up), status) in ranks.iter_mut().zip(&mut given_up).zip(&statuses) {
            if status.is_none() && is_given_up(waited, || is_stopped(&rank.child)) {
                *given_up = true;
                let _ = rank.child.kill();
            }
        }
        std::thread::sleep(PAUSE);
    }
    let statuses: Vec<ExitStatus> = statuses.into_iter().flatten().collect();
    let ended =
        statuses.iter().zip(given_up).filter(|(_, given_up)| !given_up).map(|(status, _)| *status).collect();
    Ok((statuses, ended))
}

/// Whether any rank has failed, and whether rank 0 has.
fn failures(statuses: &[Option<ExitStatus>]) -> [bool; 2] {
    let has_failed = |status: &Option<ExitStatus>| status.is_some_and(|status| !status.success());
    [statuses.iter().any(has_failed), statuses.first().is_some_and(has_failed)]
}

/// Whether a rank that has not ended is killed, so long after any rank and after rank 0 have failed.
fn is_given_up(waited: [Duration; 2], is_stopped: impl FnOnce() -> bool) -> bool {
    let [of_any, of_rank_0] = waited;
    of_any >= GRACE || of_rank_0 >= SHORT_GRACE || (of_any >= SHORT_GRACE && is_stopped())
}

/// Whether a process was stopped, as by SIGSTOP; false if the system does not report it.
fn is_stopped(child: &Child) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    // The state follows the name, which is in parentheses.
    status.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

/// The messages of ranks other than the first, without those that rank 0 has printed: an error of a rank ends all ranks with
/// the same message.
fn errors_of_others(said: impl Iterator<Item = String>, statuses: &[ExitStatus]) -> Vec<String> {
    let rank_0_failed = statuses.first().and_then(ExitStatus::code) == Some(2);
    let mut texts: Vec<String> = Vec::new();
    for text in said {
        let is_known = text.is_empty()
            || text.starts_with("stopped by ")
            || texts.contains(&text)
            || (rank_0_failed && text.starts_with("error: rank "));
        if !is_known {
            texts.push(text);
        }
    }
    texts
}

/// The status of the worst rank: that of a rank that failed, before 1, before that of the signal that all were asked to stop
/// by. A rank that was killed has failed.
fn exit_code(statuses: &[ExitStatus], asked: i32) -> u8 {
    let stopped = 128 + asked;
    let codes = statuses.iter().map(|status| match (status.code(), killed_by(*status)) {
        (Some(code), _) => code,
        (None, Some(signal)) if signal == asked => stopped,
        (None, _) => 2,
    });
    let badness = |code: &i32| match *code {
        0 => 0,
        code if asked != 0 && code == stopped => 1,
        1 => 2,
        _ => 3,
    };
    // Of equally bad ranks the first counts.
    let worst = codes.rev().max_by_key(badness);
    // Without a rank, the signal came before the first was started.
    worst.map_or(stopped, |worst| worst).try_into().unwrap_or(2)
}

#[cfg(unix)]
fn killed_by(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

#[cfg(not(unix))]
fn killed_by(_status: ExitStatus) -> Option<i32> {
    None
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a free port")?;
    Ok(listener.local_addr().context("a free port")?.port())
}

/// A secret that only these processes know.
fn token() -> Result<String> {
    use std::fmt::Write;
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| anyhow::anyhow!("random bits of the system: {error}"))?;
    Ok(bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn a_device_is_added_where_a_command_takes_one_and_names_none() {
        for (words, expected) in [
            ("eval --resume a", true),
            ("eval --device cpu", false),
            ("train a.toml", true),
            ("train a.toml --device=cpu", false),
            ("train --resume a", false),
            ("train --resume=a", false),
            ("verify a --replay", false),
        ] {
            let command: Vec<String> = words.split(' ').map(String::from).collect();
            assert_eq!(lacks_device(&command[0], &command), expected, "{words}");
            let of_ranks = |on_gpus| words_of_ranks(&command[0], command.clone(), on_gpus).join(" ");
            let added = if expected { " --device=cuda" } else { "" };
            assert_eq!((of_ranks(true), of_ranks(false)), (format!("{words}{added}"), words.to_string()));
        }
    }

    #[test]
    fn ranks_are_given_up_when_another_has_failed_and_they_do_not_end() {
        let [ended, failed] = [0, 2 << 8].map(|raw| Some(ExitStatus::from_raw(raw)));
        assert_eq!(failures(&[ended, None, failed]), [true, false]);
        assert_eq!(failures(&[failed, ended]), [true, true]);
        assert_eq!((failures(&[None, ended]), failures(&[])), ([false; 2], [false; 2]));
        let almost = |limit: Duration| limit.saturating_sub(Duration::from_nanos(1));
        let given_up = |of_any, of_rank_0, is_stopped| is_given_up([of_any, of_rank_0], || is_stopped);
        assert!(given_up(GRACE, Duration::ZERO, false) && !given_up(almost(GRACE), Duration::ZERO, false));
        assert!(given_up(SHORT_GRACE, SHORT_GRACE, false));
        assert!(!given_up(SHORT_GRACE, almost(SHORT_GRACE), false));
        assert!(given_up(SHORT_GRACE, Duration::ZERO, true));
        assert!(!given_up(almost(SHORT_GRACE), Duration::ZERO, true));
    }

    /// A rank that the signal ended before it could listen leaves another one waiting.
    #[test]
    fn a_rank_that_was_given_up_does_not_decide_the_status() {
        let start = |script: &str| {
            let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            Rank { child, stderr: None }
        };
        let stop = Stop::default();
        stop.raise(15);
        let mut ranks = [start("kill -TERM $$"), start("exec sleep 60")];
        let (statuses, ended) = watch(&mut ranks, &stop).unwrap();
        let signals =
            |statuses: &[ExitStatus]| statuses.iter().map(ExitStatusExt::signal).collect::<Vec<_>>();
        assert_eq!((signals(&statuses), signals(&ended)), (vec![Some(15), Some(9)], vec![Some(15)]));
        assert_eq!(exit_code(&ended, stop.signal()), 143);
    }

    #[test]
    fn an_error_of_several_ranks_is_said_once() {
        let texts = ["error: a", "", "stopped by SIGTERM", "error: a", "error: rank 0 has ended"];
        let said = |code: i32| {
            let statuses = [code, 0].map(|code| ExitStatus::from_raw(code << 8));
            errors_of_others(texts.into_iter().map(String::from), &statuses)
        };
        assert_eq!(said(2), ["error: a"]);
        assert_eq!(said(1), ["error: a", "error: rank 0 has ended"]);
    }

    #[test]
    fn the_status_is_that_of_the_worst_rank() {
        let code = |code: i32| ExitStatus::from_raw(code << 8);
        let killed = ExitStatus::from_raw;
        for (statuses, asked, expected) in [
            (vec![code(0), code(0)], 0, 0),
            (vec![code(0), code(2)], 0, 2),
            (vec![code(1), code(0)], 0, 1),
            (vec![code(0), killed(9)], 0, 2),
            (vec![code(143), code(0)], 15, 143),
            (vec![killed(15), code(143)], 15, 143),
            (vec![code(143), code(101)], 15, 101),
            (vec![killed(15)], 0, 2),
            (Vec::new(), 15, 143),
        ] {
            assert_eq!(exit_code(&statuses, asked), expected, "{statuses:?}");
        }
    }
}
