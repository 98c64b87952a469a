//! Run folders and evaluations.

use crate::border::{refused, to_python, without_lock};
use numpy::IntoPyArray;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use stapo_core::record::TokenRecord;
use stapo_rl::lab::evaluation::{EvalFolder, compare_folders, rows};
use stapo_rl::run::{part_files, plan_text, read_columns, records_of_file, responses_of_file, step_of};
use stapo_rl::{Config, Plan, Result};
use std::path::{Path, PathBuf};

/// A run folder, which is only read; a run that is still being written can be read too.
///
/// `Run("runs/first")` refuses a folder without a plan.
#[pyclass(frozen, module = "stapo")]
pub struct Run {
    folder: PathBuf,
}

#[pymethods]
impl Run {
    #[new]
    fn new(folder: PathBuf) -> PyResult<Self> {
        plan_text(&folder).map_err(refused)?;
        Ok(Self { folder })
    }

    /// The folder, as a pathlib.Path.
    #[getter]
    fn folder(&self) -> &Path {
        &self.folder
    }

    /// The resolved plan as a dict.
    #[getter]
    fn plan<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let text = plan_text(&self.folder).map_err(refused)?;
        let plan: toml::Table = text.parse().map_err(refused)?;
        to_python(py, &plan)
    }

    /// The metrics as a dict of arrays with one entry per step, by the paths of metrics.jsonl, as in
    /// `metrics["entropy_quantiles.q05"]`; NaN if a step lacks a number. `step` is an array of int64.
    #[getter]
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // The bindings to NumPy panic where it is missing; importing it says so as an exception.
        py.import("numpy")?;
        let columns = without_lock(py, || read_columns(&self.folder))?.map_err(refused)?;
        let metrics = PyDict::new(py);
        let steps: Vec<i64> = columns.steps().iter().map(|&step| step as i64).collect();
        metrics.set_item("step", steps.into_pyarray(py))?;
        for key in columns.keys() {
            metrics.set_item(key, columns.column(key).into_pyarray(py))?;
        }
        Ok(metrics)
    }

    /// The metrics as a pandas.DataFrame.
    fn to_pandas<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let pandas = py.import("pandas")?;
        pandas.call_method1("DataFrame", (self.metrics(py)?,))
    }

    /// The metrics as a pyarrow.Table.
    fn to_arrow<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let pyarrow = py.import("pyarrow")?;
        pyarrow.call_method1("table", (self.metrics(py)?,))
    }

    /// The steps whose responses were recorded.
    #[getter]
    fn recorded_steps(&self) -> PyResult<Vec<u64>> {
        let files = part_files(&self.folder, "rollouts").map_err(refused)?;
        Ok(files.iter().filter_map(|path| step_of(path)).collect())
    }

    /// The recorded responses of a step, or of all, as dicts: prompt, text, verdict, reward, tokens with their columns. A
    /// step that was not recorded is refused.
    #[pyo3(signature = (step=None))]
    fn responses<'py>(&self, py: Python<'py>, step: Option<u64>) -> PyResult<Bound<'py, PyAny>> {
        self.check_recorded(step, &["rollouts"])?;
        let read = || -> Result<_> {
            let config = Config::from_toml(&plan_text(&self.folder)?, [])?;
            let plan = Plan::resolve(config)?;
            let files = self.files("rollouts", step)?;
            let read = files.iter().map(|path| responses_of_file(path, &plan.objective));
            Ok(read.collect::<Result<Vec<_>>>()?.concat())
        };
        to_python(py, &without_lock(py, read)?.map_err(refused)?)
    }

    /// The silenced tokens of a step, or of all, as dicts.
    #[pyo3(signature = (step=None))]
    fn silenced<'py>(&self, py: Python<'py>, step: Option<u64>) -> PyResult<Bound<'py, PyAny>> {
        self.check_recorded(step, &["tokens", "rollouts"])?;
        let read = || -> Result<_> {
            let files = self.files("tokens", step)?;
            let read = files.iter().map(|path| records_of_file::<TokenRecord>(path));
            Ok(read.collect::<Result<Vec<_>>>()?.concat())
        };
        to_python(py, &without_lock(py, read)?.map_err(refused)?)
    }

    fn __repr__(&self) -> String {
        format!("<Run {}>", self.folder.display())
    }

    fn __getnewargs__(&self) -> (&Path,) {
        (&self.folder,)
    }
}

impl Run {
    /// Refuses a step that has no file in any of the parts.
    fn check_recorded(&self, step: Option<u64>, parts: &[&str]) -> PyResult<()> {
        let Some(step) = step else { return Ok(()) };
        for part in parts {
            if !self.files(part, Some(step)).map_err(refused)?.is_empty() {
                return Ok(());
            }
        }
        let recorded = self.recorded_steps()?;
        let range = match (recorded.first(), recorded.last()) {
            (Some(first), Some(last)) => format!("{} steps from {first} to {last} are", recorded.len()),
            _ => "no step is".to_string(),
        };
        Err(refused(format!(
            "step {step}: its responses are not in {}; {range}\nhint: Run.recorded_steps lists them; record.responses_every_steps says how often they are written",
            self.folder.display()
        )))
    }

    /// The files of a part, of all steps or of one.
    fn files(&self, part: &str, step: Option<u64>) -> Result<Vec<PathBuf>> {
        let mut files = part_files(&self.folder, part)?;
        files.retain(|path| step.is_none_or(|step| step_of(path) == Some(step)));
        Ok(files)
    }
}

/// An evaluation that `stapo eval` wrote, as a dict: `plan` (its settings), `rows` (avg@k, pass@k and maj@k of each
/// benchmark and decoding, with intervals, as `stapo eval --json` prints them) and `samples`.
#[pyfunction]
pub fn read_eval(py: Python<'_>, folder: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let read = || -> Result<_> {
        let plan = EvalFolder::read_plan(&folder)?;
        let samples = EvalFolder::read_samples(&folder)?;
        let rows = rows(&samples)?;
        Ok((plan, rows, samples))
    };
    let (plan, rows, samples) = without_lock(py, read)?.map_err(refused)?;
    let evaluation = PyDict::new(py);
    evaluation.set_item("plan", to_python(py, &plan)?)?;
    evaluation.set_item("rows", to_python(py, &rows)?)?;
    evaluation.set_item("samples", to_python(py, &samples)?)?;
    Ok(evaluation)
}

/// Compares two evaluations question by question, `a` being the baseline: one dict per benchmark and decoding, as
/// `stapo compare --json` prints them, with the paired difference, its interval and permutation p values (Holm).
#[pyfunction]
pub fn compare(py: Python<'_>, a: PathBuf, b: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let compared = without_lock(py, || compare_folders(&a, &b))?.map_err(refused)?;
    to_python(py, &compared)
}
