//! Limits on what the verifier's command may use.

use crate::reward::spec::ProcessLimits;
use rustix::io::Result;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Sets limits for this process and all that it starts, none of which can raise them again.
pub(super) fn set(limits: &ProcessLimits) -> Result<()> {
    lower(Resource::Core, Some(0))?;
    lower(Resource::Fsize, bytes(limits.file_mib))?;
    lower(Resource::Nofile, Some(limits.open_files))?;
    lower(Resource::As, bytes(limits.memory_mib))
}

/// Lowers both the soft and the hard limit; a lower limit that is already in force stays.
fn lower(resource: Resource, limit: Option<u64>) -> Result<()> {
    let Some(limit) = limit else { return Ok(()) };
    let limit = getrlimit(resource).maximum.map_or(limit, |maximum| maximum.min(limit));
    setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })
}

fn bytes(mib: u64) -> Option<u64> {
    (mib > 0).then_some(mib.saturating_mul(1 << 20))
}
