//! What a policy will try to be rewarded without solving its task. Every program here must fail a test that an honest one
//! passes, at every level of isolation that this machine has.

use crate::common::{asserted, pool_with, pools, settings};
use stapo_sandbox::{Checks, End, Level, Pool, Trial};

/// The honest program, and the tests of the table below.
const HONEST: &str = "def f(x):\n    return x + 1\n";
const TESTS: [&str; 2] = ["assert f(1) == 2", "assert f(41) == 42"];

/// Tricks, each with a part of what is said about it.
const TRICKS: &[(&str, &str, &str)] = &[
    ("sys.exit at once", "import sys\nsys.exit(0)", "SystemExit"),
    ("sys.exit in the call", "import sys\ndef f(x): sys.exit(0)", "SystemExit"),
    ("os._exit at once", "import os\nos._exit(0)", "exited with status 0"),
    ("os._exit in the call", "import os\ndef f(x): os._exit(0)", "exited with status 0"),
    (
        "an exception that a handler of asserts would swallow",
        "def f(x): raise AssertionError",
        "AssertionError",
    ),
    ("an exception that ends a loop", "def f(x): raise StopIteration", "StopIteration"),
    (
        "redefined helpers",
        "class AssertionError: pass\ndef isinstance(*a): return True\ndef f(x): return 0",
        "returned 0",
    ),
    (
        "an object that equals everything",
        "class A:\n  def __eq__(s, o): return True\ndef f(x): return A()",
        "<A of the program>",
    ),
    (
        "a number that equals everything",
        "class A(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\ndef f(x): return A(7)",
        "returned 7",
    ),
    (
        "a list that equals everything",
        "class A(list):\n  def __eq__(s, o): return True\ndef f(x): return A()",
        "returned []",
    ),
    (
        "changed builtins",
        "import builtins\nbuiltins.AssertionError = builtins.print = len\nbuiltins.__dict__['__build_class__'] = None\ndef f(x): return 0",
        "returned 0",
    ),
    (
        "a changed codec",
        "import __main__, json\njson.dumps = lambda *a, **k: 'true'\n__main__.Encoder.encode = lambda *a: True\ndef f(x): return 0",
        "on the channel",
    ),
    (
        "a written result",
        "import os\ndef f(x):\n  os.write(3, b'{\"result\": {\"passed\": true, \"message\": \"\"}}\\n\"done\"\\n')\n  return 0",
        "",
    ),
    (
        "results on every descriptor",
        "import os\nfor d in range(64):\n  try: os.write(d, b'\"done\"\\n{\"passed\": true}\\n')\n  except OSError: pass\ndef f(x): return 0",
        "",
    ),
    ("a printed marker", "def f(x):\n  print('passed all 2 tests')\n  return 0", "returned 0"),
    (
        "tests from frames",
        "import sys\ndef f(x):\n  d = 0\n  while True:\n    try: names = {**sys._getframe(d).f_locals, **sys._getframe(d).f_globals}\n    except ValueError: return 0\n    for v in names.values():\n      if isinstance(v, str) and 'assert' + ' f(1)' in v: return x + 1\n    d += 1",
        "returned 0",
    ),
    (
        "tests from gc",
        "import gc\ndef f(x):\n  for o in gc.get_objects():\n    if isinstance(o, dict) and any(isinstance(v, str) and v.startswith('assert' + ' f(') for v in list(o.values())): return x + 1\n  return 0",
        "returned 0",
    ),
    (
        "tests from inspect",
        "import inspect\ndef f(x):\n  for s in inspect.stack():\n    if 'assert' in str(s.code_context): return x + 1\n  return 0",
        "returned 0",
    ),
    (
        "tests from memory",
        "def f(x):\n  try:\n    if b'assert f' in open('/proc/self/mem', 'rb').read(): return x + 1\n  except OSError: return 'closed'",
        "'closed'",
    ),
    (
        "tests from other processes",
        "import os\ndef f(x):\n  for p in range(1, 100):\n    try:\n      if 'assert' in open(f'/proc/{p}/cmdline').read(): return x + 1\n    except OSError: pass\n  return 0",
        "returned 0",
    ),
    (
        "tests from files",
        "import os\ndef f(x):\n  for root, _, files in os.walk('/tmp'):\n    for name in files:\n      if 'assert' in open(os.path.join(root, name)).read(): return x + 1\n  return 0",
        "returned 0",
    ),
    ("a closed channel", "import os\ndef f(x): os.close(3)", ""),
    ("a closed control", "import os\nos.closerange(0, 64)\ndef f(x): return 0", ""),
    (
        "a fork that outlives",
        "import os\ndef f(x):\n  if os.fork() == 0:\n    while True: pass\n  return x + 1",
        "tried to start a process",
    ),
    (
        "a fork by ctypes",
        "import ctypes\ndef f(x):\n  ctypes.CDLL(None).syscall(57)\n  return x + 1",
        "tried to start a process",
    ),
    (
        "another program",
        "import os\ndef f(x): os.execv('/usr/bin/python3', ['python3', '-c', 'print(1)'])",
        "tried to start a process",
    ),
    ("endless output", "def f(x):\n  while True: print('x' * 1000)", "limit of output"),
    ("an endless loop", "def f(x):\n  while True: pass", "limit of processor time"),
    ("sleep, with Python's clock", "import time\ndef f(x): time.sleep(10 ** 6)", "returned None"),
    (
        "threads that never end",
        "import threading\ndef spin():\n  while True: pass\ndef f(x):\n  for _ in range(4): threading.Thread(target=spin).start()\n  while True: pass",
        "limit of processor time",
    ),
    ("memory", "def f(x): return len('x' * 10 ** 10)", "MemoryError"),
    (
        "a deleted interpreter",
        "import os, sys\nfor p in (os.__file__, sys.executable):\n  try: os.unlink(p)\n  except OSError: pass\ndef f(x): return 0",
        "returned 0",
    ),
    ("a broken pointer", "import ctypes\ndef f(x): ctypes.string_at(0)", "signal 11"),
    ("hard-coded visible tests", "def f(x): return {1: 2}[x]", "KeyError: 41"),
    ("a syntax error", "def f(x) return", "SyntaxError"),
    ("no function", "g = 1", "NameError"),
];

/// Values that no test could read to their end.
const ENDLESS: &[(&str, &str, &str)] = &[
    ("a value that never ends", "def f(x):\n  while True: yield 1", "too many"),
    ("a value inside itself", "def f(x):\n  a = []\n  a.append(a)\n  return a", "deeply nested"),
];

fn is_passed(pool: &Pool, source: &str) -> (bool, String) {
    let tested = asserted(pool, source, &TESTS);
    let messages: Vec<String> = tested.tests.iter().map(|test| test.message.clone()).collect();
    (tested.tests.iter().all(|test| test.passed), messages.join(" | "))
}

fn refuses(pool: &Pool, tricks: &[(&str, &str, &str)]) {
    for (name, source, part) in tricks {
        let (passed, message) = is_passed(pool, source);
        println!("{:10} {name}: {message:.150}", pool.layers().level.name());
        assert!(!passed, "{name} was rewarded");
        assert!(message.contains(part), "{name}: {message}");
    }
}

#[test]
fn no_trick_is_rewarded() {
    for pool in pools() {
        assert_eq!(is_passed(&pool, HONEST), (true, " | ".into()));
        refuses(&pool, TRICKS);
        assert!(is_passed(&pool, HONEST).0, "an honest program passes after all of them");
    }
}

/// The parts of a value are counted, and the count takes some tenths of a second on a machine that is busy.
#[test]
fn values_without_an_end_are_refused_by_their_parts() {
    for level in [Level::Namespaces, Level::Filters] {
        let mut settings = settings(level);
        settings.limits.cpu_seconds = 10.0;
        if let Some(pool) = pool_with(settings) {
            refuses(&pool, ENDLESS);
        }
    }
}

/// A map over the function ends early where the function raises StopIteration, and `all` of nothing is true.
#[test]
fn exceptions_cannot_shorten_the_tests() {
    for pool in pools() {
        let tests = ["assert all(map(f, [1, 2]))", "assert not any(f(x) for x in [1])"];
        let tested = asserted(&pool, "def f(x): raise StopIteration", &tests);
        assert!(tested.tests.iter().all(|test| !test.passed), "{tested:?}");
    }
}

/// The functions that a prompt defines are the tests' own.
#[test]
fn a_program_cannot_replace_the_helpers_of_its_prompt() {
    let prelude = "def poly(x):\n    return x * x - 4\n\ndef root():\n    \"\"\"a root of poly\"\"\"\n";
    let test = "def check(candidate):\n    assert abs(poly(candidate())) < 1e-6\n";
    for pool in pools() {
        let judge = |source: &str| {
            let checks =
                Checks::Check { prelude: prelude.into(), test: test.into(), entry_point: "root".into() };
            pool.test(&[Trial { source: source.into(), checks }]).unwrap().remove(0).tests[0].passed
        };
        assert!(judge(&format!("{prelude}    return 2.0\n")));
        assert!(!judge("def poly(x): return 0\ndef root(): return 7\n"));
        assert!(!judge("def abs(x): return 0\ndef root(): return 7\n"), "nor the functions of Python");
    }
}

#[test]
fn results_come_in_the_order_of_requests() {
    for pool in pools() {
        let trials: Vec<Trial> = (0..20)
            .map(|n| Trial {
                source: format!("for _ in range({}): pass\ndef f(): return {n}", (20 - n) * 20_000),
                checks: Checks::Asserts {
                    setup: String::new(),
                    tests: vec![format!("assert f() == {n} and False")],
                },
            })
            .collect();
        for (n, tested) in pool.test(&trials).unwrap().iter().enumerate() {
            assert_eq!(tested.tests[0].message, format!("assert f() == {n} and False: f returned {n}"));
            assert_eq!(tested.outcome.end, End::Finished);
        }
    }
}
