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

/// The differences from plan `a` to plan `b`; a plan that is no TOML has no differences that can be named.
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
    merged(&found)
}

/// Keys that decide most about a run, in the order in which a person asks for them.
const FIRST_KEYS: [&str; 6] = ["model", "objective", "update.learning_rate", "model.lora", "task", "data"];

/// For each plan the keys and values in which it differs from the other plans of its kind. Reinforcement learning and supervised
/// training share few keys, so that everything would differ between them.
pub fn differing_by_kind(plans: &[&str]) -> Vec<Vec<(String, String)>> {
    let is_supervised = |plan: &str| plan.lines().any(|line| line == "[data]" || line.starts_with("[data."));
    let mut found = vec![Vec::new(); plans.len()];
    for kind in [false, true] {
        let places: Vec<usize> = (0..plans.len()).filter(|&at| is_supervised(plans[at]) == kind).collect();
        let mut settings: Vec<_> =
            differing(&places.iter().map(|&at| plans[at]).collect::<Vec<_>>()).into_iter().collect();
        settings.retain(|(key, _)| key != "name");
        settings.sort_by_key(|(key, _)| {
            FIRST_KEYS.iter().position(|first| key.starts_with(first)).unwrap_or(FIRST_KEYS.len())
        });
        for (place, at) in places.into_iter().enumerate() {
            let present = settings.iter().filter(|(_, values)| values[place] != ABSENT);
            found[at] = present.map(|(key, values)| (key.clone(), values[place].clone())).collect();
        }
    }
    found
}

/// What [`Change`] says of a key that a plan does not have.
const ABSENT: &str = "absent";

/// An element of a list that some plan does not have is one difference, not one for each of its keys.
fn merged(found: &BTreeMap<String, Vec<String>>) -> BTreeMap<String, Vec<String>> {
    let mut elements: BTreeMap<&str, Vec<(&str, &Vec<String>)>> = BTreeMap::new();
    for (key, values) in found {
        if let Some((element, rest)) = element_of(key) {
            elements.entry(element).or_default().push((rest, values));
        }
    }
    let n_plans = found.values().next().map_or(0, Vec::len);
    let is_missing =
        |keys: &[(&str, &Vec<String>)], plan: usize| keys.iter().all(|(_, values)| values[plan] == ABSENT);
    elements.retain(|_, keys| (0..n_plans).any(|plan| is_missing(keys, plan)));
    let is_list = |key: &str| {
        elements.keys().any(|element| element.rsplit_once('.').is_some_and(|(list, _)| list == key))
    };
    let is_told = |key: &str| element_of(key).is_some_and(|(element, _)| elements.contains_key(element));
    let others = found.iter().filter(|(key, _)| !is_told(key) && !is_list(key));
    let whole = elements.iter().map(|(element, keys)| {
        let of_plan = |plan: usize| {
            let present = keys.iter().filter(|(_, values)| values[plan] != ABSENT);
            let settings: Vec<String> =
                present.map(|(rest, values)| format!("{rest}={}", values[plan])).collect();
            if settings.is_empty() { ABSENT.to_string() } else { settings.join(", ") }
        };
        ((*element).to_string(), (0..n_plans).map(of_plan).collect())
    });
    others.map(|(key, values)| (key.clone(), values.clone())).chain(whole).collect()
}

/// A key inside an element of a list: the element and the rest of the key.
fn element_of(key: &str) -> Option<(&str, &str)> {
    let ends = key.match_indices('.').map(|(at, _)| at);
    let mut starts = 0;
    for end in ends {
        let part = &key[starts..end];
        if part.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some((&key[..end], &key[end + 1..]));
        }
        starts = end + 1;
    }
    None
}

/// One row per key in which the arms of a study differ; `None` if they differ in nothing.
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
        assert!(!are_seeds(PLAN, &PLAN.replace("seed = 0", "seed = 7").replace("steps = 4", "steps = 5")));
    }

    #[test]
    fn runs_are_compared_with_their_kind_and_the_model_comes_first() {
        let train = |model: &str, steps: u64| {
            format!("steps = {steps}\n[model]\npath = \"{model}\"\n[rollout]\ngroup_size = 8\n")
        };
        let plans = [train("a", 4), train("b", 5), "steps = 9\n[data]\npath = \"x\"\n".to_string()];
        let found = differing_by_kind(&plans.each_ref().map(String::as_str));
        let keys = |at: usize| found[at].iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>();
        assert_eq!(keys(0), ["model.path", "steps"]);
        assert_eq!(found[1][1], ("steps".to_string(), "5".to_string()));
        assert!(found[2].is_empty(), "the one supervised run differs from none of its kind: {:?}", found[2]);
    }

    #[test]
    fn an_element_of_a_list_that_a_plan_lacks_is_one_difference() {
        let masked = "[[masks]]\nkind = \"spurious\"\nq = 0.75\n";
        let other = masked.replace("0.75", "0.5");
        let found = differing(&[masked, "masks = []\n"]);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["masks.0"]);
        assert_eq!(found["masks.0"], ["kind=\"spurious\", q=0.75", "absent"]);
        assert_eq!(differing(&[masked, &other])["masks.0.q"], ["0.75", "0.5"]);
        let longer = differing(&[&format!("steps = 1\n{masked}"), "steps = 2\nmasks = []\n"]);
        assert_eq!(longer.keys().collect::<Vec<_>>(), ["masks.0", "steps"]);
        assert_eq!(element_of("a.masks.0.q.r"), Some(("a.masks.0", "q.r")));
        assert_eq!((element_of("a2.b"), element_of("masks.0")), (None, None));
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
