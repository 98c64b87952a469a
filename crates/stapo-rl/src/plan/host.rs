//! The main memory of this machine, as far as this process may use it.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// Main memory in bytes. A container counts as a machine with the memory of its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    pub total: u64,
    /// Free, or used for files that the system can drop.
    pub available: u64,
    pub free_swap: u64,
}

impl HostMemory {
    /// `None` on systems without /proc/meminfo.
    pub fn find() -> Option<Self> {
        let machine = Self::parse(&read_to_string("/proc/meminfo").ok()?)?;
        let groups = read_to_string("/proc/self/cgroup").unwrap_or_default();
        let limits = control_groups(&groups).into_iter().filter_map(|folder| Limit::read(&folder));
        Some(limits.fold(machine, |memory, limit| Self {
            total: memory.total.min(limit.bytes),
            available: memory.available.min(limit.left),
            ..memory
        }))
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            Some(1024 * line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?)
        };
        let free_swap = field("SwapFree").unwrap_or(0);
        Some(Self { total: field("MemTotal")?, available: field("MemAvailable")?, free_swap })
    }

    /// Whether there is room for so many bytes besides what the process will come to need: a fifth of what is free.
    pub fn has_room_for(&self, n_bytes: u64) -> bool {
        n_bytes <= self.available / 5 * 4
    }

    /// What a process can have at most.
    pub fn usable(&self) -> u64 {
        self.available.saturating_add(self.free_swap)
    }
}

/// The folders of the control groups that may limit the memory of this process, from the lines of /proc/self/cgroup. A container
/// may see its group as the root.
fn control_groups(text: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let root = match controllers {
            "" => Path::new("/sys/fs/cgroup"),
            "memory" => Path::new("/sys/fs/cgroup/memory"),
            _ => continue,
        };
        let inside = Path::new(path.trim_start_matches('/'));
        folders.extend(inside.ancestors().map(|folder| root.join(folder)));
    }
    folders
}

/// The limit of a control group, and what its processes have left of it.
#[derive(Debug, PartialEq, Eq)]
struct Limit {
    bytes: u64,
    left: u64,
}

impl Limit {
    /// `None` for a group without a limit.
    fn read(group: &Path) -> Option<Self> {
        let number = |names: [&str; 2]| {
            let text = names.iter().find_map(|name| read_to_string(group.join(name)).ok())?;
            text.trim().parse::<u64>().ok()
        };
        let bytes = number(["memory.max", "memory.limit_in_bytes"])?;
        let used = number(["memory.current", "memory.usage_in_bytes"])?;
        let statistics = read_to_string(group.join("memory.stat")).unwrap_or_default();
        let files = |prefix: &str| {
            let of_files = |line: &str| {
                let (name, bytes) = line.strip_prefix(prefix)?.split_once(' ')?;
                let is_file = matches!(name, "active_file" | "inactive_file");
                bytes.parse::<u64>().ok().filter(|_| is_file)
            };
            statistics.lines().filter_map(of_files).sum::<u64>()
        };
        // The first version of control groups counts the groups inside under separate names.
        let droppable = files("").max(files("total_"));
        Some(Self { bytes, left: bytes.saturating_sub(used.saturating_sub(droppable)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        let text = "MemTotal:       24620032 kB\nMemFree:         111 kB\nMemAvailable:   20000000 kB\nSwapFree: 8 kB\n";
        let memory = HostMemory::parse(text).unwrap();
        let expected = HostMemory { total: 24620032 << 10, available: 20000000 << 10, free_swap: 8 << 10 };
        assert_eq!((memory, memory.usable()), (expected, (20000000 << 10) + (8 << 10)));
        assert_eq!(HostMemory::parse("MemTotal: many kB\n"), None);
        // A fifth of what is free stays free, and swap is no room for a copy.
        let memory = HostMemory { total: 5000, available: 1000, free_swap: 4000 };
        assert!(memory.has_room_for(800) && !memory.has_room_for(801));
    }

    #[test]
    fn a_control_group_limits_memory_without_the_files_it_can_drop() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 400\nactive_file 100\ninactive_file 200\n");
        assert_eq!(Limit::read(folder.path()), Some(Limit { bytes: 1000, left: 600 }));
        write("memory.stat", "active_file 1\ntotal_active_file 250\ntotal_inactive_file 50\n");
        assert_eq!(Limit::read(folder.path()), Some(Limit { bytes: 1000, left: 600 }));
        write("memory.max", "max\n");
        assert_eq!(Limit::read(folder.path()), None);
        let groups = control_groups("0::/a/b\n3:memory:/c\n4:cpu:/d\n");
        let expected = ["", "/a", "/a/b", "/memory", "/memory/c"].map(|end| format!("/sys/fs/cgroup{end}"));
        assert_eq!(groups.len(), expected.len());
        assert!(
            expected.iter().all(|path| groups.iter().any(|group| group == Path::new(path))),
            "{groups:?}"
        );
    }
}
