//! The program inside Python.

use crate::border::without_lock;
use pyo3::prelude::*;
use stapo_rl::run::restart;
use std::ffi::OsString;
use std::path::PathBuf;

/// Runs the command that `arguments` name, without the name of the program, and returns its exit status. `executable` and
/// `first_arguments` start this program again, for the runs of an experiment and for verifiers.
#[pyfunction]
pub fn main(
    py: Python<'_>,
    arguments: Vec<OsString>,
    executable: PathBuf,
    first_arguments: Vec<OsString>,
) -> PyResult<u8> {
    restart::set(executable, first_arguments);
    without_lock(py, || stapo_cli::run_inside(std::iter::once("stapo".into()).chain(arguments)))
}
