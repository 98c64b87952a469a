use sha2::{Digest as _, Sha256};

use super::{Digest, LEAF};
use crate::cpu::{Cpu, Shared};

pub(super) fn leaves(cpu: &Cpu, x: &[f32]) -> Vec<Digest> {
    let mut digests = vec![Digest::default(); x.len().div_ceil(LEAF)];
    let n_leaves = digests.len();
    let shared = Shared::new(&mut digests);
    cpu.tasks(n_leaves, |leaf| {
        let part = &x[leaf * LEAF..((leaf + 1) * LEAF).min(x.len())];
        let mut bytes = vec![0; 4 * part.len()];
        for (bytes, x) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(part) {
            *bytes = x.to_le_bytes();
        }
        // SAFETY: each task has its own digest.
        let digest = unsafe { shared.range(leaf..leaf + 1) };
        digest[0] = Sha256::digest(&bytes).into();
    });
    digests
}
