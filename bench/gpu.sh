#!/usr/bin/env bash
# Correctness, exactness and speed of the engine on one GPU. The script needs built programs, and Python with PyTorch
# and transformers for the comparison, but no Rust toolchain:
#   cargo build --release -p stapo-rl --example bench_gpu
#   cargo test -p stapo-ops --lib --no-run; cargo test -p stapo-model --test goldens --test cuda --test cuda_lost --no-run
#   bench/gpu.sh --bench target/release/examples/bench_gpu --tests "target/debug/deps/stapo_ops-HASH cuda" ..
# Options: --bench FILE; --tests "FILE [FILTER]" (may be repeated); --quick leaves out PyTorch and the 8B shape; --out DIR
# keeps the logs in DIR.
set -u
bench='' quick=0 out=$(mktemp -d) tests=()
while [ $# -gt 0 ]; do
    case $1 in
        --bench) bench=$2; shift 2 ;;
        --tests) tests+=("$2"); shift 2 ;;
        --out) out=$2; shift 2 ;;
        --quick) quick=1; shift ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
done
[ -x "$bench" ] || { echo "--bench: no program at '$bench'" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
: > "$out/results.jsonl"
cache=$(mktemp -d)
export STAPO_KERNEL_CACHE=$cache

# run NAME SECONDS COMMAND..: runs a command with a time limit, keeps its log, and adds its JSON lines to the results.
run() {
    local name=$1 limit=$2
    shift 2
    local start=$SECONDS
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
    local status=$?
    grep '^{' "$out/$name.log" | sed "s/^{/{\"name\": \"$name\", /" >> "$out/results.jsonl"
    [ $status -eq 0 ] || echo "{\"name\": \"$name\", \"failed\": $status}" >> "$out/results.jsonl"
    echo "$name: status $status, $((SECONDS - start)) s" >&2
}

for program in ${tests[@]+"${tests[@]}"}; do
    name=test-$(basename "${program%% *}")
    # shellcheck disable=SC2086 # a program and its filter
    run "$name" 240 $program --test-threads=1 --nocapture --skip every_kernel_compiles
    grep -E '^test result' "$out/$name.log" | sed 's/.*: \(.*\). \([0-9]*\) passed; \([0-9]*\) failed.*/{"name": "parity", "passed": \2, "failed_tests": \3}/' >> "$out/results.jsonl"
done
run train-cold 120 "$bench" train --steps=1
run train 120 "$bench" train --steps=4
run exact 120 "$bench" exact
run decode-512 120 "$bench" decode
run decode-64 120 "$bench" decode --prompts=8
run decode-alone 120 "$bench" decode --prompts=512 --samples=1
if [ $quick -eq 0 ]; then
    run train-8b 150 "$bench" train --large=1 --8bit=1 --keep=0 --sequences=4 --microbatch=2048 --steps=1
    run decode-8b 150 "$bench" decode --large=1 --prompts=16
    run torch 200 python3 "$here/gpu/torch_train.py"
fi
python3 "$here/gpu/table.py" "$out/results.jsonl"
rm -rf "$cache"
