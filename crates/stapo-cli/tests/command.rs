//! External verifiers behind their launcher, which is the program itself: the protocol, its limits, and what happens to
//! programs that do not keep to it.

use crate::common::folder_below_tmp;
use stapo_core::{Problem, Verdict};
use stapo_rl::device::{CpuOptions, Device};
use stapo_rl::reward::{CommandSpec, Judged, Programs, VerifierSpec};
use stapo_rl::run::restart;
use stapo_rl::tasks::{ArithmeticSpec, Task, TaskError, TaskSpec};
use stapo_rl::train::Trainer;
use stapo_rl::{Config, Plan};

/// A task judged by a shell script.
fn scripted(script: &str, limit: impl Fn(&mut CommandSpec)) -> Result<Task, TaskError> {
    restart::set(env!("CARGO_BIN_EXE_stapo").into(), Vec::new());
    let mut command = CommandSpec { args: vec!["-c".into(), script.into()], ..CommandSpec::new("/bin/sh") };
    limit(&mut command);
    let verifier = VerifierSpec::Command(command);
    let spec = TaskSpec::Arithmetic(ArithmeticSpec { verifier, ..ArithmeticSpec::default() });
    Task::open_with(&spec, Programs::Allowed)
}

fn samples(n: usize) -> Vec<(Problem, String)> {
    (0..n)
        .map(|i| {
            let problem = Problem {
                id: format!("p{i}"),
                earlier_turns: Vec::new(),
                prompt: format!("{i}=?\n\"\\"),
                reference: i.to_string(),
            };
            (problem, format!("it is {}\n\\boxed{{{}}}", i % 2, i % 2))
        })
        .collect()
}

fn judge(task: &Task, samples: &[(Problem, String)]) -> Result<Vec<Judged>, TaskError> {
    task.judge(&samples.iter().map(|(problem, response)| (problem, response.as_str())).collect::<Vec<_>>())
}

/// The message of a script that fails on three samples.
fn failure(script: &str, limit: impl Fn(&mut CommandSpec)) -> String {
    let task = scripted(script, limit).unwrap();
    let message = judge(&task, &samples(3)).expect_err(script).to_string();
    assert!(message.contains("verifier /bin/sh") && message.contains("\nhint: "), "{message}");
    message
}

const ECHO: &str = r#"while IFS= read -r line; do
    case "$line" in
        *'boxed{1}'*) echo '{"verdict": "right", "answer": "1", "reason": "one"}' ;;
        *) echo '{"reward": -0.5}' ;;
    esac
done"#;

#[test]
fn verdicts_come_in_order_and_the_program_keeps_running() {
    let task = scripted(&format!("echo $$ >&2; {ECHO}"), |_| {}).unwrap();
    for n in [1, 0, 5, 3000] {
        let judged = judge(&task, &samples(n)).unwrap();
        assert_eq!(judged.len(), n);
        for (i, judged) in judged.iter().enumerate() {
            let (verdict, reward) =
                if i % 2 == 1 { (Verdict::Right, None) } else { (Verdict::Wrong, Some(-0.5)) };
            assert_eq!((judged.verdict, judged.reward), (verdict, reward));
        }
    }
}

#[test]
fn a_missing_program_is_found_at_the_start() {
    let message =
        scripted("", |command| command.program = "/no/such/program".into()).err().unwrap().to_string();
    assert!(message.contains("verifier /no/such/program, at the start: No such file"), "{message}");
    for limit in [
        |command: &mut CommandSpec| command.limits.sample_seconds = 0.0,
        |command: &mut CommandSpec| command.limits.batch_seconds = f64::NAN,
        |command: &mut CommandSpec| command.limits.max_line_bytes = 0,
        |command: &mut CommandSpec| command.limits.memory_mib = 255,
        |command: &mut CommandSpec| command.limits.open_files = 15,
    ] {
        assert!(scripted(ECHO, limit).err().unwrap().to_string().contains("hint: "));
    }
}

#[test]
fn death_names_the_sample_the_status_and_the_last_words() {
    let message =
        failure(r#"read -r a; echo '{"reward": 1}'; read -r b; echo 'out of chalk' >&2; exit 3"#, |_| {});
    assert!(
        message.contains("sample 2 of 3 (problem \"p1\"): its output ended (exit status: 3)"),
        "{message}"
    );
    assert!(message.contains("out of chalk"), "{message}");
    let message = failure("read -r a; kill -9 $$", |_| {});
    assert!(message.contains("sample 1 of 3 (problem \"p0\")") && message.contains("signal: 9"), "{message}");
}

#[test]
fn death_between_calls_is_an_error_and_the_call_after_starts_anew() {
    let task = scripted(r#"read -r a; echo '{"reward": 1}'"#, |_| {}).unwrap();
    judge(&task, &samples(1)).unwrap();
    let message = judge(&task, &samples(1)).unwrap_err().to_string();
    assert!(message.contains("sample 1 of 1 (problem \"p0\"): its output ended"), "{message}");
    judge(&task, &samples(1)).unwrap();
}

#[test]
fn a_hang_ends_at_the_limit_and_names_the_sample() {
    let silent = r#"read -r a; echo '{"reward": 1}'; sleep 1000"#;
    // Long enough for the first answer on a busy machine.
    let message = failure(silent, |command| command.limits.sample_seconds = 2.0);
    assert!(message.contains("sample 2 of 3 (problem \"p1\"): no answer for sample_seconds 2"), "{message}");
    let slow = r#"while read -r a; do sleep 0.15; echo '{"reward": 1}'; done"#;
    let message = failure(slow, |command| command.limits.batch_seconds = 0.25);
    assert!(message.contains("batch_seconds 0.25 are over"), "{message}");
}

#[test]
fn garbage_is_never_a_verdict() {
    for (line, expected) in [
        ("yes", "wrote \"yes\""),
        ("", "wrote \"\""),
        ("{}", "neither verdict nor reward"),
        (r#"{"verdict": "maybe"}"#, "unknown variant `maybe`"),
        (r#"{"reward": "1"}"#, "expected f64"),
        (r#"{"reward": 1e999}"#, "number out of range"),
        (r#"{"reward": NaN}"#, "wrote"),
        (r#"{"rewards": 1}"#, "unknown field `rewards`"),
        (r#"{"reward": 1, "id": "p7"}"#, "answered for \"p7\""),
        (r"\377\376", "wrote"),
    ] {
        let message = failure(&format!("read -r a; printf '{line}\\n'; sleep 1000"), |_| {});
        assert!(message.contains("sample 1 of 3 (problem \"p0\")"), "{message}");
        assert!(message.contains(expected), "expected {expected:?} in: {message}");
    }
}

#[test]
fn floods_are_bounded() {
    // A program that writes unasked is refused by whichever limit its output meets first.
    let message = failure("cat /dev/zero", |_| {});
    assert!(message.contains("a line too many") || message.contains("above max_line_bytes"), "{message}");
    let message = failure("read -r a; cat /dev/zero", |_| {});
    assert!(
        message.contains("sample 1 of 3") && message.contains("above max_line_bytes 1048576"),
        "{message}"
    );
    let message = failure(r#"while :; do echo '{"reward": 1}'; done"#, |_| {});
    assert!(message.contains("a line too many"), "{message}");
    let complaints = format!("cat /dev/zero >&2 & {ECHO}");
    let task = scripted(&complaints, |_| {}).unwrap();
    assert_eq!(judge(&task, &samples(100)).unwrap().len(), 100);
}

#[test]
fn a_wrong_count_is_an_error() {
    let twice = r#"while read -r a; do echo '{"reward": 1}'; echo '{"reward": 1}'; done"#;
    let task = scripted(twice, |_| {}).unwrap();
    // The surplus line may arrive after the end of the call; then a later call finds the line.
    let found = (0..500).find_map(|_| judge(&task, &samples(1)).err()).expect("surplus lines passed unseen");
    assert!(found.to_string().contains("a line too many"), "{found}");
    let too_few = r#"read -r a; while read -r a; do echo '{"reward": 1}'; done"#;
    let message = failure(too_few, |command| command.limits.sample_seconds = 2.0);
    assert!(message.contains("sample 3 of 3 (problem \"p2\"): no answer"), "{message}");
}

#[test]
fn a_program_that_repeats_the_sample_number_is_never_read_out_of_step() {
    let twice = r#"n=0; while read -r a; do
        echo "{\"reward\": 1, \"sample\": $n}"; echo "{\"reward\": 1, \"sample\": $n}"; n=$((n+1)); done"#;
    let message = failure(twice, |_| {});
    assert!(
        message.contains("sample 2 of 3 (problem \"p1\"): answered sample 0 where 1 was next"),
        "{message}"
    );
    let once = r#"n=0; while read -r a; do echo "{\"reward\": 1, \"sample\": $n}"; n=$((n+1)); done"#;
    let task = scripted(once, |_| {}).unwrap();
    for _ in 0..3 {
        assert_eq!(judge(&task, &samples(4)).unwrap().len(), 4);
    }
}

#[test]
fn a_program_that_does_not_read_cannot_lock_the_judge() {
    let task = scripted("sleep 1000", |command| command.limits.sample_seconds = 0.2).unwrap();
    let long = "x".repeat(1 << 20);
    let many: Vec<_> = samples(4).into_iter().map(|(problem, _)| (problem, long.clone())).collect();
    assert!(judge(&task, &many).unwrap_err().to_string().contains("sample 1 of 4"));
}

#[test]
fn an_external_reward_is_the_reward() {
    let verifier = "task.verifier={kind=\"command\",program=\"sh\",args=[\"-c\",\"while read -r line; do echo '{\\\"reward\\\":0.25}'; done\"]}";
    restart::set(env!("CARGO_BIN_EXE_stapo").into(), Vec::new());
    let small = ["rollout.problems_per_step=4", "update.problems_per_minibatch=4", verifier];
    let external = Plan::resolve(Config::from_toml("", small).unwrap()).unwrap();
    let device = Device::cpu(CpuOptions { threads: 2, ..CpuOptions::from_env().unwrap() });
    let mut trainer = Trainer::new(&external, &device, Programs::Allowed).unwrap();
    let rolled = trainer.roll_out(&external).unwrap();
    assert!(rolled.batch.responses().all(|scored| scored.reward == 0.25));
}

/// Whether a process is there and no zombie.
#[cfg(target_os = "linux")]
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[cfg(target_os = "linux")]
#[test]
fn dropping_the_task_ends_the_program_and_its_descendants() {
    let folder = tempfile::tempdir().unwrap();
    // A child, a daemon in a session of its own whose parent has ended, and a child that ignores what can be ignored.
    let script = format!(
        "sleep 1000 & (setsid sh -c 'echo $$ > $0/daemon; sleep 1000' $0 &)
         sh -c 'trap \"\" TERM HUP INT; while :; do sleep 1000; done' &
         while ! [ -s $0/daemon ]; do sleep 0.01; done; echo $$ $! $(cat $0/daemon) > $0/pids; {ECHO}"
    );
    let task = scripted(&script, |command| command.args.push(folder.path().display().to_string())).unwrap();
    judge(&task, &samples(1)).unwrap();
    let pids = std::fs::read_to_string(folder.path().join("pids")).unwrap();
    let pids: Vec<u32> = pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    assert!(pids.len() == 3 && pids.iter().all(|&pid| is_alive(pid)), "{pids:?}");
    drop(task);
    assert!(!pids.iter().any(|&pid| is_alive(pid)), "{pids:?}");
}

/// What a program writes to the file `seen` of a folder before its first verdict. The folder is the script's `$0`: a
/// folder that an argument names is visible though `/tmp` is private.
fn seen(script: &str, change: impl Fn(&mut CommandSpec)) -> String {
    let folder = folder_below_tmp();
    let task = scripted(&format!("{{ {script}; }} > $0/seen 2>&1; {ECHO}"), |command| {
        command.args.push(folder.path().display().to_string());
        change(command);
    });
    judge(&task.unwrap(), &samples(1)).unwrap();
    std::fs::read_to_string(folder.path().join("seen")).unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn the_environment_is_an_allow_list() {
    let script = r"tr '\0' '\n' < /proc/$$/environ";
    let is_usual = |name: &str| {
        let ours = ["SAFEPATH", "NOUSERSITE", "DONTWRITEBYTECODE", "PYCACHEPREFIX"];
        let is_ours = name.strip_prefix("PYTHON").is_some_and(|name| ours.contains(&name));
        ["PATH", "HOME", "LANG", "TMPDIR", "TZ"].contains(&name) || name.starts_with("LC_") || is_ours
    };
    let names = |seen: &str| -> Vec<String> {
        seen.lines().filter_map(|line| Some(line.split_once('=')?.0.to_string())).collect()
    };
    let usual = names(&seen(script, |_| {}));
    assert!(usual.iter().any(|name| name == "PATH") && usual.iter().all(|name| is_usual(name)), "{usual:?}");
    // Cargo gives tests this variable, so the check above had something to find.
    let more = names(&seen(script, |command| command.limits.env = vec!["CARGO_MANIFEST_DIR".into()]));
    assert!(more.iter().any(|name| name == "CARGO_MANIFEST_DIR"), "{more:?}");
    assert!(more.iter().all(|name| is_usual(name) || name == "CARGO_MANIFEST_DIR"), "{more:?}");
    for name in ["", "A=B"] {
        let refused =
            scripted(ECHO, |command| command.limits.env = vec![name.into()]).err().unwrap().to_string();
        assert!(refused.contains("task env") && refused.contains("\nhint: "), "{refused}");
    }
}

/// Whether programs can be kept apart here; where they cannot, the task says so, and the reason is printed.
#[cfg(target_os = "linux")]
fn can_isolate() -> bool {
    let shared = scripted(ECHO, |_| {}).unwrap().warnings();
    if !shared.is_empty() {
        println!("skipped: {shared:?}");
    }
    shared.is_empty()
}

#[cfg(target_os = "linux")]
#[test]
fn a_program_has_no_network_unless_the_plan_gives_it() {
    if !can_isolate() {
        return;
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let connect = format!("bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}' && echo connected");
    let alone = seen(&connect, |_| {});
    assert!(!alone.contains("connected"), "{alone}");
    let connected = seen(&connect, |command| command.limits.network = true);
    if connected.contains("not found") {
        println!("skipped: no bash to connect with");
        return;
    }
    assert!(connected.contains("connected"), "{connected}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_program_has_a_tmp_of_its_own_unless_the_plan_shares_it() {
    if !can_isolate() {
        return;
    }
    let probe = format!("/tmp/stapo-probe-{}", std::process::id());
    let write = format!("echo $TMPDIR; echo written > {probe}; cat {probe}");
    assert_eq!(seen(&write, |_| {}), "/tmp\nwritten\n");
    assert!(!std::path::Path::new(&probe).exists());
    assert!(seen(&write, |command| command.limits.shared_tmp = true).ends_with("written\n"));
    assert!(std::path::Path::new(&probe).exists());
    std::fs::remove_file(probe).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn limits_are_final_for_the_program() {
    let limits = "for limit in v n f c; do ulimit -S -$limit; ulimit -H -$limit; done";
    // Files are counted in blocks of 512 bytes, memory in KiB.
    assert_eq!(
        seen(limits, |_| {}).split_whitespace().collect::<Vec<_>>(),
        ["33554432", "33554432", "1024", "1024", "2097152", "2097152", "0", "0"]
    );
    let own = seen(limits, |command| {
        (command.limits.memory_mib, command.limits.file_mib, command.limits.open_files) = (256, 1, 64);
    });
    assert_eq!(
        own.split_whitespace().collect::<Vec<_>>(),
        ["262144", "262144", "64", "64", "2048", "2048", "0", "0"]
    );
    let unlimited = seen(limits, |command| (command.limits.memory_mib, command.limits.file_mib) = (0, 0));
    assert!(unlimited.starts_with("unlimited\nunlimited\n"), "{unlimited}");
    let greedy = "dd if=/dev/zero of=/dev/null bs=400M count=1; echo status $?";
    assert!(seen(greedy, |command| command.limits.memory_mib = 256).contains("status 1"));
    assert!(seen(greedy, |_| {}).contains("status 0"));
}

#[test]
fn a_program_that_cannot_be_executed_is_found_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("judge");
    std::fs::write(&file, "\0 no program").unwrap();
    let refused = |expected: &str| {
        let message = scripted("", |command| command.program.clone_from(&file)).err().unwrap().to_string();
        assert!(message.contains("at the start") && message.contains(expected), "{message}");
    };
    refused("Permission denied");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        refused("Exec format error");
    }
}

#[test]
fn a_task_that_must_not_start_programs_has_problems_and_no_verdicts() {
    let verifier = VerifierSpec::Command(CommandSpec::new("/no/such/program"));
    let spec = TaskSpec::Arithmetic(ArithmeticSpec { verifier, ..ArithmeticSpec::default() });
    let task = Task::open_with(&spec, Programs::Never).unwrap();
    assert!(!task.held_out(3).is_empty());
    assert!(judge(&task, &samples(1)).unwrap_err().to_string().contains("was not started"));
}
