//! A persistent pool of threads that share the tasks of one call.
//!
//! Every thread begins with its own share of the tasks, the same in every call: so the rows that an op leaves in a core's
//! cache are read there by the next one. Who is done helps the others. Nothing about the result may depend on which thread
//! ran a task: ops write each output from exactly one task. The caller works too.

#[cfg(test)]
mod tests;

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

type Body<'a> = &'a (dyn Fn(usize) + Sync + 'a);

pub(crate) struct Pool {
    shared: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
    /// One call at a time.
    turn: Mutex<()>,
}

struct PoolState {
    /// Epoch in the high half; [`OPEN`] while workers may join; below it the number of workers inside the job.
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// One for each thread.
    shares: Vec<Share>,
    panicked: AtomicBool,
    stop: AtomicBool,
    n_asleep: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

/// The next task of a thread's share, on a cache line of its own.
#[repr(align(128))]
struct Share(AtomicUsize);

#[derive(Clone, Copy)]
struct Job {
    body: *const (dyn Fn(usize) + Sync),
    n_tasks: usize,
}

// SAFETY: `job` is written only while the state is closed and nobody is inside, and read only by workers that joined
// after it was opened; everything else is atomic or locked.
unsafe impl Sync for PoolState {}
// SAFETY: the job's pointer is to a `Sync` closure, used only while its owner waits in `Pool::run`.
unsafe impl Send for PoolState {}

const OPEN: u64 = 1 << 31;
const COUNT: u64 = OPEN - 1;
const EPOCH: u64 = 1 << 32;
/// How often an idle worker looks for work before it sleeps: some tens of microseconds, the gap between two ops.
const IDLE_SPINS: usize = 4000;

thread_local!(static INSIDE: Cell<bool> = const { Cell::new(false) });

impl Pool {
    /// A pool of `threads` threads, of which the caller of [`Pool::run`] is one.
    pub(crate) fn new(threads: usize) -> Self {
        let shared = Arc::new(PoolState {
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
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("stapo-{idx}"));
            // A machine that refuses a thread still computes, with those it granted.
            thread.spawn(move || shared.work(idx)).ok()
        };
        let workers = (1..threads.max(1)).map_while(spawn).collect();
        Pool { shared, workers, turn: Mutex::new(()) }
    }

    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body` once for every index below `n_tasks`, on all threads. A call from inside a task runs in place.
    pub(crate) fn run(&self, n_tasks: usize, body: Body<'_>) {
        if n_tasks <= 1 || self.workers.is_empty() || INSIDE.get() {
            (0..n_tasks).for_each(body);
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: only the lifetime is erased; `shared.close` waits for every worker before this function returns.
        let body: *const (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(body) };
        let shared = &*self.shared;
        shared.open(Job { body, n_tasks });
        INSIDE.set(true);
        let outcome = catch_unwind(AssertUnwindSafe(|| shared.take_tasks(0, Job { body, n_tasks })));
        INSIDE.set(false);
        if outcome.is_err() {
            shared.shares.iter().for_each(|share| share.0.store(n_tasks, Ordering::Relaxed));
        }
        shared.close();
        let worker_panicked = shared.panicked.swap(false, Ordering::AcqRel);
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
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.sleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches its tasks' panics, so joining cannot fail; if it did, there is nobody to tell.
            drop(worker.join());
        }
    }
}

impl PoolState {
    fn open(&self, job: Job) {
        // SAFETY: the state is closed and nobody is inside: `close` waited for that.
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

    /// Lets nobody else in and waits until everybody is out.
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

    /// Where the share of `thread` begins, and that of the thread before it ends.
    fn first_task(&self, thread: usize, n_tasks: usize) -> usize {
        thread * n_tasks / self.shares.len()
    }

    /// The tasks of `thread`'s own share, then what is left of the others'.
    fn take_tasks(&self, thread: usize, job: Job) {
        let n_threads = self.shares.len();
        for owner in (thread..n_threads).chain(0..thread) {
            let end = self.first_task(owner + 1, job.n_tasks);
            loop {
                let task = self.shares[owner].0.fetch_add(1, Ordering::Relaxed);
                if task >= end {
                    break;
                }
                // SAFETY: the closure lives until `close` has seen everybody out.
                unsafe { (*job.body)(task) };
            }
        }
    }

    fn work(&self, thread: usize) {
        INSIDE.set(true);
        let mut last_epoch = 0;
        while let Some(epoch) = self.join(last_epoch) {
            last_epoch = epoch;
            // SAFETY: this worker is inside, so the job is not written.
            let job = unsafe { *self.job.get() };
            let outcome = catch_unwind(AssertUnwindSafe(|| job.map(|job| self.take_tasks(thread, job))));
            if outcome.is_err() {
                self.panicked.store(true, Ordering::Release);
            }
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for an open job newer than `last_epoch` and enters it; `None` when the pool ends.
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
