//! Disk and processor of this machine.

use std::path::Path;

/// Bytes free for this user on the disk of `path` or of the nearest folder above it that exists.
pub fn free_disk(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let existing = path.ancestors().find(|folder| folder.exists())?;
    let disk = rustix::fs::statvfs(existing).ok()?;
    Some(disk.f_bavail * disk.f_frsize)
}

/// The processor's name; `None` on systems without /proc/cpuinfo.
pub fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_not_there_yet_has_the_disk_of_the_one_above() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        assert!(free_disk(&folder.path().join("not/yet")).is_some_and(|bytes| bytes > 0));
    }
}
