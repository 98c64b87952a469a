//! System calls, by seccomp: an allow-list for the launcher and the zygote, and less for programs.
//!
//! Several filters act together, and the kernel takes the strictest answer. A call that is on no list fails with EPERM,
//! as it would for lack of a permission. A program that starts a process is killed, which gives that its own verdict. The
//! allow-list is the zygote's; what a program may not call of it is taken away in its own process.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};
use std::collections::BTreeMap;

/// An instruction of a filter: code, jump if true, jump if false, operand.
pub(crate) type Instruction = (u16, u8, u8, u32);
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// What an interpreter calls while it runs a program.
const PROGRAM: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_capget,
    libc::SYS_chdir,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_clone3,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fchdir,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getcpu,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getitimer,
    libc::SYS_getpgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getpriority,
    libc::SYS_getrandom,
    libc::SYS_getresgid,
    libc::SYS_getresuid,
    libc::SYS_getrusage,
    libc::SYS_getsid,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_linkat,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mincore,
    libc::SYS_mkdirat,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pselect6,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_renameat2,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_yield,
    libc::SYS_sendfile,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_setitimer,
    libc::SYS_sigaltstack,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_sysinfo,
    libc::SYS_times,
    libc::SYS_truncate,
    libc::SYS_umask,
    libc::SYS_uname,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Older forms of the calls above, which the processor's system has.
#[cfg(target_arch = "x86_64")]
const OLDER: &[i64] = &[
    libc::SYS_access,
    libc::SYS_alarm,
    libc::SYS_arch_prctl,
    libc::SYS_chmod,
    libc::SYS_dup2,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_getpgrp,
    libc::SYS_getrlimit,
    libc::SYS_link,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_pause,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_select,
    libc::SYS_stat,
    libc::SYS_symlink,
    libc::SYS_time,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[i64] = &[];

/// What the launcher and the zygote call besides: they start and end programs and set their limits.
const ZYGOTE: &[i64] = &[
    libc::SYS_clone,
    libc::SYS_execve,
    libc::SYS_ioctl,
    libc::SYS_kill,
    libc::SYS_memfd_create,
    libc::SYS_pidfd_open,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_recvmsg,
    libc::SYS_seccomp,
    libc::SYS_sendmsg,
    libc::SYS_setrlimit,
    libc::SYS_socketpair,
    libc::SYS_tgkill,
    libc::SYS_wait4,
    libc::SYS_waitid,
];
#[cfg(target_arch = "x86_64")]
const STARTS: &[i64] = &[libc::SYS_fork, libc::SYS_vfork];
#[cfg(not(target_arch = "x86_64"))]
const STARTS: &[i64] = &[];

/// Restricts this process and all that it starts.
pub(super) fn restrict() -> Result<(), String> {
    let list = rules(&[PROGRAM, OLDER, ZYGOTE, STARTS]);
    for filter in [allow_list(list)?, no_clone3()?] {
        apply_filter(&filter).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The filter of a program that an interpreter runs: one process, which starts no other program.
pub(crate) fn for_program() -> Result<Vec<Instruction>, String> {
    let mut starts = process_starts()?;
    starts.insert(libc::SYS_execve, Vec::new());
    narrowed(starts)
}

/// The filter of the command that runs a program of another language: one process.
pub(crate) fn for_command() -> Result<Vec<Instruction>, String> {
    narrowed(process_starts()?)
}

/// What a program may not call of what its zygote may. Calls in `killing` end it; the others fail. The zygote's allow-list
/// stays in force below, and a short filter makes the start of a program cheap.
fn narrowed(killing: Rules) -> Result<Vec<Instruction>, String> {
    let mut denied = rules(&[ZYGOTE]);
    denied.remove(&libc::SYS_clone);
    denied.remove(&libc::SYS_execve);
    let harmless = [libc::TCGETS, libc::FIONREAD, libc::FIOCLEX, libc::FIONCLEX, libc::FIONBIO];
    let other = harmless.iter().map(|&request| condition(1, SeccompCmpOp::Ne, request));
    denied.insert(libc::SYS_ioctl, vec![rule(other.collect::<Result<_, _>>()?)?]);
    let changes = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0);
    denied.insert(libc::SYS_prlimit64, vec![rule(vec![changes.map_err(|error| error.to_string())?])?]);
    // Event loops wake themselves by a pair of stream sockets, which cannot be connected elsewhere.
    let mut pairs = vec![rule(vec![condition(0, SeccompCmpOp::Ne, libc::AF_UNIX as u64)?])?];
    for kind in (0..16).filter(|&kind| kind != libc::SOCK_STREAM as u64) {
        pairs.push(rule(vec![condition(1, SeccompCmpOp::MaskedEq(0xf), kind)?])?);
    }
    denied.insert(libc::SYS_socketpair, pairs);
    let mut both = filter(killing, SeccompAction::Allow, SeccompAction::KillProcess)?;
    // Without its last instruction, which allows what no rule names, the first filter runs on into the second.
    both.pop();
    both.extend(filter(denied, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32))?);
    Ok(both.iter().map(|one| (one.code, one.jt, one.jf, one.k)).collect())
}

/// Calls that start a process, and not a thread.
fn process_starts() -> Result<Rules, String> {
    let mut starts = rules(&[STARTS]);
    let thread = libc::CLONE_THREAD as u64;
    let is_process = condition(0, SeccompCmpOp::MaskedEq(thread), 0)?;
    starts.insert(libc::SYS_clone, vec![rule(vec![is_process])?]);
    Ok(starts)
}

/// The flags of clone3 lie in memory, which a filter cannot read; without the call, threads are started by clone.
fn no_clone3() -> Result<BpfProgram, String> {
    filter(rules(&[&[libc::SYS_clone3]]), SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))
}

fn allow_list(list: Rules) -> Result<BpfProgram, String> {
    filter(list, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow)
}

fn filter(rules: Rules, otherwise: SeccompAction, matched: SeccompAction) -> Result<BpfProgram, String> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(|error| error.to_string())?;
    let filter = SeccompFilter::new(rules, otherwise, matched, arch).map_err(|error| error.to_string())?;
    filter.try_into().map_err(|error: seccompiler::BackendError| error.to_string())
}

fn rules(lists: &[&[i64]]) -> Rules {
    lists.iter().flat_map(|list| list.iter().map(|&call| (call, Vec::new()))).collect()
}

fn rule(conditions: Vec<SeccompCondition>) -> Result<SeccompRule, String> {
    SeccompRule::new(conditions).map_err(|error| error.to_string())
}

/// A condition on the lower half of an argument.
fn condition(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompCondition, String> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
        .map_err(|error| error.to_string())
}
