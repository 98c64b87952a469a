//! This program and this process, as run folders name them.

use stapo_core::record::Writer;
use stapo_rl::run::this_process;

/// Version and commit.
pub const PROGRAM: &str = concat!(env!("CARGO_PKG_VERSION"), ", ", env!("STAPO_COMMIT"));

/// This process, with the device that it works on.
pub fn writer(device: impl std::fmt::Display) -> Writer {
    this_process(PROGRAM, &device.to_string())
}
