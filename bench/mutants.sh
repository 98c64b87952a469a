#!/usr/bin/env bash
# Tries a seeded sample of small bugs ("mutants") in one crate against its tests and those of the crates above it, and
# prints those that no test notices.
# Uses `cargo mutants` where it is installed, else bench/mutants.py, which changes single tokens and builds all at once.
#
#   bench/mutants.sh [CRATE] [N] [SEED]
#   bench/mutants.sh rl 40 1
#
# CRATE is a crate without "stapo-" (rl), N the number of mutants that compile (40), SEED the number of the sample (1).
# STAPO_MUTANTS_SECONDS is the time after which no further mutant is begun (3600). bench/mutants.py takes several crates at once.
# The sources are changed in place and put back, so the tree must be clean.
set -euo pipefail
cd "$(dirname "$0")/.."
crate=${1:-rl} n=${2:-40} seed=${3:-1} seconds=${STAPO_MUTANTS_SECONDS:-3600}
[ -d "crates/stapo-$crate/src" ] || { echo "no crate stapo-$crate; one of: core verify ops model rl cli py" >&2; exit 2; }
git diff --quiet -- crates || { echo "crates/ has changes; commit them first" >&2; exit 2; }

if ! cargo mutants --version >/dev/null 2>&1; then
    exec python3 bench/mutants.py "$crate:$n" --seed "$seed" --seconds "$seconds"
fi
out=$(mktemp -d)
cargo mutants --list --package "stapo-$crate" >"$out/all"
python3 -c 'import random, sys
names = sys.stdin.read().splitlines()
random.Random(int(sys.argv[1])).shuffle(names)
print(*names[: int(sys.argv[2])], sep="\n")' "$seed" "$n" <"$out/all" >"$out/sample"
mapfile -t regexes < <(sed 's/[][\.*^$()+?{}|\\/]/\\&/g; s/^/--re=^/; s/$/$/' "$out/sample")
timeout "$seconds" cargo mutants --in-place --package "stapo-$crate" --test-workspace=true \
    --output "$out" "${regexes[@]}" || true
echo "stapo-$crate, seed $seed: $(wc -l <"$out/mutants.out/caught.txt") caught; survivors:"
cat "$out/mutants.out/missed.txt"
