//! Namespaces, and a file system that holds the interpreter's files and an empty `/tmp`.

use super::Jail;
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{CWD, FileType, StatVfsMountFlags, fstat, statvfs};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_change,
    mount_remount, move_mount, open_tree, unmount,
};
use rustix::process::{getegid, geteuid, pivot_root};
use rustix::thread::{
    CapabilitySet, Gid, Uid, capabilities, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The user that programs run as: `nobody`.
const NOBODY: u32 = 65534;

/// Moves this process, which must have one thread, into namespaces. Its children are in a namespace of process numbers,
/// whose first process ends all others with itself.
pub(super) fn enter(jail: &Jail) -> Result<(), String> {
    let all = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS;
    let is_root = can_become_nobody();
    if is_root {
        unshare(all).map_err(|error| error.to_string())?;
    } else {
        let (user, group) = (geteuid().as_raw(), getegid().as_raw());
        unshare(all | CloneFlags::CLONE_NEWUSER).map_err(|error| error.to_string())?;
        // A group can be mapped only once `setgroups` is denied.
        for (file, text) in [
            ("setgroups", "deny".to_string()),
            ("uid_map", format!("{NOBODY} {user} 1")),
            ("gid_map", format!("{NOBODY} {group} 1")),
        ] {
            fs::write(Path::new("/proc/self").join(file), text)
                .map_err(|error| format!("{file}: {error}"))?;
        }
    }
    rustix::system::sethostname(b"sandbox").map_err(|error| format!("host name: {error}"))?;
    change_root(jail).map_err(|error| format!("file system: {error}"))?;
    if is_root {
        become_nobody().map_err(|error| format!("user {NOBODY}: {error}"))?;
    }
    Ok(())
}

/// Whether this process may make namespaces without a user namespace, and then become a user without privileges.
fn can_become_nobody() -> bool {
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::SETUID | CapabilitySet::SETGID;
    let has_them = capabilities(None).is_ok_and(|sets| sets.effective.contains(needed));
    let is_mapped = |line: &str| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        matches!(numbers[..], [first, _, n] if (first..first.saturating_add(n)).contains(&u64::from(NOBODY)))
    };
    let all_mapped = |file: &str| fs::read_to_string(file).is_ok_and(|text| text.lines().any(is_mapped));
    has_them && all_mapped("/proc/self/uid_map") && all_mapped("/proc/self/gid_map")
}

fn become_nobody() -> rustix::io::Result<()> {
    let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)
}

/// Makes a file system in memory the root: the jail's paths, read only, `/dev/null` and an empty `/tmp`.
fn change_root(jail: &Jail) -> io::Result<()> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    // The paths are opened before anything is mounted, since the new root covers `/tmp`, where some may lie.
    let mut trees = Vec::new();
    for path in jail.reads.iter().map(PathBuf::as_path).chain([Path::new("/dev/null")]) {
        let whole =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
        let tree = open_tree(CWD, path, whole)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
        trees.push((path.to_owned(), tree));
    }
    let root = Path::new("/tmp").canonicalize()?;
    mount("tmpfs", &root, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=755,size=4m")?;
    let tmp = root.join("tmp");
    fs::create_dir_all(&tmp)?;
    let size = CString::new(format!("mode=1777,size={}m,nr_inodes=4k", jail.tmp_mib))?;
    mount("tmpfs", &tmp, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, size.as_c_str())?;
    for (path, tree) in &trees {
        show(&root.join(path.strip_prefix("/").unwrap_or(path)), tree)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
    }
    std::env::set_current_dir(&root)?;
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    read_only(Path::new("/"))?;
    std::env::set_current_dir("/tmp")
}

/// Mounts a tree at a path of the new root, read only.
fn show(target: &Path, tree: &OwnedFd) -> io::Result<()> {
    let is_folder = FileType::from_raw_mode(fstat(tree)?.st_mode).is_dir();
    let folder = if is_folder { Some(target) } else { target.parent() };
    if let Some(folder) = folder {
        fs::create_dir_all(folder)?;
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    }
    if !is_folder {
        fs::write(target, "")?;
    }
    move_mount(tree, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    if target.ends_with("dev/null") { Ok(()) } else { read_only(target) }
}

/// Makes a mount read only. Inside a user namespace the flags that the mount had must stay.
fn read_only(target: &Path) -> io::Result<()> {
    let before = statvfs(target)?.f_flag;
    let mut flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    for (had, keep) in [
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
        (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
    ] {
        if before.contains(had) {
            flags |= keep;
        }
    }
    Ok(mount_remount(target, flags, c"")?)
}
