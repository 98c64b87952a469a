//! What supervised runs show while they train.

use crate::shared::clock;
use crate::shared::stop::Stop;
use stapo_core::record::{HeldOutPairs, PreferenceMetrics, PretrainMetrics, RankingMetrics, Record};
use stapo_rl::learn::pretrain::WatchPretrain;
use std::io::{ErrorKind, Write, stdout};
use std::time::{Duration, Instant};

/// The terminal of a supervised run.
pub(super) struct PretrainView {
    json: bool,
    steps: u64,
    started: Instant,
    n_seen: u64,
    stop: Stop,
    /// The first failed write of metrics to standard output.
    pub output_error: Option<std::io::Error>,
}

impl PretrainView {
    pub fn new(json: bool, steps: u64, stop: Stop) -> Self {
        Self { json, steps, started: Instant::now(), n_seen: 0, stop, output_error: None }
    }

    /// The line of a step that learned from preferences.
    fn compared(
        &self,
        metrics: &PretrainMetrics,
        preference: &PreferenceMetrics,
        left: Duration,
        held_out: &str,
    ) {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let accuracy = preference.accuracy.map_or("none".to_string(), percent);
        let eval = preference.eval_accuracy.map(percent);
        let eval = eval.map_or(String::new(), |eval| format!("  held-out pairs in order {eval}"));
        eprintln!(
            "step {:>5}/{}  loss {:.4}  pairs in order {accuracy}  rewards {:+.3} {:+.3}  silenced {} of {}  grad {:.2}  {} left{held_out}{eval}",
            metrics.step,
            self.steps,
            metrics.loss,
            preference.reward_chosen,
            preference.reward_rejected,
            preference.n_silenced,
            preference.n_chosen_tokens,
            metrics.gradient_norm,
            clock::span(left),
        );
    }
}

/// What a step of a reward model shows.
fn ranked(metrics: &RankingMetrics) -> String {
    let held_out =
        metrics.eval.map_or(String::new(), |eval| format!("  held-out pairs in order {}", in_order(&eval)));
    format!(
        "pairs in order {:.1} %  scores {:+.3} {:+.3}{held_out}",
        100.0 * metrics.accuracy,
        metrics.score_chosen,
        metrics.score_rejected
    )
}

/// The held-out accuracy of a reward model with its interval.
pub(super) fn in_order(pairs: &HeldOutPairs) -> String {
    let HeldOutPairs { n_pairs, accuracy, low, high } = pairs;
    format!(
        "{:.1} % (95 % interval {:.1} to {:.1}, {n_pairs} pairs)",
        100.0 * accuracy,
        100.0 * low,
        100.0 * high
    )
}

impl WatchPretrain for PretrainView {
    fn stepped(&mut self, metrics: &PretrainMetrics) {
        self.n_seen += 1;
        if self.json {
            // A failed write does not end the run; a full disk is reported at its end, a reader that left is not.
            let written = stdout().write_all(metrics.to_line().as_bytes());
            let failed = written.err().filter(|error| error.kind() != ErrorKind::BrokenPipe);
            self.output_error = self.output_error.take().or(failed);
            return;
        }
        let is_last = metrics.step == self.steps;
        let is_shown = is_last
            || metrics.step.is_multiple_of(10)
            || metrics.eval_accuracy.is_some()
            || metrics.eval_loss.is_some();
        if !is_shown {
            return;
        }
        let n_left = self.steps.saturating_sub(metrics.step);
        let left = clock::time_left(self.started.elapsed(), self.n_seen, n_left);
        let accuracy = metrics.eval_accuracy.map(|accuracy| format!("  held-out {:.1} %", 100.0 * accuracy));
        let loss = metrics.eval_loss.map(|loss| format!("  held-out loss {loss:.4} nats"));
        let held_out: String = [accuracy, loss].into_iter().flatten().collect();
        if let Some(preference) = &metrics.preference {
            return self.compared(metrics, preference, left, &held_out);
        }
        if let Some(ranking) = &metrics.reward_model {
            let (step, steps) = (metrics.step, self.steps);
            let (loss, grad, left) = (metrics.loss, metrics.gradient_norm, clock::span(left));
            let shown = ranked(ranking);
            eprintln!(
                "step {step:>5}/{steps}  loss {loss:.4}  {shown}  grad {grad:.2}  {left} left{held_out}"
            );
            return;
        }
        eprintln!(
            "step {:>5}/{}  loss {:.4} nats  entropy {:.3} nats  grad {:.2}  {:.0} tokens/s  {} left{held_out}",
            metrics.step,
            self.steps,
            metrics.loss,
            metrics.entropy_mean,
            metrics.gradient_norm,
            metrics.tokens_per_second,
            clock::span(left),
        );
    }

    fn warned(&mut self, text: &str) {
        eprintln!("warning: {text}");
    }

    fn wants_stop(&mut self) -> bool {
        self.stop.is_raised()
    }

    fn stop_reason(&self) -> String {
        self.stop.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_in_order_are_a_share_with_its_interval() {
        let eval = HeldOutPairs { n_pairs: 40, accuracy: 0.75, low: 0.6, high: 0.8625 };
        assert_eq!(in_order(&eval), "75.0 % (95 % interval 60.0 to 86.2, 40 pairs)");
        let metrics: RankingMetrics = serde_json::from_value(serde_json::json!({
            "n_pairs": 8, "accuracy": 0.625, "score_chosen": 1.5, "score_rejected": -0.25,
        }))
        .unwrap();
        assert_eq!(ranked(&metrics), "pairs in order 62.5 %  scores +1.500 -0.250");
        let line = ranked(&RankingMetrics { eval: Some(eval), ..metrics });
        assert!(
            line.ends_with("-0.250  held-out pairs in order 75.0 % (95 % interval 60.0 to 86.2, 40 pairs)")
        );
    }
}
