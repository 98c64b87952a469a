//! Ctrl-C: the first asks the command to stop after the current step, the second ends the process.

use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag that the first Ctrl-C raises; the second Ctrl-C exits with status 130.
pub fn on_ctrl_c() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&flag);
    ctrlc::set_handler(move || {
        if raised.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
        eprintln!("\nfinishing this step and saving; Ctrl-C again ends at once");
    })
    .context("Ctrl-C handler")?;
    Ok(flag)
}
