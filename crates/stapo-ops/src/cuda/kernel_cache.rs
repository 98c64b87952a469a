//! Machine code of kernels: read from a folder, or compiled, ahead of its use by threads in the background.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::thread::{self, JoinHandle};

use sha2::{Digest, Sha256};

use super::error::CudaError;
use super::kernels::{Source, compile, file_name};

/// Machine code that is waited for: `None` where the source does not compile.
type Compiled = Arc<OnceLock<Option<Vec<u8>>>>;

/// Code that threads in the background compile, or have compiled and could not write, by the names of its files.
static IN_BACKGROUND: Mutex<BTreeMap<String, Compiled>> = Mutex::new(BTreeMap::new());

fn in_background() -> MutexGuard<'static, BTreeMap<String, Compiled>> {
    IN_BACKGROUND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A source for an architecture, such as `sm_90a`, and a width of heads.
#[derive(Clone)]
pub(super) struct Target {
    pub source: &'static Source,
    pub arch: String,
    pub head_dim: usize,
}

impl Target {
    fn file_name(&self) -> String {
        file_name(self.source, &self.arch, self.head_dim)
    }

    fn path(&self) -> Option<PathBuf> {
        cache_folder().map(|folder| folder.join(self.file_name()))
    }

    fn compile(&self) -> Result<Vec<u8>, CudaError> {
        compile(self.source, &self.arch, self.head_dim)
    }

    /// The code from disk where it was compiled before, or as a thread in the background compiles it, or compiled now. `load` tries the
    /// code: a file that cannot be loaded (torn, or of another driver) is compiled anew.
    pub(super) fn load<T>(&self, load: impl Fn(&[u8]) -> Result<T, CudaError>) -> Result<T, CudaError> {
        let name = self.file_name();
        let waited = in_background().get(&name).cloned();
        let waited = waited.and_then(|compiled| compiled.get_or_init(|| self.compile().ok()).clone());
        let found = waited.or_else(|| self.path().as_deref().and_then(read));
        if let Some(code) = found
            && let Ok(loaded) = load(&code)
        {
            in_background().remove(&name);
            return Ok(loaded);
        }
        let code = self.compile()?;
        let loaded = load(&code)?;
        self.keep(&code);
        Ok(loaded)
    }

    /// Whether the code is now in the folder. Without one the next start compiles again: a failure to write is no error.
    fn keep(&self, code: &[u8]) -> bool {
        self.path().is_some_and(|path| write(&path, code).is_ok())
    }
}

/// Starts threads that compile what the folder does not have, in the order of [`Source::turn`]. [`Target::load`] waits for them
/// and reports a failure.
pub(super) fn compile_ahead(mut targets: Vec<Target>) -> Vec<JoinHandle<()>> {
    targets.sort_by_key(|target| target.source.turn());
    let is_new = |target: &Target| !target.path().is_some_and(|path| path.exists());
    let mut left = VecDeque::new();
    for target in targets.into_iter().filter(is_new) {
        if let Entry::Vacant(entry) = in_background().entry(target.file_name()) {
            left.push_back((target, Arc::clone(entry.insert(Compiled::default()))));
        }
    }
    // Half of the cores, and what the first update does without only when all the rest is there: more at a time would make the
    // sources that are needed first come as late as the last.
    let n_threads = thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2)).min(left.len());
    let left = Arc::new(Mutex::new(left));
    let next = move || left.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    // Read by whoever compiles a source of the first update; the others wait until nobody does. A thread that panics stops
    // nobody.
    let first_update = Arc::new(RwLock::new(()));
    let work = move || {
        while let Some((target, compiled)) = next() {
            let compiles_first = (!target.source.comes_later()).then(|| first_update.read());
            if compiles_first.is_none() {
                drop(first_update.write());
            }
            let code = compiled.get_or_init(|| target.compile().ok());
            if code.as_deref().is_none_or(|code| target.keep(code)) {
                in_background().remove(&target.file_name());
            }
        }
    };
    (0..n_threads).map(|_| thread::spawn(work.clone())).collect()
}

/// The folder of compiled kernels: `STAPO_KERNEL_CACHE`, else a folder in the user's cache; `None` without either.
fn cache_folder() -> Option<PathBuf> {
    let given = std::env::var_os("STAPO_KERNEL_CACHE").map(PathBuf::from);
    let cache = || std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    given.or_else(|| cache().or_else(home).map(|folder| folder.join("stapo/kernels")))
}

/// A cached file is the hash of the code and the code: a file that was torn or changed is not loaded.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (sum, code) = bytes.split_at_checked(32)?;
    (Sha256::digest(code).as_slice() == sum).then(|| code.to_vec())
}

fn write(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&temporary, [Sha256::digest(code).as_slice(), code].concat())?;
    std::fs::rename(&temporary, path)
}
