//! The process that a sandbox starts, for the tests of this crate; in the program it is a hidden subcommand of `stapo`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match (arguments.next().as_deref(), arguments.next()) {
        (Some(stapo_sandbox::SUBCOMMAND), Some(jail)) => stapo_sandbox::launch(&jail),
        _ => ExitCode::from(2),
    }
}
