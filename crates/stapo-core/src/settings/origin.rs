//! Where a setting was given: an override, or a line of a file.

use super::RawConfig;
use toml::de::{DeTable, DeValue};

impl RawConfig {
    /// Where a key was given: `--set KEY=VALUE` for the last override of the key or of a table around it; else
    /// `FILE:LINE:COLUMN`; else `--set KEY=VALUE` for the last override inside the key, which made the table; else, for a
    /// key that has its default, `FILE`. `key` is a path such as `rollout.group_size`.
    pub fn origin(&self, key: &str, file: &str) -> String {
        let is_around = |inner: &str, outer: &str| {
            inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let around = self.overrides.iter().rfind(|set| is_around(key, &set.keys.join(".")));
        let inside = self.overrides.iter().rfind(|set| is_around(&set.keys.join("."), key));
        match (around, line_and_column(&self.text, key), inside) {
            (Some(set), _, _) | (None, None, Some(set)) => format!("--set {}", set.text),
            (None, Some((line, column)), _) => format!("{file}:{line}:{column}"),
            (None, None, None) => file.to_string(),
        }
    }
}

/// The line and column of a key, both from 1; `None` for a key that the text does not have.
fn line_and_column(text: &str, key: &str) -> Option<(usize, usize)> {
    let document = DeTable::parse(text).ok()?;
    let mut start = 0;
    let mut table = Some(document.get_ref());
    let mut items = None;
    for part in key.split('.') {
        let value = if let Some(table) = table {
            let (name, value) = table.iter().find(|(name, _)| name.get_ref() == part)?;
            start = name.span().start;
            value
        } else {
            let value: &toml::Spanned<DeValue> = items?;
            let DeValue::Array(array) = value.get_ref() else { return None };
            let item = array.get(part.parse::<usize>().ok()?)?;
            start = item.span().start;
            item
        };
        table = match value.get_ref() {
            DeValue::Table(table) => Some(table),
            _ => None,
        };
        items = Some(value);
    }
    Some(position(text, start))
}

/// The line and column of a byte, both from 1.
pub(super) fn position(text: &str, byte: usize) -> (usize, usize) {
    let before = text.get(..byte).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_in_the_override_or_the_line_that_gives_it() {
        let text = "steps = 3\n[rollout]\n  group_size = 2\nsource = { kind = \"x\" }\n[[rewards]]\nname = \"ä\"\n[[rewards]]\nright = 1\n";
        let at = |key: &str, overrides: &[&str]| {
            RawConfig::new(text, overrides.iter().copied()).unwrap().origin(key, "a.toml")
        };
        assert_eq!(at("steps", &[]), "a.toml:1:1");
        assert_eq!(at("rollout", &[]), "a.toml:2:2");
        assert_eq!(at("rollout.group_size", &[]), "a.toml:3:3");
        assert_eq!(at("rollout.source.kind", &[]), "a.toml:4:12");
        assert_eq!(at("rewards.1.right", &[]), "a.toml:8:1");
        let listed = RawConfig::new("a = 1\nbenchmarks = [10, 20]", []).unwrap();
        assert_eq!(listed.origin("benchmarks.1", "a.toml"), "a.toml:2:19");
        assert_eq!(at("rollout.temperature", &[]), "a.toml");
        assert_eq!(at("steps", &["step=1", "steps=4", "steps = 5"]), "--set steps = 5");
        assert_eq!(at("rewards.0.name", &["rewards=[]"]), "--set rewards=[]");
        assert_eq!(at("update.reuse", &["update.reuse.max=4"]), "--set update.reuse.max=4");
        assert_eq!(at("rollout", &["rollout.chat=true"]), "a.toml:2:2");
    }
}
