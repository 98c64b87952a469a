//! Languages other than Python, by two commands.

use crate::common::{pool_with, settings};
use stapo_sandbox::{Checks, End, Language, Level, Pool, Request, Settings, Trial};
use std::path::Path;

/// Programs in C; `None`, with a printed reason, where there is no compiler.
fn pool_of_c(level: Level) -> Option<Pool> {
    let Some(compiler) = ["/usr/bin/cc", "/usr/bin/gcc"].into_iter().find(|path| Path::new(path).is_file())
    else {
        println!("SKIPPED: no C compiler");
        return None;
    };
    let words = |line: &str| line.split(' ').map(String::from).collect();
    let language = Language {
        source: "main.c".into(),
        build: words(&format!("{compiler} -O1 -o {{program}} {{source}}")),
        run: words("{program}"),
        reads: vec![
            "/usr/bin".into(),
            "/usr/include".into(),
            "/usr/libexec".into(),
            "/etc/alternatives".into(),
        ],
    };
    let mut settings = Settings { language: Some(language), ..settings(level) };
    settings.limits.cpu_seconds = 5.0;
    pool_with(settings)
}

const SUM: &str =
    "#include <stdio.h>\nint main() { int a, b; scanf(\"%d %d\", &a, &b); printf(\"%d\\n\", a + b); }";

#[test]
fn a_compiled_program_is_built_once_and_run_for_every_test() {
    for level in [Level::Namespaces, Level::Filters] {
        let Some(pool) = pool_of_c(level) else { continue };
        let pairs =
            vec![("1 2".into(), "3".into()), ("20 22".into(), "42\n".into()), ("1 1".into(), "3".into())];
        let checks = Checks::Streams { pairs, checker: None };
        let tested = pool.test(&[Trial { source: SUM.into(), checks: checks.clone() }]).unwrap().remove(0);
        let passed: Vec<bool> = tested.tests.iter().map(|test| test.passed).collect();
        assert_eq!(passed, [true, true, false], "{tested:?}");
        let broken = pool.test(&[Trial { source: "int main( {".into(), checks }]).unwrap().remove(0);
        assert!(
            matches!(&broken.outcome.end, End::NotBuilt(message) if message.contains("error")),
            "{broken:?}"
        );
        let hostile = "#include <unistd.h>\nint main() { fork(); }";
        let outcome = pool.run(&[Request { source: hostile, stdin: "" }]).unwrap().remove(0);
        assert_eq!(outcome.end, End::Processes, "{outcome:?}");
        let reading =
            "#include <stdio.h>\nint main() { puts(fopen(\"/etc/passwd\", \"r\") ? \"open\" : \"closed\"); }";
        let outcome = pool.run(&[Request { source: reading, stdin: "" }]).unwrap().remove(0);
        assert_eq!(outcome.stdout, "closed\n", "{outcome:?}");
    }
}

#[test]
fn tests_that_call_functions_are_refused_for_other_languages() {
    let Some(pool) = pool_of_c(Level::Namespaces) else { return };
    let checks = Checks::Asserts { setup: String::new(), tests: vec!["assert f(1)".into()] };
    let error = pool.test(&[Trial { source: SUM.into(), checks }]).unwrap_err();
    assert!(error.to_string().contains("not Python"), "{error}");
}

#[test]
fn a_test_that_expects_a_long_output_makes_room_for_it() {
    let Some(pool) = pool_with(settings(Level::Filters)) else { return };
    let streams =
        |expected: String| Checks::Streams { pairs: vec![(String::new(), expected)], checker: None };
    let program = |n: usize| format!("print('a' * {n})");
    let trials = [(9000, 9000), (9000 + 8000, 9000)]
        .map(|(printed, expected)| Trial { source: program(printed), checks: streams("a".repeat(expected)) });
    let tested = pool.test(&trials).unwrap();
    assert!(tested[0].tests[0].passed, "{:?}", tested[0]);
    assert_eq!(tested[1].outcome.end, End::Output, "4096 bytes beyond the expected ones are too many");
}
