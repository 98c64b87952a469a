//! Where a judge or a reward model is.

use crate::error::Result;
use crate::tasks::TaskError;
use stapo_model::cuda::{CudaOptions, Training};
use stapo_model::{CpuOptions, Device, DeviceName, DeviceNameError};

/// The device of a verifier's model: that of the run, unless the settings name another.
pub fn device_of(named: Option<&str>, of_run: &Device) -> Result<Device> {
    let refuse = |problem: String| {
        TaskError::setting("verifier.device", problem, "leave it out for the device of the run")
    };
    match named.map(str::parse).transpose().map_err(|error: DeviceNameError| refuse(error.to_string()))? {
        None => Ok(of_run.clone()),
        Some(DeviceName::Cpu) => {
            let options = CpuOptions::from_env().map_err(|error| refuse(error.to_string()))?;
            Ok(Device::cpu(options))
        }
        Some(DeviceName::Cuda { ordinal }) => {
            let options = CudaOptions { ordinal, training: Training::None, ..CudaOptions::default() };
            Ok(Device::cuda(options).map_err(|error| refuse(error.to_string()))?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verifier_is_on_the_device_of_the_run_or_on_the_one_it_names() {
        let of_run = Device::cpu(CpuOptions { threads: 3, ..CpuOptions::default() });
        assert_eq!(device_of(None, &of_run).unwrap().threads(), 3);
        let threads = CpuOptions::from_env().unwrap().threads;
        assert_eq!(device_of(Some("cpu"), &of_run).unwrap().threads(), threads);
        let error = device_of(Some("tpu"), &of_run).err().unwrap().to_string();
        assert!(error.contains("verifier.device") && error.contains("tpu"), "{error}");
    }
}
