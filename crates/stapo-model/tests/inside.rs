//! Tests of hostile input run in a process of their own: an abort there fails the test and not the test's runner.

use std::process::Command;

const INSIDE: &str = "STAPO_TEST_INSIDE";

/// Runs `work` in a second process of the test `name`, module and all, and shows the last line that it printed if it fails.
pub fn in_own_process(name: &str, work: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return work();
    }
    let program = std::env::current_exe().unwrap();
    let inside =
        Command::new(program).args([name, "--exact", "--nocapture"]).env(INSIDE, "1").output().unwrap();
    let (out, errors) = (String::from_utf8_lossy(&inside.stdout), String::from_utf8_lossy(&inside.stderr));
    let lines: Vec<&str> = out.lines().rev().take(4).collect();
    assert!(inside.status.success(), "{}, last lines {lines:#?}\n{errors}", inside.status);
    assert!(out.contains("1 passed"), "no test is called {name}:\n{out}");
    println!("{out}");
}

/// The largest memory that this process has had, in MiB; 0 where the system does not say.
pub fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.map_or(0, |text| text.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10)
}
