//! What a training run shows.

use super::*;
use stapo_core::record::Extra;

#[test]
fn commands_name_the_run_in_a_form_that_a_shell_takes() {
    let mut best = Best { schema: 1, step: 7, metric: "held_out".into(), value: 0.5, extra: Extra::new() };
    let commands = next_commands(Path::new("runs/my run"), Outcome::Stopped, 9, Some(&best));
    assert_eq!(commands[0], "continue with      stapo train --resume 'runs/my run'");
    assert!(commands[4].ends_with("stapo export 'runs/my run' --step best --out 'runs/my run-model'"));
    assert_eq!(shell_word(Path::new("it's")), r"'it'\''s'");
    assert_eq!(next_commands(Path::new("runs/a"), Outcome::Done, 9, None).len(), 4);
    best.step = 0;
    let after_training = next_commands(Path::new("runs/a"), Outcome::Done, 9, Some(&best));
    assert_eq!(after_training[3], "export             stapo export runs/a --out runs/a-model");
    assert!(best_row(&best).ends_with("no evaluation was better than before training"));
    let untrained = next_commands(Path::new("runs/a"), Outcome::Stopped, 0, Some(&best));
    assert_eq!(untrained, ["continue with      stapo train --resume runs/a"]);
}

fn screen(steps: u64) -> Screen {
    Screen {
        mode: ScreenMode::Quiet,
        stop: Stop::default(),
        folder: "runs/a".into(),
        steps,
        first_step: 2,
        started: Instant::now(),
        start_accuracy: None,
        eval: Vec::new(),
        accuracy: Vec::new(),
        entropy: Vec::new(),
        n_silenced: 0,
        n_tokens: 0,
        output_error: None,
    }
}

#[test]
fn a_step_is_a_line_and_the_last_line_below_the_curves() {
    let mut screen = screen(1000);
    let step = |step: u64, accuracy: f64| {
        let keys =
            serde_json::json!({"accuracy": accuracy, "eval_accuracy": accuracy, "kl_behavior": 2.4e-7});
        crate::shared::study::tests::metrics(step, &keys)
    };
    let (third, last) = (step(3, 0.25), step(4, 0.5));
    assert!(
        screen.line(&third).starts_with("step    3/1000  accuracy  25.0 %  entropy 0.300 nats  grad 1.00  ")
    );
    assert!(screen.line(&third).ends_with(" left"));
    screen.take(&third);
    screen.take(&last);
    assert_eq!((screen.n_silenced, screen.n_tokens, screen.eval.len()), (2, 2000, 2));
    let curves = screen.curves(&last);
    let lines: Vec<&str> = curves.lines().collect();
    assert_eq!(lines[0], "accuracy 25.0 % ▁█ 50.0 %");
    assert_eq!(lines[2], "entropy  0.300 nats ▅▅ 0.300 nats");
    assert_eq!(lines[3], "last     reward 0.000  silenced 1 of 2 candidates  grad 1.00  kl 2.4e-7");
}

/// Each of 998 steps that are left takes as long as the one that is done.
#[test]
fn the_time_left_follows_from_the_steps_of_this_process() {
    let mut screen = screen(1000);
    let Some(began) = Instant::now().checked_sub(Duration::from_secs(100)) else { return };
    screen.started = began;
    let hours = |step: u64| (screen.left(step).as_secs_f64() / 100.0 * 10.0).round() / 10.0;
    assert_eq!((hours(3), hours(4), hours(1000)), (997.0, 498.0, 0.0));
}

#[test]
fn a_curve_shows_its_ends_and_the_means_of_its_columns() {
    let shown = |values: &[f64]| curve(values, &|value| format!("{value}"));
    assert_eq!(shown(&[0.0, 1.0, 2.0, 3.0]), "0 ▁▃▆█ 3");
    assert_eq!((shown(&[1.0, 1.0]), shown(&[])), ("1 ▅▅ 1".to_string(), "-".to_string()));
    // Eighty values in forty columns: half of them low, half of them high.
    let steps: Vec<f64> = (0..80).map(|n| f64::from(n / 40)).collect();
    assert_eq!(shown(&steps), format!("0 {}{} 1", "▁".repeat(20), "█".repeat(20)));
}

#[test]
fn shares_are_percent_and_powers_of_ten() {
    assert_eq!(silenced_text(3, 2000), "3 of 2000 (1.5e-3)");
    assert_eq!(silenced_text(0, 0), "0 of 0 (0.0e0)");
    assert_eq!(held_out_text(Some(0.4), Some(0.975)), "40.0 % -> 97.5 %");
    assert_eq!([held_out_text(None, Some(0.975)), held_out_text(None, None)], ["97.5 %", "-"]);
    let mut score = BenchmarkScore {
        accuracy: 0.625,
        standard_error: Some(0.05),
        n_questions: 8,
        n_samples: 4,
        sha256: None,
    };
    assert_eq!(benchmark_text(&score), "62.5 ± 5.0 %, 8 questions x 4");
    score.standard_error = None;
    assert_eq!(benchmark_text(&score), "62.5 %, 8 questions x 4");
}

#[test]
fn lines_fit_80_columns() {
    let long: Vec<f64> = (0..500).map(|n| f64::from(n) / 500.0).collect();
    assert!(curve(&long, &percent).chars().count() + "accuracy ".len() <= 80);
    assert!(curve(&long, &nats).chars().count() + "entropy  ".len() <= 80);
}

#[test]
fn the_headline_says_how_a_run_ended() {
    let best = Best { schema: 1, step: 7, metric: "held_out".into(), value: 0.5, extra: Extra::new() };
    let ending = |outcome, n_steps| headline(outcome, Some(&best), n_steps, "3 s");
    assert_eq!(ending(Outcome::Done, 9), "done: 9 steps in 3 s");
    assert_eq!(ending(Outcome::TargetReached, 9), "target reached after 9 steps in 3 s");
    assert_eq!(
        ending(Outcome::NoImprovement, 9),
        "ended after 9 steps in 3 s: no better evaluation since step 7"
    );
    assert_eq!(
        ending(Outcome::NothingLearned, 9),
        "ended after 9 steps in 3 s: every group has equal rewards"
    );
    assert_eq!(ending(Outcome::Stopped, 9), "stopped after 9 steps; saved");
    assert_eq!(ending(Outcome::Stopped, 0), "stopped before the first step");
    assert_eq!(headline(Outcome::NoImprovement, None, 9, "3 s"), "ended after 9 steps in 3 s");
    assert_eq!(best_row(&best), "best checkpoint    step 7, held_out 50.0 %");
    let none = Best { step: 0, ..best };
    assert!(best_row(&none).ends_with("50.0 %: no evaluation was better than before training"));
}
