"""Load of `stapo serve`: many runs, many pages on one server. Prints latencies and the server's memory.

    python3 bench/serve/load.py [--stapo target/release/stapo] [--runs 1000] [--steps 20000] [--pages 20]

A page is a stream of events, the list of runs, and then a run with all its curves; one run grows meanwhile. All files
are made in a temporary folder (1,000 runs of 20,000 steps are links of a few files to save disk space: hard links, which
the server reads as plain files).
"""

import argparse
import json
import os
import random
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

KEYS = ["accuracy", "reward_mean", "entropy_mean", "loss", "gradient_norm", "clip_fraction", "learning_rate"]
YESTERDAY = time.time() - 86400


def line(step):
    numbers = {key: random.random() for key in KEYS}
    quantiles = {f"q{q:02}": random.random() for q in (5, 25, 50, 75, 95)}
    rates = {"rollout": 1e4, "update": 2e4}
    return json.dumps({"schema": 1, "step": step, **numbers, "n_tokens": 1000, "n_silenced": 3, "n_candidates": 9,
                       "entropy_quantiles": quantiles, "tokens_per_second": rates, "response_tokens_mean": 30.0}) + "\n"


def make_runs(folder, n_runs, n_steps):
    """A few files of metrics, linked into every run."""
    originals = []
    for seed in range(4):
        random.seed(seed)
        path = folder / f"metrics-{seed}"
        path.write_text("".join(line(step) for step in range(1, n_steps + 1)))
        originals.append(path)
    runs = folder / "runs"
    for idx in range(n_runs):
        run = runs / f"run-{idx:04}"
        run.mkdir(parents=True)
        (run / "plan.toml").write_text(f"name = 'r'\nseed = {idx}\nsteps = {n_steps}\n[update]\nlearning_rate = {1e-4 * (idx % 7 + 1)}\n")
        os.link(originals[idx % 4], run / "metrics.jsonl")
        for path in (run / "metrics.jsonl", run / "plan.toml"):
            os.utime(path, (YESTERDAY, YESTERDAY))
    live = runs / "live"
    live.mkdir()
    (live / "plan.toml").write_text(f"name = 'live'\nseed = 1\nsteps = {n_steps}\n")
    (live / "metrics.jsonl").write_text(line(1))
    return runs, live / "metrics.jsonl"


class Server:
    def __init__(self, stapo, runs):
        self.process = subprocess.Popen([stapo, "serve", str(runs), "--port", "0", "--no-token"], stdout=subprocess.PIPE, text=True)
        said = self.process.stdout.readline()
        host, port = said.split("http://")[1].split("/")[0].split(":")
        self.address = (host, int(port))

    def connect(self, target):
        connection = socket.create_connection(self.address)
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return connection

    def ask(self, target):
        """Seconds and bytes of an answer."""
        began = time.perf_counter()
        connection = self.connect(target)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        body = b"".join(parts).split(b"\r\n\r\n", 1)
        assert b" 200 " in body[0].split(b"\r\n")[0], body[0][:200]
        return time.perf_counter() - began, len(body[1])

    def memory_mib(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return {key: int(status.split(key + ":")[1].split()[0]) / 1024 for key in ("VmRSS", "VmHWM")}


class Page(threading.Thread):
    """Listens as a page does, and notes when it heard of each step of the growing run."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.connection = server.connect("/stream?since=0")
        self.heard = {}

    def run(self):
        for text in self.connection.makefile("r"):
            if not text.startswith("data: "):
                continue
            for row in json.loads(text[6:])["rows"]:
                if row["id"] == "live":
                    self.heard.setdefault(row["step"], time.perf_counter())


def shown(name, seconds):
    seconds = sorted(seconds)
    print(f"{name:<44} median {1e3 * seconds[len(seconds) // 2]:8.1f} ms   worst {1e3 * seconds[-1]:8.1f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stapo", default="target/release/stapo")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--pages", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs, live = make_runs(Path(folder), arguments.runs, arguments.steps)
        began = time.perf_counter()
        server = Server(arguments.stapo, runs)
        print(f"{arguments.runs} runs of {arguments.steps} steps, {arguments.pages} pages")
        print(f"{'start, with the first look at every run':<44} {1e3 * (time.perf_counter() - began):8.1f} ms")
        print(f"{'memory after the start':<44} {server.memory_mib()['VmRSS']:8.1f} MiB")
        lists = [server.ask("/api/runs") for _ in range(5)]
        shown(f"list of runs, {lists[0][1] / 1024:.0f} KiB", [seconds for seconds, _ in lists])
        pages = [Page(server) for _ in range(arguments.pages)]
        for page in pages:
            page.start()
        query = "".join(f"&key={key}" for key in KEYS)
        first, again, sizes = [], [], []
        for idx in range(arguments.pages):
            first.append(server.ask(f"/api/series?run=run-{idx:04}&points=600{query}")[0])
            seconds, n_bytes = server.ask(f"/api/series?run=run-{idx:04}&points=600{query}")
            again.append(seconds)
            sizes.append(n_bytes)
        shown("a run's curves, first time", first)
        shown(f"a run's curves again, {sizes[0] / 1024:.0f} KiB", again)
        delays = []
        for step in range(2, 12):
            with live.open("a") as file:
                file.write(line(step))
            written = time.perf_counter()
            time.sleep(1.2)
            delays += [page.heard.get(step, float("inf")) - written for page in pages]
        shown(f"from a line written to {arguments.pages} pages told", delays)
        seconds, n_bytes = server.ask(f"/api/series?run=live&points=600&after=10{query}")
        print(f"{'one new step of a run that is shown':<44} {n_bytes / 1024:8.2f} KiB")
        memory = server.memory_mib()
        print(f"{'memory at the end, and at most':<44} {memory['VmRSS']:8.1f} MiB {memory['VmHWM']:8.1f} MiB")
        before = live.read_bytes()
        server.process.kill()
        server.process.wait()
        print("killing the server changed the run" if live.read_bytes() != before else "killing the server touched no run")


if __name__ == "__main__":
    main()
