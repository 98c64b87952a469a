"""`python -m stapo.follow RUN --to wandb|mlflow`: streams a run folder to a service during the run."""

from __future__ import annotations

import argparse
import sys

from stapo.callbacks import Follower, MlflowSink, WandbSink


def main(arguments: list[str] | None = None) -> int:
    """Follows the run that the arguments name until it stops, and returns an exit status."""
    parser = argparse.ArgumentParser(prog="python -m stapo.follow", description=__doc__)
    parser.add_argument("run", help="a run folder, such as runs/first")
    parser.add_argument("--to", required=True, choices=["wandb", "mlflow"])
    parser.add_argument("--project", default="stapo", help="project of W&B, or experiment of MLflow")
    parser.add_argument("--uri", help="MLflow's server or folder; MLFLOW_TRACKING_URI by default")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="time between two looks")
    parser.add_argument("--idle", type=float, metavar="SECONDS", help="stop after this long without a new line")
    args = parser.parse_args(arguments)
    sink = WandbSink(project=args.project) if args.to == "wandb" else MlflowSink(args.project, args.uri)
    try:
        follower = Follower(args.run, sink, args.every)
        reason = follower.follow(args.idle)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"error: {error}\nhint: pip install {args.to}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    print(
        f"{follower.last_step} steps sent; the run stopped: {reason}" if reason else f"{follower.last_step} steps sent"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
