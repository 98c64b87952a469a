//! Where the time of updates goes, for benchmarks: seconds of the host by part, and of the device between marks before and
//! after each part that gives it work.

use super::Meter;
use stapo_model::{Device, Mark};
use std::time::Instant;

/// A part of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Collecting a mini-batch, its thresholds, and deciding what waits for them.
    Prepare,
    /// The scoring pass, where thresholds need one.
    Score,
    /// Packing sequences.
    Pack,
    /// Queueing forward.
    Forward,
    /// Waiting for the numbers of forward.
    Wait,
    /// The objective and its derivatives, on the critical path from forward to backward.
    Objective,
    /// Queueing backward.
    Backward,
    /// What the host does while backward runs: likeliest tokens, census.
    Beside,
    /// The optimizer step, with the wait for the norm of the gradients.
    Optimizer,
    /// What is left to do after the optimizer step.
    Close,
}

impl Part {
    pub const ALL: [Part; 10] = [
        Part::Prepare,
        Part::Score,
        Part::Pack,
        Part::Forward,
        Part::Wait,
        Part::Objective,
        Part::Backward,
        Part::Beside,
        Part::Optimizer,
        Part::Close,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Part::Prepare => "prepare",
            Part::Score => "score",
            Part::Pack => "pack",
            Part::Forward => "forward",
            Part::Wait => "wait",
            Part::Objective => "objective",
            Part::Backward => "backward",
            Part::Beside => "beside",
            Part::Optimizer => "optimizer",
            Part::Close => "close",
        }
    }
}

/// What was watched since the parts were asked for.
#[derive(Debug, Default)]
pub(super) struct Watched {
    host: [f64; Part::ALL.len()],
    /// In the order of the device's work.
    spans: Vec<(Part, Mark, Mark)>,
}

/// The times of all updates since parts were last asked for.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PartTimes {
    /// Seconds of the host by part, in the order of [`Part::ALL`].
    pub host: [f64; Part::ALL.len()],
    /// Seconds of the device by part; 0 for parts that give it no work.
    pub device: [f64; Part::ALL.len()],
    /// Seconds of the device from the first part that gave it work to the end of the last.
    pub wall: f64,
}

impl PartTimes {
    /// The share of the time in which the device worked.
    pub fn busy_share(&self) -> f64 {
        self.device.iter().sum::<f64>() / self.wall.max(1e-9)
    }
}

impl Meter {
    /// Begins to watch the parts of updates. Marks on a device cost a few microseconds each.
    pub fn watch_parts(&self) {
        self.state().watched.get_or_insert_default();
    }

    /// Does a part of an update that gives the device no work.
    pub fn part<R>(&self, part: Part, body: impl FnOnce() -> R) -> R {
        if self.state().watched.is_none() {
            return body();
        }
        let began = Instant::now();
        let result = body();
        self.add_part(part, began, None);
        result
    }

    /// Does a part of an update that gives the device work.
    pub fn part_on<R>(&self, part: Part, device: &Device, body: impl FnOnce() -> R) -> R {
        if self.state().watched.is_none() {
            return body();
        }
        let (began, before) = (Instant::now(), device.mark());
        let result = body();
        self.add_part(part, began, Some((before, device.mark())));
        result
    }

    fn add_part(&self, part: Part, began: Instant, marks: Option<(Mark, Mark)>) {
        if let Some(watched) = &mut self.state().watched {
            watched.host[part as usize] += began.elapsed().as_secs_f64();
            watched.spans.extend(marks.map(|(before, after)| (part, before, after)));
        }
    }

    /// The times since the last call; all zero where parts are not watched. Waits for the device.
    pub fn take_parts(&self) -> PartTimes {
        let Some(Watched { host, spans }) = self.state().watched.as_mut().map(std::mem::take) else {
            return PartTimes::default();
        };
        let mut times = PartTimes { host, ..PartTimes::default() };
        for (part, before, after) in &spans {
            times.device[*part as usize] += before.seconds_until(after);
        }
        if let (Some((_, first, _)), Some((_, _, last))) = (spans.first(), spans.last()) {
            times.wall = first.seconds_until(last);
        }
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_model::CpuOptions;

    #[test]
    fn a_device_that_works_half_of_the_time_is_half_busy() {
        let mut times = PartTimes { wall: 4.0, ..PartTimes::default() };
        (times.device[0], times.device[1]) = (1.5, 0.5);
        assert_eq!(times.busy_share(), 0.5);
        assert_eq!(PartTimes::default().busy_share(), 0.0);
    }

    #[test]
    fn parts_are_counted_only_while_they_are_watched() {
        let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() });
        let meter = Meter::default();
        assert_eq!(meter.part(Part::Pack, || 3), 3);
        assert_eq!(meter.take_parts(), PartTimes::default());
        meter.watch_parts();
        let pause = || std::thread::sleep(std::time::Duration::from_millis(2));
        meter.part_on(Part::Forward, &device, pause);
        meter.part(Part::Objective, pause);
        meter.part_on(Part::Backward, &device, pause);
        let times = meter.take_parts();
        let seconds_of = |seconds: [f64; Part::ALL.len()], part: Part| seconds[part as usize];
        for part in [Part::Forward, Part::Objective, Part::Backward] {
            assert!(seconds_of(times.host, part) >= 2e-3, "{part:?}");
        }
        assert!(
            seconds_of(times.device, Part::Forward) >= 2e-3
                && seconds_of(times.device, Part::Objective) == 0.0
        );
        // The device did nothing during the objective, which lies between the two.
        assert!(times.wall >= 6e-3 && times.busy_share() < 1.0);
        assert_eq!(meter.take_parts().host, [0.0; Part::ALL.len()]);
    }
}
