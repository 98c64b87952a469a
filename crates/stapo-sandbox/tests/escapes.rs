//! Attempts of a program to reach something outside of its jail. Nothing outside may change, and the pool goes on.

use crate::common::{pool_with, pools, settings};
use stapo_sandbox::{End, Level, Outcome, Pool, Request, Settings};

fn run(pool: &Pool, source: &str) -> Outcome {
    pool.run(&[Request { source, stdin: "" }]).unwrap().remove(0)
}

/// Prints what a call gives, or the name of the exception, so that a table can say what is expected.
fn attempt(pool: &Pool, setup: &str, expression: &str) -> String {
    let source = format!(
        "import os, sys\n{setup}\ntry: print('reached', {expression})\nexcept BaseException as e: print(type(e).__name__)"
    );
    let outcome = run(pool, &source);
    format!(
        "{}{}",
        outcome.stdout.trim(),
        if outcome.end == End::Finished { String::new() } else { format!(" {}", outcome.end) }
    )
}

/// Attempts with setup and expression; each must end in an exception or in a limit.
const ATTEMPTS: &[(&str, &str, &str)] = &[
    ("the passwords", "", "open('/etc/passwd').read()"),
    ("the home folder", "", "os.listdir(os.path.expanduser('~root'))"),
    ("the root of the system", "", "open('/etc/hostname').read()"),
    ("a path upwards", "", "open('/tmp/../../../../../etc/passwd').read()"),
    (
        "a symbolic link",
        "try: os.symlink('/etc/passwd', '/tmp/link')\nexcept OSError: pass",
        "open('/tmp/link').read()",
    ),
    ("a hard link", "import sysconfig", "os.link(os.__file__, '/tmp/hard') or open('/tmp/hard', 'a')"),
    ("the interpreter's files", "", "open(os.__file__, 'a')"),
    ("a new file beside them", "", "open(os.path.dirname(os.__file__) + '/new.py', 'w')"),
    ("a device", "", "open('/dev/sda')"),
    ("the kernel's memory", "", "open('/dev/mem')"),
    ("a process's memory", "", "open('/proc/1/mem')"),
    ("another's environment", "", "open(f'/proc/{os.getppid()}/environ').read()"),
    ("a socket", "import socket", "socket.socket()"),
    ("a raw socket", "import socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    ("a netlink socket", "import socket", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    ("a datagram pair", "import socket", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"),
    ("a name server", "import socket", "socket.gethostbyname('example.org')"),
    ("a signal to the zygote", "", "os.kill(os.getppid(), 9)"),
    ("a signal to everybody", "", "os.kill(-1, 9)"),
    ("a signal to the group", "", "os.killpg(0, 9)"),
    ("a terminal", "import fcntl", "fcntl.ioctl(0, 0x5412, b'x')"),
    ("a raised limit", "import resource", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    ("a priority", "", "os.nice(-5)"),
    ("another user", "", "os.setuid(0)"),
    ("another root", "", "os.chroot('/tmp')"),
    ("a name of the host", "import socket", "socket.sethostname('x')"),
    ("a schedule", "", "os.sched_setaffinity(0, {0})"),
    ("a file in memory", "", "os.memfd_create('x')"),
];

/// System calls by number (x86-64), all of which must give EPERM.
#[cfg(target_arch = "x86_64")]
const CALLS: &[(&str, u32)] = &[
    ("ptrace", 101),
    ("mount", 165),
    ("umount2", 166),
    ("pivot_root", 155),
    ("bpf", 321),
    ("keyctl", 250),
    ("add_key", 248),
    ("io_uring_setup", 425),
    ("perf_event_open", 298),
    ("userfaultfd", 323),
    ("unshare", 272),
    ("setns", 308),
    ("process_vm_readv", 310),
    ("process_vm_writev", 311),
    ("kexec_load", 246),
    ("init_module", 175),
    ("open_by_handle_at", 304),
    ("pidfd_open", 434),
    ("pidfd_getfd", 438),
    ("pidfd_send_signal", 424),
    ("prctl", 157),
    ("seccomp", 317),
    ("shmget", 29),
    ("semget", 64),
    ("msgget", 68),
    ("mq_open", 240),
    ("reboot", 169),
    ("swapon", 167),
    ("acct", 163),
    ("personality", 135),
    ("setsid", 112),
    ("tgkill", 234),
    ("tkill", 200),
    ("rt_sigqueueinfo", 129),
    ("landlock_create_ruleset", 444),
    ("mount_setattr", 442),
    ("open_tree", 428),
    ("fsopen", 430),
    ("setrlimit", 160),
    ("name_to_handle_at", 303),
    ("fanotify_init", 300),
    ("inotify_init1", 294),
    ("splice", 275),
    ("vmsplice", 278),
    ("memfd_create", 319),
    ("mlock", 149),
    ("modify_ldt", 154),
    ("iopl", 172),
    ("quotactl", 179),
    ("x32 getpid", 0x4000_0027),
]; // A table reads best with several entries a line.

#[test]
fn nothing_outside_the_jail_is_reached() {
    for pool in pools() {
        for (name, setup, expression) in ATTEMPTS {
            let found = attempt(&pool, setup, expression);
            println!("{:10} {name}: {found}", pool.layers().level.name());
            assert!(!found.contains("reached"), "{name}: {found}");
        }
        assert_eq!(run(&pool, "print(1)").stdout, "1\n");
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn system_calls_that_open_the_jail_fail() {
    let list: Vec<String> = CALLS.iter().map(|(_, number)| number.to_string()).collect();
    let source = format!(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor n in [{}]:\n  r = libc.syscall(n, 0, 0, 0, 0, 0, 0)\n  print(n, r, ctypes.get_errno())",
        list.join(", ")
    );
    for pool in pools() {
        let outcome = run(&pool, &source);
        let expected: Vec<String> = CALLS.iter().map(|(_, number)| format!("{number} -1 1")).collect();
        assert_eq!(outcome.stdout.trim().lines().collect::<Vec<_>>(), expected, "{outcome:?}");
    }
}

/// Limits, each with its own end.
#[test]
fn every_limit_has_its_own_end() {
    let cases: &[(&str, End)] = &[
        ("while True: pass", End::CpuTime),
        ("import signal\nsignal.signal(signal.SIGXCPU, lambda *a: None)\nwhile True: pass", End::CpuTime),
        ("x = 'x' * 10 ** 9", End::Memory),
        ("x = []\nwhile True: x.append(bytes(10 ** 6))", End::Memory),
        ("import os\nwhile True: os.fork()", End::Processes),
        ("import subprocess\nsubprocess.run(['/bin/true'])", End::Processes),
        ("import multiprocessing\nmultiprocessing.Process(target=print).start()", End::Processes),
        ("print('x' * 10 ** 6)", End::Output),
        ("import sys\nsys.stderr.write('x' * 10 ** 6)", End::Output),
        ("import sys\nsys.exit(3)", End::Exited(3)),
        ("import sys\nsys.exit('no')", End::Exited(1)),
        ("raise ValueError('no')", End::Raised("ValueError: no".into())),
        ("import ctypes\nctypes.string_at(0)", End::Signal(11)),
    ];
    for pool in pools() {
        for (source, end) in cases {
            let outcome = run(&pool, source);
            assert_eq!(outcome.end, *end, "{source}: {outcome:?}");
        }
        let cut = run(&pool, "print('x' * 10 ** 6)");
        assert!(cut.stdout.ends_with("... (cut at 4096 bytes)") && cut.stdout.len() < 5000);
    }
}

/// At the level of namespaces there is a private /tmp, which holds nothing of earlier programs.
#[test]
fn tmp_is_bounded_and_empty_for_every_program() {
    let mut settings = Settings { n_workers: 1, ..settings(Level::Namespaces) };
    // Deep folders take 0.3 s where other tests take the caches.
    settings.limits.cpu_seconds = 3.0;
    let Some(pool) = pool_with(settings) else { return };
    let full = run(&pool, "with open('/tmp/x', 'wb') as f:\n  while True: f.write(b'x' * 65536)");
    assert_eq!(full.end, End::FileSize, "{full:?}");
    let full = run(&pool, "n = 0\nwhile True:\n  open(f'/tmp/{n}', 'wb').write(b'x' * 65536); n += 1");
    assert_eq!(full.end, End::FileSize, "{full:?}");
    let left = "import os\nprint(os.listdir('/tmp'))\nos.makedirs('/tmp/a/b')\nos.symlink('/', '/tmp/a/root')\nopen('/tmp/a/b/c', 'w')\nos.chmod('/tmp/a/b', 0)";
    for _ in 0..3 {
        let outcome = run(&pool, left);
        assert_eq!((outcome.stdout.as_str(), outcome.end), ("[]\n", End::Finished), "{}", outcome.stderr);
    }
    let deep = "import os\nfor _ in range(3000):\n  os.mkdir('d'); os.chdir('d')\nprint('deep')";
    let outcome = run(&pool, deep);
    assert_eq!(outcome.stdout, "deep\n", "{outcome:?}");
    assert_eq!(run(&pool, left).stdout, "[]\n", "a tree that cannot be removed costs the interpreter");
}

#[test]
fn a_program_that_sleeps_ends_at_the_wall_limit() {
    let mut settings = Settings { clock: stapo_sandbox::Clock::Real, ..settings(Level::Namespaces) };
    settings.limits.wall_seconds = 1.0;
    let Some(pool) = pool_with(settings) else { return };
    assert_eq!(run(&pool, "import time\ntime.sleep(1000)").end, End::WallTime);
    assert_eq!(stapo_sandbox::Limits::default().wall().as_secs(), 30, "ten times the processor time");
}

/// The same program gives the same output, run after run and whatever interpreter runs it.
#[test]
fn programs_are_deterministic() {
    let source = "import random, time, datetime, os, uuid, tempfile, secrets\n\
        print(random.random(), os.urandom(4).hex(), uuid.uuid4(), secrets.token_hex(4))\n\
        print(time.time(), time.monotonic(), time.perf_counter_ns(), datetime.datetime.now(), datetime.date.today())\n\
        print(hash('a'), list({'b', 'c', 'd', 'e'}), object(), {object(): 1})\n\
        time.sleep(3600); print(time.time(), time.strftime('%Z'))\n\
        t = time.time()\nwhile time.time() < t + 1: pass\nprint('waited')";
    for pool in pools() {
        let outcomes = pool.run(&[Request { source, stdin: "" }; 8]).unwrap();
        assert!(outcomes[0].stdout.ends_with("waited\n"), "{:?}", outcomes[0]);
        for outcome in &outcomes {
            assert_eq!(outcome.stdout, outcomes[0].stdout);
        }
    }
}

/// One pool runs many programs, honest and hostile, and leaves no process.
#[test]
fn a_pool_leaves_nothing_behind() {
    // The seed stands on the command lines of this test's interpreters and marks them.
    let seed = 7_000_000_000 + u64::from(std::process::id());
    let n_alive = || {
        let lines = std::fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
        lines.filter(|line| String::from_utf8_lossy(line).contains(&seed.to_string())).count()
    };
    let spinning = "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()";
    let hostile = ["import os\nos.fork()", "while True: pass", spinning];
    for level in [Level::Namespaces, Level::Filters] {
        let Some(pool) = pool_with(Settings { seed, ..settings(level) }) else { continue };
        let source = |n: usize| *hostile.get(n % 10).unwrap_or(&"print(1)");
        let requests: Vec<Request> = (0..30).map(|n| Request { source: source(n), stdin: "" }).collect();
        let outcomes = pool.run(&requests).unwrap();
        assert_eq!(outcomes.iter().filter(|outcome| outcome.end == End::Finished).count(), 21);
        assert!(n_alive() > 0, "the interpreters are warm");
        drop(pool);
        assert_eq!(n_alive(), 0);
    }
}

/// Without seccomp or Landlock programs run only where the caller says so, and limits still hold.
#[test]
fn limits_alone_are_refused_unless_allowed() {
    let starter = || Ok(std::process::Command::new(env!("CARGO_BIN_EXE_sandbox-launcher")));
    let refused = Pool::open(settings(Level::None), starter).err();
    let Some(refused) = refused else { panic!("a pool without isolation") };
    assert!(refused.to_string().contains("--unsafe-code"), "{refused}");
    let Some(pool) = pool_with(Settings { unsafe_code: true, ..settings(Level::None) }) else { return };
    assert_eq!(run(&pool, "print(1)").stdout, "1\n");
    assert_eq!(run(&pool, "while True: pass").end, End::CpuTime);
    assert_eq!(run(&pool, "x = 'x' * 10 ** 9").end, End::Memory);
}
