//! The model of a judge or a reward model: its device, and where its weights are while the policy samples and learns.

use crate::error::Result;
use crate::plan::memory::JUDGE_BATCH_TOKENS;
use crate::policy::loaded::LoadedModel;
use crate::reward::KeepWeights;
use crate::run::meter::Meter;
use crate::tasks::TaskError;
use stapo_model::cuda::Training;
use stapo_model::decoder::{Pass, Policy};
use stapo_model::{Device, DeviceName, DeviceNameError, HostBuffer, Region, Tenant};
use std::ops::Deref;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

/// What a run offers to the models of its verifiers.
#[derive(Clone, Copy)]
pub struct VerifierHome<'a> {
    pub device: &'a Device,
    /// The memory that a run on a GPU uses in turns, and the meter of its seconds; `None` outside of runs and on the CPU.
    pub region: Option<(&'a Region, &'a Arc<Meter>)>,
}

impl<'a> From<&'a Device> for VerifierHome<'a> {
    fn from(device: &'a Device) -> Self {
        Self { device, region: None }
    }
}

/// A turn of the verifiers in the region of a run, which ends when the value is dropped.
struct Turn<'a> {
    region: &'a Region,
    before: Tenant,
}

impl<'a> Turn<'a> {
    fn begin(region: &'a Region) -> Self {
        Self { region, before: region.enter(Tenant::Judging) }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.region.enter(self.before);
    }
}

/// Weights that lie in host memory while the region of the run is lent to others.
struct Kept {
    weights: HostBuffer,
    region: Region,
    meter: Arc<Meter>,
}

/// A model that verifies responses.
pub(super) struct VerifierModel {
    model: RwLock<LoadedModel>,
    kept: Option<Kept>,
}

impl VerifierModel {
    /// Opens a model on the device of the run, unless the settings name another, and prepares what it works with there. With
    /// [`KeepWeights::Host`], both are in the region of the run, and `prepare` is given the device with that memory.
    pub fn open<W>(
        home: VerifierHome,
        (named, keep): (Option<&str>, KeepWeights),
        open: impl FnOnce(&Device) -> Result<LoadedModel>,
        prepare: impl FnOnce(&mut LoadedModel, Option<&Device>) -> Result<W>,
    ) -> Result<(Self, W)> {
        let region = home.region.filter(|_| keep == KeepWeights::Host);
        let turn = region.map(|(region, _)| Turn::begin(region));
        let device = match (named, region) {
            (Some(name), _) => device_named(name)?,
            (None, Some((region, _))) => home.device.in_region(region, Tenant::Judging),
            (None, None) => home.device.clone(),
        };
        let mut model = open(&device.read_only())?;
        let work = prepare(&mut model, region.map(|_| &device))?;
        if region.is_some() && model.policy.hidden_layout().is_some() {
            let remedy = "stapo export --merge writes a model with the adapters merged; or keep the weights on the device";
            return Err(
                TaskError::setting("verifier.keep", "\"host\", but the model has adapters", remedy).into()
            );
        }
        let kept = region.map(|(region, meter)| Kept {
            weights: model.policy.copy_to_host(),
            region: region.clone(),
            meter: Arc::clone(meter),
        });
        drop(turn);
        Ok((Self { model: RwLock::new(model), kept }, work))
    }

    /// The model, for everything but its weights.
    pub fn read(&self) -> impl Deref<Target = LoadedModel> + '_ {
        self.guard()
    }

    fn guard(&self) -> RwLockReadGuard<'_, LoadedModel> {
        self.model.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets `work` compute with the weights, which are copied to the device first where the host keeps them.
    pub fn at_work<R>(&self, work: impl FnOnce(&LoadedModel) -> R) -> R {
        let Some(Kept { weights, region, meter }) = &self.kept else { return work(&self.guard()) };
        let _turn = Turn::begin(region);
        let began = Instant::now();
        self.model.write().unwrap_or_else(PoisonError::into_inner).policy.copy_from_host(weights);
        meter.add_loading(began.elapsed());
        work(&self.guard())
    }
}

/// A pass that scores texts of up to `limit` tokens. In the memory of a region it has room for the largest batch from the start.
pub(super) fn scoring_pass(policy: &Policy, memory: Option<&Device>, limit: usize) -> Result<Pass> {
    Ok(match memory {
        Some(memory) => {
            let n_tokens = limit.max(JUDGE_BATCH_TOKENS);
            Pass::scoring_in(policy, memory, (n_tokens, n_tokens).into())?
        }
        None => Pass::scoring(policy)?,
    })
}

/// The device that `verifier.device` names.
fn device_named(name: &str) -> Result<Device> {
    let refuse = |problem: String| {
        TaskError::setting("verifier.device", problem, "leave it out for the device of the run")
    };
    let name: DeviceName = name.parse().map_err(|error: DeviceNameError| refuse(error.to_string()))?;
    Ok(Device::open(name, None, Training::None).map_err(|error| refuse(error.to_string()))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::ModelSource;
    use stapo_model::CpuOptions;

    #[test]
    fn a_verifier_is_on_the_device_of_the_run_or_on_the_one_it_names() {
        let of_run = Device::cpu(CpuOptions { threads: 3, ..CpuOptions::default() });
        let threads = |named: Option<&str>| {
            let open = |device: &Device| LoadedModel::open(&ModelSource::Builtin, device);
            let home = VerifierHome::from(&of_run);
            let opened = VerifierModel::open(home, (named, KeepWeights::Host), open, |_, _| Ok(()));
            opened.map(|(model, ())| model.at_work(|model| model.policy.device().threads()))
        };
        assert_eq!(threads(None).unwrap(), 3);
        assert_eq!(threads(Some("cpu")).unwrap(), CpuOptions::from_env().unwrap().threads);
        let error = threads(Some("tpu")).err().unwrap().to_string();
        assert!(error.contains("verifier.device") && error.contains("tpu"), "{error}");
    }
}
