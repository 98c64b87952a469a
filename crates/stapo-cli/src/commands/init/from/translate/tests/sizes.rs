//! Batches, mini-batches and micro-batches, counted as here and made to fit.

use super::{at, check, check_refused, config};

/// TRL counts responses of all processes; here problems are counted.
#[test]
fn batches_of_trl_are_counted_in_problems() {
    let sizes = ["update.problems_per_minibatch", "rollout.problems_per_step"];
    for (lines, expected) in [
        (
            &["num_generations: 4", "per_device_train_batch_size: 6", "gradient_accumulation_steps: 2"][..],
            ["3", "3"],
        ),
        (&["gradient_accumulation_steps: 2", "generation_batch_size: 64"], ["2", "8"]),
        (&["generation_batch_size: 64"], ["1", "8"]),
        (&["steps_per_generation: 4"], ["1", "4"]),
        (
            &["gradient_accumulation_steps: 2", "steps_per_generation: 6", "generation_batch_size: 64"],
            ["2", "8"],
        ),
        (&["per_device_train_batch_size: 20", "num_generations: 8"], ["3", "3"]),
        (&["per_device_train_batch_size: 1", "num_generations: 8"], ["1", "1"]),
    ] {
        let (config, _) = config(&lines.join("\n"));
        assert_eq!(sizes.map(|path| at(&config, path)), expected, "{lines:?}");
    }
    // A step of TRL is one mini-batch: four of a rollout batch, each used twice, are one step here.
    let rollouts = [
        "gradient_accumulation_steps: 2",
        "generation_batch_size: 64",
        "num_iterations: 2",
        "max_steps: 100",
    ];
    check("", &[(&rollouts, &[("steps", "13"), ("update.reuse.max", "2"), ("update.reuse.gate", "none")])]);
    check(
        "",
        &[(
            &["max_steps: -1", "num_iterations: 1", "num_generations: 8"],
            &[("steps", ""), ("update.reuse", "")],
        )],
    );
}

#[test]
fn batches_of_verl_have_its_defaults_and_fit_into_each_other() {
    let (batch, minibatch) = ("rollout.problems_per_step", "update.problems_per_minibatch");
    let actor = |settings: &str| format!("actor_rollout_ref: {{actor: {{{settings}}}}}");
    check(
        "trainer: {save_freq: -1}",
        &[(&[&actor("ppo_mini_batch_size: 64")], &[(batch, "1024"), (minibatch, "64")])],
    );
    let small = "trainer: {save_freq: -1}\ndata: {train_batch_size: 8}";
    check(small, &[(&[], &[(batch, "8"), (minibatch, "8")])]);
    let refused = "`actor_rollout_ref.actor.ppo_mini_batch_size` = 9";
    check_refused(small, &[(&actor("ppo_mini_batch_size: 9"), refused)]);
    let lengths = "data: {max_prompt_length: 8192, max_response_length: 1024}";
    for (limit, tokens) in [("4096", "9216"), ("9216", "9216"), ("16384", "16384")] {
        let limit = actor(&format!("ppo_max_token_len_per_gpu: {limit}"));
        check(lengths, &[(&[&limit], &[("update.microbatch_tokens", tokens)])]);
    }
}

#[test]
fn defaults_are_made_to_fit_what_is_given() {
    let microbatch = "update.microbatch_tokens";
    check("max_prompt_length: 9000", &[(&[], &[(microbatch, "9512")])]);
    check("max_prompt_length: 9000", &[(&["max_completion_length: false"], &[(microbatch, "9096")])]);
    // The default of a dual clip has to exceed OpenRLHF's upper bound.
    let base = "data: {prompt_dataset: a.jsonl, input_template: k}";
    check_refused(base, &[("actor: {eps_clip: 64}", "dual: 10 is not above 1 + high = 65")]);
}
