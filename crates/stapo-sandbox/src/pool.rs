//! Warm interpreters for several programs at a time.

use crate::interpreter::Interpreter;
use crate::relay;
use crate::zygote::{Role, Starter, Zygote};
use crate::{Checks, End, Layers, Outcome, Request, SandboxError, Settings, Tested, Trial};
use std::io;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Warm interpreters, each inside a separate jail. Results are in the order of requests. Threads may share a pool.
pub struct Pool {
    settings: Settings,
    interpreter: Interpreter,
    starter: Box<Starter>,
    layers: Layers,
    workers: Vec<Mutex<Worker>>,
    /// The worker that the next call begins with, so that calls of several threads do not wait for the same one.
    next_worker: AtomicUsize,
}

/// Interpreters that serve one program at a time, started when they are first needed and again after they died.
#[derive(Default)]
struct Worker {
    programs: Option<Zygote>,
    tests: Option<Zygote>,
}

impl Pool {
    /// Opens a pool with one interpreter, so that what this machine lacks is found at once. `starter` gives the command
    /// that starts this program again, which then calls [`launch`](crate::launch).
    pub fn open(
        settings: Settings,
        starter: impl Fn() -> io::Result<Command> + Send + Sync + 'static,
    ) -> Result<Self, SandboxError> {
        settings.limits.check()?;
        let interpreter = Interpreter::find(&settings)?;
        let first = Zygote::start(&settings, &interpreter, Role::Programs, &starter)?;
        let layers = first.layers.clone();
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let n_workers = if settings.n_workers == 0 { n_cores } else { settings.n_workers };
        let mut workers: Vec<Worker> = (0..n_workers).map(|_| Worker::default()).collect();
        workers[0].programs = Some(first);
        let workers = workers.into_iter().map(Mutex::new).collect();
        let (starter, next_worker) = (Box::new(starter), AtomicUsize::new(0));
        Ok(Self { settings, interpreter, starter, layers, workers, next_worker })
    }

    /// What keeps programs apart on this machine.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// Runs programs.
    pub fn run(&self, requests: &[Request]) -> Result<Vec<Outcome>, SandboxError> {
        let language = self.settings.language.as_ref();
        self.each(
            requests,
            |worker, request| {
                let programs = self.programs(worker)?;
                Ok(relay::run(programs, request, language).ok())
            },
            |_, outcome| outcome,
        )
    }

    /// Tests programs.
    pub fn test(&self, trials: &[Trial]) -> Result<Vec<Tested>, SandboxError> {
        if let Some(trial) = trials
            .iter()
            .find(|trial| self.settings.language.is_some() && !matches!(trial.checks, Checks::Streams { .. }))
        {
            let n_tests = trial.checks.n_tests();
            return Err(SandboxError::new(
                format!("{n_tests} tests call functions, and the language is not Python"),
                "give tests of programs in other languages as pairs of standard input and output",
            ));
        }
        let language = self.settings.language.as_ref();
        self.each(
            trials,
            |worker, trial| {
                let needs_tester = !matches!(trial.checks, Checks::Streams { checker: None, .. });
                if needs_tester {
                    self.start(&mut worker.tests, Role::Tests)?;
                }
                self.start(&mut worker.programs, Role::Programs)?;
                let Worker { programs: Some(programs), tests } = worker else { return Ok(None) };
                Ok(relay::test(programs, tests, trial, language).ok())
            },
            |trial, outcome| Tested::cut_short(Vec::new(), trial.checks.n_tests(), outcome),
        )
    }

    fn programs<'a>(&self, worker: &'a mut Worker) -> Result<&'a mut Zygote, SandboxError> {
        self.start(&mut worker.programs, Role::Programs)?;
        worker.programs.as_mut().ok_or_else(|| SandboxError::new("no interpreter", "try again"))
    }

    /// Starts an interpreter where there is none that can be used.
    fn start(&self, slot: &mut Option<Zygote>, role: Role) -> Result<(), SandboxError> {
        if slot.as_ref().is_none_or(|zygote| !zygote.is_fit) {
            *slot = None;
            let level = self.layers.level;
            let settings = Settings { strongest: level, ..self.settings.clone() };
            let zygote = Zygote::start(&settings, &self.interpreter, role, &*self.starter)?;
            // The user has seen the level of the first interpreter.
            if zygote.layers.level != level {
                let problem = zygote.layers.without_namespaces.clone().unwrap_or_default();
                return Err(SandboxError::new(
                    format!("the level {} is no longer to be had: {problem}", level.name()),
                    "start the command again to run programs at a weaker level",
                ));
            }
            *slot = Some(zygote);
        }
        Ok(())
    }

    /// Deals items to workers. `work` gives `None` where the worker's interpreter died, which is no error of the caller. The
    /// item is then given once more to a new interpreter, and a program that ends two of them is taken to have ended itself.
    fn each<T: Sync, R: Send>(
        &self,
        items: &[T],
        work: impl Fn(&mut Worker, &T) -> Result<Option<R>, SandboxError> + Sync,
        ended: impl Fn(&T, Outcome) -> R + Sync,
    ) -> Result<Vec<R>, SandboxError> {
        let next = AtomicUsize::new(0);
        let results: Vec<Mutex<Option<Result<R, SandboxError>>>> =
            items.iter().map(|_| Mutex::new(None)).collect();
        let n_started = items.len().min(self.workers.len());
        let first = self.next_worker.fetch_add(n_started, Ordering::Relaxed) % self.workers.len();
        std::thread::scope(|scope| {
            for worker in self.workers.iter().cycle().skip(first).take(n_started) {
                let (next, results, work, ended) = (&next, &results, &work, &ended);
                scope.spawn(move || {
                    let mut worker = worker.lock().unwrap_or_else(PoisonError::into_inner);
                    loop {
                        let idx = next.fetch_add(1, Ordering::Relaxed);
                        let Some(item) = items.get(idx) else { return };
                        let mut result = work(&mut worker, item);
                        if let Ok(None) = result {
                            result = work(&mut worker, item);
                        }
                        let result = result.map(|result| result.unwrap_or_else(|| ended(item, killed())));
                        let is_error = result.is_err();
                        *results[idx].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
                        if is_error {
                            next.store(items.len(), Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        let results: Vec<_> = results
            .into_iter()
            .map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner))
            .collect();
        let mut all = Vec::with_capacity(items.len());
        let mut failure = None;
        for result in results.into_iter().flatten() {
            match result {
                Ok(result) => all.push(result),
                Err(error) => failure = Some(failure.unwrap_or(error)),
            }
        }
        failure.map_or(Ok(all), Err)
    }
}

fn killed() -> Outcome {
    Outcome {
        end: End::Signal(9),
        stdout: String::new(),
        stderr: "the interpreter ended".into(),
        cpu_seconds: 0.0,
    }
}
