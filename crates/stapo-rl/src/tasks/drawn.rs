use serde_json::{Map, Value};

/// A generated problem before the template. The text is the problem's id: equal ids are equal problems.
pub(super) struct DrawnProblem {
    pub(super) problem: String,
    pub(super) reference: String,
    /// Further variables of the template.
    pub(super) fields: Map<String, Value>,
}
