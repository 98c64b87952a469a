"""together.py PID ... --end TIME --max N [--drop FOLDER ...]: lets the runs of several experiments end at the same step.

It watches the metrics of the runs, which are children of the processes PID, finds the last step that the slowest of them
reaches by TIME (seconds since the epoch), and interrupts every run while it makes that step. It removes checkpoints of
step 0, and of the runs after --drop all but the newest."""
import argparse, os, shutil, signal, time

arguments = argparse.ArgumentParser()
arguments.add_argument("parents", nargs="+")
arguments.add_argument("--end", type=float)
arguments.add_argument("--max", type=int)
arguments.add_argument("--drop", nargs="*", default=[])
args = arguments.parse_args()


def children():
    """The processes of the runs, by run folder."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline", "rb").read().decode().split("\0")
            parent = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1]
        except (OSError, IndexError, UnicodeDecodeError):
            continue
        if "train" in words and "--out" in words and parent in args.parents:
            found[words[words.index("--out") + 1]] = int(pid)
    return found


def n_steps(run):
    try:
        return open(f"{run}/metrics.jsonl", "rb").read().count(b"\n")
    except OSError:
        return 0


def clean(run):
    try:
        names = sorted(name for name in os.listdir(f"{run}/checkpoints") if name[5:].isdigit())
    except OSError:
        return
    old = names[:-1] if run in args.drop else []
    for name in {*old, *(name for name in names if int(name[5:]) == 0)}:
        shutil.rmtree(f"{run}/checkpoints/{name}", ignore_errors=True)


began, first, asked, known, chosen = time.time(), {}, set(), set(), None
while True:
    runs, now = children(), time.time()
    known |= set(runs)
    if (known and not runs) or now > args.end + 40:
        break
    done = {run: n_steps(run) for run in runs}
    for run, n in done.items():
        if n >= 1:
            first.setdefault(run, (now, n))
        if n >= 2:
            clean(run)
    if chosen is None and runs and all(run in first for run in runs):
        reach = []
        for run, n in done.items():
            since, n_first = first[run]
            pace = (now - since) / (n - n_first) if n > n_first + 2 else None
            reach.append(n + (args.end - now) / pace if pace else args.max)
        n = max(min(args.max, int(min(reach))), 2)
        if max(done.values()) >= n - 2:
            chosen = max(n, max(done.values()) + 1)
            print(f"guard: {chosen} steps, decided after {now - began:.0f} s at {done}", flush=True)
    for run, pid in runs.items():
        if chosen and chosen < args.max and run not in asked and n_steps(run) >= chosen - 1:
            time.sleep(0.1)
            os.kill(pid, signal.SIGINT)
            asked.add(run)
    time.sleep(0.1)
print(f"guard: ended after {time.time() - began:.0f} s", {run: n_steps(run) for run in sorted(known)}, flush=True)
