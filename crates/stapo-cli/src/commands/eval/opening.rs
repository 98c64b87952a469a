//! Opens what an evaluation names: the model, its decodings and its benchmarks.

use crate::shared::model::Fetch;
use anyhow::{Result, bail};
use stapo_core::record::FileHash;
use stapo_rl::device::Device;
use stapo_rl::lab::evaluation::{Benchmark, Decoding, EvalPlan, QuestionStyle};
use stapo_rl::policy::{hashes, identity};
use stapo_rl::reward::{JudgeSpec, Programs, VerifierSpec};
use stapo_rl::rollout::ModelJudge;
use stapo_rl::tasks::EnvironmentSpec;
use stapo_rl::{FoundModel, LoadedModel};
use std::path::Path;
use std::sync::Arc;

/// The files of the model, of the benchmarks and of a second verifier.
pub fn inputs(
    plan: &EvalPlan,
    model_files: Vec<FileHash>,
    benchmarks: &[Benchmark],
) -> Result<Vec<FileHash>> {
    let files = benchmarks.iter().filter_map(|benchmark| benchmark.input.clone());
    let mut inputs: Vec<FileHash> = model_files.into_iter().chain(files).collect();
    if let Some(text) = &plan.verifier {
        inputs.extend(identity::of_verifier("second verifier", &VerifierSpec::named(text)?)?);
    }
    for (name, command) in plan.environment.iter().flat_map(EnvironmentSpec::programs) {
        inputs.push(identity::of_program(&name, &command)?);
    }
    Ok(inputs)
}

/// The second verifier as a text: as it was given, or a judge with its model by a name that stays and its prompt.
pub fn second_verifier(verifier: Option<&str>, judge: Option<&str>, fetch: &Fetch) -> Result<Option<String>> {
    let Some(model) = judge else { return Ok(verifier.map(str::to_string)) };
    let mut judge = JudgeSpec::new(&fetch.find(model)?.pinned.to_string());
    judge.template = Some(judge.template().to_string());
    Ok(Some(toml::Value::try_from(VerifierSpec::Judge(judge))?.to_string()))
}

/// The model of a plan, for responses as long as the plan's.
pub fn find(plan: &EvalPlan, fetch: &Fetch) -> Result<FoundModel> {
    Ok(fetch.find(&plan.model)?.for_sequences_of(plan.max_tokens))
}

/// A model all of whose weights are finite numbers, and the hashes of its files.
pub fn open_finite(
    found: &FoundModel,
    adapter: Option<&Path>,
    device: &Device,
) -> Result<(LoadedModel, Vec<FileHash>)> {
    let model = LoadedModel::open_found(found, adapter, device)?;
    if let Some((tensor, element)) = model.first_not_finite() {
        bail!(
            "model {}: {tensor}: element {element} is not a finite number\nhint: such a model answers nothing; take an earlier one",
            found.pinned
        );
    }
    let mut files = hashes::of_found(found)?;
    files.extend(hashes::of_adapter(adapter)?);
    Ok((model, files))
}

pub fn decodings(texts: &[String]) -> Result<Vec<Decoding>> {
    let parsed = texts.iter().map(|text| Decoding::parse(text).map_err(anyhow::Error::msg));
    Ok(parsed.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// `programs` says whether the program of a second verifier may start: the user's own may, a folder's only if it is known.
pub fn open_benchmarks(plan: &EvalPlan, programs: Programs, device: &Device) -> Result<Vec<Benchmark>> {
    let style =
        QuestionStyle { template: plan.template.as_deref(), system: plan.system.as_deref(), chat: plan.chat };
    let mut benchmarks = Benchmark::open_all(&plan.benchmarks, &plan.data, style)?;
    let verifier = plan.verifier.as_deref().map(VerifierSpec::named).transpose()?;
    let judge = verifier.as_ref().and_then(VerifierSpec::judge);
    let judge = judge.map(|spec| ModelJudge::open(spec, device)).transpose()?.map(Arc::new);
    for benchmark in &mut benchmarks {
        benchmark.limit(plan.limit, plan.n_samples)?;
        benchmark.equip(verifier.as_ref(), plan.environment.as_ref(), programs)?;
        if let Some(judge) = &judge {
            benchmark.set_judge(judge);
        }
    }
    Ok(benchmarks)
}
