//! Several processes that train together: the bits of one, whatever their number, and one clear error on all of them where
//! one fails.

#![cfg(target_os = "linux")]

use crate::common::{folder_below_tmp, ok, stapo};
use serde_json::Value;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Small steps with several micro-batches in a mini-batch, so that rounds are full, partly full and empty.
const SMALL: [&str; 9] = [
    "rollout.problems_per_step=6",
    "rollout.group_size=6",
    "update.problems_per_minibatch=3",
    "update.microbatch_tokens=192",
    "update.sum=microbatches",
    "evaluation.problems=6",
    "evaluation.every_steps=0",
    "record.checkpoint_every_steps=1",
    "record.responses_every_steps=1",
];

fn train(out: &str, settings: &[&str]) -> Vec<String> {
    let mut words = vec!["train".to_string(), "--out".into(), out.into()];
    words.extend(
        SMALL.iter().chain(settings).flat_map(|setting| ["--set".to_string(), (*setting).to_string()]),
    );
    words
}

/// Runs a command on `world` ranks that `launch` starts; on one as it is.
fn launched(at: &Path, world: usize, words: &[String]) -> String {
    let world_text = world.to_string();
    let mut all: Vec<&str> = if world == 1 { Vec::new() } else { vec!["launch", "--ranks", &world_text] };
    all.extend(words.iter().map(String::as_str));
    ok(&stapo(at, &all))
}

/// The metrics of a run without times, rates and what single ranks did.
fn metrics(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let clean = |line: &str| {
        let mut step: Value = serde_json::from_str(line).unwrap();
        for key in ["seconds", "wall_seconds", "tokens_per_second", "memory_bytes", "ranks", "decoding"] {
            step.as_object_mut().unwrap().remove(key);
        }
        step
    };
    text.lines().map(clean).collect()
}

/// Every record of a run besides its metrics, by the name of its file.
fn records(run: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for part in ["rollouts", "tokens", "explored"] {
        for entry in std::fs::read_dir(run.join(part)).unwrap().flatten() {
            let name = format!("{part}/{}", entry.file_name().to_string_lossy());
            found.push((name, std::fs::read_to_string(entry.path()).unwrap()));
        }
    }
    found.sort();
    found
}

fn assert_same_run(a: &Path, b: &Path) {
    let (left, right) = (metrics(a), metrics(b));
    assert_eq!(left.len(), right.len(), "{} {}", a.display(), b.display());
    for (left, right) in left.iter().zip(&right) {
        assert_eq!(left, right, "{} {}", a.display(), b.display());
        assert!(left["state_sha256"].is_string(), "{left}");
    }
    assert_eq!(records(a), records(b), "{} {}", a.display(), b.display());
    let last = format!("checkpoints/step-{:06}", left.len());
    for name in ["weights.safetensors", "moments.safetensors", "moments.digests"] {
        let [a, b] = [a, b].map(|run| run.join(&last).join(name));
        assert!(std::fs::read(&a).unwrap() == std::fs::read(&b).unwrap(), "{} {}", a.display(), b.display());
    }
}

/// One, two, three and four processes, and then another number of them replays the last step.
fn every_world_is_the_same_run(settings: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for world in 1..=4 {
        let out = format!("w{world}");
        launched(at, world, &train(&out, &[&["steps=2"], settings].concat()));
        assert_same_run(&at.join("w1"), &at.join(&out));
    }
    let ranks = &metrics_of_ranks(&at.join("w3"))[1];
    assert_eq!(ranks.as_array().unwrap().len(), 3, "{ranks}");
    assert!(ranks[2]["idle_share"].is_number(), "{ranks}");
    assert_sent_as_counted(at);
    let norms: Vec<f64> =
        metrics(&at.join("w1")).iter().map(|m| m["gradient_norm"].as_f64().unwrap()).collect();
    assert!(norms.iter().all(|norm| *norm > 0.0), "a run without gradients compares nothing: {norms:?}");
    let replay = launched(at, 2, &["verify", "w3", "--replay", "--steps", "1"].map(String::from));
    assert!(replay.contains("step 2: the same"), "{replay}");
}

/// Every owner sends the f32 weights that it owns to all others after each optimizer step, so W ranks together send W - 1
/// times the weights; every micro-batch's gradient goes to its owners but for what its rank owns.
fn assert_sent_as_counted(at: &Path) {
    let sent = |world: usize, what: &str| -> Vec<u64> {
        let of_step = |ranks: &Value| {
            let of_rank = |rank: &Value| rank["exchanged"][what].as_u64().unwrap();
            ranks.as_array().unwrap().iter().map(of_rank).sum()
        };
        metrics_of_ranks(&at.join(format!("w{world}"))).iter().map(of_step).collect()
    };
    let n_weights: u64 = 793_984;
    let n_updates: Vec<u64> = {
        let made: Vec<u64> =
            metrics(&at.join("w1")).iter().map(|m| m["n_updates"].as_u64().unwrap()).collect();
        made.iter().scan(0, |before, now| Some(now - std::mem::replace(before, *now))).collect()
    };
    for world in [2, 3, 4] {
        let expected: Vec<u64> = n_updates.iter().map(|n| n * (world - 1) * 4 * n_weights).collect();
        assert_eq!(sent(world as usize, "weight_bytes"), expected, "{world} ranks");
    }
    // A gradient has a second one of the tied embedding; two ranks own nearly half each.
    for (gradients, weights) in sent(2, "gradient_bytes").iter().zip(sent(2, "weight_bytes")) {
        assert!(*gradients >= weights / 2, "{gradients} {weights}");
    }
}

fn metrics_of_ranks(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["ranks"].clone()).collect()
}

#[test]
fn reuse_a_reference_and_redraws_give_the_same_run_on_every_number_of_ranks() {
    // Two mini-batches a step: the second one defers tokens, and the reuse of batches reads the head's gradient.
    every_world_is_the_same_run(&[
        "update.reuse={max=2}",
        "objective.kl={kind=\"k3\",beta=0.04}",
        "rollout.max_redraws=3",
        "evaluation.benchmarks=[\"arithmetic\"]",
        "evaluation.benchmark_limit=3",
    ]);
}

/// Ranks that this test holds by their processes.
struct Ranks {
    children: Vec<Child>,
}

impl Ranks {
    /// Starts the same command as every rank; `of_rank` changes it for one.
    fn start(at: &Path, world: usize, mut of_rank: impl FnMut(usize, &mut Command)) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let start = |rank: usize| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
            command.env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
            of_rank(rank, &mut command);
            let flags = [("--rank", rank.to_string()), ("--world", world.to_string())];
            command.args(flags.iter().flat_map(|(flag, value)| [*flag, value]));
            command.arg("--master").arg(format!("127.0.0.1:{port}"));
            command.env("STAPO_THREADS", "1");
            command.env("STAPO_RANKS_TIMEOUT", "3").env("STAPO_RANKS_TOKEN", "of this test");
            if command.get_current_dir().is_none() {
                command.current_dir(at);
            }
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        Self { children: (0..world).map(start).collect() }
    }

    fn signal(&self, rank: usize, signal: &str) {
        let pid = self.children[rank].id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Waits until the run has that many steps.
    fn wait_for_steps(&mut self, run: &Path, n_steps: usize) {
        let deadline = Instant::now() + Duration::from_secs(120);
        let n_made =
            || std::fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |text| text.lines().count());
        while n_made() < n_steps {
            let ended = self.children.iter_mut().any(|child| child.try_wait().unwrap().is_some());
            assert!(!ended && Instant::now() < deadline, "a rank ended before step {n_steps}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The exit status of every rank, and what it said last: the error and its hint.
    fn ends(self) -> Vec<(Option<i32>, String)> {
        let end = |child: Child| {
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let error = said.find("error: ").map_or("", |at| &said[at..]);
            (output.status.code(), error.trim().to_string())
        };
        self.children.into_iter().map(end).collect()
    }
}

/// All ranks but those in `gone` ended with the same error, which is returned.
fn common_error(ends: &[(Option<i32>, String)], gone: &[usize]) -> String {
    let left: Vec<&(Option<i32>, String)> =
        ends.iter().enumerate().filter(|(rank, _)| !gone.contains(rank)).map(|(_, end)| end).collect();
    for end in &left {
        assert_eq!(end.0, Some(2), "{ends:?}");
        assert_eq!(end.1, left[0].1, "{ends:?}");
    }
    left[0].1.clone()
}

#[test]
fn a_killed_rank_stops_all_and_the_run_goes_on_with_what_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let run = at.join("cut");
    let steps = ["steps=5"];
    launched(at, 1, &train("whole", &steps));
    for (world, killed, from) in [(3, 2, 1), (2, 0, 3)] {
        let mut ranks = Ranks::start(at, world, |_, command| {
            if run.join("plan.toml").exists() {
                command.args(["train", "--resume", "cut"]);
            } else {
                command.args(train("cut", &steps));
            }
        });
        ranks.wait_for_steps(&run, from);
        ranks.signal(killed, "-KILL");
        let error = common_error(&ranks.ends(), &[killed]);
        let named = format!("error: rank {killed}: its process has ended");
        assert!(error.starts_with(&named), "{error}");
    }
    launched(at, 4, &["train", "--resume", "cut"].map(String::from));
    assert_same_run(&at.join("whole"), &run);
}

#[test]
fn ranks_without_room_for_a_copy_and_ranks_that_do_not_see_the_folder_give_the_same_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let steps = ["steps=2"];
    launched(at, 1, &train("whole", &steps));
    let ranks = Ranks::start(at, 2, |rank, command| {
        command.args(train("in-place", &steps)).envs((rank == 1).then_some(("STAPO_NO_ROOM", "1")));
    });
    assert!(ranks.ends().iter().all(|end| end.0 == Some(0)));
    assert_same_run(&at.join("whole"), &at.join("in-place"));
    // The folder has the same name for both ranks, and is another one for rank 1.
    std::fs::create_dir(at.join("elsewhere")).unwrap();
    let ranks = Ranks::start(at, 2, |rank, command| {
        let current = if rank == 1 { at.join("elsewhere") } else { at.to_owned() };
        command.args(train("/proc/self/cwd/blind", &steps)).current_dir(current);
    });
    let ends = ranks.ends();
    assert!(ends.iter().all(|end| end.0 == Some(0)), "{ends:?}");
    assert_same_run(&at.join("whole"), &at.join("blind"));
    let events = std::fs::read_to_string(at.join("blind/events.jsonl")).unwrap();
    assert_eq!(events.matches("rank 1 does not see the folder").count(), 1, "{events}");
    // A part that cannot be written ends the run on all ranks.
    let ranks = Ranks::start(at, 2, |rank, command| {
        command
            .args(train("failed", &["steps=500"]))
            .envs((rank == 1).then_some(("STAPO_DISK_FAULT", "full:5")));
    });
    let error = common_error(&ranks.ends(), &[]);
    assert!(error.starts_with("error: rank 1: ") && error.contains("no storage space"), "{error}");
    launched(at, 2, &["train", "--resume", "failed", "--set", "steps=2"].map(String::from));
    ok(&stapo(at, &["verify", "failed"]));
}

#[test]
fn a_hung_rank_and_a_full_disk_stop_all_with_one_error() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let mut ranks = Ranks::start(at, 2, |_, command| {
        command.args(train("hung", &["steps=500"]));
    });
    ranks.wait_for_steps(&at.join("hung"), 1);
    ranks.signal(1, "-STOP");
    let rank_1 = ranks.children.pop().unwrap();
    let error = common_error(&ranks.ends(), &[]);
    assert!(error.starts_with("error: rank 1: gave no sign of life for 3 s"), "{error}");
    assert!(Command::new("kill").args(["-KILL", &rank_1.id().to_string()]).status().unwrap().success());
    rank_1.wait_with_output().unwrap();

    let ranks = Ranks::start(at, 3, |rank, command| {
        command
            .args(train("full", &["steps=500"]))
            .envs((rank == 0).then_some(("STAPO_DISK_FAULT", "full:60")));
    });
    let error = common_error(&ranks.ends(), &[]);
    assert!(error.starts_with("error: rank 0: full/"), "{error}");
    assert!(error.contains("hint: free some space, then continue with --resume"), "{error}");
    let n_steps = metrics(&at.join("full")).len() + 2;
    let more = format!("steps={n_steps}");
    launched(at, 2, &["train", "--resume", "full", "--set", &more].map(String::from));
    assert_eq!(metrics(&at.join("full")).len(), n_steps);
}

#[test]
fn a_signal_to_any_rank_stops_all_after_the_step() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let mut ranks = Ranks::start(at, 2, |_, command| {
        command.args(train("asked", &["steps=500"]));
    });
    ranks.wait_for_steps(&at.join("asked"), 1);
    ranks.signal(1, "-TERM");
    let ends = ranks.ends();
    assert_eq!((ends[0].0, ends[1].0), (Some(143), Some(143)), "{ends:?}");
    let events = std::fs::read_to_string(at.join("asked/events.jsonl")).unwrap();
    assert!(events.contains("SIGTERM") && events.contains("\"world\":2"), "{events}");
    let step = metrics(&at.join("asked")).len();
    assert!(at.join(format!("asked/checkpoints/step-{step:06}")).is_dir(), "the last step is saved");
}

#[test]
fn what_differs_between_ranks_is_named_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let other_plan = Ranks::start(at, 3, |rank, command| {
        let temperature = if rank == 2 { "rollout.temperature=0.9" } else { "rollout.temperature=1.0" };
        command.args(train("plan", &[temperature]));
    });
    let error = common_error(&other_plan.ends(), &[]);
    assert!(
        error.starts_with("error: rank 2: plan key rollout.temperature is 0.9, and 1.0 on rank 0"),
        "{error}"
    );

    for (rank, answer) in [(0, "2"), (1, "3")] {
        let own = at.join(format!("rank{rank}"));
        std::fs::create_dir(&own).unwrap();
        let row = |n| format!("{{\"problem\": \"{n}+1=\", \"answer\": \"{answer}\"}}");
        let rows = (0..8).map(row).collect::<Vec<_>>().join("\n");
        std::fs::write(own.join("data.jsonl"), rows).unwrap();
    }
    let other_data = Ranks::start(at, 2, |rank, command| {
        command.current_dir(at.join(format!("rank{rank}")));
        command.args(train("data", &["task={kind=\"jsonl\",path=\"data.jsonl\"}"]));
    });
    let error = common_error(&other_data.ends(), &[]);
    assert!(error.starts_with("error: rank 1: input data is "), "{error}");
    assert!(!at.join("plan").exists() && !at.join("rank0/data").exists(), "nothing is left behind");

    let sum_over_tokens = Ranks::start(at, 2, |_, command| {
        command.args(["train", "--out", "tokens"]);
    });
    let error = common_error(&sum_over_tokens.ends(), &[]);
    assert!(error.contains("config.update.sum: tokens, and 2 ranks share the micro-batches"), "{error}");
}

/// Rank 1 has its config from a run folder, or goes on with a run as a user who has not recorded the program.
#[test]
fn every_rank_refuses_a_verifier_that_its_user_has_not_allowed() {
    let folder = folder_below_tmp();
    let at = folder.path();
    std::fs::write(at.join("judge.sh"), "while read -r line; do echo '{\"reward\": 0.5}'; done\n").unwrap();
    let judge = at.join("judge.sh");
    let config = format!("[task.verifier]\nkind = \"command\"\nprogram = \"sh\"\nargs = [{judge:?}]\n");
    for rank in ["rank0", "rank1"] {
        std::fs::create_dir(at.join(rank)).unwrap();
        std::fs::write(at.join(rank).join("config.toml"), &config).unwrap();
    }
    std::fs::write(at.join("rank1/plan.toml"), "").unwrap();
    let trained = |out: &str, allow: &[&str]| {
        let mut words = train(out, &["steps=1"]);
        words.insert(1, "config.toml".into());
        let start = |rank, command: &mut Command| {
            command.current_dir(at.join(format!("rank{rank}"))).args(&words).args(allow);
        };
        Ranks::start(at, 2, start).ends()
    };
    let error = common_error(&trained("refused", &[]), &[]);
    assert!(error.starts_with("error: rank 1: ") && error.contains("not started"), "{error}");
    let ends = trained("out", &["--allow-command"]);
    assert!(ends.iter().all(|end| end.0 == Some(0)), "{ends:?}");
    let resumed = Ranks::start(at, 2, |rank, command| {
        command.current_dir(at.join(format!("rank{rank}"))).args(["train", "--resume", "out"]);
        if rank == 1 {
            command.env("XDG_STATE_HOME", at.join("of another user"));
        }
    });
    let error = common_error(&resumed.ends(), &[]);
    assert!(error.starts_with("error: rank 1: ") && error.contains("not started"), "{error}");
}

/// Starts an evaluation, or goes on with one, on ranks that the test holds.
fn eval_words(out: &str) -> Vec<String> {
    let words = "eval --benchmarks arithmetic countdown --limit 30 --decoding paper --samples 6 --max-tokens 80 --out";
    words.split_whitespace().chain([out]).map(String::from).collect()
}

/// What an evaluation leaves, without what depends on when it was made.
fn eval_files(folder: &Path) -> [String; 3] {
    ["eval.json", "samples.jsonl", "table.json"]
        .map(|name| std::fs::read_to_string(folder.join(name)).unwrap())
}

#[test]
fn an_evaluation_is_the_same_on_every_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    // A receipt covers the times of events too.
    let without_receipt = |said: &str| {
        let lines = said.lines().filter(|line| !line.starts_with("receipt ")).map(|line| format!("{line}\n"));
        lines.collect::<String>()
    };
    let table = without_receipt(&launched(at, 1, &eval_words("w1")));
    assert!(table.contains("arithmetic") && table.contains("countdown"), "{table}");
    for world in [2, 3] {
        let out = format!("w{world}");
        let of_ranks = launched(at, world, &eval_words(&out));
        assert_eq!(without_receipt(&of_ranks.replace(&out, "w1")), table);
        assert_eq!(eval_files(&at.join(&out)), eval_files(&at.join("w1")), "{world} ranks");
        let events = std::fs::read_to_string(at.join(&out).join("events.jsonl")).unwrap();
        assert!(events.contains(&format!("\"world\":{world}")), "{events}");
    }
}

/// Waits until an evaluation has some samples, and not yet all.
fn wait_for_samples(ranks: &mut Ranks, folder: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::metadata(folder.join("samples.jsonl")).map_or(0, |file| file.len()) < 4_000 {
        let has_ended = ranks.children.iter_mut().any(|child| child.try_wait().unwrap().is_some());
        assert!(!has_ended && Instant::now() < deadline, "a rank ended before the first samples");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_evaluation_that_loses_a_rank_or_is_asked_to_stop_goes_on_with_what_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    // Long enough that no rank is done before it is killed.
    let words = |out: &str| {
        let mut words = eval_words(out);
        let samples = words.iter().position(|word| word == "--samples").unwrap();
        words[samples + 1] = "24".to_string();
        words
    };
    launched(at, 1, &words("whole"));
    let start = |world: usize, words: Vec<String>| {
        Ranks::start(at, world, |_, command| {
            command.args(&words);
        })
    };
    let mut ranks = start(3, words("cut"));
    wait_for_samples(&mut ranks, &at.join("cut"));
    ranks.signal(1, "-KILL");
    let error = common_error(&ranks.ends(), &[1]);
    assert!(error.starts_with("error: rank 1: its process has ended"), "{error}");

    let resume = ["eval", "--resume", "cut"].map(String::from).to_vec();
    let ranks = start(2, resume.clone());
    std::thread::sleep(Duration::from_millis(1500));
    ranks.signal(1, "-TERM");
    // A signal that comes too late finds the evaluation done.
    let ends = ranks.ends();
    let statuses: Vec<Option<i32>> = ends.iter().map(|end| end.0).collect();
    assert!(statuses == [Some(143), Some(143)] || statuses[0] == Some(0), "{ends:?}");
    launched(at, 1, &resume);
    let [_, samples, table] = eval_files(&at.join("cut"));
    let [_, whole_samples, whole_table] = eval_files(&at.join("whole"));
    assert_eq!((samples, table), (whole_samples, whole_table));
}

#[test]
fn only_commands_that_share_their_work_are_launched() {
    let folder = tempfile::tempdir().unwrap();
    let said = crate::common::complaint(folder.path(), &["launch", "--ranks", "2", "grade", "x"]);
    assert!(said.contains("launch grade: expected one of train"), "{said}");
}
