//! The end of the command with all processes that descend from it.

#[cfg(target_os = "linux")]
pub(super) use linux::{adopt, end};
#[cfg(not(target_os = "linux"))]
pub(super) use process_group::{adopt, end};
use rustix::process::Pid;

#[cfg(target_os = "linux")]
mod linux {
    use super::Pid;
    use rustix::io::Errno;
    use rustix::process::{Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};
    use std::collections::BTreeMap;
    use std::time::{Duration, Instant};

    /// How long processes may take to disappear after SIGKILL, which a blocked system call can delay.
    const PATIENCE: Duration = Duration::from_secs(10);

    /// Makes this process the parent of orphaned descendants, so that a daemon stays a descendant.
    pub(in crate::launcher) fn adopt() -> rustix::io::Result<()> {
        set_child_subreaper(Some(getpid()))
    }

    /// Ends and reaps every descendant of this process.
    pub(in crate::launcher) fn end(_command: Pid) {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            match wait(WaitOptions::NOHANG) {
                // No child is left, and hence no descendant. That a look at /proc finds none is no proof: a process can
                // start another one and end while the look is under way.
                Err(Errno::CHILD) => return,
                Ok(Some(_)) => continue,
                Ok(None) | Err(_) => {}
            }
            // All are stopped before any is killed, so that none can start another one in the meantime.
            for pid in descendants() {
                let _ = kill_process(pid, Signal::STOP);
            }
            for pid in descendants() {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The living descendants of this process, by the parents that `/proc` names.
    fn descendants() -> Vec<Pid> {
        let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        for entry in entries {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
            let Ok(stat) = std::fs::read(entry.path().join("stat")) else { continue };
            if let Some(parent) = living_parent(&String::from_utf8_lossy(&stat)) {
                children.entry(parent).or_default().push(pid);
            }
        }
        let mut found = Vec::new();
        let mut open = vec![getpid().as_raw_nonzero().get()];
        while let Some(parent) = open.pop() {
            for child in children.remove(&parent).unwrap_or_default() {
                open.push(child);
                found.extend(Pid::from_raw(child));
            }
        }
        found
    }

    /// The parent in `PID (NAME) STATE PARENT ..`; `None` for a process that has ended and waits to be reaped. The name
    /// may hold brackets and spaces.
    fn living_parent(stat: &str) -> Option<i32> {
        let (_, rest) = stat.rsplit_once(") ")?;
        let mut fields = rest.split(' ');
        let state = fields.next()?;
        (!matches!(state, "Z" | "X")).then_some(())?;
        fields.next()?.parse().ok()
    }

    #[cfg(test)]
    mod tests {
        use super::living_parent;

        #[test]
        fn a_process_name_cannot_hide_its_parent() {
            assert_eq!(living_parent("12 (a) S 7) S 34 12 12"), Some(34));
            assert_eq!(living_parent("12 (sh) Z 34 12 12"), None);
            assert_eq!(living_parent("12"), None);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod process_group {
    use super::Pid;
    use rustix::process::{Signal, kill_process_group};

    /// Nothing to do: the command is the head of a process group.
    pub(in crate::launcher) fn adopt() -> rustix::io::Result<()> {
        Ok(())
    }

    /// Ends the command's process group.
    pub(in crate::launcher) fn end(command: Pid) {
        let _ = kill_process_group(command, Signal::KILL);
    }
}
