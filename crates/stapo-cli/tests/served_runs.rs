//! What people write about runs, evaluations that lie elsewhere, and the samples of all steps, as `stapo runs` and `stapo
//! serve` show them.

use crate::browser::runs::{STAPO, lines, train};
use crate::common::{complaint, json, ok, stapo};
use crate::serve::Server;
use serde_json::{Value, json};

fn row<'a>(list: &'a Value, id: &str) -> &'a Value {
    list["rows"].as_array().unwrap().iter().find(|row| row["id"] == id).unwrap()
}

#[test]
fn notes_stand_beside_the_runs_and_never_inside() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::create_dir(at.join("runs")).unwrap();
    train(&at.join("runs"), "a", STAPO, 1);
    train(&at.join("runs"), "b", STAPO, 2);
    ok(&stapo(at, &["runs", "note", "runs/a", "the", "first", "try"]));
    ok(&stapo(at, &["runs", "tag", "runs/a", "low", "kept"]));
    ok(&stapo(at, &["runs", "tag", "runs/a", "low", "--remove"]));
    ok(&stapo(at, &["runs", "archive", "runs/b"]));
    let expected =
        json!({"runs": {"a": {"note": "the first try", "tags": ["kept"]}, "b": {"is_archived": true}}});
    assert_eq!(json(&at.join("runs/notes.json")), expected);
    ok(&stapo(at, &["verify", "runs/a"]));
    let output = stapo(at, &["runs"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(told, "note: 1 archived runs are left out; --all lists them\n");
    std::fs::create_dir(at.join("none")).unwrap();
    let none = stapo(at, &["runs", "none"]);
    assert!(String::from_utf8_lossy(&none.stderr).contains("note: no runs in none; stapo train makes one"));
    let listed = ok(&output);
    assert!(listed.contains("done #kept; the first try") && !listed.contains("\nb "), "{listed}");
    assert!(ok(&stapo(at, &["runs", "--all"])).contains("\nb "));
    let server = Server::start(&at.join("runs"), &[]);
    let seen = server.json("/api/runs");
    assert_eq!(
        (&row(&seen, "a")["note"], &row(&seen, "a")["tags"]),
        (&json!("the first try"), &json!(["kept"]))
    );
    assert_eq!(row(&seen, "b")["is_archived"], true);
    ok(&stapo(at, &["runs", "archive", "--undo", "runs/b"]));
    ok(&stapo(at, &["runs", "note", "runs/a"]));
    let seen = server.json("/api/runs");
    assert!(row(&seen, "b")["is_archived"].is_null() && row(&seen, "a")["note"].is_null(), "{seen}");
    // A receipt of an experiment is about every file inside, so notes on its runs stand beside it.
    std::fs::create_dir_all(at.join("runs/exp/arm")).unwrap();
    let experiment = json!({"schema": 1, "name": "exp", "method": "arm", "arms": []});
    std::fs::write(at.join("runs/exp/experiment.json"), experiment.to_string()).unwrap();
    train(&at.join("runs/exp/arm"), "seed-0", STAPO, 1);
    ok(&stapo(at, &["runs", "tag", "runs/exp/arm/seed-0", "odd"]));
    assert_eq!(json(&at.join("runs/notes.json"))["runs"]["exp/arm/seed-0"]["tags"], json!(["odd"]));
    assert!(ok(&stapo(at, &["runs"])).contains("done #odd"));
    assert_eq!(row(&server.json("/api/runs"), "exp/arm/seed-0")["tags"], json!(["odd"]));
    assert!(complaint(at, &["runs", "tag", "runs", "x"]).contains("run runs: no run folder\nhint: "));
}

#[test]
fn an_evaluation_in_the_default_folder_belongs_to_its_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::create_dir(at.join("runs")).unwrap();
    train(&at.join("runs"), "a", STAPO, 1);
    train(&at.join("runs"), "b", STAPO, 2);
    ok(&stapo(at, &["eval", "--model", "runs/a", "--limit", "3", "--samples", "1", "--max-tokens", "20"]));
    let server = Server::start(&at.join("runs"), &[]);
    let seen = server.json("/api/runs");
    assert_eq!(
        (&row(&seen, "a")["is_evaluated"], &row(&seen, "b")["is_evaluated"]),
        (&json!(true), &json!(false))
    );
    let run = server.json("/api/run?run=a");
    assert!(run["evaluations"][0].as_str().unwrap().starts_with("evals/"), "{run}");
    assert!(run["disk_free"].as_u64().unwrap() > 0 && run["silent_seconds"].as_f64().unwrap() >= 0.0);
    let shown = server.json("/api/evaluations?run=a");
    assert_eq!(shown["benchmarks"][0]["results"][0]["n_questions"], 3);
    // The held-out accuracies of the list are those of the start and of steps 2 and 4.
    let metrics = lines(at.join("runs/a/metrics.jsonl"));
    let known: Vec<f64> =
        [&metrics[0]["eval_accuracy_before"], &metrics[1]["eval_accuracy"], &metrics[3]["eval_accuracy"]]
            .map(|value| value.as_f64().unwrap())
            .to_vec();
    let sparks: Vec<f64> = row(&seen, "a")["sparks"]["eval_accuracy"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_f64().unwrap())
        .collect();
    assert!(
        sparks.len() == 3 && sparks.iter().zip(&known).all(|(a, b)| (a - b).abs() < 1e-3),
        "{sparks:?} {known:?}"
    );
}

#[test]
fn samples_of_all_steps_are_found_by_what_they_are() {
    let folder = tempfile::tempdir().unwrap();
    train(folder.path(), "a", STAPO, 1);
    let server = Server::start(folder.path(), &[]);
    let all: Vec<Value> = (1..=4)
        .filter_map(|step| {
            std::fs::read_to_string(folder.path().join(format!("a/rollouts/step-{step:06}.jsonl"))).ok()
        })
        .flat_map(|text| crate::common::parsed_lines(&text))
        .collect();
    let n_where = |is: &dyn Fn(&Value) -> bool| all.iter().filter(|record| is(record)).count();
    let n_found = |query: &str| {
        server.json(&format!("/api/samples?run=a{query}"))["n_found"].as_u64().unwrap() as usize
    };
    assert!(all.len() > 90);
    assert_eq!(n_found(""), all.len());
    assert_eq!(n_found("&verdict=right"), n_where(&|r| r["verdict"] == "right"));
    assert_eq!(n_found("&verdict=not_right"), n_where(&|r| r["verdict"] != "right"));
    assert_eq!(n_found("&step_from=2&step_to=2"), n_where(&|r| r["step"] == 2));
    assert_eq!(n_found("&reward_from=0.5"), n_where(&|r| r["reward"].as_f64().unwrap() >= 0.5));
    let n_tokens = |r: &Value| r["tokens"]["id"].as_array().unwrap().len();
    assert_eq!(n_found("&tokens_to=20"), n_where(&|r| n_tokens(r) <= 20));
    let problem = all[0]["problem_id"].as_str().unwrap();
    let encoded = problem.bytes().fold(String::new(), |text, byte| text + &format!("%{byte:02x}"));
    let history = server.json(&format!("/api/samples?run=a&problem={encoded}"));
    assert_eq!(history["n_found"], n_where(&|r| r["problem_id"] == problem));
    assert_eq!(history["responses"][0]["step"], all[0]["step"]);
    assert_eq!(n_found("&text=BOXED"), n_where(&|r| r["text"].as_str().unwrap().contains("boxed")));
    let few = server.json("/api/samples?run=a&most=5");
    assert_eq!((few["responses"].as_array().unwrap().len(), &few["n_read"]), (5, &json!(all.len())));
}

/// Other users of the machine can read the command line of a browser, so that it holds a token that opens the page once.
#[cfg(target_os = "linux")]
#[test]
fn the_browser_is_given_a_token_that_opens_the_page_once() {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let (browser, opened) = (folder.path().join("xdg-open"), folder.path().join("opened"));
    std::fs::write(&browser, "#!/bin/sh\necho \"$1\" > \"$OPENED\"\n").unwrap();
    std::fs::set_permissions(&browser, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_stapo"))
        .args(["serve", "--port", "0", "--open"])
        .arg(folder.path())
        .env("PATH", folder.path())
        .env("OPENED", &opened)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let printed = line.split_once("http://").unwrap().1.trim().to_string();
    let given = loop {
        match std::fs::read_to_string(&opened) {
            Ok(text) if text.ends_with('\n') => break text.trim().trim_start_matches("http://").to_string(),
            _ => std::thread::sleep(std::time::Duration::from_millis(10)),
        }
    };
    let status = |page: &str| {
        let (address, target) = page.split_once('/').unwrap();
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(stream, "GET /{target} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text.split(' ').nth(1).unwrap().to_string()
    };
    let found = [status(&given), status(&given), status(&printed), status(&printed)];
    child.kill().unwrap();
    child.wait().unwrap();
    assert_ne!(given, printed);
    // Without a program that opens pages, the address is enough.
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_stapo"))
        .args(["serve", "--port", "0", "--open"])
        .arg(folder.path())
        .env("PATH", folder.path().join("none"))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut said).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(said.starts_with("warning: --open: xdg-open could not be started"), "{said}");
    assert_eq!(found, ["303", "401", "303", "303"]);
}
