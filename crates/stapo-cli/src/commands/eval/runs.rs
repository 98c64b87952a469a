//! `stapo compare` of two training runs: how their responses differ.

use crate::shared::run_folder;
use crate::shared::units::p_value;
use anyhow::{Result, bail};
use stapo_core::stats::{PairedComparison, Resampling};
use stapo_rl::lab::experiment::{ComparedRuns, RunResponses, compare_runs};
use stapo_rl::run::receipt::short_of;
use stapo_rl::run::{Run, check_tree, part_files, responses_of_file};
use std::path::Path;
use std::process::ExitCode;

pub fn compare(a: &Path, b: &Path, json: bool) -> Result<ExitCode> {
    let compared = compare_runs(&read(a)?, &read(b)?, &Resampling::default())?;
    if compared.n_steps == 0 {
        bail!("{} and {} share no step\nhint: compare runs that have made steps", a.display(), b.display());
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&compared)?);
    } else {
        show(a, b, &compared);
    }
    Ok(ExitCode::SUCCESS)
}

fn read(folder: &Path) -> Result<RunResponses> {
    check_tree(folder)?;
    let plan = run_folder::plan(folder)?;
    let mut responses = Vec::new();
    for path in part_files(folder, "rollouts")? {
        responses.extend(responses_of_file(&path, &plan.objective)?);
    }
    let group_size = plan.config.rollout.group_size;
    let tau_p = plan.objective.tau_p();
    Ok(RunResponses { metrics: Run::read_metrics(folder)?, responses, group_size, tau_p })
}

fn show(a: &Path, b: &Path, compared: &ComparedRuns) {
    for (name, folder) in [("A", a), ("B", b)] {
        println!("{name} {}, receipt {}", folder.display(), short_of(folder));
    }
    println!(
        "\n{} steps in both, {} of them with whole groups recorded in both",
        compared.n_steps, compared.n_recorded
    );
    let difference = |paired: Option<PairedComparison>| {
        paired.map_or("needs two steps".to_string(), |paired| {
            let (low, high) = (paired.interval.low, paired.interval.high);
            format!("{:+.3} [{low:+.3}, {high:+.3}], p {}", paired.difference, p_value(paired.p_permutation))
        })
    };
    println!("{:<28} {:>9} {:>9}  B - A, 95 % interval", "mean over steps", "A", "B");
    let (of_a, of_b) = compared.length_means;
    println!("{:<28} {of_a:>9.2} {of_b:>9.2}  {}", "tokens of a response", difference(compared.length));
    if let Some((of_a, of_b)) = compared.distinct_means {
        let found = difference(compared.distinct_answers);
        println!("{:<28} {of_a:>9.2} {of_b:>9.2}  {found}", "distinct answers of a group");
    }
    println!("\n{:<10} {:<32} {:>10} {:>8}", "n-grams", "divergence, nats", "by chance", "p");
    for own in &compared.n_grams {
        let interval = own.divergence.interval.map_or(String::new(), |i| {
            format!(" [{:.4}, {:.4}]", i.low.max(0.0), i.high.min(std::f64::consts::LN_2))
        });
        let shown = format!("{:.4}{interval}", own.divergence.value);
        println!("n = {:<6} {shown:<32} {:>10.4} {:>8.3}", own.n, own.by_chance, own.p_value);
    }
    println!(
        "divergence: Jensen-Shannon, of the tokens of whole recorded groups; by chance:\nresponses exchanged between the runs at random. Steps of a run follow from each\nother: intervals over seeds would be wider."
    );
    let Some(thresholds) = compared.thresholds else {
        println!("\nquadrants: no step of either run had an entropy threshold");
        return;
    };
    println!(
        "\ntokens by quadrant, divided at p = {:.4} and H = {:.4} nats in both runs",
        thresholds.tau_p, thresholds.tau_h
    );
    println!("{:<24} {:<28}B", "share of tokens, %", "A: first, middle, last third");
    for own in &compared.quadrants {
        let name = own.quadrant.words();
        let one = |share: Option<f64>| share.map_or("-".to_string(), |share| format!("{:.4}", 100.0 * share));
        let shares = |of: [Option<f64>; 3]| of.map(|share| format!("{:>8}", one(share))).join(" ");
        println!("{name:<24} {:<27} {}", shares(own.a), shares(own.b));
    }
}
