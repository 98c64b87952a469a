//! A run folder is data: what commands do with the run folder of another, with links and pipes inside a run folder, and
//! with a run folder that they only read.

#![cfg(unix)]

use crate::common::folder_below_tmp;
use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, SystemTime};

/// A folder with a trained run `run`, its verifier `judge.sh`, and the state folders of two users.
struct Place {
    folder: tempfile::TempDir,
}

const OWNER: &str = "owner";
const OTHER: &str = "other";

/// A verifier that leaves a line in `started` beside it for each start.
const JUDGE: &str = "#!/bin/sh
echo started >> \"$(dirname \"$0\")/started\"
while IFS= read -r line; do echo '{\"reward\": 1}'; done
";

const SMALL: [&str; 14] = [
    "--set",
    "steps=2",
    "--set",
    "rollout.problems_per_step=2",
    "--set",
    "rollout.group_size=2",
    "--set",
    "update.problems_per_minibatch=2",
    "--set",
    "evaluation.problems=2",
    "--set",
    "evaluation.every_steps=0",
    "--set",
    "record.checkpoint_every_steps=1",
];

impl Place {
    /// With a run that its owner trained; `more` are further settings.
    fn new(more: &[&str]) -> Self {
        let place = Self { folder: folder_below_tmp() };
        let judge = place.at("judge.sh");
        std::fs::write(&judge, JUDGE).unwrap();
        std::fs::set_permissions(&judge, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(place.at("responses.jsonl"), r#"{"prompt": "1+1=", "response": "2"}"#).unwrap();
        place.ok(OWNER, &[&["train", "--out", "run"], &SMALL[..], more].concat());
        place
    }

    fn judged() -> Self {
        Self::new(&["--set", "task.verifier={kind=\"command\",program=\"./judge.sh\"}"])
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, user: &str, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
        command.current_dir(self.folder.path()).args(args).env("XDG_STATE_HOME", self.at(user));
        command
    }

    fn call(&self, user: &str, args: &[&str]) -> Output {
        self.command(user, args).output().unwrap()
    }

    fn ok(&self, user: &str, args: &[&str]) -> String {
        let output = self.call(user, args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn refused(&self, user: &str, args: &[&str]) -> String {
        let output = self.call(user, args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        said
    }

    /// How often the verifier has started.
    fn n_started(&self) -> usize {
        std::fs::read_to_string(self.at("started")).map_or(0, |text| text.lines().count())
    }
}

/// What stands at a path. A file is shown by its size.
#[derive(PartialEq)]
enum Content {
    File(Vec<u8>),
    Folder,
    Other,
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::File(bytes) => write!(f, "a file of {} bytes", bytes.len()),
            Self::Folder => f.write_str("a folder"),
            Self::Other => f.write_str("neither file nor folder"),
        }
    }
}

/// Every file and folder below `folder` with its time of change and its content.
fn tree(folder: &Path) -> BTreeMap<PathBuf, (SystemTime, Content)> {
    let mut found = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(path) = open.pop() {
        let metadata = std::fs::symlink_metadata(&path).unwrap();
        let content = if metadata.is_dir() {
            open.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            Content::Folder
        } else if metadata.is_file() {
            Content::File(std::fs::read(&path).unwrap())
        } else {
            Content::Other
        };
        found.insert(path, (metadata.modified().unwrap(), content));
    }
    found
}

/// Commands that only read a run; each writes at most to the folder `out`.
const READING: [&[&str]; 12] = [
    &["export", "run", "--to", "out/model"],
    &["eval", "--model", "run", "--samples", "1", "--limit", "1", "--max-tokens", "8", "--out", "out/eval"],
    &["generate", "--model", "run", "--prompt", "1+1=", "--max-tokens", "4"],
    &["score", "--model", "run", "--input", "responses.jsonl"],
    &["report", "run", "--output", "out/report.html", "--csv", "out/csv"],
    &["inspect", "run", "--out", "out/inspect.html"],
    &["inspect", "run", "--terminal"],
    &["runs", "."],
    &["problems", "run", "-n", "2"],
    &["plan", "run", "--no-measure"],
    &["plan", "run/plan.toml", "--no-measure"],
    &["doctor", "--out", "run"],
];

#[test]
fn another_users_verifier_starts_only_when_allowed() {
    let place = Place::judged();
    let n_own = place.n_started();
    assert!(n_own >= 1);
    std::fs::create_dir(place.at("out")).unwrap();
    let before = tree(&place.at("run"));
    for args in READING {
        place.ok(OTHER, args);
    }
    let judging: [&[&str]; 4] = [
        &["verify", "run", "--replay", "--steps", "1"],
        &["train", "--resume", "run"],
        &["plan", "run"],
        &["train", "run/plan.toml", "--out", "again"],
    ];
    for args in judging {
        let said = place.refused(OTHER, args);
        assert!(said.contains("\"./judge.sh\"") && said.contains("--allow-command"), "{args:?}: {said}");
    }
    assert_eq!(place.n_started(), n_own, "no verifier has started");
    assert_eq!(tree(&place.at("run")), before);
    assert!(!place.at("again").exists());

    place.ok(OTHER, &["verify", "run", "--replay", "--steps", "1", "--allow-command"]);
    assert_eq!(place.n_started(), n_own + 1);
    place.refused(OTHER, &["verify", "run", "--replay", "--steps", "1"]);
    place.ok(OWNER, &["verify", "run", "--replay", "--steps", "1"]);
    assert_eq!(place.n_started(), n_own + 2, "the owner has recorded the program");
    assert_eq!(tree(&place.at("run")), before);

    std::fs::write(place.at("judge.sh"), format!("{JUDGE}# another\n")).unwrap();
    let said = place.refused(OWNER, &["verify", "run", "--replay", "--steps", "1"]);
    assert!(said.contains("--allow-command"), "another content is another program: {said}");
    assert_eq!(place.n_started(), n_own + 2);
}

#[test]
fn a_refusal_shows_the_whole_command_line_and_nothing_that_steers_a_terminal() {
    let place = Place::new(&[]);
    let plan = place.at("run/plan.toml");
    let text = std::fs::read_to_string(&plan).unwrap();
    let (before, after) = text.split_once("[task.verifier]\n").unwrap();
    let after = after.find("\n[").map_or("", |end| &after[end..]);
    let verifier = r#"[task.verifier]
kind = "command"
program = "sh"
args = ["-c", "touch stolen\u001b[2K\u202e\u0007"]
env = ["SECRET"]
network = true
"#;
    std::fs::write(&plan, format!("{before}{verifier}{after}")).unwrap();
    let changed = place.refused(OWNER, &["train", "--resume", "run"]);
    assert!(changed.contains(r#"task.verifier.kind: was "rule", is "command""#), "{changed}");
    let said = place.refused(OWNER, &["train", "--resume", "run", "--accept-changes"]);
    let shown =
        r#""sh" "-c" "touch stolen\u{1b}[2K\u{202e}\u{7}" with ["SECRET"] of the environment with network"#;
    assert!(said.contains(shown), "{said}");
    for said in [said, changed] {
        assert!(!said.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{said:?}");
    }
    assert!(!place.at("stolen").exists());
}

#[test]
fn reading_commands_leave_the_run_as_it_was() {
    let place = Place::new(&[]);
    std::fs::create_dir(place.at("out")).unwrap();
    let before = tree(&place.at("run"));
    for args in READING.into_iter().chain([
        &["verify", "run", "--replay", "--steps", "1"][..],
        &["plan", "run"],
        &["compare", "out/eval", "out/eval", "--json"],
    ]) {
        let output = place.call(OTHER, args);
        assert_eq!(tree(&place.at("run")), before, "{args:?}");
        // The evaluation of one question is too small to compare; everything else is done.
        let is_compare = args[0] == "compare";
        assert!(
            output.status.success() || is_compare,
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    // The page that is asked for without a place goes to the run and changes nothing else.
    let page = place.ok(OTHER, &["report", "run"]);
    assert_eq!(page.trim(), "run/report.html");
    let mut after = tree(&place.at("run"));
    assert!(after.remove(&place.at("run/report.html")).is_some());
    let files = |tree: BTreeMap<PathBuf, (SystemTime, Content)>| -> Vec<_> {
        tree.into_iter().filter(|(_, (_, content))| *content != Content::Folder).collect()
    };
    assert_eq!(files(after), files(before));
}

/// Mounts the run folder read-only in a namespace of its own and calls the program there; `None` where the system does
/// not let tests do so.
fn on_a_read_only_run(place: &Place, args: &str) -> Option<Output> {
    let stapo = env!("CARGO_BIN_EXE_stapo");
    let script = format!(
        "mount --bind run run && mount -o remount,ro,bind run && echo mounted && exec {stapo} {args}"
    );
    let output = Command::new("unshare")
        .current_dir(place.folder.path())
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script])
        .output()
        .ok()?;
    String::from_utf8_lossy(&output.stdout).starts_with("mounted").then_some(output)
}

#[test]
fn a_read_only_run_is_read_and_asks_for_a_place_for_pages() {
    let place = Place::new(&[]);
    for command in ["report", "inspect"] {
        let Some(output) = on_a_read_only_run(&place, &format!("{command} run")) else {
            println!("skipped: no user and mount namespaces here");
            return;
        };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("--out FILE") && said.contains("cannot be written to"), "{said}");
        let output = on_a_read_only_run(&place, &format!("{command} run --output page.html")).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    for args in [
        "export run --to model",
        "verify run --replay --steps 1",
        "eval --model run --samples 1 --limit 1 --max-tokens 8",
    ] {
        let output = on_a_read_only_run(&place, args).unwrap();
        assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Commands that open a run folder, reading or writing.
const OPENING: [&[&str]; 8] = [
    &["export", "run", "--to", "out/model"],
    &["eval", "--model", "run", "--samples", "1", "--limit", "1", "--out", "out/eval"],
    &["generate", "--model", "run", "--prompt", "1+1="],
    &["report", "run"],
    &["inspect", "run"],
    &["verify", "run", "--replay", "--steps", "1"],
    &["train", "--resume", "run"],
    &["problems", "run"],
];

fn refuse_everywhere(place: &Place, name: &str, expected: &str) -> usize {
    for args in OPENING {
        let said = place.refused(OWNER, args);
        assert!(said.contains(expected) && said.contains("\nhint: "), "{name}: {args:?}: {said}");
    }
    OPENING.len()
}

#[test]
fn a_link_or_pipe_anywhere_in_a_run_folder_is_refused() {
    let place = Place::new(&[]);
    std::fs::create_dir_all(place.at("out")).unwrap();
    std::fs::create_dir_all(place.at("elsewhere")).unwrap();
    std::fs::write(place.at("elsewhere/precious"), "mine").unwrap();
    let mut inside: Vec<PathBuf> =
        tree(&place.at("run")).into_keys().filter(|path| *path != place.at("run")).collect();
    // Names that commands write to, and a folder that older versions unpacked a model to.
    inside.extend([
        place.at("run/base"),
        place.at("run/.metrics.jsonl.tmp"),
        place.at("run/.report.html.tmp"),
    ]);
    let mut n_tried = 0;
    for path in &inside {
        let aside = place.at("aside");
        let was_there = path.exists();
        if was_there {
            std::fs::rename(path, &aside).unwrap();
        }
        let target = if was_there { aside.clone() } else { place.at("elsewhere") };
        let outside = (tree(&target), tree(&place.at("elsewhere")));
        symlink(&target, path).unwrap();
        let rest = tree(&place.at("run"));
        let name = path.strip_prefix(place.at("run")).unwrap();
        n_tried += refuse_everywhere(&place, &format!("{name:?}"), "is a symbolic link");
        assert_eq!((tree(&target), tree(&place.at("elsewhere"))), outside, "{name:?}");
        assert_eq!(tree(&place.at("run")), rest, "{name:?}");
        std::fs::remove_file(path).unwrap();
        if was_there {
            std::fs::rename(&aside, path).unwrap();
        }
    }
    for name in ["run/metrics.jsonl", "run/plan.toml", "run/rollouts/step-000001.jsonl", "run/anything"] {
        let (path, aside) = (place.at(name), place.at("aside"));
        let was_there = path.exists();
        if was_there {
            std::fs::rename(&path, &aside).unwrap();
        }
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        n_tried += refuse_everywhere(&place, name, "is a pipe, a socket or a device");
        std::fs::remove_file(&path).unwrap();
        if was_there {
            std::fs::rename(&aside, &path).unwrap();
        }
    }
    println!("{n_tried} calls on a run folder with a link or pipe inside, all refused");
    // The folder itself may be reached by a link.
    symlink(place.at("run"), place.at("link")).unwrap();
    place.ok(OWNER, &["verify", "link", "--replay", "--steps", "1"]);
}

/// A system without user namespaces, made of a user namespace that allows no further one.
#[cfg(target_os = "linux")]
#[test]
fn where_a_verifier_cannot_be_kept_apart_it_is_said_once() {
    let place = Place::judged();
    let stapo = env!("CARGO_BIN_EXE_stapo");
    let script = format!(
        "echo 0 > /proc/sys/user/max_user_namespaces && echo alone && exec {stapo} verify run --replay --steps 1"
    );
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "sh", "-c", &script]).current_dir(place.folder.path());
    let output = command.env("XDG_STATE_HOME", place.at(OWNER)).output();
    let Some(output) = output.ok().filter(|output| output.stdout.starts_with(b"alone")) else {
        println!("skipped: no user namespace here");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert_eq!(said.matches("shares with this machine the network and /tmp").count(), 1, "{said}");
}

/// The processes that name a folder in their command lines.
#[cfg(target_os = "linux")]
fn processes_naming(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(&folder.display().to_string())).collect()
}

#[cfg(target_os = "linux")]
#[test]
fn a_killed_trainer_leaves_no_process_behind() {
    let place = Place { folder: folder_below_tmp() };
    let marker = place.folder.path().canonicalize().unwrap();
    // The verifier starts a daemon in a session of its own and a child, and every command line names the folder. The
    // child stops itself: the kernel sends SIGHUP to a process group with a stopped member when its last tie to the
    // session, here the trainer, ends.
    let script =
        "(setsid sh -c 'sleep 1000; : $0' $0 &); sh -c 'echo here > $0/started; kill -STOP $$; : $0' $0 &
        while IFS= read -r line; do echo '{\"reward\": 1}'; done";
    let verifier = format!(
        "task.verifier={{kind=\"command\",program=\"sh\",args=[\"-c\",{script:?},{:?}]}}",
        marker.display().to_string()
    );
    for (n, signal) in [(0, rustix::process::Signal::KILL), (1, rustix::process::Signal::TERM)] {
        let _ = std::fs::remove_file(place.at("started"));
        let out = format!("run-{n}");
        let args =
            [&["train", "--out", &out, "--set", "steps=1000000", "--set", &verifier], &SMALL[2..]].concat();
        let mut trainer =
            place.command(OWNER, &args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let is_up = || place.at("started").exists() && processes_naming(&marker).len() >= 5;
        assert!((0..3000).any(|_| wait_a_bit(&is_up)), "{:?}", processes_naming(&marker));
        rustix::process::kill_process(rustix::process::Pid::from_child(&trainer), signal).unwrap();
        trainer.wait().unwrap();
        assert!(
            (0..3000).any(|_| wait_a_bit(&|| processes_naming(&marker).is_empty())),
            "{:?}",
            processes_naming(&marker)
        );
    }
}

#[cfg(target_os = "linux")]
fn wait_a_bit(is_so: &dyn Fn() -> bool) -> bool {
    std::thread::sleep(Duration::from_millis(10));
    is_so()
}
