//! Updates in which the responses of a group share the rows of their prompt.

use super::{check_resumed, learned, plan};
use crate::whole_run;
use stapo_core::record::Metrics;
use stapo_rl::{Config, Plan};

const SHARED: [&str; 2] = ["update.sum=microbatches", "update.share_prompts=true"];

fn run(settings: &[&[&str]]) -> (String, Vec<Metrics>) {
    whole_run(&plan(&settings.concat()))
}

/// Micro-batches that are smaller than a group.
const CUT: [&str; 3] =
    ["rollout.max_prompt_tokens=20", "rollout.max_response_tokens=40", "update.microbatch_tokens=60"];

#[test]
fn updates_with_shared_prompts_have_the_log_probs_of_sampling_and_the_gradients_of_whole_sequences() {
    for limits in [&[][..], &CUT] {
        let one_step = [&["steps=1"][..], limits].concat();
        let whole = &run(&[&one_step, &["update.sum=microbatches"]]).1[0];
        let (hash, shared) = run(&[&one_step, &SHARED]);
        let shared = &shared[0];
        assert_eq!((whole.exactness_max_abs, shared.exactness_max_abs), (0.0, 0.0));
        assert_eq!(whole.entropy_mean, shared.entropy_mean, "entropies are those of sampling");
        for (whole, shared) in learned(whole).iter().zip(learned(shared)) {
            assert!((whole - shared).abs() <= 1e-4 * whole.abs().max(1e-3), "{whole} and {shared}");
        }
        assert_eq!(run(&[&one_step, &SHARED]).0, hash, "a second run has the same bits");
    }
}

#[test]
fn a_run_with_shared_prompts_resumes_bit_for_bit() {
    let metrics = check_resumed(&plan(&[&["steps=2"][..], &SHARED].concat()));
    assert!(metrics.iter().all(|step| step.exactness_max_abs == 0.0));
}

#[test]
fn sharing_is_refused_where_no_bit_may_depend_on_micro_batches() {
    let config = Config::from_toml("", ["update.share_prompts=true"]).unwrap();
    let error = Plan::resolve(config).unwrap_err().to_string();
    assert!(
        error.contains("update.share_prompts") && error.contains("set update.sum=microbatches"),
        "{error}"
    );
}
