#!/usr/bin/env bash
# Correctness, exactness and speed of the engine on one GPU. The script needs built programs, and Python with PyTorch
# and transformers for the comparison, but no Rust toolchain:
#   cargo build --release -p stapo-rl --example bench_gpu; cargo build --release -p stapo-ops --example bench_gpu_ops
#   cargo test -p stapo-ops --lib --no-run; cargo test -p stapo-model --test all --test cuda_lost --no-run
#   bench/gpu.sh --bench target/release/examples/bench_gpu --ops target/release/examples/bench_gpu_ops \
#       --tests "target/debug/deps/stapo_ops-HASH cuda" --tests "target/debug/deps/all-HASH cuda::" ..
# Options: --bench FILE; --ops FILE; --tests "FILE [FILTER]" (may be repeated); --quick leaves out PyTorch and the 8B shape; --only REGEX
# runs the rows whose names match, so that the rows can be measured in parts; --out DIR keeps the logs in DIR, and what parts of other
# calls have left there stays in the table.
set -u
bench='' ops='' quick=0 only='' out=$(mktemp -d) tests=()
while [ $# -gt 0 ]; do
    case $1 in
        --bench) bench=$2; shift 2 ;;
        --ops) ops=$2; shift 2 ;;
        --tests) tests+=("$2"); shift 2 ;;
        --out) out=$2; shift 2 ;;
        --quick) quick=1; shift ;;
        --only) only=$2; shift 2 ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
done
[ -x "$bench" ] || { echo "--bench: no program at '$bench'" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
touch "$out/results.jsonl"
cache=$(mktemp -d)
export STAPO_KERNEL_CACHE=$cache

# run NAME SECONDS COMMAND..: runs a command with a time limit, keeps its log, and adds its JSON lines to the results.
run() {
    local name=$1 limit=$2
    shift 2
    [[ $name =~ $only ]] || return 0
    # A row that is measured again replaces what an earlier call wrote.
    sed -i "/^{\"name\": \"$name\",/d" "$out/results.jsonl"
    local start=$SECONDS
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
    local status=$?
    grep '^{' "$out/$name.log" | sed "s/^{/{\"name\": \"$name\", /" >> "$out/results.jsonl"
    [ $status -eq 0 ] || echo "{\"name\": \"$name\", \"failed\": $status}" >> "$out/results.jsonl"
    echo "$name: status $status, $((SECONDS - start)) s" >&2
}

for program in ${tests[@]+"${tests[@]}"}; do
    name=test-$(basename "${program%%:*}" | tr " " -)
    # shellcheck disable=SC2086 # a program and its filter
    run "$name" 240 $program --test-threads=1 --nocapture --skip every_kernel_compiles
    grep -qs "\"$name\"" "$out/results.jsonl" || grep -sE '^test result' "$out/$name.log" \
        | sed 's/.*: \(.*\). \([0-9]*\) passed; \([0-9]*\) failed.*/{"name": "'"$name"'", "passed": \2, "failed_tests": \3}/' >> "$out/results.jsonl"
done
# NVRTC keeps what it compiled in the driver's cache.
run train-cold 120 env CUDA_CACHE_DISABLE=1 STAPO_KERNEL_CACHE="$cache/cold" "$bench" train --steps=1
run train 120 "$bench" train --steps=4
run train-16k 120 "$bench" train --sequences=2 --length=16384 --microbatch=16384 --steps=2
run train-16k-recomputed 120 "$bench" train --sequences=2 --length=16384 --microbatch=16384 --steps=2 --keep=0
run exact 120 "$bench" exact
run decode-512 120 "$bench" decode
run decode-64 120 "$bench" decode --prompts=8
# Adapters of rank 32, beside full training and decode without adapters above.
run lora-train 120 "$bench" train --steps=4 --lora=32
run lora-exact 120 "$bench" exact --lora=32
run lora-decode-512 120 "$bench" decode --lora=32
run lora-decode-64 120 "$bench" decode --prompts=8 --lora=32
run decode-alone 120 "$bench" decode --prompts=512 --samples=1
# Long contexts: sequences with a prompt each, then sequences that share prompts.
long() {
    local prompts=$1 samples=$2 prompt=$3
    run "decode-$prompts-$samples-$prompt" 120 "$bench" decode --prompts="$prompts" --samples="$samples" \
        --prompt="$prompt" --new=100 --rows=16384 --kv-gib=90 --warm=0
}
run decode-2 60 "$bench" decode --prompts=2 --samples=1 --new=256
long 4 1 15000
long 16 1 15000
long 40 1 15000
long 128 1 4000
long 8 8 8192
# Prompts alone, by the kernel of prefill and without it; vLLM where it is installed, with the same shapes.
prefill() {
    run "prefill-$1-$2" 120 "$bench" prefill --prompts="$1" --prompt="$2"
}
prefill 40 15000
prefill 16 8192
prefill 64 2048
prefill 512 128
# Prompts and responses, as vLLM's script generates them.
generate() {
    run "generate-$1-$2-$3" 120 "$bench" decode --prompts="$1" --samples="$2" --prompt="$3" --new="$4" --rows=16384 --kv-gib=90
}
generate 64 8 128 512
generate 8 8 128 512
generate 512 1 128 512
generate 2 1 128 512
generate 8 8 8192 256
generate 40 1 15000 256
[ $quick -eq 1 ] || run vllm 900 python3 "$here/gpu/vllm.py" --mode default --mode batch-invariant --mode no-logprobs
run exact-long 120 "$bench" exact --prompts=2 --samples=2 --prompt=15900 --new=480 --rows=5000 --kv-gib=16 --together=1
[ -z "$ops" ] || run attention 120 "$ops" attention
[ -z "$ops" ] || [ $quick -eq 1 ] || run torch-attention 120 python3 "$here/gpu/torch_attention.py"
# Updates as `stapo train` makes them: 128 x 8 responses of 290 tokens, and a quarter of them by a larger model.
run update-0.5b 120 "$bench" update --steps=3
run update-1.7b 120 "$bench" update --shape=1 --problems=32 --minibatch=8 --steps=3 --folder=0
# Responses that share the rows of their prompt, compared with whole sequences: 128 x 8 of 100 + 280 tokens, and 8 x 8 of 8,192 + 256.
for share in 0 1; do
    run "shared-short-$share" 120 "$bench" train --sequences=1024 --length=380 --prompt=100 --samples=8 --microbatch=16384 --steps=2 --share=$share
    run "shared-long-$share" 200 "$bench" train --sequences=64 --length=8448 --prompt=8192 --samples=8 --microbatch=33792 --steps=1 --share=$share
done
# Spread lengths: a quarter of 64 prompts x 8 samples in a quarter of 100 GiB, then one step of 8 x 8 responses.
run rollout 200 "$bench" rollout --prompts=16 --kv-gib=25 --rows=8192
run step-1.7b 120 "$bench" step --shape=1
if [ $quick -eq 0 ]; then
    run rollout-512 400 "$bench" rollout --kv-gib=100 --rows=8192
    run step-8b 240 "$bench" step --shape=2 --8bit=1
    run train-8b 150 "$bench" train --large=1 --8bit=1 --keep=0 --sequences=4 --microbatch=2048 --steps=1
    run train-8b-kept 150 "$bench" train --large=1 --8bit=1 --steps=2
    run decode-8b 150 "$bench" decode --large=1 --prompts=16
    # A hybrid of 2B and the shape of Qwen3.5-9B, beside 1.7B and 8B above.
    run hybrid-exact 150 "$bench" exact --large=7
    run hybrid-train 150 "$bench" train --large=7 --microbatch=16384 --steps=3
    run hybrid-train-16k 150 "$bench" train --large=7 --sequences=2 --length=16384 --microbatch=16384 --steps=2
    run hybrid-decode-64 150 "$bench" decode --large=7 --prompts=8
    run hybrid-decode-512 150 "$bench" decode --large=7 --kv-gib=60
    run hybrid-decode-15000 150 "$bench" decode --large=7 --prompts=16 --samples=1 --prompt=15000 --new=100 --rows=16384 --kv-gib=60 --warm=0
    run hybrid-prefill 150 "$bench" prefill --large=7 --prompts=16 --prompt=8192
    run hybrid-train-9b 150 "$bench" train --large=6 --8bit=1 --keep=0 --sequences=4 --microbatch=2048 --steps=1
    run hybrid-decode-9b 150 "$bench" decode --large=6 --prompts=16
    # The shapes of Gemma-3-4B, OLMo-3-7B and Mistral-7B: training, at 16,384 tokens too, where windows count, and decode.
    number=3
    for shape in gemma-3-4b olmo-3-7b mistral-7b; do
        run "family-$shape-train" 150 "$bench" train --large=$number --8bit=1 --steps=2
        run "family-$shape-train-16k" 150 "$bench" train --large=$number --8bit=1 --keep=0 --sequences=1 --length=16384 --microbatch=16384 --steps=2
        run "family-$shape-decode-128" 150 "$bench" decode --large=$number --prompts=16
        run "family-$shape-decode-512" 150 "$bench" decode --large=$number
        # Gemma's windows leave so little of the keys and values that a fifth of the memory holds them.
        kv=60
        [ "$shape" != gemma-3-4b ] || kv=12
        run "family-$shape-decode-15000" 150 "$bench" decode --large=$number --prompts=16 --samples=1 --prompt=15000 --new=100 --rows=16384 --kv-gib=$kv --warm=0
        run "exact-$shape" 150 "$bench" exact --large=$number
        number=$((number + 1))
    done
    # Of Gemma's size.
    run family-qwen3-4b-train 150 "$bench" train --large=8 --8bit=1 --steps=2
    run family-qwen3-4b-train-16k 150 "$bench" train --large=8 --8bit=1 --keep=0 --sequences=1 --length=16384 --microbatch=16384 --steps=2
    run family-qwen3-4b-decode-128 150 "$bench" decode --large=8 --prompts=16
    run family-qwen3-4b-decode-512 150 "$bench" decode --large=8
    run family-qwen3-4b-decode-15000 150 "$bench" decode --large=8 --prompts=16 --samples=1 --prompt=15000 --new=100 --rows=16384 --kv-gib=60 --warm=0
    run hybrid-decode-9b-15000 150 "$bench" decode --large=6 --prompts=16 --samples=1 --prompt=15000 --new=100 --rows=16384 --kv-gib=60 --warm=0
    run decode-8b-15000 150 "$bench" decode --large=1 --prompts=16 --samples=1 --prompt=15000 --new=100 --rows=16384 --kv-gib=60 --warm=0
    run train-8b-16k 200 "$bench" train --large=1 --8bit=1 --keep=0 --sequences=1 --length=16384 --microbatch=16384 --steps=1
    run hybrid-train-9b-16k 200 "$bench" train --large=6 --8bit=1 --keep=0 --sequences=1 --length=16384 --microbatch=16384 --steps=1
    [ -z "$ops" ] || run deltanet 60 "$ops" deltanet
    run torch-deltanet 200 python3 "$here/gpu/torch_deltanet.py"
    run torch 200 python3 "$here/gpu/torch_train.py"
    run step-14b 360 "$bench" step --shape=3 --8bit=1
fi
python3 "$here/gpu/table.py" "$out/results.jsonl"
rm -rf "$cache"
