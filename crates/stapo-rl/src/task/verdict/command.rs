//! An external program as verifier. The program keeps running; requests and replies are lines; every wait and every
//! buffer has a limit.

use crate::task::TaskError;
use crate::task::judged::Judged;
use crate::task::verifier_spec::CommandSpec;
use process::{Process, Silence};
use serde::{Deserialize, Serialize};
use stapo_core::{Problem, Turn, Verdict};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

mod process;

/// An external program and its process. A failure ends the process, and the next call starts another.
pub(in crate::task) struct External {
    spec: CommandSpec,
    process: Mutex<Option<Process>>,
    /// What the program shares with this machine because the machine cannot keep it apart.
    shared: Vec<String>,
}

impl External {
    pub(super) fn start(spec: &CommandSpec) -> Result<Self, TaskError> {
        for (key, seconds) in [("sample_seconds", spec.sample_seconds), ("batch_seconds", spec.batch_seconds)]
        {
            if !(seconds > 0.0 && seconds <= 1e6) {
                return Err(TaskError::setting(
                    key,
                    format!("{seconds} s"),
                    "a time above 0 and up to 1e6 s",
                ));
            }
        }
        if spec.max_line_bytes == 0 {
            return Err(TaskError::setting(
                "max_line_bytes",
                "0",
                "a verdict takes some 30 bytes; default 1 MiB",
            ));
        }
        // The launcher, of some 100 MiB of address space, is under the same limits.
        if (1..256).contains(&spec.memory_mib) {
            return Err(TaskError::setting(
                "memory_mib",
                spec.memory_mib.to_string(),
                "0 for no limit, or at least 256",
            ));
        }
        if spec.open_files < 16 {
            return Err(TaskError::setting("open_files", spec.open_files.to_string(), "at least 16"));
        }
        if let Some(name) = spec.env.iter().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
            return Err(TaskError::setting("env", format!("{name:?}"), "names of environment variables"));
        }
        let (process, shared) = Process::start(spec)?;
        Ok(Self { spec: spec.clone(), process: Mutex::new(Some(process)), shared })
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        let program = self.spec.program.display();
        self.shared.iter().map(|what| format!("verifier {program} shares with this machine {what}")).collect()
    }

    /// Sends and receives one line per sample. A failure ends the process and is an error that names the sample.
    pub(super) fn judge(&self, samples: &[(&Problem, &str)]) -> Result<Vec<Judged>, TaskError> {
        if samples.is_empty() {
            return Ok(Vec::new());
        }
        let mut slot = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let mut process = match slot.take() {
            Some(process) => process,
            None => Process::start(&self.spec)?.0,
        };
        let judged = self.exchange(&mut process, samples)?;
        *slot = Some(process);
        Ok(judged)
    }

    fn exchange(
        &self,
        process: &mut Process,
        samples: &[(&Problem, &str)],
    ) -> Result<Vec<Judged>, TaskError> {
        let place =
            |idx: usize| format!("sample {} of {} (problem {:?})", idx + 1, samples.len(), samples[idx].0.id);
        match process.next_line(Instant::now()) {
            Err(Silence::TimedOut) => {}
            found => return Err(self.failure(process, format!("before {}", place(0)), self.surplus(found))),
        }
        let first = process.n_sent;
        process.n_sent += samples.len() as u64;
        process.send(requests(samples, first));
        let batch_deadline = Instant::now() + Duration::from_secs_f64(self.spec.batch_seconds);
        let mut judged = Vec::with_capacity(samples.len());
        for (idx, (problem, _)) in samples.iter().enumerate() {
            let deadline =
                batch_deadline.min(Instant::now() + Duration::from_secs_f64(self.spec.sample_seconds));
            let line = process.next_line(deadline).map_err(|silence| {
                self.failure(process, place(idx), self.describe(silence, batch_deadline))
            })?;
            let answer = read_reply(&line, &problem.id, first + idx as u64).map_err(|problem| {
                let remedy = r#"one line of JSON per sample: {"verdict": "right"} or {"reward": 0.5}"#;
                self.failure(process, place(idx), (problem, remedy.into()))
            })?;
            judged.push(answer);
        }
        match process.next_line(Instant::now()) {
            // All verdicts have arrived. A program that has ended by now fails the next call.
            Err(Silence::TimedOut | Silence::Ended) => Ok(judged),
            found => {
                Err(self.failure(process, format!("after {}", place(samples.len() - 1)), self.surplus(found)))
            }
        }
    }

    /// The problem and the remedy of a surplus line, which would shift every later verdict by one sample.
    fn surplus(&self, found: Result<Vec<u8>, Silence>) -> (String, String) {
        match found {
            Ok(line) => {
                let problem = format!("wrote a line too many: {}", shortened(&line));
                (problem, "exactly one line per sample, in order; messages belong on standard error".into())
            }
            Err(silence) => self.describe(silence, Instant::now()),
        }
    }

    fn describe(&self, silence: Silence, batch_deadline: Instant) -> (String, String) {
        match silence {
            Silence::TimedOut if Instant::now() >= batch_deadline => {
                let problem = format!("no answer, and batch_seconds {} are over", self.spec.batch_seconds);
                (problem, "raise verifier.batch_seconds, or make the program faster".into())
            }
            Silence::TimedOut => {
                let problem = format!("no answer for sample_seconds {}", self.spec.sample_seconds);
                (problem, "raise verifier.sample_seconds, and flush standard output after every line".into())
            }
            Silence::TooLong => {
                let problem = format!("wrote a line above max_line_bytes {}", self.spec.max_line_bytes);
                (problem, "shorten the reason it gives, or raise verifier.max_line_bytes".into())
            }
            Silence::Ended => (
                "its output ended".to_string(),
                "run the program by hand with one sample on standard input".into(),
            ),
        }
    }

    fn failure(
        &self,
        process: &mut Process,
        place: String,
        (problem, remedy): (String, String),
    ) -> TaskError {
        let problem = format!("{problem}{}", process.end());
        TaskError::Verifier { program: self.spec.program.display().to_string(), place, problem, remedy }
    }
}

#[derive(Serialize)]
struct VerifierRequest<'a> {
    sample: u64,
    id: &'a str,
    /// The turns before the prompt; left out where there are none.
    #[serde(skip_serializing_if = "<[Turn]>::is_empty")]
    earlier_turns: &'a [Turn],
    prompt: &'a str,
    response: &'a str,
    reference: &'a str,
}

fn requests(samples: &[(&Problem, &str)], first: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (sample, (problem, response)) in (first..).zip(samples) {
        let Problem { id, earlier_turns, prompt, reference } = problem;
        let request = VerifierRequest { sample, id, earlier_turns, prompt, response, reference };
        serde_json::to_writer(&mut bytes, &request).expect("numbers, strings and lists are always JSON");
        bytes.push(b'\n');
    }
    bytes
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VerifierReply {
    sample: Option<u64>,
    verdict: Option<Verdict>,
    reward: Option<f64>,
    answer: Option<String>,
    reason: Option<String>,
    id: Option<String>,
}

fn read_reply(line: &[u8], id: &str, sample: u64) -> Result<Judged, String> {
    let reply: VerifierReply =
        serde_json::from_slice(line).map_err(|e| format!("wrote {}: {e}", shortened(line)))?;
    if let Some(other) = reply.sample.filter(|&other| other != sample) {
        return Err(format!("answered sample {other} where {sample} was next"));
    }
    if let Some(other) = reply.id.filter(|other| other != id) {
        return Err(format!("answered for {other:?}"));
    }
    let verdict = match (reply.verdict, reply.reward) {
        (_, Some(reward)) if !reward.is_finite() => return Err(format!("gave the reward {reward}")),
        (Some(verdict), _) => verdict,
        (None, Some(reward)) if reward > 0.0 => Verdict::Right,
        (None, Some(_)) => Verdict::Wrong,
        (None, None) => return Err(format!("gave neither verdict nor reward: {}", shortened(line))),
    };
    let reason = reply.reason.unwrap_or_else(|| "by the external verifier".into());
    Ok(Judged { verdict, reward: reply.reward, answer: reply.answer, canonical: None, reason })
}

fn shortened(line: &[u8]) -> String {
    const MAX_CHARS: usize = 120;
    let text = String::from_utf8_lossy(&line[..line.len().min(4 * MAX_CHARS)]);
    let start: String = text.chars().take(MAX_CHARS).collect();
    let rest = if text.chars().count() > MAX_CHARS || line.len() > 4 * MAX_CHARS { " ..." } else { "" };
    format!("{start:?}{rest}")
}
