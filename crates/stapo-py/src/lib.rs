//! `stapo._stapo`, the extension module of the Python package: the grader, the objectives, run folders and evaluations,
//! and the program itself. Long calls run without the interpreter's lock and heed Ctrl-C.

#![allow(clippy::needless_pass_by_value, reason = "the arguments of Python functions arrive as values")]
#![allow(clippy::doc_link_with_quotes, reason = "docstrings hold lists of Python's")]

mod batch;
mod border;
mod columns;
mod command;
mod folders;
mod grade;
mod objective;
mod sandbox;

use pyo3::prelude::*;

/// The extension module of the package `stapo`.
#[pymodule]
mod _stapo {
    #[pymodule_export]
    use crate::border::Error;
    #[pymodule_export]
    use crate::command::main;
    #[pymodule_export]
    use crate::folders::{Run, compare, read_eval};
    #[pymodule_export]
    use crate::grade::{Verdict, grade, grade_batch, verify};
    #[pymodule_export]
    use crate::objective::{Effects, Objective, presets};
    #[pymodule_export]
    use crate::sandbox::Sandbox;

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "the name that Python gives versions")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
