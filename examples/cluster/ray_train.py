"""Trains with Ray: a placement group, one actor for each rank, and restarts by resume.

    python examples/cluster/ray_train.py --ranks 8 --gpus-per-rank 1 runs/stapo-1.7b configs/qwen3-1.7b.toml

Ray places the ranks and watches them; the ranks are ordinary `stapo train` processes that find each other by RANK,
WORLD_SIZE and MASTER_ADDR. When a rank or its machine is lost, all ranks end within seconds; the program then asks Ray
for as many ranks as it still has room for, at least --min-ranks, and goes on from the last checkpoint. The result has the
same bits as without the loss. Ray 2.x; the run folder must be seen by all machines.
"""

import argparse
import os
import secrets
import socket
import subprocess
import sys
import time

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RANK_SH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank.sh")


class Rank:
    """One rank on the machine where Ray placed it."""

    def meeting_point(self):
        """An address of this machine and a free port, for rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def node(self):
        return ray.get_runtime_context().get_node_id()

    def train(self, environment, command, folder):
        """Runs the rank to its end; returns its exit status and what it said last."""
        # Ray gives each actor its own GPU through CUDA_VISIBLE_DEVICES, so every rank uses the first that it sees.
        process = subprocess.Popen(
            ["bash", *command],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        _, said = process.communicate()
        return process.returncode, said[-2000:]


def attempt(n_ranks, args):
    """Runs all ranks once; True where every one of them ended well."""
    bundle = {"CPU": args.cpus_per_rank}
    if args.gpus_per_rank:
        bundle["GPU"] = args.gpus_per_rank
    group = placement_group([bundle] * n_ranks, strategy="PACK")
    actors = []
    try:
        ray.get(group.ready(), timeout=args.wait)
        for bundle_idx in range(n_ranks):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle_idx)
            options = {"num_cpus": args.cpus_per_rank, "num_gpus": args.gpus_per_rank, "scheduling_strategy": where}
            actors.append(ray.remote(Rank).options(**options).remote())
        nodes = ray.get([actor.node.remote() for actor in actors])
        address, port = ray.get(actors[0].meeting_point.remote())
        token = secrets.token_hex(16)
        ends = []
        for rank, actor in enumerate(actors):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(n_ranks),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "STAPO_RANKS_TOKEN": token,
            }
            ends.append(actor.train.remote(environment, [RANK_SH, args.run, *args.stapo], os.getcwd()))
        print(f"{n_ranks} ranks, rank 0 at {address}:{port}", flush=True)
        statuses = ray.get(ends)
        for rank, (status, said) in enumerate(statuses):
            if status != 0:
                print(f"rank {rank} ended with status {status}: {said.strip()}", flush=True)
        return all(status == 0 for status, _ in statuses)
    except RayError as error:
        print(f"an actor was lost: {type(error).__name__}", flush=True)
        return False
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def room(args):
    """The ranks that the cluster has resources for, at most as many as were asked for."""
    resources = ray.cluster_resources()
    fits = int(resources.get("CPU", 0) // args.cpus_per_rank)
    if args.gpus_per_rank:
        fits = min(fits, int(resources.get("GPU", 0) // args.gpus_per_rank))
    return min(fits, args.ranks)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--min-ranks", type=int, default=1, help="go on with as few as these after a loss")
    parser.add_argument("--gpus-per-rank", type=int, default=0)
    parser.add_argument("--cpus-per-rank", type=float, default=1)
    parser.add_argument("--attempts", type=int, default=10)
    parser.add_argument("--wait", type=float, default=600, help="seconds to wait for Ray to place the ranks")
    parser.add_argument("run", help="the run folder")
    parser.add_argument("stapo", nargs=argparse.REMAINDER, help="config and options of stapo train, for a new run")
    args = parser.parse_args()
    ray.init(log_to_driver=False)
    for number in range(args.attempts):
        n_ranks = room(args)
        if n_ranks < args.min_ranks:
            sys.exit(f"Ray has room for {n_ranks} ranks, --min-ranks asks for {args.min_ranks}")
        if attempt(n_ranks, args):
            return
        print(f"attempt {number + 1} of {args.attempts} failed; the run continues from its last checkpoint", flush=True)
        time.sleep(5)
    sys.exit("too many failures")


if __name__ == "__main__":
    main()
