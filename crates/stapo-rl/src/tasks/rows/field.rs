//! Paths into a row: `answer`, `reward_model.ground_truth`, `prompt[].content`, `choices[0]`.

use serde_json::Value;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FieldPath {
    written: String,
    steps: Vec<PathStep>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PathStep {
    Name(String),
    Element(usize),
    /// `[]`: the user's message, or the only element.
    TheOne,
}

impl FieldPath {
    pub(crate) fn parse(written: &str) -> Result<Self, String> {
        let mut steps = Vec::new();
        for part in written.split('.') {
            let (name, mut rest) = part.split_at(part.find('[').unwrap_or(part.len()));
            if name.is_empty() {
                return Err(format!("field path {written:?} has an empty name"));
            }
            steps.push(PathStep::Name(name.to_string()));
            while !rest.is_empty() {
                let inside = rest.strip_prefix('[').and_then(|rest| rest.split_once(']'));
                let Some((element, after)) = inside else {
                    return Err(format!("field path {written:?} has a bracket that is not closed"));
                };
                steps.push(match element {
                    "" => PathStep::TheOne,
                    number => PathStep::Element(number.parse().map_err(|_| {
                        format!("field path {written:?} has [{number}], expected [] or a number from 0")
                    })?),
                });
                rest = after;
            }
        }
        Ok(Self { written: written.to_string(), steps })
    }

    pub(crate) fn written(&self) -> &str {
        &self.written
    }

    /// The value at the path, or the reason why there is none.
    pub(crate) fn get<'a>(&self, row: &'a Value) -> Result<&'a Value, String> {
        // A field whose name is the whole path, dots and brackets included, has precedence.
        if let Some(value) = row.get(&self.written) {
            return Ok(value);
        }
        self.steps.iter().try_fold(row, |value, step| match step {
            PathStep::Name(name) => value.get(name).ok_or_else(|| format!("no field {name:?}")),
            PathStep::Element(idx) => value.get(idx).ok_or_else(|| format!("no element {idx}")),
            PathStep::TheOne => the_one(value),
        })
    }
}

fn the_one(value: &Value) -> Result<&Value, String> {
    let elements = value.as_array().ok_or("not a list")?;
    if let [only] = &elements[..] {
        return Ok(only);
    }
    let of_user: Vec<&Value> = elements
        .iter()
        .filter(|element| element.get("role").and_then(Value::as_str) == Some("user"))
        .collect();
    match of_user[..] {
        [message] => Ok(message),
        _ => Err(format!("{} elements, {} of them the user's, expected one", elements.len(), of_user.len())),
    }
}
