//! Names of devices, as configs and the command line write them.

use std::fmt;
use std::str::FromStr;

/// `cpu`, `cuda` or `cuda:1`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceName {
    #[default]
    Cpu,
    /// The GPU that the driver numbers `ordinal`.
    Cuda { ordinal: usize },
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("device {0:?}: expected cpu, cuda, or cuda:N for the GPU of number N")]
pub struct DeviceNameError(String);

impl DeviceName {
    /// Bytes of an element of weights and activations.
    pub fn compute_bytes(self) -> usize {
        match self {
            DeviceName::Cpu => 4,
            DeviceName::Cuda { .. } => 2,
        }
    }
}

impl FromStr for DeviceName {
    type Err = DeviceNameError;

    fn from_str(text: &str) -> Result<Self, DeviceNameError> {
        let unknown = || DeviceNameError(text.to_owned());
        match text.split_once(':') {
            None if text == "cpu" => Ok(DeviceName::Cpu),
            None if text == "cuda" => Ok(DeviceName::Cuda { ordinal: 0 }),
            Some(("cuda", number)) => {
                Ok(DeviceName::Cuda { ordinal: number.parse().map_err(|_| unknown())? })
            }
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda { ordinal: 0 } => f.write_str("cuda"),
            DeviceName::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}
