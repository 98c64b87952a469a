//! An external program as verifier. The program keeps running; requests and replies are lines; every wait and every
//! buffer has a limit.

use crate::reward::judged::Judged;
use crate::reward::process::{Process, Silence};
use crate::reward::spec::{CommandSpec, PythonSpec};
use crate::reward::verdict::lines::{RowOf, read_reply, requests, requests_with_rows, shortened};
use crate::reward::verdict::python::{self, Worker};
use crate::tasks::error::TaskError;
use stapo_core::Problem;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An external program and its process. A failure ends the process, and the next call starts another.
pub(crate) struct External {
    spec: CommandSpec,
    /// Present where the program is an interpreter that runs a function of the user.
    worker: Option<Worker>,
    process: Mutex<Option<Process>>,
    /// What the program shares with this machine because the machine cannot keep it apart.
    shared: Vec<String>,
}

impl External {
    pub(super) fn start(spec: &CommandSpec) -> Result<Self, TaskError> {
        Self::start_with(spec.clone(), None)
    }

    /// Starts the interpreter and loads the function, so that a file that cannot be loaded is found before sampling.
    pub(super) fn start_python(spec: &PythonSpec) -> Result<Self, TaskError> {
        Self::start_with(spec.command().isolated(), Some(Worker::new(spec)))
    }

    fn start_with(spec: CommandSpec, worker: Option<Worker>) -> Result<Self, TaskError> {
        spec.limits.check()?;
        let external = Self { spec, worker, process: Mutex::new(None), shared: Vec::new() };
        let (process, shared) = external.new_process()?;
        Ok(Self { process: Mutex::new(Some(process)), shared, ..external })
    }

    /// A running program that is ready for samples, and what it shares with this machine.
    fn new_process(&self) -> Result<(Process, Vec<String>), TaskError> {
        let (mut process, shared) = Process::start(&self.spec)?;
        if self.worker.is_none() {
            return Ok((process, shared));
        }
        process.send(python::greeting());
        let deadline = Instant::now() + Duration::from_secs_f64(self.spec.limits.batch_seconds);
        let ready = match process.next_line(deadline) {
            Ok(line) => python::read_greeting(&line),
            Err(silence) => Err(self.describe(silence, deadline)),
        };
        match ready {
            Ok(()) => Ok((process, shared)),
            Err(problem) => Err(self.failure(&mut process, "at the start".into(), problem)),
        }
    }

    pub(super) fn reads_rows(&self) -> bool {
        self.worker.is_some()
    }

    fn name(&self) -> String {
        let program = self.spec.program.display();
        self.worker
            .as_ref()
            .map_or_else(|| program.to_string(), |worker| format!("{program} {}", worker.name()))
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        let program = self.name();
        self.shared.iter().map(|what| format!("verifier {program} shares with this machine {what}")).collect()
    }

    /// Sends and receives one line per sample. A failure ends the process and is an error that names the sample. An
    /// interpreter that dies is started again, once, and gets all samples of the call anew: an extension module may have
    /// crashed, or the system may have taken its memory.
    pub(super) fn judge(
        &self,
        samples: &[(&Problem, &str)],
        row_of: &RowOf,
    ) -> Result<Vec<Judged>, TaskError> {
        if samples.is_empty() {
            return Ok(Vec::new());
        }
        let mut slot = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let mut process = match slot.take() {
            Some(process) => process,
            None => self.new_process()?.0,
        };
        let mut judged = self.exchange(&mut process, samples, row_of);
        if let (Err(error), Some(worker)) = (&judged, &self.worker)
            && process.has_ended()
        {
            worker.show(&format!("started again after: {error}"));
            process = self.new_process()?.0;
            judged = self.exchange(&mut process, samples, row_of);
        }
        let judged = judged?;
        *slot = Some(process);
        Ok(judged)
    }

    fn exchange(
        &self,
        process: &mut Process,
        samples: &[(&Problem, &str)],
        row_of: &RowOf,
    ) -> Result<Vec<Judged>, TaskError> {
        let sample_name =
            |idx: usize| format!("sample {} of {} (problem {:?})", idx + 1, samples.len(), samples[idx].0.id);
        match process.next_line(Instant::now()) {
            Err(Silence::TimedOut) => {}
            found => {
                return Err(self.failure(process, format!("before {}", sample_name(0)), self.surplus(found)));
            }
        }
        let first = process.n_sent;
        process.n_sent += samples.len() as u64;
        process.send(match &self.worker {
            None => requests(samples, first),
            Some(_) => requests_with_rows(samples, first, row_of),
        });
        let batch_deadline = Instant::now() + Duration::from_secs_f64(self.spec.limits.batch_seconds);
        let mut judged = Vec::with_capacity(samples.len());
        for (idx, (problem, _)) in samples.iter().enumerate() {
            let deadline =
                batch_deadline.min(Instant::now() + Duration::from_secs_f64(self.spec.limits.sample_seconds));
            let line = process.next_line(deadline).map_err(|silence| {
                self.failure(process, sample_name(idx), self.describe(silence, batch_deadline))
            })?;
            let answer = match &self.worker {
                None => read_reply(&line, &problem.id, first + idx as u64).map_err(|problem| {
                    let remedy = r#"one line of JSON per sample: {"verdict": "right"} or {"reward": 0.5}"#;
                    (problem, remedy.into())
                }),
                Some(worker) => worker.read_reply(&line, &problem.id, first + idx as u64, &sample_name(idx)),
            };
            judged.push(answer.map_err(|problem| self.failure(process, sample_name(idx), problem))?);
        }
        match process.next_line(Instant::now()) {
            // All verdicts have arrived. A program that has ended by now fails the next call.
            Err(Silence::TimedOut | Silence::Ended) => Ok(judged),
            found => Err(self.failure(
                process,
                format!("after {}", sample_name(samples.len() - 1)),
                self.surplus(found),
            )),
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
                let problem =
                    format!("no answer, and batch_seconds {} are over", self.spec.limits.batch_seconds);
                (problem, "raise verifier.batch_seconds, or make the program faster".into())
            }
            Silence::TimedOut => {
                let problem = format!("no answer for sample_seconds {}", self.spec.limits.sample_seconds);
                (problem, "raise verifier.sample_seconds, and flush standard output after every line".into())
            }
            Silence::TooLong => {
                let problem =
                    format!("wrote a line above max_line_bytes {}", self.spec.limits.max_line_bytes);
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
        TaskError::Verifier { program: self.name(), place, problem, remedy }
    }
}
