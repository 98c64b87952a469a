"""The interpreter inside a jail: it forks one child for every program.

Standard input is a socket to the pool. A message "run" carries three descriptors (channel, output, errors) for a child;
"kill" ends the child. The zygote answers with one line of JSON when the child has ended. The child talks with the pool by
lines of JSON on its channel, and holds neither the zygote's socket nor anything of earlier programs.
"""
import ctypes
import datetime
import errno
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
import traceback
import types

CHANNEL = 3
# Modules that many programs import; a fork has them at no cost.
USUAL = ("bisect", "copy", "functools", "heapq", "itertools", "math", "operator", "re", "string", "typing")
START_OF_TIME = 1_735_732_800  # 2025-01-01 12:00 UTC


class Channel:
    """Lines of JSON to and from the pool."""

    def __init__(self):
        self.buffer = bytearray()

    def read(self):
        while True:
            end = self.buffer.find(b"\n")
            if end >= 0:
                line = bytes(self.buffer[:end])
                del self.buffer[: end + 1]
                return json.loads(line)
            piece = os.read(CHANNEL, 1 << 16)
            if not piece:
                os._exit(0)
            self.buffer += piece

    def write(self, message):
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(CHANNEL, line) :]


# The program's side.


class Handles:
    """Values of the program that stay in its process, by number."""

    def __init__(self, names):
        self.names = names
        self.values = []
        self.numbers = {}

    def number(self, value):
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.values)
            self.values.append(value)
        return [self.numbers[id(value)], type(value).__name__[:100]]

    def value(self, number, _kind=None):
        return self.names[number] if isinstance(number, str) else self.values[number]


def serve(channel, source):
    """Defines what the program defines, and then answers calls until the pool ends this process."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    load(channel, source, module, "program")
    names = [name for name in vars(module) if not name.startswith("__")][:10_000]
    channel.write({"names": names})
    handles = Handles(vars(module))
    while True:
        request = channel.read()
        try:
            result = answer(request, handles)
            reply = {"value": Encoder(handles.number).encode(result)}
        except BaseException as error:  # Whatever a program raises, tests go on.
            reply = {"raised": described(error)}
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:
                pass
        channel.write(reply)


def answer(request, handles):
    target = handles.value(request["target"])
    args = [decode(arg, handles.value) for arg in request.get("args", [])]
    if request["do"] == "call":
        kwargs = {key: decode(value, handles.value) for key, value in request["kwargs"].items()}
        return target(*args, **kwargs)
    if request["do"] == "bool":
        return bool(target)
    if request["do"] == "get":
        return getattr(target, request["attribute"])
    return setattr(target, request["attribute"], args[0])


def load(channel, source, module, name):
    """Runs a program's source; reports what it raises, and ends then."""
    module.__name__ = name
    try:
        exec(compile(source, "<program>", "exec"), vars(module))
    except SystemExit as error:
        if name == "program":
            channel.write({"raised": described(error)})
            os._exit(1)
        leave(error.code)
    except BaseException as error:
        channel.write({"raised": described(error)})
        print_traceback(error)
        os._exit(1)


def described(error):
    """Type, text and number of an exception, in bounded length."""
    try:
        text = str(error)[:500]
    except BaseException:
        text = ""
    return [type(error).__name__[:100], text, getattr(error, "errno", None) if isinstance(error, OSError) else None]


def print_traceback(error):
    try:
        frames = traceback.extract_tb(error.__traceback__)
        shown = [frame for frame in frames if frame.filename == "<program>"]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown[-5:])]
        sys.stderr.write("".join(lines) + f"{type(error).__name__}: {str(error)[:500]}\n")
        sys.stderr.flush()
    except BaseException:
        pass


def leave(code):
    """Ends as an interpreter ends: threads are waited for and buffers written."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = 1
    os._exit((code or 0) & 255)


def run_script(channel, source):
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    load(channel, source, module, "__main__")
    leave(0)


def run_command(request):
    """Becomes a command of another language; a source is written first."""
    for path, text in request["files"].items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/tmp", "TMPDIR": os.getcwd()}
    if request["is_program"]:
        install("command")
    os.execve(request["command"][0], request["command"], environment)


# What every child does before it runs anything of a model.


def limit(limits):
    def lower(which, value):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))

    lower(resource.RLIMIT_AS, limits["memory_mib"] << 20)
    lower(resource.RLIMIT_FSIZE, limits["tmp_mib"] << 20)
    # The zygote watches the exact time; this limit, by ticks of the kernel, is the second line.
    lower(resource.RLIMIT_CPU, 2 * int(limits["cpu_seconds"]) + 2)
    lower(resource.RLIMIT_STACK, 64 << 20)


class Program(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]


def compiled(filters):
    """Filters in the kernel's form. The arrays must stay alive until they are installed."""
    arrays = {name: (Instruction * len(one))(*(Instruction(*parts) for parts in one)) for name, one in filters.items()}
    return arrays, {name: Program(len(array), ctypes.addressof(array)) for name, array in arrays.items()}


def install(name):
    """Gives up system calls for good."""
    if CONFIG["has_seccomp"] and PRCTL(22, 2, ctypes.byref(FILTERS[name]), 0, 0) != 0:  # PR_SET_SECCOMP, a filter
        os._exit(3)


def make_deterministic():
    """Once, in the zygote: every child begins with the same state."""
    os.urandom = random._urandom = random.Random(CONFIG["seed"]).randbytes
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(CONFIG["seed"] % (1 << 32))
    if CONFIG["clock"] == "frozen":
        freeze_clock()


def open_streams():
    """Once, in the zygote: children put their own descriptors in the places 0 to 2."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def freeze_clock():
    """A clock that moves on by a millisecond with each reading, so that loops that wait for it end."""
    nanoseconds = START_OF_TIME * 10**9

    def read():
        nonlocal nanoseconds
        nanoseconds += 10**6
        return nanoseconds

    def sleep(seconds):
        nonlocal nanoseconds
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        nanoseconds += int(seconds * 10**9)

    time.sleep = sleep
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        setattr(time, name, lambda: read() / 10**9)
        setattr(time, name + "_ns", read)

    class Date(datetime.date):
        @classmethod
        def today(cls):
            return cls.fromtimestamp(read() // 10**9)

    class DateTime(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(read() / 10**9, tz)

        @classmethod
        def utcnow(cls):
            return cls.utcfromtimestamp(read() / 10**9)

        @classmethod
        def today(cls):
            return cls.now()

    for kind, name in ((Date, "date"), (DateTime, "datetime")):
        kind.__module__, kind.__name__, kind.__qualname__ = "datetime", name, name
        setattr(datetime, name, kind)


def child(descriptors):
    null = os.open("/dev/null", os.O_RDWR)
    for source, target in zip((null, descriptors[1], descriptors[2], descriptors[0]), range(4)):
        if source <= CHANNEL:
            source = os.dup2(source, 10 + target)
        os.dup2(source, target)
    os.closerange(CHANNEL + 1, 256)
    # Signals that a supervisor may have ignored or handled act as usual.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    channel = Channel()
    request = channel.read()
    if request["do"] == "script" or request["do"] == "command":
        file = os.memfd_create("stdin")
        view = memoryview(request["stdin"].encode())
        while view:
            view = view[os.write(file, view) :]
        os.lseek(file, 0, os.SEEK_SET)
        os.dup2(file, 0)
        os.close(file)
    limit(CONFIG["limits"])
    if request["do"] == "command":
        os.close(CHANNEL)
        run_command(request)
    install("program")
    random.seed(CONFIG["seed"])  # Python's own hook after a fork has made it random.
    if request["do"] == "script":
        run_script(channel, request["source"])
    elif request["do"] == "serve":
        serve(channel, request["source"])
    else:
        run_tests(channel)


# The zygote.


def clean(folder, kept):
    """Empties a folder. Returns whether it could: a program may have made a tree that is too deep to walk."""
    try:
        for entry in os.scandir(folder):
            if entry.name in kept:
                continue
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                clean(entry.path, ())
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)
        return True
    except (OSError, RecursionError):
        return False


def watch(control, pid):
    """Waits for the child's end, and ends it when the pool says so or is gone."""
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(control, select.POLLIN)
    clock = (~pid << 3) | 2  # The clock of a process's exact processor time, as clock_getcpuclockid(3) makes it.
    while True:
        left = CONFIG["limits"]["cpu_seconds"] - time.clock_gettime(clock)
        ready = [descriptor for descriptor, _ in poll.poll(max(1, 1000 * left + 1))]
        if process in ready:
            break
        if not ready:
            if left < 0:
                os.kill(pid, signal.SIGKILL)
                poll.poll()
            continue
        if not control.recv(64):
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
        os.kill(pid, signal.SIGKILL)
    os.close(process)
    _, status, usage = os.wait4(pid, 0)
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    return {"signal": killed, "exit": code, "cpu_seconds": usage.ru_utime + usage.ru_stime, "is_clean": True}


def main():
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=0)
    try:
        for name in (*USUAL, *CONFIG["imports"]):
            __import__(name)
    except BaseException as error:
        control.send(json.dumps({"error": f"import {name}: {type(error).__name__}: {error}"[:1000]}).encode())
        os._exit(2)
    make_deterministic()
    open_streams()
    folder = CONFIG["writes"]
    kept = os.listdir(folder) if folder else []
    gc.collect()
    gc.freeze()
    control.send(b'{"ready": true}')
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 8)
        if not message:
            os._exit(0)
        if not message.startswith(b"run"):
            continue
        pid = os.fork()
        if pid == 0:
            try:
                child(descriptors)
            except BaseException:
                traceback.print_exc()
            os._exit(4)
        for descriptor in descriptors:
            os.close(descriptor)
        report = watch(control, pid)
        if message != b"run and keep" and folder:
            report["is_clean"] = clean(folder, kept)
        control.send(json.dumps(report).encode())


CONFIG = json.loads(sys.argv[1])
ARRAYS, FILTERS = compiled(CONFIG["filters"])
PRCTL = ctypes.CDLL(None).prctl
sys.path = [path for path in sys.path if path]
sys.argv = [""]
