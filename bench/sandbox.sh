#!/bin/sh
# The rate of the sandbox on 1 and 2 workers, and what 100,000 runs leave behind.
#   bench/sandbox.sh [N_RUNS]
set -eu
cd "$(dirname "$0")/.."
n_runs=${1:-100000}
cargo build --release -p stapo-sandbox --bins --examples
launcher=target/release/sandbox-launcher
bench=target/release/examples/bench
for n_workers in 1 2; do
    "$bench" "$launcher" 5000 "$n_workers"
done
count() { find /proc -maxdepth 1 -name '[0-9]*' | wc -l; }
files() { find "${TMPDIR:-/tmp}" -maxdepth 1 -name 'stapo-sandbox-*' | wc -l; }
before=$(count)
"$bench" "$launcher" "$n_runs" 2
echo "processes of this machine: $before before, $(count) after; folders left: $(files)"
if pgrep -f "$launcher" > /dev/null; then
    echo "a launcher is left" >&2
    exit 1
fi
