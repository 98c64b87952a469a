//! Where the CUDA libraries are found: in the folders of an environment variable, on the loader's own path, then in the
//! folders in which toolkits and Python packages install them. A library in a folder is opened once by its full path;
//! the loader then gives the same library to everyone who asks for its short name.

use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use cudarc::{cublaslt, driver, nvrtc};

/// The environment variable that names the folders to search first, separated as in `PATH`.
pub const SEARCH_VARIABLE: &str = "STAPO_CUDA_LIBRARIES";

/// A library that CUDA work needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// Comes with the GPU's driver.
    Driver,
    /// Compiles kernels.
    Nvrtc,
    /// Multiplies matrices.
    CublasLt,
    /// Moves bytes between GPUs.
    Nccl,
}

impl Library {
    /// The Python package that installs the library.
    pub fn package(self) -> Option<&'static str> {
        match self {
            Library::Driver => None,
            Library::Nvrtc => Some("nvidia-cuda-nvrtc==13.0.*"),
            Library::CublasLt => Some("nvidia-cublas==13.0.*"),
            Library::Nccl => Some("nvidia-nccl-cu13"),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Library::Driver => "libcuda",
            Library::Nvrtc => "libnvrtc",
            Library::CublasLt => "libcublasLt",
            Library::Nccl => "libnccl",
        }
    }

    /// Files to open, in this order: the library comes after its dependencies.
    fn files(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &["libcuda.so.1"],
            Library::Nvrtc => &["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"],
            Library::CublasLt => &["libcublasLt.so.13"],
            Library::Nccl => &["libnccl.so.2"],
        }
    }

    /// The library by the name that the loader knows once it was found; null if it was not.
    pub(super) fn handle(self) -> *mut c_void {
        let name = self.files().last().and_then(|name| CString::new(*name).ok());
        // SAFETY: the name is a string that ends in 0; the handle is never closed.
        name.map_or(std::ptr::null_mut(), |name| unsafe {
            libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL)
        })
    }

    fn opens(self) -> bool {
        // SAFETY: these calls open a shared library by its name and use nothing in it.
        unsafe {
            match self {
                Library::Driver => driver::sys::is_culib_present(),
                Library::Nvrtc => nvrtc::sys::is_culib_present(),
                Library::CublasLt => cublaslt::sys::is_culib_present(),
                Library::Nccl => !self.handle().is_null(),
            }
        }
    }

    /// Loads the library. False if it was not found.
    pub fn find(self) -> bool {
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let given = std::env::var_os(SEARCH_VARIABLE);
        let given = given.iter().flat_map(std::env::split_paths).any(|folder| self.open_in(&folder));
        given || self.opens() || folders().iter().any(|folder| self.open_in(folder))
    }

    fn open_in(self, folder: &Path) -> bool {
        let paths: Vec<PathBuf> = self.files().iter().map(|name| folder.join(name)).collect();
        let main = paths.last().is_some_and(|path| path.is_file());
        main && {
            // A dependency may lie in another folder, so only the library itself must open.
            for path in &paths {
                open(path);
            }
            self.opens()
        }
    }
}

/// Opens a library for the rest of the program. A failure shows when the library is used.
fn open(path: &Path) {
    if let Ok(path) = CString::new(path.as_os_str().as_encoded_bytes()) {
        // SAFETY: the path is a string that ends in 0; the handle is never closed.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    }
}

/// Folders of toolkits, then of the Python packages of this environment.
fn folders() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for root in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os) {
        found.push(PathBuf::from(root).join("lib64"));
    }
    found.extend(
        ["/usr/local/cuda/lib64", "/usr/local/cuda-13/lib64", "/usr/local/cuda-13.0/lib64"]
            .map(PathBuf::from),
    );
    let pythons = std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
    let python_roots =
        pythons.unwrap_or_default().into_iter().filter(|folder| folder.join("python3").exists());
    let roots = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter();
    for root in roots.chain(python_roots.filter_map(|folder| folder.parent().map(Path::to_path_buf))) {
        let Ok(entries) = root.join("lib").read_dir() else { continue };
        for entry in
            entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        {
            let packages = entry.path().join("site-packages/nvidia");
            found.extend(
                ["cu13/lib", "cuda_nvrtc/lib", "cublas/lib", "nccl/lib"].map(|part| packages.join(part)),
            );
        }
    }
    found
}
