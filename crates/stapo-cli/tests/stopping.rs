//! Signals at every point of a run: it ends at once or soon, with the status of the signal, and goes on to the same bits.

#![cfg(target_os = "linux")]

use crate::common::{ok, stapo};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A run that this test holds by its process.
struct Started {
    child: Child,
    began: Instant,
}

impl Started {
    fn new(at: &Path, words: &[&str]) -> Self {
        // Ranks of a busy machine may be silent for some seconds.
        Self::with_silence(at, words, "60")
    }

    /// `seconds` without a sign of life end a rank.
    fn with_silence(at: &Path, words: &[&str], seconds: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
        command.current_dir(at).args(words).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
        command.env("STAPO_RANKS_TIMEOUT", seconds);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self { child: command.spawn().unwrap(), began: Instant::now() }
    }

    /// Waits until the file has that many lines.
    fn wait_for_lines(&mut self, file: &Path, n_lines: usize) {
        while std::fs::read_to_string(file).map_or(0, |text| text.lines().count()) < n_lines {
            assert!(self.child.try_wait().unwrap().is_none(), "ended before {}", file.display());
            assert!(self.began.elapsed() < Duration::from_secs(120), "no {}", file.display());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// SIGTERM, which unlike SIGINT is heeded by a test that runs in the background too.
    fn ask_to_stop(&self) {
        signal("-TERM", self.child.id());
    }

    /// The exit status, what was said, and the seconds since `since`.
    fn end(self, since: Instant) -> (Option<i32>, String, f64) {
        let output = self.child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        let killed = std::os::unix::process::ExitStatusExt::signal(&output.status).map(|signal| 128 + signal);
        (output.status.code().or(killed), said, since.elapsed().as_secs_f64())
    }
}

fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

fn train<'a>(out: &'a str, settings: &[&'a str]) -> Vec<&'a str> {
    let set = settings.iter().flat_map(|setting| ["--set", setting]);
    ["train", "--out", out].into_iter().chain(set).collect()
}

/// Rollouts of a few seconds, most of whose pairs are drawn again because their rewards are equal: updates are short.
const SLOW: [&str; 10] = [
    "steps=2",
    "objective.preset=dapo",
    "rollout.max_redraws=20",
    "rollout.temperature=0.3",
    "rollout.problems_per_step=64",
    "rollout.group_size=2",
    "update.problems_per_minibatch=64",
    "update.sum=microbatches",
    "evaluation={problems=4, every_steps=0}",
    "record.checkpoint_every_steps=1000",
];

fn last_hash(run: &Path) -> Value {
    let manifest: Value =
        serde_json::from_str(&std::fs::read_to_string(run.join("manifest.json")).unwrap()).unwrap();
    manifest["steps"].as_array().unwrap().last().unwrap().clone()
}

#[test]
fn a_signal_before_the_first_step_ends_the_run_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let small = ["steps=1", "rollout.problems_per_step=4", "update.problems_per_minibatch=4"];
    let large =
        ["rollout.problems_per_step=512", "rollout.group_size=64", "update.problems_per_minibatch=512"];
    let (short, long) = ("evaluation={problems=4}", "evaluation={problems=512, samples=64}");
    for (out, settings) in [("evaluating", [&small[..], &[long]]), ("sampling", [&large, &[short]])] {
        let mut run = Started::new(at, &train(out, &settings.concat()));
        run.wait_for_lines(&at.join(out).join("events.jsonl"), 1);
        std::thread::sleep(Duration::from_secs(1));
        let asked = Instant::now();
        run.ask_to_stop();
        let (status, said, seconds) = run.end(asked);
        assert!(status == Some(143) && seconds < 5.0, "{out}: {status:?} after {seconds} s: {said}");
        assert!(said.contains("stopped before the first step"), "{said}");
        assert!(said.contains(&format!("stapo train --resume {out}")), "{said}");
        assert!(!said.contains("stapo export"), "the untrained model is nothing to export: {said}");
        let events = std::fs::read_to_string(at.join(out).join("events.jsonl")).unwrap();
        assert!(events.contains("SIGTERM"), "{events}");
        ok(&stapo(at, &["verify", out]));
    }
    // A run without a checkpoint begins anew.
    ok(&stapo(at, &["train", "--resume", "evaluating", "--set", short]));
    ok(&stapo(at, &train("whole", &[&small[..], &[short]].concat())));
    assert_eq!(last_hash(&at.join("evaluating")), last_hash(&at.join("whole")));
}

#[test]
fn a_rollout_that_was_abandoned_is_sampled_again_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    ok(&stapo(at, &train("whole", &SLOW)));
    for (out, launcher) in [("alone", &[][..]), ("launched", &["launch", "--ranks", "2"])] {
        let run = at.join(out);
        let mut cut = Started::new(at, &[launcher, &train(out, &SLOW)].concat());
        cut.wait_for_lines(&run.join("metrics.jsonl"), 1);
        // Between two steps a run stops at once; the second rollout, of some 900 responses, begins within a second.
        std::thread::sleep(Duration::from_secs(1));
        cut.ask_to_stop();
        std::thread::sleep(Duration::from_millis(300));
        let asked = Instant::now();
        cut.ask_to_stop();
        let (status, said, seconds) = cut.end(asked);
        assert!(status == Some(143) && seconds < 8.0, "{out}: {status:?} after {seconds} s: {said}");
        assert!(said.contains("a rollout that is not done in 10 s is abandoned"), "{said}");
        assert!(said.contains("abandoning the rollout"), "{said}");
        let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        assert_eq!(metrics.lines().count(), 1, "{out}: the second step was not made");
        assert!(run.join("checkpoints/step-000001").is_dir(), "{out}: the first step is saved");
        ok(&stapo(at, &["verify", out]));
        ok(&stapo(at, &["train", "--resume", out]));
        assert_eq!(last_hash(&run), last_hash(&at.join("whole")), "{out}");
    }
}

/// Prompts are checked before a run begins; a signal then ends the program without waiting for them.
#[test]
fn a_signal_while_prompts_are_prepared_ends_the_run_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let sum = vec!["1"; 100].join("+");
    let rows: String = (0..300_000)
        .map(|n| format!("{{\"problem\": \"{n}+{sum}=\", \"answer\": \"1\"}}\n"))
        .collect::<Vec<_>>()
        .concat();
    std::fs::write(at.join("rows.jsonl"), rows).unwrap();
    let settings = [
        "task={kind=\"jsonl\", path=\"rows.jsonl\", template=\"{{ problem }}\", held_out_share=0.1}",
        "rollout.max_prompt_tokens=1000",
    ];
    for millis in [300, 1500] {
        let run = Started::new(at, &train("run", &settings));
        std::thread::sleep(Duration::from_millis(millis));
        let asked = Instant::now();
        run.ask_to_stop();
        let (status, said, seconds) = run.end(asked);
        assert!(status == Some(143) && seconds < 2.0, "{status:?} after {seconds} s: {said}");
        assert!(!at.join("run").exists(), "nothing was begun");
    }
}

/// Small steps that several ranks share.
const SHARED: [&str; 6] = [
    "rollout.problems_per_step=6",
    "update.problems_per_minibatch=3",
    "update.microbatch_tokens=192",
    "update.sum=microbatches",
    "evaluation={problems=6, every_steps=0}",
    "steps=500",
];

#[test]
fn launched_ranks_end_with_the_signal_whenever_it_comes() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for millis in [5, 60, 400, 1500, 4000] {
        let out = format!("after-{millis}");
        let words = [&["launch", "--ranks", "2"], &train(&out, &SHARED)[..]].concat();
        let run = Started::new(at, &words);
        std::thread::sleep(Duration::from_millis(millis));
        let asked = Instant::now();
        run.ask_to_stop();
        let (status, said, seconds) = run.end(asked);
        assert!(status == Some(143) && seconds < 15.0, "{millis} ms: {status:?} after {seconds} s: {said}");
    }
}

#[test]
fn launch_notices_a_stopped_rank_within_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for stopped in [0, 1] {
        let out = format!("stopped-{stopped}");
        let words = [&["launch", "--ranks", "2"], &train(&out, &SHARED)[..]].concat();
        let mut run = Started::with_silence(at, &words, "2");
        run.wait_for_lines(&at.join(&out).join("metrics.jsonl"), 1);
        let began = Instant::now();
        let ranks = ranks_of(run.child.id());
        // A signal from the terminal goes to the process group of the launcher, which passes it on.
        let groups = ranks.iter().map(|rank| field_of(*rank, 2).unwrap()).collect::<Vec<_>>();
        assert_eq!(groups, ranks, "each rank is alone in its process group");
        signal("-STOP", ranks[stopped]);
        let (status, said, seconds) = run.end(began);
        assert!(status == Some(2) && seconds < 12.0, "rank {stopped}: {status:?} after {seconds} s: {said}");
        assert!(said.contains(&format!("rank {stopped}: gave no sign of life for 2 s")), "{said}");
    }
}

/// What the kernel says of a process: 1 is its parent, 2 its process group.
fn field_of(pid: u32, number: usize) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(") ")?.1.split(' ').nth(number)?.parse().ok()
}

/// The processes that a launcher has started, in order.
fn ranks_of(launcher: u32) -> Vec<u32> {
    let mut ranks: Vec<u32> = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if field_of(pid, 1) == Some(launcher) {
            ranks.push(pid);
        }
    }
    ranks.sort_unstable();
    ranks
}
