use super::*;
use std::time::{Duration, Instant};

/// A task judged by a shell script.
fn scripted(script: &str, limit: impl Fn(&mut CommandSpec)) -> Result<Task, TaskError> {
    let mut command = CommandSpec { args: vec!["-c".into(), script.into()], ..CommandSpec::new("/bin/sh") };
    limit(&mut command);
    let verifier = VerifierSpec::Command(command);
    Task::open(&TaskSpec::Arithmetic(ArithmeticSpec { verifier, ..ArithmeticSpec::default() }))
}

fn samples(n: usize) -> Vec<(Problem, String)> {
    (0..n)
        .map(|i| {
            let problem =
                Problem { id: format!("p{i}"), prompt: format!("{i}=?\n\"\\"), reference: i.to_string() };
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
        |command: &mut CommandSpec| command.sample_seconds = 0.0,
        |command: &mut CommandSpec| command.batch_seconds = f64::NAN,
        |command: &mut CommandSpec| command.max_line_bytes = 0,
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
    let start = Instant::now();
    let silent = r#"read -r a; echo '{"reward": 1}'; sleep 1000"#;
    let message = failure(silent, |command| command.sample_seconds = 0.2);
    assert!(
        message.contains("sample 2 of 3 (problem \"p1\"): no answer for sample_seconds 0.2"),
        "{message}"
    );
    let slow = r#"while read -r a; do sleep 0.15; echo '{"reward": 1}'; done"#;
    let message = failure(slow, |command| command.batch_seconds = 0.25);
    assert!(message.contains("batch_seconds 0.25 are over"), "{message}");
    assert!(start.elapsed() < Duration::from_secs(60));
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
    let message = failure("cat /dev/zero", |_| {});
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
    let message = failure(too_few, |command| command.sample_seconds = 0.2);
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
    let task = scripted("sleep 1000", |command| command.sample_seconds = 0.2).unwrap();
    let long = "x".repeat(1 << 20);
    let many: Vec<_> = samples(4).into_iter().map(|(problem, _)| (problem, long.clone())).collect();
    assert!(judge(&task, &many).unwrap_err().to_string().contains("sample 1 of 4"));
}

#[cfg(target_os = "linux")]
#[test]
fn dropping_the_task_ends_the_program_and_its_children() {
    let folder = tempfile::tempdir().unwrap();
    let pids = folder.path().join("pids");
    let script = format!("sleep 1000 & echo $$ $! > {}; {ECHO}", pids.display());
    let task = scripted(&script, |_| {}).unwrap();
    judge(&task, &samples(1)).unwrap();
    let pids: Vec<u32> =
        std::fs::read_to_string(pids).unwrap().split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    drop(task);
    let state = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
    };
    assert_eq!(state(pids[0]), None, "the program is reaped");
    // The init process reaps the program's child, which may take a moment.
    let gone = (0..400).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        matches!(state(pids[1]), None | Some('Z' | 'X'))
    });
    assert!(gone, "the child of the program still runs: {:?}", state(pids[1]));
}
