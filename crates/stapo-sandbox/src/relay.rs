//! Tests of a program: the tester asks, the program answers, and this process carries checked values between them.

use crate::value::checked_reply;
use crate::zygote::{Received, Session, Zygote};
use crate::{Checks, End, Language, Outcome, Request, TestResult, Tested, Trial};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io;

/// A message of the tester.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    Ask(Value),
    Result(TestResult),
    /// The tests themselves cannot be run.
    Broken(String),
    Done,
}

/// Runs a program with its standard input.
pub(crate) fn run(
    zygote: &mut Zygote,
    request: &Request,
    language: Option<&Language>,
) -> io::Result<Outcome> {
    match language {
        None => run_python(zygote, request, ""),
        Some(language) => match build(zygote, request.source, language)? {
            Some(outcome) => Ok(outcome),
            None => run_built(zygote, (request.stdin, ""), language, false),
        },
    }
}

fn run_python(zygote: &mut Zygote, request: &Request, expected: &str) -> io::Result<Outcome> {
    let message = json!({ "do": "script", "source": request.source, "stdin": request.stdin });
    zygote.begin(&message, false)?.expecting(expected).outcome()
}

/// Tests a program. Streams need no tester unless a checker judges them.
pub(crate) fn test(
    zygote: &mut Zygote,
    tester: &mut Option<Zygote>,
    trial: &Trial,
    language: Option<&Language>,
) -> io::Result<Tested> {
    if let Checks::Streams { pairs, checker } = &trial.checks {
        return test_streams(zygote, tester.as_mut(), trial, (pairs, checker.as_deref()), language);
    }
    let Some(tester) = tester else { return Err(io::Error::other("no tester")) };
    let mut program = zygote.begin(&json!({ "do": "serve", "source": trial.source }), false)?;
    let (names, is_over) = match program.receive()? {
        Received::Line(line) if !program.note_raised(&line) => (names_in(&line), false),
        _ => (None, true),
    };
    let Some(names) = names else {
        let outcome = if is_over { unfinished(program)? } else { out_of_turn(program)? };
        return Ok(Tested::cut_short(Vec::new(), trial.checks.n_tests(), outcome));
    };
    let mut session = tester.begin(&json!({ "do": "test" }), false)?;
    session.send(&json!({ "checks": trial.checks, "names": names }));
    let (tests, is_done) = relay(&mut session, &mut program)?;
    session.finish()?;
    let outcome = if is_done { program.finish()? } else { unfinished(program)? };
    if is_done && tests.len() == trial.checks.n_tests().max(1) && outcome.end == End::Finished {
        return Ok(Tested { tests, outcome });
    }
    // Tests that passed before the program went over a limit do not count as all passed.
    let n_tests = trial.checks.n_tests();
    let tests = if tests.len() >= n_tests { tests[..n_tests - 1].to_vec() } else { tests };
    Ok(Tested::cut_short(tests, n_tests, outcome))
}

/// The names that a program defines, from its first line.
fn names_in(line: &[u8]) -> Option<Vec<String>> {
    let message: Value = serde_json::from_slice(line).ok()?;
    serde_json::from_value(message.get("names")?.clone()).ok()
}

/// The outcome of a program that wrote something else to the channel than what it was asked for.
fn out_of_turn(program: Session) -> io::Result<Outcome> {
    let outcome = program.finish()?;
    let end = match outcome.end {
        End::Finished => End::Raised("a message on the channel of the tests".into()),
        end => end,
    };
    Ok(Outcome { end, ..outcome })
}

/// The outcome of a program that ended before its tests did. A program that ends itself has not succeeded.
fn unfinished(program: Session) -> io::Result<Outcome> {
    let outcome = program.outcome()?;
    Ok(match outcome.end {
        End::Finished => Outcome { end: End::Exited(0), ..outcome },
        _ => outcome,
    })
}

/// Carries questions and answers until the tests are done; false if the program ended, or spoke out of turn.
fn relay(tester: &mut Session, program: &mut Session) -> io::Result<(Vec<TestResult>, bool)> {
    let mut tests = Vec::new();
    loop {
        let Received::Line(line) = tester.receive()? else {
            let message = "the tests ended at a limit of their interpreter".to_string();
            tests.push(TestResult { passed: false, message });
            return Ok((tests, true));
        };
        match serde_json::from_slice(&line).map_err(io::Error::other)? {
            Message::Ask(question) => {
                program.send(&question);
                let Received::Line(reply) = program.receive()? else { return Ok((tests, false)) };
                let refused = json!({ "raised": ["ProgramFailed", "a value that is no plain value"] });
                tester.send(&checked_reply(&reply).unwrap_or(refused));
            }
            Message::Result(result) => tests.push(result),
            Message::Broken(problem) => {
                let message = format!("the tests cannot be run: {problem}");
                tests.push(TestResult { passed: false, message });
                return Ok((tests, true));
            }
            Message::Done => return Ok((tests, true)),
        }
    }
}

fn test_streams(
    zygote: &mut Zygote,
    tester: Option<&mut Zygote>,
    trial: &Trial,
    (pairs, checker): (&[(String, String)], Option<&str>),
    language: Option<&Language>,
) -> io::Result<Tested> {
    if let Some(language) = language
        && let Some(outcome) = build(zygote, &trial.source, language)?
    {
        return Ok(Tested::cut_short(Vec::new(), pairs.len(), outcome));
    }
    let mut tests = Vec::new();
    let mut outputs = Vec::new();
    let mut worst: Option<Outcome> = None;
    for (idx, (stdin, expected)) in pairs.iter().enumerate() {
        let outcome = match language {
            None => run_python(zygote, &Request { source: &trial.source, stdin }, expected)?,
            Some(language) => run_built(zygote, (stdin, expected), language, idx + 1 < pairs.len())?,
        };
        let passed =
            outcome.end == End::Finished && (checker.is_some() || has_words(&outcome.stdout, expected));
        let message = match &outcome.end {
            _ if passed => String::new(),
            End::Finished => {
                format!("input {stdin:.80?}: printed {:.80?}, expected {expected:.80?}", outcome.stdout)
            }
            end => format!("input {stdin:.80?}: the program {end}"),
        };
        tests.push(TestResult { passed, message });
        outputs.push(json!([stdin, outcome.stdout, expected]));
        // The outcome that is shown is that of the first failure, with the time of the longest run.
        let cpu_seconds = worst.as_ref().map_or(0.0, |worst| worst.cpu_seconds).max(outcome.cpu_seconds);
        let is_first = worst
            .as_ref()
            .is_none_or(|worst| worst.end == End::Finished && tests[..idx].iter().all(|test| test.passed));
        let shown = if is_first { outcome } else { worst.take().unwrap_or(outcome) };
        worst = Some(Outcome { cpu_seconds, ..shown });
    }
    if let (Some(checker), Some(tester)) = (checker, tester) {
        let checks = json!({ "kind": "outputs", "checker": checker, "outputs": outputs });
        let verdicts = check_outputs(tester, &checks)?;
        for (idx, test) in tests.iter_mut().enumerate().filter(|(_, test)| test.passed) {
            *test = verdicts
                .get(idx)
                .cloned()
                .unwrap_or(TestResult { passed: false, message: "the checker did not end".into() });
        }
    }
    let none = Outcome { end: End::Finished, stdout: String::new(), stderr: String::new(), cpu_seconds: 0.0 };
    Ok(Tested { tests, outcome: worst.unwrap_or(none) })
}

fn check_outputs(tester: &mut Zygote, checks: &Value) -> io::Result<Vec<TestResult>> {
    let mut session = tester.begin(&json!({ "do": "test" }), false)?;
    session.send(&json!({ "checks": checks, "names": [] }));
    let mut verdicts = Vec::new();
    while let Received::Line(line) = session.receive()? {
        match serde_json::from_slice(&line).map_err(io::Error::other)? {
            Message::Result(result) => verdicts.push(result),
            _ => break,
        }
    }
    session.finish()?;
    Ok(verdicts)
}

/// Whether two outputs have the same words in the same lines; empty lines at the end do not count.
fn has_words(output: &str, expected: &str) -> bool {
    let lines = |text: &str| -> Vec<Vec<String>> {
        let lines = text.trim_end().lines();
        lines.map(|line| line.split_whitespace().map(str::to_string).collect()).collect()
    };
    lines(output) == lines(expected)
}

/// Builds a program of a compiled language; an outcome where that failed.
fn build(zygote: &mut Zygote, source: &str, language: &Language) -> io::Result<Option<Outcome>> {
    let folder = zygote.writes().ok_or_else(|| io::Error::other("no folder to build in"))?;
    let file = folder.join(&language.source).display().to_string();
    let command = match &language.build[..] {
        [] => vec!["/bin/true".to_string()],
        words => filled(words, &folder, language),
    };
    let message = json!({
        "do": "command", "files": { file: source }, "command": command, "is_program": false, "stdin": "",
    });
    let outcome = zygote.begin(&message, true)?.outcome()?;
    let failed = match &outcome.end {
        End::Finished => return Ok(None),
        End::Exited(_) => End::NotBuilt(outcome.stderr.lines().next().unwrap_or_default().to_string()),
        end => end.clone(),
    };
    Ok(Some(Outcome { end: failed, ..outcome }))
}

fn run_built(
    zygote: &mut Zygote,
    (stdin, expected): (&str, &str),
    language: &Language,
    keeps: bool,
) -> io::Result<Outcome> {
    let folder = zygote.writes().ok_or_else(|| io::Error::other("no folder to run in"))?;
    let command = filled(&language.run, &folder, language);
    let message =
        json!({ "do": "command", "files": {}, "command": command, "is_program": true, "stdin": stdin });
    zygote.begin(&message, keeps)?.expecting(expected).outcome()
}

/// A command with the paths of source and program.
fn filled(words: &[String], folder: &std::path::Path, language: &Language) -> Vec<String> {
    let source = folder.join(&language.source).display().to_string();
    let program = folder.join("program").display().to_string();
    words.iter().map(|word| word.replace("{source}", &source).replace("{program}", &program)).collect()
}
