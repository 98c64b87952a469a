"""Streams a run folder to W&B or MLflow during the run. The trainer does not depend on it.

    from stapo.callbacks import Follower, WandbSink

    Follower("runs/first", WandbSink(project="stapo")).follow()

The follower reads `metrics.jsonl` and `events.jsonl` as they grow. A line counts once it is whole; a file that a resume
rewrote is read from its beginning, and steps that were sent already are not sent again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Follower", "MlflowSink", "Sink", "WandbSink", "flat_numbers"]

# Events that a person should look at.
_ALARMS = ("warning", "canary", "checkpoint_refused")


class Sink(Protocol):
    """What a follower writes to."""

    def start(self, name: str, folder: Path, plan: dict[str, Any]) -> int:
        """Opens the run at the service; returns the last step that it holds already, 0 where it is new."""

    def metrics(self, step: int, numbers: dict[str, float]) -> None: ...

    def event(self, event: dict[str, Any]) -> None: ...

    def finish(self, reason: str | None) -> None:
        """`reason` is that of the run's stop, None if the follower stopped first."""


class Follower:
    """Follows one run folder and writes to one sink."""

    def __init__(self, run: str | Path, sink: Sink, every_seconds: float = 2.0) -> None:
        self.folder = Path(run)
        if not (self.folder / "plan.toml").is_file():
            raise FileNotFoundError(f"run {run}: no plan.toml in it\nhint: name a run folder, such as runs/first")
        self.sink = sink
        self.every_seconds = every_seconds
        self.last_step = 0
        self.stop_reason: str | None = None
        self._metrics = _Lines(self.folder / "metrics.jsonl")
        self._events = _Lines(self.folder / "events.jsonl")
        self._n_events = 0
        self._is_started = False

    def poll(self) -> int:
        """Sends what is new; returns the number of lines sent."""
        if not self._is_started:
            self.last_step = self.sink.start(self.folder.resolve().name, self.folder, _plan(self.folder))
            self._is_started = True
        # Events first: whoever wrote a stop had written all metrics before, so these are read afterwards.
        n_sent = self._send_events()
        for line in self._metrics.read():
            step = line.get("step")
            if isinstance(step, int) and step > self.last_step:
                self.sink.metrics(step, flat_numbers(line))
                self.last_step = step
                n_sent += 1
        return n_sent

    def follow(self, idle_seconds: float | None = None) -> str | None:
        """Sends until the run stops; returns the reason of its stop.

        A run that was killed leaves no stop: `idle_seconds` without a new line then end the following, with None.
        """
        last_news = time.monotonic()
        try:
            while True:
                if self.poll() > 0:
                    last_news = time.monotonic()
                if self.stop_reason is not None:
                    break
                if idle_seconds is not None and time.monotonic() - last_news > idle_seconds:
                    break
                time.sleep(self.every_seconds)
        finally:
            self.sink.finish(self.stop_reason)
        return self.stop_reason

    def _send_events(self) -> int:
        events = self._events.read()
        if self._events.was_rewritten:
            # Events are only ever added; a file without its torn last line is read again from the beginning.
            events = events[self._n_events :]
        self._n_events += len(events)
        for event in events:
            self.sink.event(event)
            kind = event.get("event")
            if kind == "stop":
                self.stop_reason = str(event.get("reason", "unknown"))
            elif kind in ("start", "resume"):
                self.stop_reason = None
        return len(events)


class WandbSink:
    """Writes to Weights & Biases; keyword arguments are those of `wandb.init`."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.run: Any = None

    def start(self, name: str, folder: Path, plan: dict[str, Any]) -> int:
        import wandb

        settings = {"name": name, "config": plan, "resume": "allow", "job_type": "stapo"} | self.settings
        self.run = wandb.init(**settings)
        self.run.config.update({"run_folder": str(folder.resolve())}, allow_val_change=True)
        return max(int(self.run.step) - 1, 0) if self.run.resumed else 0

    def metrics(self, step: int, numbers: dict[str, float]) -> None:
        # Without `commit` W&B holds a step back until the next one.
        self.run.log(numbers, step=step, commit=True)

    def event(self, event: dict[str, Any]) -> None:
        kind = event.get("event", "event")
        if kind in _ALARMS:
            self.run.alert(title=f"{self.run.name}: {kind}", text=f"step {event.get('step')}: {event.get('text', '')}")
        self.run.summary["last_event"] = f"{event.get('time', '')} {kind} {event.get('text', '')}".strip()

    def finish(self, reason: str | None) -> None:
        if self.run is None:
            return
        self.run.summary["stop_reason"] = reason or "the follower stopped first"
        self.run.finish(exit_code=1 if reason == "error" else 0)


class MlflowSink:
    """Writes to the MLflow server or folder of `uri`, or of MLflow's own environment variables."""

    def __init__(self, experiment: str = "stapo", uri: str | None = None) -> None:
        self.experiment = experiment
        self.uri = uri
        self.client: Any = None
        self.run_id = ""
        self._events: list[str] = []

    def start(self, name: str, folder: Path, plan: dict[str, Any]) -> int:
        from mlflow import MlflowClient

        self.client = MlflowClient(self.uri)
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self.client.create_experiment(self.experiment)
        address = str(folder.resolve())
        quoted = address.replace("'", "''")
        earlier = self.client.search_runs([experiment], f"tags.stapo_run = '{quoted}'", max_results=1)
        if earlier:
            self.run_id = earlier[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            return int(earlier[0].data.tags.get("stapo_last_step", 0))
        self.run_id = self.client.create_run(experiment, tags={"stapo_run": address}, run_name=name).info.run_id
        for key, value in _flat(plan).items():
            self.client.log_param(self.run_id, key, str(value)[:500])
        return 0

    def metrics(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, step) for key, value in numbers.items()]
        self.client.log_batch(self.run_id, metrics=metrics, tags=[RunTag("stapo_last_step", str(step))])

    def event(self, event: dict[str, Any]) -> None:
        self._events.append(json.dumps(event))
        self.client.set_tag(self.run_id, "stapo_last_event", f"{event.get('event')} {event.get('text', '')}"[:500])

    def finish(self, reason: str | None) -> None:
        if self.client is None:
            return
        self.client.log_text(self.run_id, "\n".join(self._events) + "\n", "events.jsonl")
        status = {None: "KILLED", "error": "FAILED", "signal": "KILLED"}.get(reason, "FINISHED")
        self.client.set_tag(self.run_id, "stapo_stop_reason", reason or "the follower stopped first")
        self.client.set_terminated(self.run_id, status=status)


class _Lines:
    """The JSON objects of a file of lines that another process appends to, and now and then writes anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.was_rewritten = False
        self._offset = 0
        self._inode: int | None = None
        self._tail = b""

    def read(self) -> list[dict[str, Any]]:
        """The objects of the lines that are whole now and were not read before, or all of them after a rewrite."""
        self.was_rewritten = False
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if self._inode is not None and self._is_other(file, status):
                    self._offset, self._tail = 0, b""
                    self.was_rewritten = True
                self._inode = status.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            self._offset += len(whole)
            self._tail = whole[-64:]
        return [found for line in whole.splitlines() if (found := self._parse(line)) is not None]

    def _is_other(self, file: Any, status: os.stat_result) -> bool:
        """Whether the file is another one, or no longer begins with what was read."""
        if status.st_ino != self._inode or status.st_size < self._offset:
            return True
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) != self._tail

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            print(f"warning: {self.path}: a line that is no record was left out", file=sys.stderr)
            return None
        return found


def flat_numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record, with the names of nested ones joined by `/`; texts and lists are left out.

    >>> flat_numbers({"schema": 1, "step": 3, "loss": 0.5, "entropy": {"p50": 0.1}, "warnings": ["x"], "ok": True})
    {'loss': 0.5, 'entropy/p50': 0.1}
    """
    numbers = {key: value for key, value in _flat(record).items() if isinstance(value, (int, float))}
    return {
        key: float(value)
        for key, value in numbers.items()
        if not isinstance(value, bool) and key not in ("schema", "step")
    }


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _plan(folder: Path) -> dict[str, Any]:
    """The run's plan; as one text before Python 3.11, which reads no TOML."""
    text = (folder / "plan.toml").read_text(encoding="utf-8")
    try:
        import tomllib
    except ImportError:
        return {"plan": text}
    return tomllib.loads(text)
