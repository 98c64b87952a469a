//! What the settings of TRL, verl and OpenRLHF are called here, for messages and for `stapo init --from`. The tables of
//! `docs/from-trl.md`, `docs/from-verl.md` and `docs/from-openrlhf.md` are the source: a row has their names, ours and a note.

use toml::Value;

const PAGES: [(&str, &str, &str); 3] = [
    ("TRL", "docs/from-trl.md", include_str!("../../../../docs/from-trl.md")),
    ("verl", "docs/from-verl.md", include_str!("../../../../docs/from-verl.md")),
    ("OpenRLHF", "docs/from-openrlhf.md", include_str!("../../../../docs/from-openrlhf.md")),
];
/// Keys of an unknown table that are named in a hint.
const MAX_NAMED: usize = 3;

/// A setting of another program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSetting {
    pub program: &'static str,
    pub page: &'static str,
    /// The name or path of the setting there.
    pub name: String,
    /// Our name as the page writes it; "none" where there is no counterpart.
    pub ours: String,
    pub note: &'static str,
    /// The program's default, where the page states it.
    pub default: Option<&'static str>,
}

/// The rows of all pages, one entry for each name.
pub fn peer_settings() -> Vec<PeerSetting> {
    let mut settings = Vec::new();
    for (program, page, text) in PAGES {
        for line in text.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&'static str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            let [theirs, ours, ..] = &cells[..] else { continue };
            let (default, others) = default_of(theirs);
            let names = full_names(&quoted(&others));
            let own_names = full_names(&quoted(ours));
            for (idx, name) in names.iter().enumerate() {
                let is_product = theirs.contains("` x ");
                let is_flag = own_names.iter().any(|name| name.starts_with('-'));
                let one_each = names.len() == own_names.len() && names.len() > 1 && !is_product && !is_flag;
                let ours = if one_each { format!("`{}`", own_names[idx]) } else { (*ours).to_string() };
                let name = name.split([' ', '=']).next().unwrap_or_default().to_string();
                let note = cells.get(2).map_or("", |note| note.trim_end_matches(['|', ' ']));
                let default = default.filter(|_| idx == 0);
                settings.push(PeerSetting { program, page, name, ours, note, default });
            }
        }
    }
    settings
}

/// The hint for an unknown key at `path`, with the value that was given; `None` if no program has such a setting.
pub(super) fn hint(path: &str, value: Option<&Value>) -> Option<String> {
    let mut paths = Vec::new();
    leaves(path, value, &mut paths);
    let known = peer_settings();
    let named = paths.iter().filter_map(|path| known.iter().find(|setting| setting.is_named(path)));
    let sentences: Vec<String> = named.take(MAX_NAMED).map(PeerSetting::sentence).collect();
    (!sentences.is_empty()).then(|| sentences.join("; "))
}

impl PeerSetting {
    /// Says what the setting is called here.
    pub fn sentence(&self) -> String {
        let Self { program, page, name, ours, note, .. } = self;
        match ours.as_str() {
            "none" if note.is_empty() => format!("{program}'s `{name}` has no counterpart here ({page})"),
            "none" => format!("{program}'s `{name}` has no counterpart here: {note} ({page})"),
            ours => format!("{program}'s `{name}` is {ours} here ({page})"),
        }
    }

    /// True for the path of the setting, also where it is shortened at its beginning or is below another table.
    pub fn is_named(&self, path: &str) -> bool {
        let ends = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|rest| rest.ends_with('.'));
        let is_path = path.contains('.');
        self.name == path || ends(path, &self.name) || is_path && ends(&self.name, path)
    }

    /// Our key, where the setting has exactly one.
    pub fn key(&self) -> Option<&str> {
        let key = self.ours.split('`').nth(1)?;
        let is_plain = key.chars().all(|c| c.is_ascii_lowercase() || "._".contains(c));
        (is_plain && !self.ours.contains("` x ") && !self.ours.contains(" with ")).then_some(key)
    }
}

/// The paths of all values inside.
fn leaves(path: &str, value: Option<&Value>, found: &mut Vec<String>) {
    match value {
        Some(Value::Table(table)) if !table.is_empty() => {
            table.iter().for_each(|(key, value)| leaves(&format!("{path}.{key}"), Some(value), found));
        }
        _ => found.push(path.to_string()),
    }
}

/// The default of the first setting of a cell such as "`a` = 1, `b`", and the cell without it.
fn default_of(cell: &'static str) -> (Option<&'static str>, String) {
    let Some((name, rest)) = cell.split_once("` = ") else { return (None, cell.to_string()) };
    let (default, others) = rest.split_once(',').unwrap_or((rest, ""));
    (Some(default.trim_matches('`')), format!("{name}`,{others}"))
}

/// The texts between backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_string).collect()
}

/// Names with the tables of the first: `a.b.c`, `.d` or `d` is `a.b.d`.
fn full_names(names: &[String]) -> Vec<String> {
    let Some((first, others)) = names.split_first() else { return Vec::new() };
    let tables =
        first.split([' ', '=']).next().unwrap_or_default().rsplit_once('.').map(|(tables, _)| tables);
    let full = |name: &String| match tables {
        Some(tables) if !name.trim_start_matches('.').contains(['.', '-']) => {
            format!("{tables}.{}", name.trim_start_matches('.'))
        }
        _ => name.clone(),
    };
    std::iter::once(first.clone()).chain(others.iter().map(full)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hinted(path: &str) -> String {
        hint(path, None).unwrap_or_default()
    }

    #[test]
    fn names_of_both_programs_are_answered_with_ours() {
        let cases = [
            (
                "num_generations",
                "TRL's `num_generations` is `rollout.group_size` = 8 here (docs/from-trl.md)",
            ),
            ("epsilon_high", "`objective.surrogate.high`"),
            ("beta", "`objective.kl = "),
            ("per_device_train_batch_size", "`update.problems_per_minibatch` x `rollout.group_size`"),
            ("max_completion_length", "`rollout.max_response_tokens`"),
            ("loss_type", "`objective.preset`"),
            ("top_k", "has no counterpart here: elsewhere they bias every ratio"),
            ("rollout.n", "verl's `actor_rollout_ref.rollout.n` is `rollout.group_size`"),
            ("actor.optim.lr", "`update.learning_rate`"),
            ("actor_rollout_ref.actor.optim.lr", "`update.learning_rate`"),
            ("actor_rollout_ref.actor.clip_ratio_high", "`objective.surrogate.high`"),
            ("trainer.test_freq", "`evaluation.every_steps`"),
        ];
        for (path, expected) in cases {
            assert!(hinted(path).contains(expected), "{path}: {}", hinted(path));
        }
        let defaults: Vec<_> =
            peer_settings().into_iter().filter_map(|s| Some((s.name, s.default?))).collect();
        for (name, default) in [("num_generations", "8"), ("loss_type", "dapo"), ("actor.optim.lr", "1e-6")] {
            assert!(defaults.contains(&(name.to_string(), default)), "{name}: {defaults:?}");
        }
        assert!(hinted("warmup_ratio").contains("`update.schedule`") && hint("dapo", None).is_none());
        let all = peer_settings();
        let key = |name: &str| all.iter().find(|s| s.name == name).and_then(PeerSetting::key);
        assert_eq!(key("num_generations"), Some("rollout.group_size"));
        assert_eq!(key("epsilon_high"), Some("objective.surrogate.high"));
        for without_one in ["generation_batch_size", "off_policy_mask_threshold", "num_iterations", "top_p"] {
            assert_eq!(key(without_one), None, "{without_one}");
        }
        let model = all.iter().find(|s| s.name == "model_name_or_path").unwrap();
        assert_eq!(model.ours, "`model.path`, `--model`", "a flag is another way to say the key");
        assert_eq!(model.note, "a folder, a GGUF file, a run, a hub name");
        assert_eq!(hint("no_such_setting", None), None);
        assert_eq!(hint("n", None), None, "a last part alone says too little");
    }

    #[test]
    fn the_keys_inside_a_table_of_theirs_are_named() {
        let table = toml::toml! { rollout = { n = 8 } actor = { optim = { lr = 1e-6 } } };
        let said = hint("actor_rollout_ref", Some(&Value::Table(table))).unwrap();
        assert!(said.contains("`rollout.group_size`") && said.contains("`update.learning_rate`"), "{said}");
    }
}
