//! A program of the user that answers one line of JSON with another, for tools and environments. Several processes of the
//! program work side by side, each started when it is first needed.

use super::permission::{self, Programs};
use super::process::{Process, Silence};
use super::spec::CommandSpec;
use crate::tasks::error::TaskError;
use serde_json::Value;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The processes of one program.
pub(crate) struct Dialogue {
    spec: CommandSpec,
    /// The first line that a process reads, which it answers before the first request.
    greeting: Option<Vec<u8>>,
    workers: Mutex<Workers>,
    is_idle: Condvar,
    /// What the program shares with this machine because the machine cannot keep it apart.
    shared: Vec<String>,
}

struct Workers {
    idle: Vec<Process>,
    /// Processes that may still be started.
    n_unused: usize,
}

/// Why a request has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    TimedOut,
    /// The process ended, wrote too much or wrote no JSON.
    Failed(String),
}

impl Dialogue {
    /// Starts a program that may be started. Returns the answer to the greeting too, null where there is none.
    pub(crate) fn start(
        spec: CommandSpec,
        greeting: Option<Vec<u8>>,
        n_workers: usize,
        programs: Programs,
    ) -> Result<(Self, Value), TaskError> {
        permission::check(&spec, programs)?;
        spec.limits.check()?;
        if n_workers == 0 {
            return Err(TaskError::setting("workers", "0", "the number of processes, at least 1"));
        }
        // The permission does not cover options of the interpreter.
        let spec = if greeting.is_some() { spec.isolated() } else { spec };
        let workers = Mutex::new(Workers { idle: Vec::new(), n_unused: n_workers - 1 });
        let mut dialogue = Self { spec, greeting, workers, is_idle: Condvar::new(), shared: Vec::new() };
        let (process, shared, answer) = dialogue.new_process()?;
        dialogue.shared = shared;
        dialogue.give_back(Some(process));
        Ok((dialogue, answer))
    }

    /// The answer to a request.
    pub(crate) fn ask(&self, request: &Value) -> Result<Result<Value, NoAnswer>, TaskError> {
        let mut process = match self.take() {
            Some(process) => process,
            None => match self.new_process() {
                Ok((process, ..)) => process,
                Err(error) => {
                    self.give_back(None);
                    return Err(error);
                }
            },
        };
        let mut line = request.to_string().into_bytes();
        line.push(b'\n');
        process.send(line);
        let limit = Duration::from_secs_f64(self.spec.limits.sample_seconds);
        let answer = match process.next_line(Instant::now() + limit) {
            Ok(line) => serde_json::from_slice(&line)
                .map_err(|error| NoAnswer::Failed(format!("wrote a line that is no JSON: {error}"))),
            Err(Silence::TimedOut) => Err(NoAnswer::TimedOut),
            Err(Silence::TooLong) => Err(NoAnswer::Failed(format!(
                "wrote a line above max_line_bytes {}",
                self.spec.limits.max_line_bytes
            ))),
            Err(Silence::Ended) => Err(NoAnswer::Failed("its process ended".into())),
        };
        // A process without an answer may still write one, which would be taken for the answer of a later request.
        self.give_back(answer.is_ok().then_some(process));
        Ok(answer)
    }

    pub(crate) fn warnings(&self) -> Vec<String> {
        let program = self.spec.program.display();
        self.shared.iter().map(|what| format!("tool {program} shares with this machine {what}")).collect()
    }

    /// An idle process, or `None` where another one may be started; waits while all are busy.
    fn take(&self) -> Option<Process> {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(process) = workers.idle.pop() {
                return Some(process);
            }
            if workers.n_unused > 0 {
                workers.n_unused -= 1;
                return None;
            }
            workers = self.is_idle.wait(workers).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Makes a process idle; `None` lets another one be started instead.
    fn give_back(&self, process: Option<Process>) {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        match process {
            Some(process) => workers.idle.push(process),
            None => workers.n_unused += 1,
        }
        drop(workers);
        self.is_idle.notify_one();
    }

    /// A running program, what it shares with this machine, and its answer to the greeting.
    fn new_process(&self) -> Result<(Process, Vec<String>, Value), TaskError> {
        let (mut process, shared) = Process::start(&self.spec)?;
        let Some(greeting) = &self.greeting else { return Ok((process, shared, Value::Null)) };
        process.send(greeting.clone());
        let deadline = Instant::now() + Duration::from_secs_f64(self.spec.limits.batch_seconds);
        let line = process.next_line(deadline);
        let answer: Option<Value> = line.as_ref().ok().and_then(|line| serde_json::from_slice(line).ok());
        let problem = match answer {
            Some(answer) if answer["error"].is_null() => return Ok((process, shared, answer)),
            Some(answer) => answer["error"].as_str().unwrap_or_default().to_string(),
            None => format!("did not answer the driver{}", process.end()),
        };
        Err(TaskError::Verifier {
            program: self.spec.program.display().to_string(),
            place: "at the start".into(),
            problem,
            remedy:
                "a Python file that loads and the name in it; python = \"PATH\" names another interpreter"
                    .into(),
        })
    }
}
