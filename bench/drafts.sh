#!/bin/sh
# Steps and time that drafts save with a model and a task, greedy and at the temperature of the config.
#   bench/drafts.sh CONFIG.toml [KEY=VALUE ..]
# As in `bench/drafts.sh gsm8k.toml device=cuda model=Qwen/Qwen2.5-1.5B-Instruct rollout.problems_per_step=128`.
set -eu
cd "$(dirname "$0")/.."
exec cargo run --release -q -p stapo-rl --example bench_drafts -- "$@"
