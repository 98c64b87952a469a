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

    /// The line of a step; `None` for one that is not shown. The last step, every tenth and those with an evaluation are.
    fn line(&self, metrics: &PretrainMetrics, left: Duration) -> Option<String> {
        let is_shown = metrics.step == self.steps
            || metrics.step.is_multiple_of(10)
            || metrics.eval_accuracy.is_some()
            || metrics.eval_loss.is_some();
        if !is_shown {
            return None;
        }
        let accuracy = metrics.eval_accuracy.map(|accuracy| format!("  held-out {:.1} %", 100.0 * accuracy));
        let loss = metrics.eval_loss.map(|loss| format!("  held-out loss {loss:.4} nats"));
        let held_out: String = [accuracy, loss].into_iter().flatten().collect();
        let (loss, grad) = (metrics.loss, metrics.gradient_norm);
        let begin = format!("step {:>5}/{}  loss {loss:.4}", metrics.step, self.steps);
        let end = format!("{} left{held_out}", clock::span(left));
        Some(if let Some(preference) = &metrics.preference {
            format!("{begin}  {}  grad {grad:.2}  {end}{}", compared(preference), held_out_pairs(preference))
        } else if let Some(ranking) = &metrics.reward_model {
            format!("{begin}  {}  grad {grad:.2}  {end}", ranked(ranking))
        } else {
            let (entropy, rate) = (metrics.entropy_mean, metrics.tokens_per_second);
            format!("{begin} nats  entropy {entropy:.3} nats  grad {grad:.2}  {rate:.0} tokens/s  {end}")
        })
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// What a step that learned from preferences shows.
fn compared(metrics: &PreferenceMetrics) -> String {
    format!(
        "pairs in order {}  rewards {:+.3} {:+.3}  silenced {} of {}",
        metrics.accuracy.map_or("none".to_string(), percent),
        metrics.reward_chosen,
        metrics.reward_rejected,
        metrics.n_silenced,
        metrics.n_chosen_tokens,
    )
}

fn held_out_pairs(metrics: &PreferenceMetrics) -> String {
    let eval = metrics.eval_accuracy.map(percent);
    eval.map_or(String::new(), |eval| format!("  held-out pairs in order {eval}"))
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
        let n_left = self.steps.saturating_sub(metrics.step);
        let left = clock::time_left(self.started.elapsed(), self.n_seen, n_left);
        if let Some(line) = self.line(metrics, left) {
            eprintln!("{line}");
        }
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
    use serde_json::{Value, json};

    #[test]
    fn pairs_in_order_are_a_share_with_its_interval() {
        let eval = HeldOutPairs { n_pairs: 40, accuracy: 0.75, low: 0.6, high: 0.8625 };
        assert_eq!(in_order(&eval), "75.0 % (95 % interval 60.0 to 86.2, 40 pairs)");
        let metrics: RankingMetrics = serde_json::from_value(json!({
            "n_pairs": 8, "accuracy": 0.625, "score_chosen": 1.5, "score_rejected": -0.25,
        }))
        .unwrap();
        assert_eq!(ranked(&metrics), "pairs in order 62.5 %  scores +1.500 -0.250");
        let line = ranked(&RankingMetrics { eval: Some(eval), ..metrics });
        assert!(
            line.ends_with("-0.250  held-out pairs in order 75.0 % (95 % interval 60.0 to 86.2, 40 pairs)")
        );
    }

    /// Steps 1 to 9 are left out unless they were evaluated, and the last one never is.
    #[test]
    fn a_step_is_a_line_if_it_is_the_last_a_tenth_or_evaluated() {
        let metrics = |step: u64, more: &[(&str, Value)]| -> PretrainMetrics {
            let mut metrics = json!({
                "schema": 1, "step": step, "loss": 0.5, "entropy_mean": 0.25, "n_tokens": 1000, "n_scored": 900,
                "learning_rate": 1e-4, "gradient_norm": 1.5, "tokens_per_second": 880.4,
            });
            for (key, value) in more {
                metrics[*key] = value.clone();
            }
            serde_json::from_value(metrics).unwrap()
        };
        let view = PretrainView::new(false, 25, Stop::default());
        let line = |metrics: PretrainMetrics| view.line(&metrics, Duration::from_secs(65));
        let is_shown = [1, 9, 10, 20, 21, 25].map(|step| line(metrics(step, &[])).is_some());
        assert_eq!(is_shown, [false, false, true, true, false, true]);
        let tenth =
            "step    10/25  loss 0.5000 nats  entropy 0.250 nats  grad 1.50  880 tokens/s  1 min 5 s left";
        assert_eq!(line(metrics(10, &[])).unwrap(), tenth);
        let held_out = line(metrics(3, &[("eval_accuracy", json!(0.75))])).unwrap();
        assert!(held_out.ends_with("s left  held-out 75.0 %"), "{held_out}");
        let held_out = line(metrics(3, &[("eval_loss", json!(0.125))])).unwrap();
        assert!(held_out.ends_with("s left  held-out loss 0.1250 nats"), "{held_out}");
        let ranking = json!({"n_pairs": 8, "accuracy": 0.625, "score_chosen": 1.5, "score_rejected": -0.25});
        assert_eq!(
            line(metrics(25, &[("reward_model", ranking)])).unwrap(),
            "step    25/25  loss 0.5000  pairs in order 62.5 %  scores +1.500 -0.250  grad 1.50  1 min 5 s left"
        );
        let mut preference = json!({
            "n_terms": 8, "accuracy": 0.625, "reward_chosen": 1.5, "reward_rejected": -0.25, "logp_chosen": -1.0,
            "logp_rejected": -2.0, "n_chosen_tokens": 90, "n_candidates": 5, "n_silenced": 4,
        });
        let compared = "pairs in order 62.5 %  rewards +1.500 -0.250  silenced 4 of 90";
        assert_eq!(
            line(metrics(20, &[("preference", preference.clone())])).unwrap(),
            format!("step    20/25  loss 0.5000  {compared}  grad 1.50  1 min 5 s left")
        );
        preference["accuracy"] = Value::Null;
        preference["eval_accuracy"] = json!(0.5);
        let held_out = line(metrics(3, &[("eval_loss", json!(0.125)), ("preference", preference)])).unwrap();
        assert!(held_out.contains("  pairs in order none  rewards "), "{held_out}");
        assert!(
            held_out.ends_with("left  held-out loss 0.1250 nats  held-out pairs in order 50.0 %"),
            "{held_out}"
        );
    }

    #[test]
    fn a_supervised_run_stops_by_the_signal_that_was_raised() {
        let mut view = PretrainView::new(false, 25, Stop::default());
        assert!(!view.wants_stop());
        view.stop.raise(15);
        assert_eq!((view.wants_stop(), view.stop_reason().as_str()), (true, "SIGTERM"));
    }
}
