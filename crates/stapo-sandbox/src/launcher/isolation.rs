//! A separate user namespace for the verifier's command: no network, a private `/tmp`, no privileges.

use super::Launch;
use crate::privileges::drop_capabilities;
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{CWD, FileType, fstat};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change, move_mount,
    open_tree,
};
use rustix::process::{getgid, getuid};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// How far the command is kept apart.
pub(super) struct Isolation {
    pub has_private_tmp: bool,
    /// What could not be kept apart.
    pub shared: Vec<String>,
}

/// Moves this process, which must have one thread, to new namespaces. An error means that the process is in a
/// state in which the command must not run.
pub(super) fn enter(launch: &Launch) -> Result<Isolation, String> {
    let mut isolation = Isolation { has_private_tmp: false, shared: Vec::new() };
    if launch.network && launch.shared_tmp {
        return Ok(isolation);
    }
    let (user, group) = (getuid().as_raw(), getgid().as_raw());
    let mut namespaces = CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS;
    if !launch.network {
        namespaces |= CloneFlags::CLONE_NEWNET;
    }
    unshare(namespaces).map_err(|error| format!("namespaces: {error}"))?;
    // The user and the group stay the same inside. A group can be mapped only once `setgroups` is denied.
    for (file, text) in [
        ("setgroups", "deny".to_string()),
        ("uid_map", format!("{user} {user} 1")),
        ("gid_map", format!("{group} {group} 1")),
    ] {
        fs::write(Path::new("/proc/self").join(file), text).map_err(|error| format!("{file}: {error}"))?;
    }
    if !launch.shared_tmp {
        match cover_tmp(launch) {
            Ok(kept) => {
                isolation.has_private_tmp = true;
                kept.show()?;
            }
            Err(problem) => isolation.shared.push(format!("/tmp ({problem})")),
        }
    }
    drop_capabilities().map_err(|error| format!("capabilities: {error}"))?;
    Ok(isolation)
}

/// Folders and files below a covered `/tmp` that the command still needs.
struct Kept {
    working: PathBuf,
    /// Each path with what was there before `/tmp` was covered.
    paths: Vec<(PathBuf, OwnedFd)>,
}

impl Kept {
    /// Makes the paths visible again where they were, and enters the working folder again: the process is still in
    /// the covered one.
    fn show(self) -> Result<(), String> {
        for (path, tree) in &self.paths {
            let show = || -> io::Result<()> {
                if FileType::from_raw_mode(fstat(tree)?.st_mode).is_dir() {
                    fs::create_dir_all(path)?;
                } else {
                    fs::write(path, "")?;
                }
                Ok(move_mount(tree, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
            };
            show().map_err(|error| format!("{}: {error}", path.display()))?;
        }
        std::env::set_current_dir(&self.working)
            .map_err(|error| format!("{}: {error}", self.working.display()))
    }
}

/// Covers `/tmp` with an empty file system that vanishes with the command. An error means that `/tmp` is as before.
fn cover_tmp(launch: &Launch) -> Result<Kept, String> {
    let cover = || -> io::Result<Kept> {
        let tmp = Path::new("/tmp").canonicalize()?;
        let working = std::env::current_dir()?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        let whole =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
        let mut paths = Vec::new();
        for path in kept_paths(&tmp, launch, &working)? {
            let tree = open_tree(CWD, &path, whole)?;
            paths.push((path, tree));
        }
        mount("tmpfs", &tmp, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=1777,size=1g")?;
        Ok(Kept { working, paths })
    };
    cover().map_err(|error| error.to_string())
}

/// The paths below `tmp` that the command needs, none inside another: the working folder, folders that the command
/// line names, and the folders of files that it names.
fn kept_paths(tmp: &Path, launch: &Launch, working: &Path) -> io::Result<Vec<PathBuf>> {
    let named = launch.args.iter().map(Path::new).chain([launch.program.as_path(), working]);
    let mut paths = Vec::new();
    for path in named.filter_map(|path| path.canonicalize().ok()) {
        if path == tmp {
            return Err(io::Error::other("the working folder, or an argument"));
        }
        let folder = path.parent().filter(|parent| path.is_file() && *parent != tmp);
        let path = folder.map_or(path.clone(), Path::to_owned);
        if path.starts_with(tmp) {
            paths.push(path);
        }
    }
    paths.sort();
    paths.dedup_by(|inner, outer| inner.starts_with(&*outer));
    Ok(paths)
}
