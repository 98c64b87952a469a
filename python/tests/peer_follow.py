"""The follower against the real W&B (offline) and MLflow (a folder).

Run by peers.sh as `python peer_follow.py FOLDER`.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

from follow_story import story  # noqa: E402
from stapo.callbacks import Follower, MlflowSink, WandbSink  # noqa: E402


class CheckedWandbSink(WandbSink):
    def finish(self, reason):
        # W&B's summary cannot be read once a run is finished.
        summary = self.run.summary
        assert (summary["reward_mean"], summary["entropy/p50"]) == (0.6, 0.5), dict(summary)
        assert "stop" in summary["last_event"], dict(summary)
        super().finish(reason)


def main():
    folder = Path(sys.argv[1])
    wandb_folder = folder / "wandb-files"
    wandb_folder.mkdir(parents=True)
    sink = CheckedWandbSink(project="stapo", dir=str(wandb_folder))
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
