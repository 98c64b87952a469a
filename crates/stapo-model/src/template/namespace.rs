//! The object of `namespace()`.

use minijinja::value::{Object, ObjectRepr, Value};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Attributes that a template may change. A namespace shows nothing of its attributes when printed or compared: it may
/// hold itself.
#[derive(Default)]
pub(super) struct Namespace(Mutex<BTreeMap<String, Value>>);

impl Namespace {
    pub(super) fn attributes(&self) -> MutexGuard<'_, BTreeMap<String, Value>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn clear(&self) {
        // The attributes are dropped after the lock: one of them may be this namespace.
        let attributes = std::mem::take(&mut *self.attributes());
        drop(attributes);
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<namespace>")
    }
}

impl Object for Namespace {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, name: &Value) -> Option<Value> {
        self.attributes().get(name.as_str()?).cloned()
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<namespace>")
    }
}
