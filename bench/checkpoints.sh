#!/usr/bin/env bash
# What the checkpoints of a run cost: seconds that they stop the loop, seconds of writing beside the raw speed of the disk, seconds to the
# first token of the trained model beside its base, and the disk that they take.
#   bench/checkpoints.sh --stapo target/release/stapo --config CONFIG [--base MODEL] [--out DIR] [-- --set KEY=VALUE ..]
# The run makes 4 steps with a checkpoint after each. --base is the file or folder that the config's model was made from.
set -eu
stapo=stapo config='' base='' out=''
while [ $# -gt 0 ]; do
    case $1 in
        --stapo) stapo=$2; shift 2 ;;
        --config) config=$2; shift 2 ;;
        --base) base=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --) shift; break ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
done
[ -n "$config" ] || { echo "--config: which run?" >&2; exit 2; }
[ -n "$out" ] || out=$(mktemp -d)
run=$out/run
mkdir -p "$out"

now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.2f", b - a }'; }

"$stapo" plan "$config" --no-measure "$@" | grep -A 3 '^disk' || true
"$stapo" train "$config" -q --out "$run" --set steps=4 --set record.checkpoint_every_steps=1 --set record.keep_checkpoints=2 "$@" &
train=$!
# A checkpoint is being written from the moment that its temporary folder is there until it has its name.
: > "$out/writing.txt"
while kill -0 $train 2> /dev/null; do
    for folder in "$run"/checkpoints/.step-*.tmp; do
        [ -d "$folder" ] || continue
        began=$(now)
        while [ -d "$folder" ]; do sleep 0.02; done
        name=$(basename "$folder" .tmp)
        [ -f "$run/checkpoints/${name#.}/weights.safetensors" ] && echo "${name#.} $(since "$began")" >> "$out/writing.txt"
    done
    sleep 0.02
done
wait $train

echo "seconds that the loop stood still (copy, wait), by the line of the step after:"
sed 's/.*"step":\([0-9]*\).*/\1 &/; s/^\([0-9]*\) .*"checkpoint":\([0-9.e-]*\),"checkpoint_wait":\([0-9.e-]*\).*/  step \1: \2 \3/' "$run/metrics.jsonl"
echo "seconds of writing:"
sed 's/^/  /' "$out/writing.txt"
newest=$(find "$run/checkpoints" -maxdepth 1 -name 'step-*' | sort | tail -1)
bytes=$(du -sb "$newest" | cut -f1)
began=$(now)
dd if=/dev/zero of="$out/raw" bs=64M count=$((bytes / 67108864 + 1)) conv=fsync 2> /dev/null
raw=$(since "$began")
rm "$out/raw"
echo "the disk writes as many bytes ($bytes) in $raw s (dd, one thread, with a sync at the end)"
echo "disk taken by the run: $(du -sh "$run" | cut -f1); by checkpoint:"
du -sh "$run"/checkpoints/step-* | sed 's/^/  /'

# first MODEL: seconds until a model has said one token, twice: the second finds its files in the cache of the system.
first() {
    for turn in 1 2; do
        began=$(now)
        "$stapo" generate --model "$1" --prompt "1+1=" --max-tokens 1 ${device:+--device "$device"} > /dev/null
        echo "  $1, $turn: $(since "$began") s"
    done
}
device=$(sed -n 's/^device = "\(.*\)"/\1/p' "$run/plan.toml")
echo "seconds to the first token:"
first "$run"
first "$run@0"
[ -z "$base" ] || first "$base"
