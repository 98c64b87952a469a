//! What differs between the plans of several runs.

use super::Study;
use super::table::{Table, text};
use stapo_core::record::Change;
use stapo_rl::run::plan_differences;
use std::collections::BTreeMap;

/// Keys that name a run or number its random choices.
const SEED_KEYS: [&str; 2] = ["seed", "name"];

/// Whether two plans differ in nothing but seed and name.
pub fn are_seeds(a: &str, b: &str) -> bool {
    changes(a, b).iter().all(|change| SEED_KEYS.contains(&change.name.as_str()))
}

/// The differences from plan `a` to plan `b`; a plan that is no TOML differs in nothing that can be told.
fn changes(a: &str, b: &str) -> Vec<Change> {
    plan_differences(a, a, b).unwrap_or_default()
}

/// The keys in which plans differ, each with its value in every plan, in the order of the plans.
pub fn differing(plans: &[&str]) -> BTreeMap<String, Vec<String>> {
    let Some((first, others)) = plans.split_first() else { return BTreeMap::new() };
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (idx, other) in others.iter().enumerate() {
        for change in changes(first, other) {
            let values = found.entry(change.name).or_insert_with(|| vec![change.before; plans.len()]);
            values[idx + 1] = change.after;
        }
    }
    found
}

/// One row per key in which the arms of a study differ; `None` where they differ in nothing.
pub fn table(study: &Study) -> Option<Table> {
    let plans: Vec<&str> = study.arms.iter().map(|arm| arm.runs[0].plan_text.as_str()).collect();
    let names = study.arms.iter().map(|arm| arm.name.as_str());
    let titles: Vec<&str> = std::iter::once("setting").chain(names).collect();
    let mut table = Table::new("differences", &titles);
    for (key, values) in differing(&plans) {
        if !SEED_KEYS.contains(&key.as_str()) {
            table.push(std::iter::once(text(key)).chain(values.into_iter().map(text)).collect());
        }
    }
    (!table.rows.is_empty()).then_some(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: &str = "seed = 0\nname = \"a\"\nsteps = 4\n[update]\nlearning_rate = 0.001\n";

    #[test]
    fn plans_of_two_seeds_are_one_arm() {
        assert!(are_seeds(PLAN, &PLAN.replace("seed = 0", "seed = 7").replace("\"a\"", "\"b\"")));
        assert!(!are_seeds(PLAN, &PLAN.replace("steps = 4", "steps = 5")));
    }

    #[test]
    fn each_differing_key_has_the_value_of_every_plan() {
        let faster = PLAN.replace("0.001", "0.002");
        let longer = PLAN.replace("steps = 4", "steps = 8");
        let found = differing(&[PLAN, &faster, &longer]);
        let keys: Vec<&String> = found.keys().collect();
        assert_eq!(keys, ["steps", "update.learning_rate"]);
        assert_eq!(found["steps"], ["4", "4", "8"]);
        assert_eq!(found["update.learning_rate"], ["0.001", "0.002", "0.001"]);
    }
}
