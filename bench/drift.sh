#!/bin/sh
# Tokens of past turns that change between turns: here, through messages, and with TRL's token suffixes.
#   bench/drift.sh [N_TURNS]
# PYTHON names an interpreter with transformers and tokenizers.
set -eu
cd "$(dirname "$0")/.."
n_turns=${1:-1000000}
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" bench/drift/peers.py make "$folder"
cargo run --release -q -p stapo-model --example bench_drift -- "$folder" "$n_turns"
"$python" bench/drift/peers.py count "$folder"
