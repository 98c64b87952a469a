//! The budget of a rendering.

use super::namespace::Namespace;
use minijinja::value::{DynObject, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// What a value costs besides its text, in bytes.
const VALUE_BYTES: u64 = 64;
/// How many lists, maps and results of filters a rendering may make. A value can be nested no deeper, and the stack
/// holds that many levels.
const MAX_CONTAINERS: u64 = 10_000;

/// Empty until it is filled for a rendering.
#[derive(Debug, Default)]
pub(super) struct Meter {
    bytes_left: AtomicU64,
    containers_left: AtomicU64,
    namespaces: Mutex<Vec<Arc<Namespace>>>,
}

impl Meter {
    /// Gives the next rendering its budget; what the one before left over is lost.
    pub(super) fn fill(&self, work_bytes: u64) {
        self.bytes_left.store(work_bytes, Relaxed);
        self.containers_left.store(MAX_CONTAINERS, Relaxed);
    }

    pub(super) fn charge(&self, bytes: u64) -> Result<(), Error> {
        take(&self.bytes_left, bytes, "the texts and lists that it makes are too large")
    }

    /// Pays for a value and everything in it, as often as it is reached.
    pub(super) fn charge_whole(&self, value: &Value) -> Result<(), Error> {
        let mut pending = vec![value.clone()];
        while let Some(value) = pending.pop() {
            self.charge(VALUE_BYTES + text_bytes(&value))?;
            let Some(object) = value.as_object() else { continue };
            if object.repr() == ObjectRepr::Plain {
                continue;
            }
            for item in value.try_iter()?.checked() {
                let item = item?;
                self.charge(VALUE_BYTES)?;
                if object.repr() == ObjectRepr::Map {
                    pending.extend(object.get_value(&item));
                }
                pending.push(item);
            }
        }
        Ok(())
    }

    /// Pays for a value without what is in its items.
    pub(super) fn charge_flat(&self, value: &Value) -> Result<(), Error> {
        let n_items = value.as_object().and_then(DynObject::enumerator_len).unwrap_or(0) as u64;
        self.charge(VALUE_BYTES * (1 + n_items) + 4 * text_bytes(value))
    }

    /// Pays for a new list, map or lazy sequence, and turns a lazy sequence into a list.
    pub(super) fn settled(&self, value: Value) -> Result<Value, Error> {
        if value.as_object().is_none() {
            self.charge(text_bytes(&value))?;
            return Ok(value);
        }
        take(&self.containers_left, 1, "it makes too many lists and maps")?;
        if value.kind() == ValueKind::Iterable { self.list(&value) } else { Ok(value) }
    }

    /// The items of a sequence as a separate list.
    pub(super) fn list(&self, value: &Value) -> Result<Value, Error> {
        let mut items = Vec::new();
        for item in value.try_iter()?.checked() {
            let item = item?;
            self.charge(VALUE_BYTES)?;
            items.push(item);
        }
        Ok(Value::from(items))
    }

    pub(super) fn keep(&self, namespace: Arc<Namespace>) {
        self.namespaces.lock().unwrap_or_else(PoisonError::into_inner).push(namespace);
    }

    pub(super) fn empty_namespaces(&self) {
        for namespace in self.namespaces.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            namespace.clear();
        }
    }
}

fn text_bytes(value: &Value) -> u64 {
    value.as_str().map_or(0, str::len).max(value.as_bytes().map_or(0, <[u8]>::len)) as u64
}

fn take(left: &AtomicU64, amount: u64, problem: &'static str) -> Result<(), Error> {
    match left.load(Relaxed).checked_sub(amount) {
        Some(rest) => {
            left.store(rest, Relaxed);
            Ok(())
        }
        None => Err(Error::new(ErrorKind::OutOfFuel, problem)),
    }
}
