//! What CUDA needs and what this machine has of it: for `stapo doctor` and for errors.

use cudarc::driver::result::{self, device};
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};

use super::libraries::Library;
use super::nccl_library::nccl_version;

/// What was found. Probing allocates no memory on a GPU and makes no context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// CUDA version of the driver, such as 13.0; `None` without a driver.
    pub driver: Option<(u32, u32)>,
    /// The driver's error, if it failed to list the GPUs.
    pub driver_error: Option<String>,
    pub gpus: Vec<Gpu>,
    pub nvrtc: FoundLibrary,
    pub cublaslt: FoundLibrary,
    /// Needed by several GPUs only.
    pub nccl: FoundLibrary,
    /// Pairs of GPUs, by their numbers, that read each other's memory without the host.
    pub peers: Vec<(usize, usize)>,
}

/// One GPU, in the words of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    pub name: String,
    pub memory_bytes: usize,
    /// Such as (9, 0).
    pub compute_capability: (u32, u32),
    pub multiprocessors: u32,
}

/// A library's version, or the Python package that installs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FoundLibrary {
    Version(String),
    Missing { package: &'static str },
}

/// The oldest GPU whose matrix instructions the kernels use.
pub const OLDEST_CAPABILITY: (u32, u32) = (8, 0);

impl Found {
    /// What keeps this machine from computing on a GPU, with the remedy; `None` if nothing does.
    pub fn obstacle(&self) -> Option<String> {
        if self.driver.is_none() {
            return Some("no NVIDIA driver: libcuda was not found\nhint: install the GPU's driver, or use --device cpu".into());
        }
        if let Some(error) = &self.driver_error {
            return Some(format!(
                "the NVIDIA driver failed: {error}\nhint: see nvidia-smi; or use --device cpu"
            ));
        }
        let Some(gpu) = self.gpus.first() else {
            return Some("the NVIDIA driver lists no GPU\nhint: see nvidia-smi and CUDA_VISIBLE_DEVICES; or use --device cpu".into());
        };
        if gpu.compute_capability < OLDEST_CAPABILITY {
            let (major, minor) = gpu.compute_capability;
            let (need, _) = OLDEST_CAPABILITY;
            return Some(format!(
                "{}: compute capability {major}.{minor}, the kernels need {need}.0\nhint: use --device cpu",
                gpu.name
            ));
        }
        [(Library::Nvrtc, &self.nvrtc), (Library::CublasLt, &self.cublaslt)].into_iter().find_map(
            |(library, part)| {
                let FoundLibrary::Missing { package } = part else { return None };
                Some(format!(
                    "{} was not found\nhint: pip install '{package}', or name its folder in {}",
                    library.name(),
                    super::libraries::SEARCH_VARIABLE
                ))
            },
        )
    }
}

/// Looks for driver, GPUs and libraries.
pub fn probe() -> Found {
    let mut found = Found {
        driver: None,
        driver_error: None,
        gpus: Vec::new(),
        nvrtc: nvrtc(),
        cublaslt: cublaslt(),
        nccl: nccl(),
        peers: Vec::new(),
    };
    if Library::Driver.find() {
        let mut version = 0;
        // SAFETY: the library is loaded; the version is written to a live integer.
        let known = unsafe { sys::cuDriverGetVersion(&raw mut version) };
        found.driver = known.result().is_ok().then(|| split(version));
        match gpus() {
            Ok(gpus) => {
                found.peers = peers(gpus.len());
                found.gpus = gpus;
            }
            Err(error) => found.driver_error = Some(describe(error)),
        }
    }
    found
}

/// 13020 as (13, 2).
fn split(version: i32) -> (u32, u32) {
    let version = version.unsigned_abs();
    (version / 1000, version % 1000 / 10)
}

pub(super) fn describe(error: result::DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{name}, {text}"),
        _ => format!("{:?}", error.0),
    }
}

pub(super) fn gpus() -> Result<Vec<Gpu>, result::DriverError> {
    result::init()?;
    (0..device::get_count()?).map(|ordinal| gpu(device::get(ordinal)?)).collect()
}

pub(super) fn gpu(device: sys::CUdevice) -> Result<Gpu, result::DriverError> {
    // SAFETY: the driver listed the device.
    let attribute = |which| unsafe { device::get_attribute(device, which) }.map(i32::unsigned_abs);
    Ok(Gpu {
        name: device::get_name(device)?,
        // SAFETY: as above.
        memory_bytes: unsafe { device::total_mem(device) }?,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
    })
}

/// Pairs of GPUs with direct access in both directions. A pair that the driver says nothing about has none.
fn peers(n_gpus: usize) -> Vec<(usize, usize)> {
    let devices: Vec<_> = (0..n_gpus).map(|ordinal| device::get(ordinal as i32)).collect();
    let reaches = |from: usize, to: usize| {
        let (Ok(from), Ok(to)) = (&devices[from], &devices[to]) else { return false };
        let mut can = 0;
        // SAFETY: the driver listed both devices; the answer is written to a live integer.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, *from, *to) };
        asked.result().is_ok() && can != 0
    };
    let pairs = (0..n_gpus).flat_map(|a| (a + 1..n_gpus).map(move |b| (a, b)));
    pairs.filter(|&(a, b)| reaches(a, b) && reaches(b, a)).collect()
}

fn missing(library: Library) -> FoundLibrary {
    FoundLibrary::Missing { package: library.package().unwrap_or_default() }
}

fn nvrtc() -> FoundLibrary {
    if !Library::Nvrtc.find() {
        return missing(Library::Nvrtc);
    }
    let mut major = 0;
    let mut minor = 0;
    // SAFETY: the library is loaded; both numbers are written to live integers.
    let known = unsafe { cudarc::nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    known.result().map_or(missing(Library::Nvrtc), |()| FoundLibrary::Version(format!("{major}.{minor}")))
}

fn cublaslt() -> FoundLibrary {
    if !Library::CublasLt.find() {
        return missing(Library::CublasLt);
    }
    // SAFETY: the library is loaded; the call takes and changes nothing.
    let version = unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() };
    FoundLibrary::Version(format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100))
}

fn nccl() -> FoundLibrary {
    nccl_version().map_or(missing(Library::Nccl), FoundLibrary::Version)
}
