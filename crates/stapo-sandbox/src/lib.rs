//! Runs programs that a model wrote.
//!
//! A [`Pool`] keeps warm interpreters, each inside a jail that the system's kernel enforces, and forks one of them for
//! every program. A program is one process: it cannot start another, cannot reach the network, sees no file but those of
//! its interpreter, and is killed at its limits. [`Pool::run`] gives what a program printed. [`Pool::test`] runs tests in
//! a second jailed interpreter, which calls the program's functions through this crate and decodes plain values only, so
//! that a program can return wrong values and cannot touch a verdict.

#[cfg(target_os = "linux")]
mod interpreter;
#[cfg(target_os = "linux")]
mod jail;
pub mod launcher;
mod outcome;
#[cfg(target_os = "linux")]
mod pool;
#[cfg(not(target_os = "linux"))]
#[path = "elsewhere.rs"]
mod pool;
mod privileges;
#[cfg(target_os = "linux")]
mod relay;
mod settings;
mod trial;
#[cfg(target_os = "linux")]
mod value;
#[cfg(target_os = "linux")]
mod zygote;

#[cfg(target_os = "linux")]
pub use jail::{SUBCOMMAND, launch};
pub use outcome::{End, Outcome};
pub use pool::Pool;
#[cfg(not(target_os = "linux"))]
pub use pool::{SUBCOMMAND, launch};
pub use settings::{Clock, Language, Layers, Level, Limits, SandboxError, Settings};
pub use trial::{Call, Checks, Request, TestResult, Tested, Trial};
