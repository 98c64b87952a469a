//! Truncated sampling: from which tokens a response is drawn, and what a plan may combine with it.

use super::refusal::{PlanError, require};
use super::{Config, RolloutConfig};
use stapo_model::DeviceName;
use stapo_model::generate::Filter;

/// Tokens that are kept of each distribution, at most: their ids are stored with every sampled token.
pub const MAX_TOP_K: usize = 128;

impl RolloutConfig {
    /// Which tokens may be drawn, and the most that are kept; 0 if sampling is not truncated.
    pub fn truncation(&self) -> (Filter, usize) {
        let Self { top_k, top_p, min_p, .. } = *self;
        let filter = Filter { top_k, top_p: top_p.unwrap_or(1.0), min_p: min_p.unwrap_or(0.0) };
        (filter, top_k.unwrap_or(0))
    }
}

/// Refuses what cannot be sampled or learned from the kept tokens alone.
pub(super) fn check(config: &Config, device: DeviceName) -> Result<(), PlanError> {
    let RolloutConfig { top_k, top_p, min_p, .. } = config.rollout;
    let Some(top_k) = top_k else {
        let without = "needs rollout.top_k, which bounds the tokens that are stored";
        let remedy = "set rollout.top_k, at most 128";
        require(top_p.is_none(), "rollout.top_p", top_p.unwrap_or(1.0), without, remedy)?;
        return require(min_p.is_none(), "rollout.min_p", min_p.unwrap_or(0.0), without, remedy);
    };
    let is_within = (1..=MAX_TOP_K).contains(&top_k);
    require(
        is_within,
        "rollout.top_k",
        top_k,
        "expected a number from 1 to 128",
        "leave it out to sample from all",
    )?;
    let is_share = top_p.is_none_or(|p| p > 0.0 && p <= 1.0);
    require(is_share, "rollout.top_p", top_p.unwrap_or(1.0), "expected a share above 0, at most 1", "")?;
    let is_share = min_p.is_none_or(|p| (0.0..1.0).contains(&p));
    require(is_share, "rollout.min_p", min_p.unwrap_or(0.0), "expected a share from 0, below 1", "")?;
    let refused = [
        (
            device != DeviceName::Cpu,
            "cannot be trained exactly on a GPU",
            "set device = \"cpu\", or leave rollout.top_k out",
        ),
        (config.environment.is_some(), "cannot be used with an environment", "leave one of them out"),
        (config.rollout.source.is_some(), "has no effect on responses from rollout.source", "leave it out"),
        (
            config.teacher.is_some(),
            "cannot be used with a teacher, who reads the whole distribution",
            "leave one of them out",
        ),
    ];
    for (is_refused, problem, remedy) in refused {
        require(!is_refused, "rollout.top_k", top_k, problem, remedy)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::plan::config::{Config, Plan};

    #[test]
    fn shares_hold_exactly() {
        let refusal = |set: &str| {
            let set = ["rollout.top_k=5", set];
            Plan::resolve(Config::from_toml("", set).unwrap()).err().map(|error| error.to_string())
        };
        for set in [
            "rollout.top_p=0.001",
            "rollout.top_p=1.0",
            "rollout.min_p=0.0",
            "rollout.min_p=0.999",
            "rollout.top_k=128",
        ] {
            assert_eq!(refusal(set), None, "{set}");
        }
        for set in [
            "rollout.top_p=0.0",
            "rollout.top_p=1.001",
            "rollout.min_p=-0.1",
            "rollout.min_p=1.0",
            "rollout.top_k=0",
            "rollout.top_k=129",
        ] {
            assert!(refusal(set).unwrap_or_default().contains("expected"), "{set}");
        }
    }

    #[test]
    fn what_does_not_draw_from_the_kept_tokens_is_refused_beside_them() {
        let cases: [(&[&str], &str); 3] = [
            (
                &["task={kind=\"guess\"}", "environment={kind=\"guess\"}"],
                "5 cannot be used with an environment",
            ),
            (&["rollout.source={kind=\"jsonl\",path=\"x\"}"], "5 has no effect on responses from"),
            (
                &["objective.distillation={kind=\"dasd\"}", "teacher={kind=\"solution\"}"],
                "5 cannot be used with a teacher",
            ),
        ];
        for (set, expected) in cases {
            let with = [set, &["rollout.top_k=5"]].concat();
            let said = Plan::resolve(Config::from_toml("", with).unwrap()).unwrap_err().to_string();
            assert!(said.starts_with(&format!("config.rollout.top_k: {expected}")), "{set:?}: {said}");
            assert!(Plan::resolve(Config::from_toml("", set.to_vec()).unwrap()).is_ok(), "{set:?}");
        }
    }
}
