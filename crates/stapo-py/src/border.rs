//! What crosses the border to Python: errors with the texts of the command line, values as JSON, and no panic.

use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::panic::{AssertUnwindSafe, catch_unwind};

create_exception!(
    stapo,
    Error,
    PyValueError,
    "An input, a file or a setting was refused; the text is that of the command line."
);

/// A refusal with that text.
pub fn refused(problem: impl ToString) -> PyErr {
    Error::new_err(problem.to_string())
}

/// Runs `work` without the interpreter's lock, guarded.
pub fn without_lock<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| guarded(work))
}

/// Runs `work`. A panic, which is a fault of this program, becomes a `RuntimeError`.
pub fn guarded<T>(work: impl FnOnce() -> T) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        PyRuntimeError::new_err(format!("stapo: a fault of the program: {text}"))
    })
}

/// The exception of a signal that came, as Ctrl-C; for threads without the interpreter's lock.
#[allow(clippy::redundant_closure_for_method_calls, reason = "the method is not general over lifetimes")]
pub fn check_signals() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}

/// A value as Python has it: dicts, lists, strings and numbers.
pub fn to_python<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(refused)?;
    py.import("json")?.call_method1("loads", (text,))
}

/// The value of a dict of Python's, whose entries JSON can hold.
pub fn from_python<T: DeserializeOwned>(name: &str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    let text: String = value.py().import("json")?.call_method1("dumps", (value,))?.extract()?;
    serde_json::from_str(&text).map_err(|error| refused(format!("{name}: {error}")))
}
