//! Memory, disk and processor of this machine.

use std::path::Path;

/// Main memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MainMemory {
    pub total: u64,
    pub available: u64,
}

/// `None` on systems without /proc/meminfo.
pub fn memory() -> Option<MainMemory> {
    parse_memory(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_memory(text: &str) -> Option<MainMemory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(1024 * line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?)
    };
    Some(MainMemory { total: field("MemTotal")?, available: field("MemAvailable")? })
}

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
    fn memory_is_read_in_bytes() {
        let text = "MemTotal:       24620032 kB\nMemFree:         111 kB\nMemAvailable:   20000000 kB\n";
        assert_eq!(parse_memory(text), Some(MainMemory { total: 24620032 << 10, available: 20000000 << 10 }));
        assert_eq!(parse_memory("MemTotal: many kB\n"), None);
    }

    #[test]
    fn a_folder_that_is_not_there_yet_has_the_disk_of_the_one_above() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        assert!(free_disk(&folder.path().join("not/yet")).is_some_and(|bytes| bytes > 0));
    }
}
