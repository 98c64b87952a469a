//! A plan as lines for people, at most 80 columns wide.

use super::planned::{MemoryPhase, Planned, fits};
use crate::shared::clock::span_of_seconds;
use crate::shared::units::{grouped, size};
use stapo_rl::plan::disk::DiskPlan;
use stapo_rl::plan::estimate::{Machine, Processor};

const COLUMNS: usize = 80;
/// Columns of the names at the left.
const NAME_COLUMNS: usize = 9;

pub fn print(planned: &Planned) {
    print_run(planned);
    print_memory(planned);
    print_disk(planned);
    print_times(planned);
    for note in planned.plan.notes() {
        line("note", &note);
    }
}

/// The times of a plan and what was assumed for them.
pub fn print_times(planned: &Planned) {
    print_time(planned);
    for (idx, text) in planned.assumed.iter().enumerate() {
        line(if idx == 0 { "assumed" } else { "" }, text);
    }
}

fn print_run(planned: &Planned) {
    let config = &planned.plan.config;
    let rollout = &config.rollout;
    let objective = config.preset.as_deref().unwrap_or("own");
    line("run", &format!("{}: {objective} on {}", config.name, config.task.kind()));
    let shapes = planned.shapes;
    let n_parameters = grouped(shapes.model.n_parameters());
    line("model", &format!("{}, {}, {n_parameters} parameters", shapes.name, shapes.model.family.name()));
    line("machine", &format!("{}; {}", planned.machine.description, rates(planned.machine)));
    if let Some(ranks) = &planned.prediction.ranks {
        let world = &ranks.world;
        let machines = if world.n_nodes == 1 { "one machine" } else { "machines" };
        let n_nodes =
            if world.n_nodes == 1 { String::new() } else { format!("{} ", grouped(world.n_nodes as u64)) };
        line("ranks", &format!("{} in {n_nodes}{machines}, a GPU each; memory is of one", world.n_ranks));
    }
    line(
        "steps",
        &format!(
            "{} of {} problems x {} responses, {} optimizer steps each",
            grouped(config.steps),
            rollout.problems_per_step,
            rollout.group_size,
            planned.plan.updates_per_step()
        ),
    );
    line(
        "tokens",
        &format!(
            "prompts to {}, responses to {}: at most {} sampled in all",
            grouped(rollout.max_prompt_tokens as u64),
            grouped(rollout.max_response_tokens as u64),
            grouped(planned.most_tokens())
        ),
    );
}

/// The two ceilings of a machine and where they come from.
pub(super) fn rates(machine: &Machine) -> String {
    let products = match machine.processor {
        Processor::Gpu => format!("{:.0} TFLOP/s", machine.products.per_second / 1e12),
        Processor::Cpu => format!("{:.0} GFLOP/s", machine.products.per_second / 1e9),
    };
    let bandwidth = match machine.processor {
        Processor::Gpu => format!("{:.2} TB/s", machine.bandwidth.per_second / 1e12),
        Processor::Cpu => format!("{:.0} GB/s", machine.bandwidth.per_second / 1e9),
    };
    let origin = machine.products.origin;
    format!("{products}, {bandwidth}, {} ({})", origin.word(), origin.source())
}

/// A table of the parts and the phases that use them, and all parts together, which are held at once.
fn print_memory(planned: &Planned) {
    let row = |name: &str, cells: [String; 3]| {
        format!("{name:<13} {:>10} {:>10} {:>10}", cells[0], cells[1], cells[2])
    };
    line("memory", &row("", MemoryPhase::ALL.map(|phase| phase.name().to_string())));
    for part in planned.memory.held.iter().chain(&planned.memory.sampling).chain(&planned.memory.updating) {
        let cell =
            |phase: MemoryPhase| if planned.uses(phase, part) { size(part.bytes) } else { "-".to_string() };
        line("", &row(part.name, MemoryPhase::ALL.map(cell)));
    }
    line("", &row("used", MemoryPhase::ALL.map(|phase| size(planned.used_bytes(phase)))));
    for part in &planned.memory.judging {
        line(
            "",
            &format!(
                "{:<13} {:>10} while it judges, in the memory of the others",
                part.name,
                size(part.bytes)
            ),
        );
    }
    let of_all = planned.memory_bytes.map_or(String::new(), |bytes| format!(" of {}", size(bytes)));
    line("", &format!("{:<13} {:>10}{of_all}", "held at once", size(planned.total_bytes())));
    if planned.fits() == Some(false) {
        line("", &does_not_fit(planned));
    }
}

fn print_disk(planned: &Planned) {
    let DiskPlan { first_bytes, most_bytes, n_most } = planned.disk;
    let keep = planned.plan.config.record.keep_checkpoints;
    let free = planned.disk_free.map_or(String::new(), |free| format!("; {} are free here", size(free)));
    let checkpoints = if n_most == 1 { "checkpoint" } else { "checkpoints" };
    line(
        "disk",
        &format!(
            "{} at most, in {n_most} {checkpoints} of up to {} (record.keep_checkpoints = {keep}, the best one, and the one being written){free}",
            size(most_bytes),
            size(first_bytes)
        ),
    );
    if fits(most_bytes, planned.disk_free) == Some(false) {
        line(
            "",
            "does not fit on the disk; a lower record.keep_checkpoints, record.optimizer = \"last\" or another disk helps",
        );
    }
}

fn does_not_fit(planned: &Planned) -> String {
    match &planned.remedy {
        Some(remedy) => {
            let options =
                remedy.changes.iter().map(|change| format!(" --set {}={}", change.key, change.value));
            format!("does not fit; with{} it needs {}", options.collect::<String>(), size(remedy.peak_bytes))
        }
        None => {
            "does not fit, and no setting helps: take a smaller model, shorter sequences or a larger machine"
                .to_string()
        }
    }
}

fn print_time(planned: &Planned) {
    let prediction = &planned.prediction;
    let total = span_of_seconds(prediction.seconds());
    let per_step = seconds(prediction.phases.total());
    line("time", &format!("about {total} for {} steps, {per_step} a step:", grouped(prediction.n_steps)));
    for phase in prediction.phases.list().iter().filter(|phase| phase.seconds > 0.0) {
        line("", &format!("{:<13} {:>10}", phase.name, seconds(phase.seconds)));
    }
    print_ranks(planned);
    let lengths = &prediction.lengths;
    line(
        "",
        &format!(
            "for prompts of {:.0} and responses of {:.0} tokens on average",
            lengths.prompt_mean, lengths.response_mean
        ),
    );
    if let Some(episodes) = &prediction.episodes {
        let given = episodes.given(*lengths);
        line(
            "",
            &format!(
                "of which {given:.0} tokens are given between {:.1} turns; answers take {}, {} at once",
                episodes.turns,
                seconds(episodes.answer_seconds),
                grouped(episodes.at_once as u64)
            ),
        );
    }
    let rate = |rate: f64| grouped(rate.round() as u64);
    let trained = format!("training {} response tokens/s", rate(prediction.trained_per_second()));
    let sampled = prediction.sampled_per_second().map_or(String::new(), |sampled| {
        format!(
            "sampling {} tokens/s, up to {} at once; ",
            rate(sampled),
            grouped(prediction.most_running as u64)
        )
    });
    line("", &format!("{sampled}{trained}"));
    if prediction.n_saved_tokens > 0.0 {
        let n_saved = rate(prediction.n_saved_tokens);
        line("", &format!("responses share their prompts: updates compute {n_saved} tokens of a batch less"));
    }
    if let Some(step) = &planned.measured {
        line(
            "measured",
            &format!(
                "a warm step of {} problems with responses to {} tokens: rollout {}, update {}",
                step.n_problems,
                grouped(step.response_limit as u64),
                seconds(step.rollout_seconds),
                seconds(step.update_seconds)
            ),
        );
    }
}

/// How well several ranks are used.
fn print_ranks(planned: &Planned) {
    let Some(ranks) = &planned.prediction.ranks else { return };
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let total = planned.prediction.phases.total();
    line(
        "",
        &format!(
            "exchanges are {} of a step, {} sent by each rank; {} of the ranks' time is waiting",
            percent(planned.prediction.phases.exchange / total),
            size(ranks.exchange.bytes_sent as u64),
            percent(ranks.idle_share)
        ),
    );
    if let (Some(one), Some(efficiency)) = (&planned.on_one, planned.efficiency()) {
        let fits = if one.fits { "" } else { ", which it has no memory for" };
        line(
            "",
            &format!(
                "one GPU takes {} a step{fits}: {} ranks do the work of {:.1}, an efficiency of {}",
                seconds(one.step_seconds),
                ranks.world.n_ranks,
                efficiency * ranks.world.n_ranks as f64,
                percent(efficiency)
            ),
        );
    }
}

/// Seconds with three digits that count.
pub(super) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{} s", grouped(s.round() as u64)),
        s if s >= 10.0 => format!("{s:.1} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.1} ms", 1e3 * s),
    }
}

/// Prints a named line; what does not fit the columns continues below, without the name.
pub(super) fn line(name: &str, text: &str) {
    for (idx, part) in wrapped(text, COLUMNS - NAME_COLUMNS).iter().enumerate() {
        let name = if idx == 0 { name } else { "" };
        println!("{name:<8} {part}");
    }
}

/// The text in lines of at most `columns` characters, cut at spaces; a longer word stays whole.
fn wrapped(text: &str, columns: usize) -> Vec<String> {
    if text.chars().count() <= columns {
        return vec![text.to_string()];
    }
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is always a line");
        if !last.is_empty() && last.chars().count() + 1 + word.chars().count() > columns {
            lines.push(word.to_string());
        } else {
            if !last.is_empty() {
                last.push(' ');
            }
            last.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_at_spaces() {
        assert_eq!(wrapped("a   b", 9), ["a   b"]);
        assert_eq!(wrapped("one two three four", 9), ["one two", "three", "four"]);
        assert_eq!(wrapped("a-word-that-is-long b", 5), ["a-word-that-is-long", "b"]);
    }

    #[test]
    fn seconds_have_three_digits_that_count() {
        let shown = [0.0123, 1.2345, 12.345, 1234.5].map(seconds);
        assert_eq!(shown, ["12.3 ms", "1.23 s", "12.3 s", "1,235 s"]);
    }
}
