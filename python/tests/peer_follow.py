"""The follower against the real W&B (offline) and MLflow (a folder): a run that grows, is torn, resumed and stopped.

Run by peers.sh as `python peer_follow.py FOLDER`.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

from stapo.callbacks import Follower, MlflowSink, WandbSink  # noqa: E402


def metrics_line(step):
    return json.dumps({"schema": 1, "step": step, "reward_mean": step / 10, "entropy": {"p50": 0.5}, "warnings": []}) + "\n"


def event_line(kind, step, **more):
    return json.dumps({"schema": 1, "time": "2026-01-01T00:00:00Z", "event": kind, "step": step} | more) + "\n"


class Run:
    """A run folder as a trainer writes it."""

    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.folder = folder
        (folder / "plan.toml").write_text('seed = 0\n[rollout]\ngroup_size = 8\n')
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
        # W&B's summary cannot be read once a run is finished.
        if isinstance(self.sink, WandbSink):
            summary = self.sink.run.summary
            assert (summary["reward_mean"], summary["entropy/p50"]) == (0.6, 0.5), dict(summary)
            assert "stop" in summary["last_event"], dict(summary)
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


def main():
    folder = Path(sys.argv[1])
    wandb_folder = folder / "wandb-files"
    wandb_folder.mkdir(parents=True)
    sink = WandbSink(project="stapo", dir=str(wandb_folder))
    story(folder / "to-wandb", sink)
    assert list(wandb_folder.rglob("*.wandb")), "W&B wrote no file"
    print("follow wandb: 6 steps of a torn, resumed and stopped run, each once, in W&B's offline file", flush=True)

    uri = (folder / "mlruns").absolute().as_uri()
    sink = MlflowSink("stapo", uri)
    story(folder / "to-mlflow", sink)
    history = sink.client.get_metric_history(sink.run_id, "reward_mean")
    assert [(point.step, point.value) for point in history] == [(step, step / 10) for step in range(1, 7)]
    stored = sink.client.get_run(sink.run_id)
    assert stored.info.status == "FINISHED" and stored.data.params["rollout/group_size"] == "8"
    # Another follower of the same run goes on where the first one stopped.
    again = MlflowSink("stapo", uri)
    Follower(folder / "to-mlflow", again).follow()
    assert again.run_id == sink.run_id
    assert len(again.client.get_metric_history(again.run_id, "reward_mean")) == 6
    print("follow mlflow: the same in MLflow's folder; a second follower sends nothing twice", flush=True)


main()
