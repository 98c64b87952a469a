//! What a run is doing at this moment, for displays in other threads, and the seconds of each phase.

mod parts;

pub use parts::{Part, PartTimes};

use parts::Watched;
use stapo_core::record::{DecodingRecord, PhaseSeconds};
use stapo_model::Device;
use stapo_model::generate::StepCounts;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A part of a training step, under the name that `seconds` in `metrics.jsonl` gives to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Rollout,
    Environment,
    Grade,
    Calibrate,
    Update,
    Record,
    Evaluate,
    Checkpoint,
    CheckpointWait,
}

impl Phase {
    const COUNT: usize = 9;

    pub fn name(self) -> &'static str {
        match self {
            Phase::Rollout => "rollout",
            Phase::Environment => "environment",
            Phase::Grade => "grade",
            Phase::Calibrate => "calibrate",
            Phase::Update => "update",
            Phase::Record => "record",
            Phase::Evaluate => "evaluate",
            Phase::Checkpoint => "checkpoint",
            Phase::CheckpointWait => "checkpoint_wait",
        }
    }
}

/// The work of one phase since the last [`Meter::take`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    pub seconds: f64,
    pub n_tokens: u64,
    /// Responses that are finished, and all that are expected; 0 and 0 where the phase does not count responses.
    pub n_done: u64,
    pub n_all: u64,
}

/// What a run is doing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    /// The step in progress; 0 before the first step.
    pub step: u64,
    pub phase: Phase,
    pub work: Work,
}

/// Counts the work of a run. The trainer writes, displays read.
#[derive(Debug, Default)]
pub struct Meter {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    step: u64,
    /// The current phase and when it was entered; `None` before the first.
    current: Option<(Phase, Instant)>,
    /// By phase.
    work: [Work; Phase::COUNT],
    decoding: Option<DecodingRecord>,
    /// Seconds in which weights were copied to the device for judging.
    loading: Option<f64>,
    /// The parts of updates, if they were asked for.
    watched: Option<Watched>,
}

impl State {
    /// Adds the time since the current phase was entered to its seconds.
    fn settle(&mut self) {
        let Some((phase, since)) = &mut self.current else { return };
        let at = Instant::now();
        self.work[*phase as usize].seconds += at.duration_since(*since).as_secs_f64();
        *since = at;
    }
}

impl Meter {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a phase, which ends the current one. A phase may be entered several times in a step.
    pub fn enter(&self, phase: Phase) {
        let mut state = self.state();
        state.settle();
        state.current = Some((phase, Instant::now()));
    }

    /// Says that a phase has `n` responses more to do.
    pub fn expect(&self, phase: Phase, n: usize) {
        self.state().work[phase as usize].n_all += n as u64;
    }

    /// Counts work of the current phase.
    pub fn add(&self, n_responses: usize, n_tokens: usize) {
        let mut state = self.state();
        let Some((phase, _)) = state.current else { return };
        let work = &mut state.work[phase as usize];
        work.n_done += n_responses as u64;
        work.n_tokens += n_tokens as u64;
    }

    /// Adds the steps of an engine that has sampled for the rollout.
    pub fn add_steps(&self, counts: StepCounts) {
        let mut state = self.state();
        let decoding = state.decoding.get_or_insert_default();
        decoding.steps += counts.n_steps;
        decoding.drafted += counts.n_drafted;
        decoding.accepted += counts.n_accepted;
    }

    /// How rollouts were decoded since the last call.
    pub fn take_decoding(&self) -> Option<DecodingRecord> {
        self.state().decoding.take()
    }

    /// Counts a copy of a verifier's weights to the device.
    pub fn add_loading(&self, duration: Duration) {
        *self.state().loading.get_or_insert_default() += duration.as_secs_f64();
    }

    /// Seconds of these copies since the last call; `None` if there was none.
    pub fn take_loading(&self) -> Option<f64> {
        self.state().loading.take()
    }

    /// Says which step is in progress.
    pub fn set_step(&self, step: u64) {
        self.state().step = step;
    }

    /// The seconds of each phase since the last call; all counts begin again at 0.
    pub fn take(&self) -> PhaseSeconds {
        let mut state = self.state();
        state.settle();
        let work = std::mem::take(&mut state.work);
        let seconds = |phase: Phase| work[phase as usize].seconds;
        PhaseSeconds {
            rollout: seconds(Phase::Rollout),
            environment: seconds(Phase::Environment),
            grade: seconds(Phase::Grade),
            calibrate: seconds(Phase::Calibrate),
            update: seconds(Phase::Update),
            record: seconds(Phase::Record),
            evaluate: seconds(Phase::Evaluate),
            checkpoint: seconds(Phase::Checkpoint),
            checkpoint_wait: seconds(Phase::CheckpointWait),
        }
    }

    /// The current phase with its work up to this moment; `None` before the first phase.
    pub fn now(&self) -> Option<Moment> {
        let mut state = self.state();
        state.settle();
        let (phase, _) = state.current?;
        Some(Moment { step: state.step, phase, work: state.work[phase as usize] })
    }
}

/// The memory in use on a GPU, that of other processes included, or the most that this process has held on the CPU.
/// Bytes; `None` if the system does not report it.
pub(crate) fn memory_bytes(device: &Device) -> Option<u64> {
    if let Some((free, total)) = device.memory() {
        return Some((total - free) as u64);
    }
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = peak.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_model::CpuOptions;

    #[test]
    fn phases_add_up_and_begin_anew() {
        let meter = Meter::default();
        assert_eq!(meter.now(), None);
        meter.set_step(3);
        meter.expect(Phase::Update, 8);
        meter.enter(Phase::Rollout);
        meter.add(2, 30);
        meter.enter(Phase::Update);
        meter.add(4, 50);
        meter.enter(Phase::Rollout);
        meter.add(1, 12);
        let rollout = meter.now().unwrap();
        assert_eq!((rollout.step, rollout.phase), (3, Phase::Rollout));
        assert_eq!((rollout.work.n_done, rollout.work.n_all, rollout.work.n_tokens), (3, 0, 42));
        meter.enter(Phase::Update);
        let update = meter.now().unwrap().work;
        assert_eq!((update.n_done, update.n_all, update.n_tokens), (4, 8, 50));
        let seconds = meter.take();
        assert!(seconds.rollout > 0.0 && seconds.update > 0.0 && seconds.grade == 0.0);
        assert!((seconds.total() - seconds.rollout - seconds.update).abs() < 1e-12);
        let after = meter.now().unwrap();
        assert_eq!((after.phase, after.work.n_done, after.work.n_all), (Phase::Update, 0, 0));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_of_the_process_is_its_peak() {
        let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::from_env().unwrap() });
        let large = std::hint::black_box(vec![1_u8; 256 << 20]);
        let with = memory_bytes(&device).unwrap();
        drop(large);
        assert!(with >= 256 << 20, "{with}");
        // The system counts pages of threads late, so the mark may waver by a little.
        assert!(memory_bytes(&device).unwrap() + (64 << 20) >= with, "the peak stays");
    }

    #[test]
    fn what_rollouts_and_judges_did_is_added_up_until_it_is_taken() {
        let meter = Meter::default();
        assert_eq!((meter.take_decoding(), meter.take_loading()), (None, None));
        for n in 1..=3 {
            meter.add_steps(StepCounts {
                n_steps: n,
                n_drafting_steps: 1,
                n_drafted: 10 * n,
                n_accepted: 100 * n,
            });
            meter.add_loading(Duration::from_millis(250));
        }
        let decoding = meter.take_decoding().unwrap();
        assert_eq!((decoding.steps, decoding.drafted, decoding.accepted), (6, 60, 600));
        assert_eq!(meter.take_loading(), Some(0.75));
        assert_eq!((meter.take_decoding(), meter.take_loading()), (None, None));
    }
}
