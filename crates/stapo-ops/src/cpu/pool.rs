//! A persistent pool of threads that share the tasks of one call.
//!
//! A thread begins with its own share of the tasks. The share is the same in every call, so the next op reads the rows
//! that an op left in a core's cache on the same core. A thread that has finished its share takes tasks from the
//! others' shares. The calling thread works too. No result depends on which thread ran a task: each output is written
//! by exactly one task.

#[cfg(test)]
mod tests;

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

type Body<'a> = &'a (dyn Fn(usize) + Sync + 'a);

pub(crate) struct Pool {
    state: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a call: the pool runs one call at a time.
    turn: Mutex<()>,
}

struct PoolState {
    /// The number of the call (epoch) in the high half; the bit [`OPEN`] while workers may join the call; in the bits
    /// below, the number of workers that have joined.
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// One share for each thread.
    shares: Vec<Share>,
    panicked: AtomicBool,
    stop: AtomicBool,
    n_asleep: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

/// The next task of a thread's share. Each lies on its own cache line, so that threads do not slow each other down.
#[repr(align(128))]
struct Share(AtomicUsize);

#[derive(Clone, Copy)]
struct Job {
    body: *const (dyn Fn(usize) + Sync),
    n_tasks: usize,
}

// SAFETY: `job` is written only while the call is closed and no worker has joined it, and read only by workers that
// joined after it was opened; everything else is atomic or locked.
unsafe impl Sync for PoolState {}
// SAFETY: the job points to a `Sync` closure, which is used only while its owner waits in `Pool::run`.
unsafe impl Send for PoolState {}

const OPEN: u64 = 1 << 31;
const COUNT: u64 = OPEN - 1;
const EPOCH: u64 = 1 << 32;
/// How often an idle worker looks for work before it sleeps: tens of microseconds, longer than the gap between two ops.
const IDLE_SPINS: usize = 4000;

thread_local!(static INSIDE: Cell<bool> = const { Cell::new(false) });

impl Pool {
    /// A pool of `threads` threads, of which the caller of [`Pool::run`] is one.
    pub(crate) fn new(threads: usize) -> Self {
        let state = Arc::new(PoolState {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            shares: (0..threads.max(1)).map(|_| Share(AtomicUsize::new(0))).collect(),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            n_asleep: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let spawn = |idx: usize| {
            let state = Arc::clone(&state);
            let thread = std::thread::Builder::new().name(format!("stapo-{idx}"));
            // If the machine refuses a thread, the pool runs with the threads it got.
            thread.spawn(move || state.work(idx)).ok()
        };
        let workers = (1..threads.max(1)).map_while(spawn).collect();
        Pool { state, workers, turn: Mutex::new(()) }
    }

    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body` once for every index below `n_tasks`, on all threads. A call from inside of a task runs on that
    /// task's thread alone.
    pub(crate) fn run(&self, n_tasks: usize, body: Body<'_>) {
        if n_tasks <= 1 || self.workers.is_empty() || INSIDE.get() {
            (0..n_tasks).for_each(body);
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: only the lifetime is erased; `close` waits for every worker before this function returns.
        let body: *const (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(body) };
        let state = &*self.state;
        state.open(Job { body, n_tasks });
        INSIDE.set(true);
        let outcome = catch_unwind(AssertUnwindSafe(|| state.take_tasks(0, Job { body, n_tasks })));
        INSIDE.set(false);
        if outcome.is_err() {
            state.shares.iter().for_each(|share| share.0.store(n_tasks, Ordering::Relaxed));
        }
        state.close();
        let worker_panicked = state.panicked.swap(false, Ordering::AcqRel);
        drop(turn);
        match outcome {
            Err(payload) => resume_unwind(payload),
            Ok(()) if worker_panicked => panic!("a task of the pool panicked; see the message above"),
            Ok(()) => {}
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        drop(self.state.sleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.state.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so joining cannot fail.
            drop(worker.join());
        }
    }
}

impl PoolState {
    fn open(&self, job: Job) {
        // SAFETY: the call is closed and all workers have left it: `close` waited for that.
        unsafe { *self.job.get() = Some(job) };
        for (thread, share) in self.shares.iter().enumerate() {
            share.0.store(self.first_task(thread, job.n_tasks), Ordering::Relaxed);
        }
        let epoch = self.state.load(Ordering::Relaxed) / EPOCH + 1;
        self.state.store((epoch * EPOCH) | OPEN, Ordering::SeqCst);
        if self.n_asleep.load(Ordering::SeqCst) > 0 {
            drop(self.sleep.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    /// Lets no more workers join, and waits until those that joined have left.
    fn close(&self) {
        self.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while self.state.load(Ordering::Acquire) & COUNT != 0 {
            spins += 1;
            if spins > IDLE_SPINS {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// The first task of the share of `thread`; the share of the thread before ends here.
    fn first_task(&self, thread: usize, n_tasks: usize) -> usize {
        thread * n_tasks / self.shares.len()
    }

    /// Runs the tasks of the share of `thread`, then what is left of the other shares.
    fn take_tasks(&self, thread: usize, job: Job) {
        let n_threads = self.shares.len();
        for owner in (thread..n_threads).chain(0..thread) {
            let end = self.first_task(owner + 1, job.n_tasks);
            loop {
                let task = self.shares[owner].0.fetch_add(1, Ordering::Relaxed);
                if task >= end {
                    break;
                }
                // SAFETY: the closure lives until `close` has waited for all workers.
                unsafe { (*job.body)(task) };
            }
        }
    }

    fn work(&self, thread: usize) {
        INSIDE.set(true);
        let mut last_epoch = 0;
        while let Some(epoch) = self.join(last_epoch) {
            last_epoch = epoch;
            // SAFETY: this worker has joined the call, so no thread writes the job.
            let job = unsafe { *self.job.get() };
            let outcome = catch_unwind(AssertUnwindSafe(|| job.map(|job| self.take_tasks(thread, job))));
            if outcome.is_err() {
                self.panicked.store(true, Ordering::Release);
            }
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for an open call newer than `last_epoch` and joins it; returns its epoch, or `None` when the pool ends.
    fn join(&self, last_epoch: u64) -> Option<u64> {
        let is_new = |state: u64| state & OPEN != 0 && state / EPOCH != last_epoch;
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Acquire);
            if is_new(state) {
                let entered =
                    self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Relaxed);
                if entered.is_ok() {
                    return Some(state / EPOCH);
                }
            } else if self.stop.load(Ordering::Relaxed) {
                return None;
            } else if spins < IDLE_SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                let guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
                self.n_asleep.fetch_add(1, Ordering::SeqCst);
                let idle = |(): &mut ()| {
                    !is_new(self.state.load(Ordering::SeqCst)) && !self.stop.load(Ordering::SeqCst)
                };
                drop(self.wake.wait_while(guard, idle));
                self.n_asleep.fetch_sub(1, Ordering::SeqCst);
                spins = 0;
            }
        }
    }
}
