//! Objectives on arrays.

use crate::batch::{EffectColumns, PythonBatch, Stopped, evaluate};
use crate::border::{from_python, guarded, refused, to_python, without_lock};
use numpy::{IntoPyArray, PyArray1};
use pyo3::exceptions::{PyTypeError, PyUserWarning};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use stapo_core::minibatch::Totals;
use stapo_core::objective::{EntropyBonus, Mask, MaskKind, ObjectiveSpec, UpdateKey};
use stapo_rl::untrusted::read_text;
use std::ffi::CString;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};

/// The presets by name, each with one line about it.
///
/// >>> import stapo
/// >>> "stapo" in stapo.presets()
/// True
#[pyfunction]
pub fn presets(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let listed = PyDict::new(py);
    for preset in stapo_core::objective::presets() {
        listed.set_item(preset.name, preset.summary)?;
    }
    Ok(listed)
}

/// An algorithm as a value: how a mini-batch of responses turns into a number per token.
///
/// `spec` is a preset ("stapo", "dapo", "grpo+spurious"), a dict of axes as in {"preset": "stapo", "kl": {..}}, a TOML
/// text, or a path to a TOML file such as the plan of a run. `set` changes values of it: {"masks.0.tau_p": 0.001}, a text
/// "masks.0.tau_p=0.001", or a list of such texts. Objectives with the same values are equal.
///
/// >>> import stapo
/// >>> batch = dict(
/// ...     offsets=[0, 3, 5],
/// ...     advantage=[1.0, -1.0],
/// ...     logp=[-0.1, -9.0, -0.3, -0.2, -0.4],
/// ...     behavior_logp=[-0.1, -9.0, -0.3, -0.2, -0.4],
/// ...     entropy=[0.2, 0.1, 0.5, 0.3, 0.4],
/// ... )
/// >>> effects = stapo.Objective("stapo", set=["masks.0.select=full"]).evaluate(batch)
/// >>> effects.kept.tolist(), effects.totals["n_silenced"]
/// ([True, False, True, True, True], 1)
/// >>> effects.d_logp.tolist()
/// [-0.25, -0.0, -0.25, 0.25, 0.25]
#[pyclass(frozen, eq, hash, module = "stapo")]
pub struct Objective {
    spec: ObjectiveSpec,
}

impl PartialEq for Objective {
    fn eq(&self, other: &Self) -> bool {
        self.spec == other.spec
    }
}

impl Hash for Objective {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.spec.to_toml().hash(state);
    }
}

#[pymethods]
impl Objective {
    #[new]
    #[pyo3(signature = (spec, *, set=None))]
    fn new(spec: &Bound<'_, PyAny>, set: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let py = spec.py();
        let set = set.map(overrides).transpose()?.unwrap_or_default();
        let spec = load(spec)?.with_overrides(set.iter().map(String::as_str)).map_err(refused)?;
        for text in spec.warnings() {
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &CString::new(text).unwrap_or_default(), 1)?;
        }
        Ok(Self { spec })
    }

    /// The whole spec as TOML, as `stapo objective --show` prints it.
    #[getter]
    fn toml(&self) -> String {
        self.spec.to_toml()
    }

    /// The whole spec as a dict of its axes.
    #[getter]
    fn axes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.spec)
    }

    /// True if the fate of a token depends on the other tokens of its mini-batch, as with most masks.
    #[getter]
    fn needs_minibatch(&self) -> bool {
        self.spec.chooses_among_tokens()
    }

    /// Optimizer steps per mini-batch: 2 for objectives that update in two passes.
    #[getter]
    fn n_passes(&self) -> usize {
        self.spec.n_passes()
    }

    /// False for an objective that gives the same numbers whatever the entropies are.
    #[getter]
    fn reads_entropy(&self) -> bool {
        self.spec.masks.iter().any(Mask::reads_entropy)
            || self.spec.entropy_bonus != EntropyBonus::None
            || self.spec.is_adaptive()
    }

    fn __repr__(&self) -> String {
        let masks: Vec<String> = self.spec.masks.iter().map(|mask| mask_name(mask.kind())).collect();
        format!("<Objective with masks [{}]>", masks.join(", "))
    }

    fn __getnewargs__(&self) -> (String,) {
        (self.spec.to_toml(),)
    }

    /// What the objective does to each token of a mini-batch.
    ///
    /// `batch` has the keys of the JSON lines of `stapo objective`, for all responses at once: `logp`, `behavior_logp` and
    /// `entropy` hold the tokens of all responses one after another, `offsets` (n + 1 numbers from 0) says where each
    /// response begins. `advantage` has a number per response or per token; without it, `reward` (a number or a row per
    /// response) and `group` give the advantages. Optional columns: `reference_logp`, `behavior_entropy`, `sampler_logp`,
    /// `collision`, `teacher_logp`, `loss_mask`. Arrays, tensors (by DLPack) and lists are taken; contiguous float64 is
    /// read in place. The interpreter's lock is released.
    #[pyo3(signature = (batch, *, step=0, pass_number=1, reward_weights=None))]
    fn evaluate(
        &self,
        py: Python<'_>,
        batch: &Bound<'_, PyAny>,
        step: i64,
        pass_number: usize,
        reward_weights: Option<Vec<f64>>,
    ) -> PyResult<Effects> {
        let reward_weights = reward_weights.unwrap_or_default();
        if !(1..=self.spec.n_passes()).contains(&pass_number) {
            let n = self.spec.n_passes();
            return Err(refused(format!("pass_number {pass_number}: this objective has {n} pass")));
        }
        let step =
            u64::try_from(step).map_err(|_| refused(format!("step {step}: expected a number from 0")))?;
        let update = UpdateKey { step, pass: pass_number - 1, ..UpdateKey::default() };
        // The bindings to NumPy panic where it is missing; importing it says so as an exception.
        py.import("numpy")?;
        let batch = guarded(|| PythonBatch::read(batch))??;
        let table = batch.table()?;
        let evaluated = without_lock(py, || evaluate(&self.spec, &table, &reward_weights, update))?;
        let (effects, totals) = evaluated.map_err(|stopped| match stopped {
            Stopped::Refused(error) => refused(table.placed(error)),
            Stopped::Signal(signal) => signal,
        })?;
        Effects::new(py, effects, &totals)
    }
}

/// What an objective does to the tokens of a mini-batch, as arrays with one entry per token. It can be pickled and copied.
#[pyclass(frozen, get_all, module = "stapo")]
pub struct Effects {
    /// True if no mask silenced the token.
    kept: Py<PyArray1<bool>>,
    /// The first mask that silenced the token, as a place in `MASKS`; -1 for none.
    silenced_by: Py<PyArray1<i8>>,
    /// True for a rewarded and improbable token, which S2T may silence.
    is_candidate: Py<PyArray1<bool>>,
    /// True if the trust region is active.
    clipped: Py<PyArray1<bool>>,
    /// Current over behavior probability; NaN for a token that is not in the loss.
    ratio: Py<PyArray1<f64>>,
    /// Derivative of the loss, which is minimised, by the token's logp.
    d_logp: Py<PyArray1<f64>>,
    /// Derivative of the loss by the entropy at the token; None without an entropy bonus.
    d_entropy: Option<Py<PyArray1<f64>>>,
    /// One per response, or per token where tokens differ (NaN for a token that is not in the loss).
    advantage: Py<PyArray1<f64>>,
    /// The last line of `stapo objective` as a dict: loss, n_tokens, n_kept, n_silenced, tau_h, ..
    totals: Py<PyAny>,
}

/// The fields of `Effects`, in their order.
type EffectFields = (
    Py<PyArray1<bool>>,
    Py<PyArray1<i8>>,
    Py<PyArray1<bool>>,
    Py<PyArray1<bool>>,
    Py<PyArray1<f64>>,
    Py<PyArray1<f64>>,
    Option<Py<PyArray1<f64>>>,
    Py<PyArray1<f64>>,
    Py<PyAny>,
);

#[pymethods]
impl Effects {
    /// For pickle and copy: the attributes in their order. `Objective.evaluate` makes effects.
    #[new]
    #[pyo3(signature = (*attributes))]
    fn from_attributes(attributes: EffectFields) -> Self {
        let (kept, silenced_by, is_candidate, clipped, ratio, d_logp, d_entropy, advantage, totals) =
            attributes;
        Self { kept, silenced_by, is_candidate, clipped, ratio, d_logp, d_entropy, advantage, totals }
    }

    fn __getnewargs__(&self, py: Python<'_>) -> EffectFields {
        (
            self.kept.clone_ref(py),
            self.silenced_by.clone_ref(py),
            self.is_candidate.clone_ref(py),
            self.clipped.clone_ref(py),
            self.ratio.clone_ref(py),
            self.d_logp.clone_ref(py),
            self.d_entropy.as_ref().map(|column| column.clone_ref(py)),
            self.advantage.clone_ref(py),
            self.totals.clone_ref(py),
        )
    }

    /// The names of the masks, by which `silenced_by` counts.
    #[classattr]
    #[pyo3(name = "MASKS")]
    fn masks(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        PyTuple::new(py, MaskKind::ALL.map(mask_name))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<Effects {}>", self.totals.bind(py).repr()?))
    }
}

impl Effects {
    fn new(py: Python<'_>, effects: EffectColumns, totals: &Totals) -> PyResult<Self> {
        Ok(Self {
            kept: effects.kept.into_pyarray(py).unbind(),
            silenced_by: effects.silenced_by.into_pyarray(py).unbind(),
            is_candidate: effects.is_candidate.into_pyarray(py).unbind(),
            clipped: effects.clipped.into_pyarray(py).unbind(),
            ratio: effects.ratio.into_pyarray(py).unbind(),
            d_logp: effects.d_logp.into_pyarray(py).unbind(),
            d_entropy: effects.d_entropy.map(|column| column.into_pyarray(py).unbind()),
            advantage: effects.advantage.into_pyarray(py).unbind(),
            totals: to_python(py, totals)?.unbind(),
        })
    }
}

/// Overrides from a dict, whose inner dicts are paths, a text or a list of texts.
fn overrides(set: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    if let Ok(text) = set.extract::<String>() {
        return Ok(vec![text]);
    }
    if set.is_instance_of::<PyDict>() {
        let table: serde_json::Map<String, serde_json::Value> = from_python("set", set)?;
        let mut texts = Vec::new();
        add_overrides("", &table, &mut texts);
        return Ok(texts);
    }
    set.extract().map_err(|_| {
        let kind = set.get_type();
        PyTypeError::new_err(format!(
            "set: {kind}, expected a dict such as {{\"masks.0.tau_p\": 0.001}}, a text \"masks.0.tau_p=0.001\", or a list of such texts"
        ))
    })
}

fn add_overrides(root: &str, table: &serde_json::Map<String, serde_json::Value>, texts: &mut Vec<String>) {
    for (key, value) in table {
        match value {
            serde_json::Value::Object(inner) => add_overrides(&format!("{root}{key}."), inner, texts),
            // JSON writes texts, numbers, truth values and lists of these as TOML does.
            value => texts.push(format!("{root}{key}={value}")),
        }
    }
}

/// The spec that a preset's name, a dict, a TOML text or a path leads to.
fn load(spec: &Bound<'_, PyAny>) -> PyResult<ObjectiveSpec> {
    if spec.is_instance_of::<PyDict>() {
        let table: toml::Table = from_python("objective", spec)?;
        return ObjectiveSpec::from_table(table).map_err(refused);
    }
    let Ok(text) = spec.extract::<String>() else {
        let path: PathBuf = spec.extract().map_err(|_| {
            let kind = spec.get_type();
            PyTypeError::new_err(format!("spec: {kind}, expected a name, a dict, a TOML text or a path"))
        })?;
        return load_file(&path);
    };
    let path = Path::new(&text);
    if text.contains(['\n', '=']) {
        ObjectiveSpec::from_toml(&text).map_err(refused)
    } else if path.extension().is_some_and(|e| e == "toml") || path.is_file() {
        load_file(path)
    } else {
        ObjectiveSpec::from_preset(&text).map_err(refused)
    }
}

fn load_file(path: &Path) -> PyResult<ObjectiveSpec> {
    let named = |problem: &dyn std::fmt::Display| refused(format!("spec {}: {problem}", path.display()));
    let text = read_text(path).map_err(|error| named(&error))?;
    ObjectiveSpec::from_toml(&text).map_err(|error| named(&error))
}

fn mask_name(kind: MaskKind) -> String {
    serde_json::to_value(kind).ok().and_then(|name| name.as_str().map(str::to_string)).unwrap_or_default()
}
