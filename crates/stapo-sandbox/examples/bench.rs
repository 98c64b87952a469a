//! The rate of a pool, and what many runs leave behind: `bench LAUNCHER N_RUNS N_WORKERS [PYTHON]`. The launcher is the
//! program `stapo`.

#![allow(clippy::print_stdout, reason = "a bench prints its numbers")]

use stapo_sandbox::{Checks, Pool, Request, Settings, Trial};
use std::process::Command;
use std::time::Instant;

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let number =
        |idx: usize, default: usize| words.get(idx).and_then(|word| word.parse().ok()).unwrap_or(default);
    let launcher = words.get(1).cloned().unwrap_or_else(|| "target/release/stapo".into());
    let (n_runs, n_workers) = (number(2, 10_000), number(3, 1));
    let python = words.get(4).cloned().unwrap_or_else(|| "python3".into()).into();
    let settings = Settings { n_workers, python, ..Settings::default() };
    let pool = Pool::open(settings, move || Ok(Command::new(&launcher))).expect("a pool");
    println!("level {}, {n_workers} workers", pool.layers().level.name());
    let before = counts();
    let requests = vec![Request { source: "print(1)", stdin: "" }; 1000];
    let start = Instant::now();
    for _ in 0..n_runs.div_ceil(requests.len()) {
        let outcomes = pool.run(&requests).expect("outcomes");
        assert!(outcomes.iter().all(|outcome| outcome.stdout == "1\n"), "{:?}", outcomes[0]);
    }
    let n_run = n_runs.next_multiple_of(requests.len());
    let seconds = start.elapsed().as_secs_f64();
    println!("{n_run} runs of a trivial program: {:.0} a second", n_run as f64 / seconds);
    let checks = Checks::Asserts { setup: String::new(), tests: vec!["assert f(1) == 2".into(); 3] };
    let trials = vec![Trial { source: "def f(x): return x + 1".into(), checks }; 1000];
    let start = Instant::now();
    let tested = pool.test(&trials).expect("results");
    assert!(tested.iter().all(|tested| tested.tests.iter().all(|test| test.passed)), "{:?}", tested[0]);
    println!(
        "programs with three tests: {:.0} a second",
        trials.len() as f64 / start.elapsed().as_secs_f64()
    );
    let after = counts();
    println!("descriptors, threads and resident MiB of this process: {before:?} before, {after:?} after");
}

/// Open descriptors, threads and resident memory of this process.
fn counts() -> (usize, usize, u64) {
    let entries = |path: &str| std::fs::read_dir(path).map_or(0, Iterator::count);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = resident.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok());
    (entries("/proc/self/fd"), entries("/proc/self/task"), kib.unwrap_or(0) / 1024)
}
