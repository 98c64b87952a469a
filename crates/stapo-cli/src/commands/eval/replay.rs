//! The first questions of a complete evaluation, sampled and judged again.

use super::opening::{self, decodings, inputs, open_benchmarks, open_finite};
use crate::shared::allow_command::AllowCommand;
use crate::shared::model::Fetch;
use crate::shared::run_folder::{self, Use};
use anyhow::{Result, bail};
use stapo_core::record::{EvalRecord, changed_inputs};
use stapo_rl::device::DeviceName;
use stapo_rl::inference::EngineMemory;
use stapo_rl::lab::evaluation::{Done, EvalEvent, EvalFolder, Evaluation, sample_key};
use std::collections::HashMap;
use std::path::Path;

/// Samples the first `n_questions` of each benchmark as the evaluation did and compares tokens and verdicts; true where
/// inputs and samples are the same.
pub fn replay(folder: &Path, n_questions: usize, fetch: &Fetch, allow: AllowCommand) -> Result<bool> {
    let plan = EvalFolder::read_plan(folder)?;
    let name = if plan.device.is_empty() { "cpu" } else { plan.device.as_str() };
    let Ok(name) = name.parse::<DeviceName>() else {
        bail!("evaluation {}: {name:?} is not a device", folder.display());
    };
    let device = run_folder::device(name, None, Use::Reading)?;
    let found = opening::find(&plan, fetch)?;
    let (model, files) = open_finite(&found, plan.adapter.as_deref(), &device)?;
    let mut benchmarks = open_benchmarks(&plan, allow.of_run(), &device)?;
    let changes = changed_inputs(&plan.inputs, &inputs(&plan, files, &benchmarks)?);
    for change in &changes {
        println!("{}: DIFFERENT, recorded {}, found {}", change.name, change.before, change.after);
    }
    for benchmark in &mut benchmarks {
        benchmark.limit(Some(n_questions.max(1)), None)?;
    }
    let recorded: HashMap<_, EvalRecord> =
        EvalFolder::read_samples(folder)?.into_iter().map(|sample| (sample_key(&sample), sample)).collect();
    let style = plan.style();
    let episode = plan.episode();
    let sampling = plan.sampling((&style, &episode), (0, 1), found.step());
    let (mut n_same, mut n_different) = (0, 0);
    let decodings = decodings(&plan.decodings)?;
    let done = Done::new();
    let evaluation =
        Evaluation { model: &model, benchmarks: &benchmarks, decodings: &decodings, sampling, done: &done };
    evaluation.run(&mut EngineMemory::new(), |event| {
        if let EvalEvent::Finished(sample) = event {
            let before = recorded.get(&sample_key(&sample));
            if before.is_some_and(|before| before.tokens == sample.tokens && before.verdict == sample.verdict)
            {
                n_same += 1;
            } else {
                n_different += 1;
                let EvalRecord { benchmark, problem_id, sample_idx, .. } = &*sample;
                println!("{benchmark} {problem_id:?}, sample {sample_idx}: DIFFERENT");
            }
        }
        Ok(true)
    })?;
    println!("replay: {n_same} samples the same, {n_different} different");
    Ok(n_different == 0 && changes.is_empty())
}
