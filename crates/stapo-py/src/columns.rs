//! Columns of numbers from Python: NumPy arrays, tensors by way of DLPack, and lists. A contiguous array of float64 is
//! read in place; other numbers are converted.

use crate::border::refused;
use numpy::{
    PyArray1, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A column of float64.
pub enum Column<'py> {
    InPlace(PyReadonlyArray1<'py, f64>),
    Converted(Vec<f64>),
}

impl<'py> Column<'py> {
    /// The numbers of `values`, which has one dimension.
    pub fn read(name: &str, values: &Bound<'py, PyAny>) -> PyResult<Self> {
        let array = array(name, values)?;
        expect(name, &array, "iuf", "numbers")?;
        if array.ndim() != 1 {
            return Err(refused(format!(
                "{name}: {} dimensions, expected 1\nhint: give the tokens of all responses one after another, and where each begins as offsets",
                array.ndim()
            )));
        }
        if let Some(numbers) = in_place::<f64>(&array) {
            return Ok(Self::InPlace(numbers));
        }
        if let Some(numbers) = in_place::<f32>(&array) {
            let numbers = numbers.as_slice()?;
            return Ok(Self::Converted(numbers.iter().map(|&x| f64::from(x)).collect()));
        }
        Ok(Self::InPlace(converted::<f64>(&array, "float64")?))
    }

    pub fn as_slice(&self) -> PyResult<&[f64]> {
        match self {
            Self::InPlace(numbers) => Ok(numbers.as_slice()?),
            Self::Converted(numbers) => Ok(numbers),
        }
    }
}

/// Where each response begins in the columns, and where the last one ends: `n + 1` numbers.
pub fn offsets(values: &Bound<'_, PyAny>, n_tokens: usize) -> PyResult<Vec<usize>> {
    let array = array("offsets", values)?;
    if array.len() == 0 {
        return Err(refused(
            "offsets: empty, expected one number more than there are responses, from 0\nhint: numpy.cumsum of the lengths with a 0 in front",
        ));
    }
    expect("offsets", &array, "iu", "whole numbers")?;
    let array = converted::<i64>(&array, "int64")?;
    let offsets = array.as_slice()?;
    let is_rising = offsets.windows(2).all(|pair| pair[0] <= pair[1]);
    if !is_rising || offsets.first() != Some(&0) || offsets.last() != Some(&(n_tokens as i64)) {
        let ends = (offsets.first().copied().unwrap_or(0), offsets.last().copied().unwrap_or(0));
        let problem =
            if is_rising { format!("from {} to {}", ends.0, ends.1) } else { "falling".to_string() };
        return Err(refused(format!(
            "offsets: {problem}, expected numbers that rise from 0 to the {n_tokens} tokens of logp\nhint: numpy.cumsum of the lengths with a 0 in front"
        )));
    }
    Ok(offsets.iter().map(|&offset| offset as usize).collect())
}

/// True for each token that is in the loss.
pub fn loss_mask(values: &Bound<'_, PyAny>, n_tokens: usize) -> PyResult<Vec<bool>> {
    let array = array("loss_mask", values)?;
    expect("loss_mask", &array, "biuf", "truth values")?;
    let mask = converted::<f64>(&array, "float64")?;
    let mask = mask.as_slice()?;
    if mask.len() != n_tokens {
        return Err(refused(format!("loss_mask has {} entries, logp has {n_tokens}", mask.len())));
    }
    if let Some(at) = mask.iter().position(|&bit| bit != 0.0 && bit != 1.0) {
        return Err(refused(format!("loss_mask[{at}] is neither true or 1 nor false or 0")));
    }
    Ok(mask.iter().map(|&bit| bit == 1.0).collect())
}

/// The rewards of `n` responses, one after another, and how many each has.
pub fn rewards(values: &Bound<'_, PyAny>, n_responses: usize) -> PyResult<(Vec<f64>, usize)> {
    let array = array("reward", values)?;
    expect("reward", &array, "biuf", "numbers")?;
    let shape = array.shape().to_vec();
    let n_each = match shape[..] {
        [n] if n == n_responses => 1,
        [n, n_each] if n == n_responses && n_each > 0 => n_each,
        _ => {
            return Err(refused(format!(
                "reward: shape {shape:?}, expected [{n_responses}], or [{n_responses}, k] for k rewards each"
            )));
        }
    };
    let flat = array.as_any().call_method1("reshape", (-1,))?;
    let flat = converted::<f64>(flat.cast::<PyUntypedArray>().map_err(PyErr::from)?, "float64")?;
    Ok((flat.as_slice()?.to_vec(), n_each))
}

/// The group of each response as a number, in order of first appearance.
pub fn groups(values: &Bound<'_, PyAny>, n_responses: usize) -> PyResult<Vec<usize>> {
    let values = match values.getattr("tolist") {
        Ok(tolist) => tolist.call0()?,
        Err(_) => values.clone(),
    };
    let numbers = PyDict::new(values.py());
    let number = |item: PyResult<Bound<'_, PyAny>>| {
        let item = item?;
        if let Some(known) = numbers.get_item(&item)? {
            return known.extract();
        }
        let next = numbers.len();
        numbers.set_item(item, next)?;
        Ok(next)
    };
    let groups = values.try_iter()?.map(number).collect::<PyResult<Vec<usize>>>()?;
    if groups.len() != n_responses {
        return Err(refused(format!(
            "group: {} entries, offsets make {n_responses} responses",
            groups.len()
        )));
    }
    Ok(groups)
}

/// `values` as an array of NumPy's: without a copy where they are one, or a tensor in this machine's memory.
fn array<'py>(name: &str, values: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyUntypedArray>> {
    if let Ok(array) = values.cast::<PyUntypedArray>() {
        return Ok(array.clone());
    }
    let numpy = values.py().import("numpy")?;
    let is_tensor = values.hasattr("__dlpack__")?;
    let made = numpy.call_method1(if is_tensor { "from_dlpack" } else { "asarray" }, (values,));
    let made = made.map_err(|error| {
        let kind = values.get_type();
        let hint = if is_tensor { "\nhint: give tensor.detach().cpu().float()" } else { "" };
        refused(format!("{name}: NumPy cannot read {kind}: {}{hint}", error.value(values.py())))
    })?;
    Ok(made.cast_into::<PyUntypedArray>()?)
}

/// Refuses an array whose elements are of none of the kinds, which are NumPy's letters.
fn expect(name: &str, array: &Bound<'_, PyUntypedArray>, kinds: &str, what: &str) -> PyResult<()> {
    let dtype = array.dtype();
    if kinds.as_bytes().contains(&dtype.kind()) {
        return Ok(());
    }
    Err(refused(format!("{name}: elements of type {dtype}, expected {what}")))
}

/// The array itself, where it has elements of that type one after another.
fn in_place<'py, T: numpy::Element>(array: &Bound<'py, PyUntypedArray>) -> Option<PyReadonlyArray1<'py, T>> {
    let array = array.cast::<PyArray1<T>>().ok()?;
    let array = array.try_readonly().ok()?;
    array.as_slice().is_ok().then_some(array)
}

/// A contiguous array with elements of another type.
fn converted<'py, T: numpy::Element>(
    array: &Bound<'py, PyUntypedArray>,
    dtype: &str,
) -> PyResult<PyReadonlyArray1<'py, T>> {
    let numpy = array.py().import("numpy")?;
    let made = numpy.call_method1("ascontiguousarray", (array, dtype))?;
    Ok(made.cast_into::<PyArray1<T>>()?.try_readonly()?)
}
