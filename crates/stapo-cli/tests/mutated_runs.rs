//! Every reading command on run folders and evaluations with seeded faults: done, or refused in words; never a panic,
//! an abort or a command that does not end.

use crate::common::{ok, stapo};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Faults per file and round; `STAPO_TRIALS` sets another number of rounds.
const N_ROUNDS: usize = 1;
/// A command that takes as long hangs: on these folders the slowest takes a few seconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// A sequence of numbers that depends on its seed only (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

/// A run of two steps with every kind of record, and two evaluations.
fn prepare(at: &Path) {
    let settings = [
        "steps=2",
        "rollout.problems_per_step=2",
        "rollout.group_size=4",
        "update.problems_per_minibatch=2",
        "evaluation.problems=2",
        "evaluation.every_steps=1",
        "record.checkpoint_every_steps=1",
        "record.responses_every_steps=1",
    ];
    let mut args = vec!["train", "--out", "run"];
    args.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    ok(&stapo(at, &args));
    for (name, seed) in [("a", "1"), ("b", "2")] {
        let size = ["--limit", "3", "--samples", "2", "--max-tokens", "12"];
        ok(&stapo(at, &[&["eval", "--out", name, "--seed", seed], &size[..]].concat()));
    }
}

fn files_under(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![folder.to_owned()];
    while let Some(folder) = pending.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { pending.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

/// The bytes of a file with one fault.
fn faulty(numbers: &mut Numbers, original: &[u8]) -> Vec<u8> {
    let mut bytes = original.to_vec();
    let at = numbers.below(bytes.len());
    let n = 1 + numbers.below(64.min(bytes.len()));
    let end = (at + n).min(bytes.len());
    match numbers.below(11) {
        0 => bytes.truncate(at),
        1 => bytes.clear(),
        2 if !bytes.is_empty() => bytes[at] ^= 1 << numbers.below(8),
        3 => bytes[at..end].fill(0),
        4 => bytes[at..end].fill(0xff),
        5 => bytes.splice(at..at, original[at..end].to_vec()).for_each(drop),
        6 => {
            bytes.splice(at..end, [b"\xf0\x9f", &b"[[[[[[[[{"[..]][numbers.below(2)].to_vec()).for_each(drop);
        }
        7 => bytes.extend_from_slice(&original[..at]),
        8 => {
            let mut lines: Vec<&[u8]> = original.split_inclusive(|&byte| byte == b'\n').collect();
            let other = numbers.below(lines.len());
            let one = numbers.below(lines.len());
            if !lines.is_empty() {
                lines.swap(one, other);
            }
            bytes = lines.concat();
        }
        _ => {
            // A number becomes another; numbers of binary files are rare, and then nothing changes.
            let odd = [
                "-1",
                "0",
                "9223372036854775808",
                "18446744073709551616",
                "1e308",
                "-1e999",
                "NaN",
                "null",
                "\"x\"",
                "[]",
            ];
            let start = (at..bytes.len()).find(|&idx| bytes[idx].is_ascii_digit()).unwrap_or(at);
            let n_digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            bytes.splice(start..start + n_digits, odd[numbers.below(odd.len())].bytes()).for_each(drop);
        }
    }
    bytes
}

/// The commands that read a run or an evaluation. Those that would train or sample at the size that a changed plan asks
/// for come with a size of their own, or without the changed plan.
fn commands(file: &str) -> Vec<Vec<&'static str>> {
    let is_plan = file.ends_with("plan.toml") || file.ends_with("config.toml");
    let mut all = vec![
        vec!["runs", "."],
        vec!["report", "run", "-o", "page.html", "--csv", "csv", "--tensorboard", "board"],
        vec!["inspect", "run", "-o", "page.html"],
        vec!["inspect", "run", "--terminal"],
        vec!["export", "run", "--to", "model"],
        vec!["eval", "--model", "run", "--limit", "1", "--samples", "1", "--max-tokens", "4", "--out", "c"],
        vec!["problems", "run/plan.toml", "-n", "2"],
        vec!["plan", "run/plan.toml", "--no-measure"],
        vec!["verify", "run"],
    ];
    if !is_plan {
        all.push(vec!["verify", "run", "--replay", "--steps", "1"]);
    }
    if !file.starts_with("run") {
        all = vec![
            vec!["compare", "a", "b"],
            vec!["compare", "b", "a", "--json"],
            vec!["report", "a", "-o", "page.html"],
            vec!["runs", "."],
            vec!["verify", "a"],
        ];
    }
    all
}

/// Runs a command in `at`; the description of what went wrong, if something did.
fn misbehaved(at: &Path, args: &[&str]) -> Option<String> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
        .current_dir(at)
        .args(args)
        .env("STAPO_THREADS", "1")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        errors.read_to_end(&mut text).map(|_| String::from_utf8_lossy(&text).into_owned())
    });
    let start = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if start.elapsed() > PATIENCE => {
                child.kill().unwrap();
                child.wait().unwrap();
                return Some("does not end".into());
            }
            None => std::thread::sleep(Duration::from_millis(3)),
        }
    };
    let said = reader.join().unwrap().unwrap();
    match status.code() {
        Some(0 | 1) => None,
        Some(2) if said.starts_with("error: ") || said.contains("\nerror: ") => None,
        _ => Some(format!("{status}: {said}")),
    }
}

#[test]
fn no_fault_in_a_run_folder_makes_a_reading_command_panic_or_hang() {
    let rounds = std::env::var("STAPO_TRIALS").map_or(N_ROUNDS, |text| text.parse().unwrap());
    let n_trials = AtomicUsize::new(0);
    let wrong = std::sync::Mutex::new(Vec::new());
    let original = tempfile::tempdir().unwrap();
    prepare(original.path());
    let n_workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for worker in 0..n_workers {
            let (n_trials, wrong, original) = (&n_trials, &wrong, original.path());
            scope.spawn(move || {
                let folder = tempfile::tempdir().unwrap();
                for path in files_under(original) {
                    copy(&path, &folder.path().join(path.strip_prefix(original).unwrap()));
                }
                for (idx, path) in files_under(original).iter().enumerate() {
                    for round in (0..rounds).filter(|round| (idx + round) % n_workers == worker) {
                        let name = path.strip_prefix(original).unwrap();
                        let bytes = std::fs::read(path).unwrap();
                        let mut numbers = Numbers((idx * 1000 + round) as u64);
                        let target = folder.path().join(name);
                        std::fs::write(&target, faulty(&mut numbers, &bytes)).unwrap();
                        let commands = commands(name.to_str().unwrap());
                        // Two commands for each fault, so that all of them meet every file in a few rounds.
                        for k in 0..2 {
                            let args = &commands[(2 * round + k + idx) % commands.len()];
                            n_trials.fetch_add(1, Ordering::Relaxed);
                            if let Some(how) = misbehaved(folder.path(), args) {
                                wrong
                                    .lock()
                                    .unwrap()
                                    .push(format!("{} round {round}, {args:?}: {how}", name.display()));
                            }
                            for made in ["model", "c", "csv", "board"] {
                                let _ = std::fs::remove_dir_all(folder.path().join(made));
                            }
                        }
                        std::fs::write(&target, &bytes).unwrap();
                    }
                }
            });
        }
    });
    println!("{} trials on {} files", n_trials.load(Ordering::Relaxed), files_under(original.path()).len());
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
    std::fs::copy(from, to).unwrap();
}
