//! The progress of an evaluation on a terminal.

use crate::shared::stop::{Asked, Stop};
use crate::shared::terminal::is_quiet;
use crate::shared::units::short;
use indicatif::{ProgressBar, ProgressStyle};
use stapo_core::Verdict;
use std::time::Duration;

/// A bar over the samples; hidden where the output is JSON or nothing.
pub fn bar(n_all: usize, n_done: usize, json: bool) -> ProgressBar {
    if json || is_quiet() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(n_all as u64).with_position(n_done as u64);
    let template = "{bar:20} {pos}/{len} samples  {elapsed}, {eta} left  {msg}";
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.reset_eta();
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

/// What the samples of this process have come to so far.
#[derive(Default)]
pub struct Tally {
    n_right: usize,
    n_tokens: u64,
}

impl Tally {
    pub fn add_token(&mut self) {
        self.n_tokens += 1;
    }

    pub fn add(&mut self, verdict: Verdict) {
        self.n_right += usize::from(verdict == Verdict::Right);
    }

    pub fn text(&self) -> String {
        format!("{} right, {} tokens", self.n_right, short(self.n_tokens))
    }
}

/// Shows signals above the bar, where a bar is drawn, so that no part of it stays behind.
pub fn show_signals(stop: &Stop, bar: &ProgressBar) {
    if bar.is_hidden() {
        return;
    }
    let shown = bar.clone();
    stop.show_by(move |asked, text| match asked {
        Asked::Once | Asked::Urgently => shown.println(text),
        Asked::AtOnce => shown.finish_and_clear(),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn right_samples_and_tokens_are_counted() {
        let mut tally = Tally::default();
        for verdict in [Verdict::Right, Verdict::Wrong, Verdict::Right] {
            tally.add(verdict);
        }
        (0..1200).for_each(|_| tally.add_token());
        assert_eq!(tally.text(), "2 right, 1.2k tokens");
    }
}
