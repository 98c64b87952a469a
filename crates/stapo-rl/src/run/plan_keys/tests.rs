use super::*;
use crate::learn::pretrain::PretrainConfig;
use crate::plan::config::{Config, Plan};

/// The lists of `docs/trust.md`, key by key: a key that is added to a config must be put into one of them.
#[test]
fn every_key_of_a_plan_has_the_freedom_that_the_documentation_gives_it() {
    let set = ["model={kind=\"path\",path=\"m\"}", "task={kind=\"jsonl\",path=\"d\"}"];
    let plan = Plan::resolve(Config::from_toml("", set).unwrap()).unwrap().to_toml();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/trust.md");
    let page = std::fs::read_to_string(page).unwrap();
    let list = |heading: &str| -> String {
        let (_, rest) = page.split_once(heading).unwrap_or_else(|| panic!("{heading}"));
        rest.split("\n- **").next().unwrap().to_string()
    };
    let lists = [
        (Freedom::Identity, list("- **Identity**")),
        (Freedom::Recorded, list("- **May change**")),
        (Freedom::Free, list("- **Free**")),
    ];
    for text in [plan, PretrainConfig::default().to_toml()] {
        for key in flat(&settings::parse(&text).unwrap()).keys() {
            let names: Vec<String> = std::iter::once(key.clone())
                .chain(key.match_indices('.').map(|(at, _)| format!("{}.*", &key[..at])))
                .collect();
            let named = |list: &str| names.iter().any(|name| list.contains(&format!("`{name}`")));
            let (_, own) = lists.iter().find(|(freedom, _)| *freedom == Freedom::of_key(key)).unwrap();
            assert!(named(own), "{key} is {:?}, and docs/trust.md does not say so", Freedom::of_key(key));
        }
    }
}

#[test]
fn a_missing_key_differs_and_a_new_one_with_its_default_does_not() {
    let before = "steps = 2\n[update]\nlearning_rate = 1e-4\n[[objective.masks]]\ntau_p = 0.5\n";
    let complete = format!("{before}[record]\nresponses = 32\n");
    let changes = |after: &str| -> Vec<String> {
        differences(before, &complete, after).unwrap().iter().map(ToString::to_string).collect()
    };
    assert!(changes(&complete).is_empty());
    assert_eq!(
        changes("steps = 2\n[record]\nresponses = 31\n[update]\nlearning_rate = 0.0001\n"),
        ["objective.masks.0.tau_p: was 0.5, is absent", "record.responses: was 32, is 31"]
    );
    assert_eq!(changes(&before.replace("0.5", "0.25")), ["objective.masks.0.tau_p: was 0.5, is 0.25"]);
    assert!(differences(before, before, "steps = = 2").is_err());
}

#[test]
fn how_a_gpu_holds_the_weights_below_adapters_is_free_and_adapters_are_not() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/trust.md");
    let free = std::fs::read_to_string(page).unwrap();
    let free = free.split_once("- **Free**").unwrap().1.split("\n- **").next().unwrap();
    assert!(free.contains("`model.lora.base`"), "{free}");
    assert_eq!(Freedom::of_key("model.lora.base"), Freedom::Free);
    assert_eq!(Freedom::of_key("model.lora.rank"), Freedom::Identity);
}

#[test]
fn the_number_of_a_device_is_free_and_its_kind_is_not() {
    let differing = |before: &str, after: &str| {
        freedom(&Change { name: "device".into(), before: before.into(), after: after.into() })
    };
    assert_eq!(differing("\"cuda:0\"", "\"cuda:3\""), Freedom::Free);
    assert_eq!(differing("\"cuda\"", "\"cuda:1\""), Freedom::Free);
    assert_eq!(differing("\"cpu\"", "\"cuda\""), Freedom::Identity);
}

/// The content of a file is identity wherever it lies, and so are keys that only sound like a place.
#[test]
fn the_place_of_every_file_of_a_run_may_change_and_what_it_holds_may_not() {
    for key in [
        "model.path",
        "reference.path",
        "teacher.path",
        "task.path",
        "data.path",
        "data.parts.0.texts.path",
        "rollout.source.path",
        "model.lora.adapter",
    ] {
        assert_eq!(Freedom::of_key(key), Freedom::Recorded, "{key}");
    }
    for key in
        ["model.kind", "reference.kind", "rollout.source.behavior", "update.path", "task.verifier.file"]
    {
        assert_eq!(Freedom::of_key(key), Freedom::Identity, "{key}");
    }
    for key in ["task.verifier.keep", "rewards.1.verifier.keep", "episode.workers", "rollout.draft"] {
        assert_eq!(Freedom::of_key(key), Freedom::Free, "{key}");
    }
    for key in ["episode.max_turns", "rollout.temperature", "rewards.1.weight", "update.schedule.kind"] {
        assert_eq!(Freedom::of_key(key), Freedom::Identity, "{key}");
    }
}
