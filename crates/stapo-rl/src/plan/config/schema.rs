//! The JSON Schema of a file of settings, from its types and their doc comments.

use super::LoraConfig;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

/// The schema of a type as configs write it: without `null`, which TOML does not have, with closed sets as `enum`, and
/// with the short forms of models. Everything is written out in place; only types that contain themselves are references.
pub fn schema<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    simplify(&mut schema);
    lower_adapters(&mut schema);
    schema
}

fn simplify(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(simplify),
        Value::Object(object) => {
            object.values_mut().for_each(simplify);
            if let Some(Value::String(text)) = object.get_mut("description") {
                *text =
                    text.split("\n\n").map(|part| part.replace('\n', " ")).collect::<Vec<_>>().join("\n\n");
            }
            drop_null(object);
            join_constants(object);
            describe_kind(object);
            relax(object);
        }
        _ => {}
    }
}

/// Takes `null` out of an optional value.
fn drop_null(object: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = types.as_slice() {
            let only = only.clone();
            object.insert("type".to_string(), only);
        }
    }
    if let Some(Value::Array(values)) = object.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    let Some(Value::Array(options)) = object.get_mut("anyOf") else { return };
    options.retain(|option| option.get("type") != Some(&json!("null")));
    if let [Value::Object(only)] = options.as_mut_slice() {
        let only = std::mem::take(only);
        object.remove("anyOf");
        for (key, value) in only {
            // Of the type's description, what it says of single values joins that of the key.
            let values = value.as_str().and_then(|text| text.split_once("\n\n"));
            match (object.get_mut(&key), values) {
                (Some(Value::String(text)), Some((_, values))) => *text = format!("{text}\n\n{values}"),
                (Some(_), _) => {}
                (None, _) => {
                    object.insert(key, value);
                }
            }
        }
    }
}

/// Writes a choice between described constants as an `enum`, with the descriptions in that of the key.
fn join_constants(object: &mut Map<String, Value>) {
    let Some(Value::Array(options)) = object.get("oneOf") else { return };
    let mut values = Vec::new();
    let mut lines = Vec::new();
    for option in options {
        let described = option.get("description").and_then(Value::as_str).unwrap_or_default();
        match (option.get("const"), option.get("enum")) {
            (Some(value), _) => {
                lines.push(format!("{value}: {described}"));
                values.push(value.clone());
            }
            (None, Some(Value::Array(several))) => values.extend(several.iter().cloned()),
            _ => return,
        }
    }
    object.remove("oneOf");
    object.insert("enum".to_string(), Value::Array(values));
    let before = object.get("description").and_then(Value::as_str).unwrap_or_default();
    let text = format!("{before}\n\n{}", lines.join("\n\n"));
    object.insert("description".to_string(), Value::String(text.trim().to_string()));
}

/// Gives the `kind` of a tagged union the description of the kind. A kind takes no unknown keys: serde alone takes any in a
/// kind without keys.
fn describe_kind(object: &mut Map<String, Value>) {
    let described = object.get("description").cloned();
    let kind = object.get_mut("properties").and_then(|keys| keys.get_mut("kind"));
    if let Some(Value::Object(kind)) = kind.filter(|kind| kind.get("const").is_some()) {
        kind.entry("description").or_insert_with(|| described.unwrap_or_else(|| json!("This kind.")));
        object.insert("additionalProperties".to_string(), json!(false));
    }
}

/// Keys that the default of a table gives are not required of a file, whose tables are laid over the default.
fn relax(object: &mut Map<String, Value>) {
    let Some(Value::Object(default)) = object.get("default").cloned() else { return };
    let relax = |required: Option<&mut Value>| {
        if let Some(Value::Array(required)) = required {
            required.retain(|key| !key.as_str().is_some_and(|key| default.contains_key(key)));
        }
    };
    relax(object.get_mut("required"));
    let kinds = object.get_mut("oneOf").and_then(Value::as_array_mut);
    for kind in kinds.into_iter().flatten() {
        if kind.pointer("/properties/kind/const") == default.get("kind") {
            relax(kind.get_mut("required"));
        }
    }
}

/// Moves the adapters, which are read apart from the model, into the model's table, and lets models be named by a text or
/// by their path alone.
fn lower_adapters(schema: &mut Value) {
    if let Some(inner) = schema.pointer_mut("/properties/config") {
        lower_adapters(inner);
    }
    let Some(Value::Object(keys)) = schema.get_mut("properties") else { return };
    let adapters = keys.remove(LoraConfig::KEY);
    for name in ["model", "reference", "teacher"] {
        let Some(Value::Array(kinds)) = keys.get_mut(name).and_then(|model| model.get_mut("oneOf")) else {
            continue;
        };
        for kind in kinds.iter_mut() {
            let is_path = kind.pointer("/properties/kind/const") == Some(&json!("path"));
            if let (true, Some(Value::Array(required))) = (is_path, kind.get_mut("required")) {
                required.retain(|key| key != "kind");
            }
            let inner = kind.get_mut("properties").and_then(Value::as_object_mut);
            if let (Some(inner), Some(adapters), "model") = (inner, &adapters, name) {
                inner.insert("lora".to_string(), adapters.clone());
            }
        }
        kinds.push(json!({ "type": "string", "description": "The name of the model." }));
    }
}
