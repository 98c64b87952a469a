"""A run folder that grows, is torn, resumed and stopped, and a follower that looks after each part."""

import json
import os
import threading
import time

from stapo.callbacks import Follower


def metrics_line(step):
    return (
        json.dumps({"schema": 1, "step": step, "reward_mean": step / 10, "entropy": {"p50": 0.5}, "warnings": []})
        + "\n"
    )


def event_line(kind, step, **more):
    return json.dumps({"schema": 1, "time": "2026-01-01T00:00:00Z", "event": kind, "step": step} | more) + "\n"


class Run:
    """A run folder as a trainer writes it."""

    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.folder = folder
        (folder / "plan.toml").write_text("seed = 0\n[rollout]\ngroup_size = 8\n")
        self.append("events.jsonl", event_line("start", 0))

    def append(self, name, text):
        with open(self.folder / name, "a") as file:
            file.write(text)

    def rewrite(self, name, text):
        """As a resume does: the file appears anew by a rename."""
        (self.folder / "new").write_text(text)
        os.rename(self.folder / "new", self.folder / name)


class Noted:
    """Hands everything on to a sink, and notes it."""

    def __init__(self, sink):
        self.sink = sink
        self.steps = []
        self.events = []

    def start(self, *arguments):
        return self.sink.start(*arguments)

    def metrics(self, step, numbers):
        self.steps.append((step, numbers["reward_mean"], numbers["entropy/p50"]))
        self.sink.metrics(step, numbers)

    def event(self, event):
        self.events.append(event["event"])
        self.sink.event(event)

    def finish(self, reason):
        self.reason = reason
        self.sink.finish(reason)


def story(folder, sink):
    """What happens to a run, with a look after each part."""
    run = Run(folder)
    noted = Noted(sink)
    follower = Follower(run.folder, noted, every_seconds=0.05)
    assert follower.poll() == 1  # The start; there are no metrics yet.
    run.append("metrics.jsonl", metrics_line(1) + metrics_line(2) + metrics_line(3)[:20])
    assert follower.poll() == 2, "a torn line counts when it is whole"
    run.append("metrics.jsonl", metrics_line(3)[20:])
    assert follower.poll() == 1
    assert follower.poll() == 0
    # The process is killed in a line, and a resume goes back to step 2 and writes the file anew.
    run.append("metrics.jsonl", metrics_line(4)[:10])
    run.append("events.jsonl", event_line("warning", 3, text="entropy is low") + '{"torn')
    follower.poll()
    run.rewrite("metrics.jsonl", metrics_line(1) + metrics_line(2))
    run.rewrite("events.jsonl", event_line("start", 0) + event_line("warning", 3, text="entropy is low"))
    run.append("events.jsonl", event_line("resume", 2))
    follower.poll()

    def rest():
        for step in range(3, 7):
            run.append("metrics.jsonl", metrics_line(step))
            time.sleep(0.1)
        run.append("events.jsonl", event_line("stop", 6, reason="done"))

    writer = threading.Thread(target=rest)
    writer.start()
    assert follower.follow(idle_seconds=60) == "done"
    writer.join()
    assert noted.steps == [(step, step / 10, 0.5) for step in range(1, 7)], noted.steps
    assert noted.events == ["start", "warning", "resume", "stop"], noted.events
