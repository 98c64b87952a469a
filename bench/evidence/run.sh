#!/usr/bin/env bash
# Runs experiments of docs/evidence.md on one GPU, their runs side by side under MPS, one experiment after the other and each for a
# time at most. An experiment that is ended by its time is stopped by a signal; the same command goes on with it.
#   bench/evidence/run.sh stability-arms:44:310 scale:30:250 'code:4:400:--seeds 1,2 --only stapo --only justrl'
# Arguments: EXPERIMENT:JOBS:SECONDS each, with :OPTIONS of `stapo experiment` after it if any. STAPO names the program (stapo), OUT the
# folder for everything that is written (runs of 14M parameters take 0.2 GB each); models/ and data/ are read there. In OUT: base models
# in runs/, experiments/NAME (or what --out names), NAME.log and NAME.tar.gz, which leaves out checkpoints and responses.
# TIDY=1 deletes the checkpoints of runs that have ended and the first one of a run that has made three steps: those of a model of
# 1.5B parameters take 20 GiB each.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
stapo=$(command -v "${STAPO:-stapo}") || { echo "STAPO: no program '${STAPO:-stapo}'" >&2; exit 2; }
stapo=$(realpath "$stapo")
[ $# -gt 0 ] || { sed -n '2,9p' "$0" >&2; exit 2; }
for words in "$@"; do
    [[ $words =~ ^[a-z0-9.-]+:[0-9]+:[0-9]+(:--.*)?$ ]] || { echo "$words: expected EXPERIMENT:JOBS:SECONDS or EXPERIMENT:JOBS:SECONDS:OPTIONS" >&2; exit 2; }
    [ -f "$here/experiments/${words%%:*}.toml" ] || { echo "${words%%:*}: no such file in experiments/" >&2; exit 2; }
done
mkdir -p "${OUT:=$PWD/evidence}"
cd "$OUT"

# What this script starts ends with it.
tidying='' has_mps=''
end() {
    [ -z "$tidying" ] || { kill "$tidying" && tidy; }
    [ -z "$has_mps" ] || echo quit | nvidia-cuda-mps-control
}
trap end EXIT

# Many processes on one GPU take turns without MPS.
if command -v nvidia-cuda-mps-control > /dev/null && ! echo get_server_list | nvidia-cuda-mps-control > /dev/null 2>&1; then
    nvidia-cuda-mps-control -d && has_mps=1
fi

# The base models that the experiments name, side by side; one that is there is kept.
files=()
for words in "$@"; do files+=("$here/experiments/${words%%:*}.toml"); done
for base in $(grep -oh 'runs/base-[0-9a-z]*' "${files[@]}" | sort -u); do
    [ -f "$base/manifest.sha256" ] || "$stapo" pretrain "$here/configs/${base#runs/}.toml" --device "${DEVICE:-cuda}" --out "$base" \
        > "${base#runs/}.log" 2>&1 &
done
wait

tidy() {
    for run in experiments/*/*/seed-*; do
        [ "$(cat "$run/metrics.jsonl" 2> /dev/null | wc -l)" -lt 3 ] || rm -rf "$run/checkpoints/step-000000"
        # The manifest is written last.
        if grep -qs '"reason":"done"' "$run/events.jsonl" && [ -f "$run/manifest.sha256" ]; then rm -rf "$run"/checkpoints/step-*; fi
    done
}
if [ "${TIDY:-0}" = 1 ]; then
    (while sleep 5; do tidy; done) &
    tidying=$!
fi

for words in "$@"; do
    IFS=: read -r name jobs seconds options <<< "$words"
    folder=experiments/$name
    [[ $options =~ --out[\ =]([^ ]+) ]] && folder=${BASH_REMATCH[1]}
    log=$(basename "$folder")
    status=0
    start=$SECONDS
    timeout --signal TERM --kill-after 60 "$seconds" "$stapo" experiment "$here/experiments/$name.toml" --jobs "$jobs" \
        $options ${DEVICE:+--set device="$DEVICE"} > "$log.log" 2>&1 || status=$?
    echo "$log: status $status after $((SECONDS - start)) s"
    tar --exclude=checkpoints --exclude=rollouts -czf "$log.tar.gz" "$folder" "$log.log"
done
