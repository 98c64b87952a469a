//! Pools for tests. A test of a level, or of an interpreter, that this machine has not got is skipped aloud.

use stapo_sandbox::{Checks, Level, Limits, Pool, Settings, Tested, Trial};
use std::process::Command;

/// A pool with its level exactly; `None`, with a printed reason, where this machine has not got it.
pub fn pool_with(settings: Settings) -> Option<Pool> {
    let wanted = settings.strongest;
    let starter = || Ok(Command::new(env!("CARGO_BIN_EXE_sandbox-launcher")));
    match Pool::open(settings, starter) {
        Ok(pool) if pool.layers().level == wanted => Some(pool),
        Ok(pool) => {
            println!("SKIPPED: this machine has no level {}: {:?}", wanted.name(), pool.layers());
            None
        }
        Err(error)
            if error.problem.contains("cannot keep programs") || error.problem.contains("No such file") =>
        {
            println!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Small limits, so that attacks on them end soon.
pub fn settings(level: Level) -> Settings {
    // A long wall time, because the machine may be busy with other tests.
    let limits =
        Limits { cpu_seconds: 0.3, wall_seconds: 120.0, memory_mib: 256, tmp_mib: 4, output_bytes: 4096 };
    Settings { limits, strongest: level, n_workers: 2, ..Settings::default() }
}

/// One pool for each level that programs of a model run at.
pub fn pools() -> Vec<Pool> {
    [Level::Namespaces, Level::Filters].into_iter().filter_map(|level| pool_with(settings(level))).collect()
}

/// Tests a program with statements.
pub fn asserted(pool: &Pool, source: &str, tests: &[&str]) -> Tested {
    let tests = tests.iter().map(ToString::to_string).collect();
    let checks = Checks::Asserts { setup: String::new(), tests };
    pool.test(&[Trial { source: source.into(), checks }]).unwrap().remove(0)
}
