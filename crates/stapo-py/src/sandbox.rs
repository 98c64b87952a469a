//! Programs that a model wrote, run from Python.

use crate::border::{refused, to_python, without_lock};
use pyo3::prelude::*;
use stapo_rl::reward::CodeSpec;
use stapo_rl::reward::code::CodeJudge;
use stapo_rl::run::restart;
use std::ffi::OsString;
use std::path::PathBuf;

/// Warm interpreters for programs that a model wrote; `stapo.sandbox` keeps one for each setting.
#[pyclass(frozen, module = "stapo")]
pub struct Sandbox {
    judge: CodeJudge,
}

#[pymethods]
impl Sandbox {
    /// `executable` and `first_arguments` start the program `stapo` again.
    #[new]
    fn new(
        py: Python<'_>,
        python: PathBuf,
        cpu_seconds: f64,
        memory_mib: u64,
        executable: PathBuf,
        first_arguments: Vec<OsString>,
    ) -> PyResult<Self> {
        restart::set(executable, first_arguments);
        let mut spec = CodeSpec { python, ..CodeSpec::default() };
        spec.limits.cpu_seconds = cpu_seconds;
        spec.limits.memory_mib = memory_mib;
        let judge = without_lock(py, || CodeJudge::open(&spec))?.map_err(refused)?;
        Ok(Self { judge })
    }

    /// How strongly programs are kept apart on this machine: `namespaces` or `filters`.
    #[getter]
    fn level(&self) -> &'static str {
        self.judge.layers().level.name()
    }

    /// Runs pairs of a program and its standard input; the outcomes have the order of the pairs.
    fn run<'py>(&self, py: Python<'py>, programs: Vec<(String, String)>) -> PyResult<Bound<'py, PyAny>> {
        let outcomes = without_lock(py, || self.judge.run(&programs))?.map_err(refused)?;
        to_python(py, &outcomes)
    }
}
