#!/usr/bin/env bash
# Runs the examples for torchrun and Ray on this machine with CPU ranks, kills a rank in the middle of each, and compares
# the state hash of every step with that of a single process. It needs a built program, Python, and ray and torch from PyPI,
# which it installs into a virtual environment outside of the repository (about 7 GB), unless one is given:
#   cargo build --release && bench/cluster.sh --stapo target/release/stapo [--venv FOLDER] [--steps N] [--out FOLDER]
set -eu
stapo='' venv='' steps=6 out=$(mktemp -d)
while [ $# -gt 0 ]; do
    case $1 in
        --stapo) stapo=$2; shift 2 ;;
        --venv) venv=$2; shift 2 ;;
        --steps) steps=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
done
[ -x "$stapo" ] || { echo "--stapo: no program at '$stapo'" >&2; exit 2; }
STAPO=$(realpath "$stapo")
export STAPO
here=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "$venv" ]; then
    venv=$out/venv
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q ray torch
fi
venv=$(realpath "$venv")
mkdir -p "$out"
cd "$out"
# Ray lowers the priority of its workers by default, and gives up on a busy machine after half a minute.
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 RAY_raylet_start_wait_time_s=300

options=(--set "steps=$steps" --set update.sum=microbatches --set evaluation.every_steps=0 --set evaluation.problems=8
    --set rollout.problems_per_step=4 --set update.problems_per_minibatch=2 --set update.microbatch_tokens=256
    --set record.state_hash_every_steps=1 --set record.checkpoint_every_steps=1 --set rollout.max_response_tokens=48)

# hashes RUN: the state hash of each step, as the run recorded it.
hashes() {
    "$venv/bin/python" - "$1/manifest.json" << 'PY'
import json, sys
for record in json.load(open(sys.argv[1]))["steps"]:
    print(record["step"], record["sha256"])
PY
}

# kill_one RUN: kills one of the processes that train RUN, other than rank 0, once the run has a second step.
kill_one() {
    local run=$1 pid rank
    for _ in $(seq 600); do
        if [ "$(cat "$run/metrics.jsonl" 2> /dev/null | wc -l)" -ge 2 ]; then
            for pid in $(pgrep -f "train .*--out $run\$"); do
                rank=$(tr '\0' '\n' < "/proc/$pid/environ" 2> /dev/null | sed -n 's/^RANK=//p')
                if [ "$rank" = 1 ] && [ "$(readlink "/proc/$pid/exe")" = "$STAPO" ]; then
                    kill -9 "$pid"
                    echo "killed rank 1 of $run" >&2
                    return
                fi
            done
        fi
        sleep 0.2
    done
    echo "$run: no rank to kill" >&2
}

failed=0
# compare NAME RUN
compare() {
    hashes "$2" > "$1.hashes"
    if [ "$(wc -l < "$1.hashes")" -eq "$steps" ] && cmp -s single.hashes "$1.hashes"; then
        echo "$1: $steps steps, the same state hashes as a single process"
    else
        echo "$1: other state hashes than a single process; see $out" >&2
        failed=1
    fi
}

"$STAPO" train "${options[@]}" --out single > single.log 2>&1
hashes single > single.hashes
echo "a single process: state hash after step $(tail -n1 single.hashes)"

"$STAPO" launch --ranks 3 train "${options[@]}" --out launch > launch.log 2>&1
compare launch launch

start=$here/examples/cluster/rank.sh
"$venv/bin/torchrun" --no-python --nproc-per-node 2 "$start" torchrun "${options[@]}" > torchrun.log 2>&1
compare torchrun torchrun

kill_one torchrun-killed &
"$venv/bin/torchrun" --no-python --nproc-per-node 3 --max-restarts 2 "$start" torchrun-killed "${options[@]}" \
    > torchrun-killed.log 2>&1 || echo "torchrun ended with $?" >&2
wait $!
compare torchrun-killed torchrun-killed
grep -c '"event":"resume"' torchrun-killed/events.jsonl | sed 's/$/ restarts by torchrun/'

kill_one ray &
"$venv/bin/python" "$here/examples/cluster/ray_train.py" --ranks 2 --cpus-per-rank 0.5 ray "${options[@]}" > ray.log 2>&1 ||
    echo "Ray's program ended with $?" >&2
wait $!
compare ray ray
grep 'ranks, rank 0\|ended with\|failed' ray.log || true
exit $failed
