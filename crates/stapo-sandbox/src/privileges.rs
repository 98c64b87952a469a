//! What a launcher takes away from itself and from all that it starts.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Takes away the privileges of a root user, and those that a user namespace gives to its first process.
#[cfg(target_os = "linux")]
pub(crate) fn drop_capabilities() -> rustix::io::Result<()> {
    use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
    let is_root = rustix::process::geteuid().is_root();
    for capability in CapabilitySet::all().iter() {
        match remove_capability_from_bounding_set(capability) {
            // An older kernel does not know the newest capabilities. A user who is not root has none to lose.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(rustix::io::Errno::PERM) if !is_root => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Lowers the soft and the hard limit; a lower limit that is in force stays.
pub(crate) fn lower(resource: Resource, limit: u64) -> rustix::io::Result<()> {
    let limit = getrlimit(resource).maximum.map_or(limit, |maximum| maximum.min(limit));
    setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })
}
