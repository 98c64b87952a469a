#!/usr/bin/env bash
# From a model and a file of problems to an exported policy, in an empty folder; prints every command and its seconds.
# Usage: run.sh MODEL FOLDER [SETTING...], with `stapo` on the PATH; each SETTING is a `--set` of the training run.
set -euo pipefail
model=$(realpath "$1")
folder=$2
shift 2

mkdir -p "$folder"
cd "$folder"
if [ -n "$(ls -A)" ]; then
  echo "the folder $folder is not empty; name an empty or a new one" >&2
  exit 1
fi

run() {
  echo
  echo "\$ $*"
  local start=$EPOCHREALTIME
  "$@"
  awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "(%.1f s)\n", b - a }'
}

for a in 2 3 4 5 6 7 8 9; do
  for b in 2 3 4 5 6 7 8 9; do
    printf '{"question": "%d + %d = ?", "answer": "%d"}\n' "$a" "$b" $((a + b))
  done
done > problems.jsonl

settings=()
for setting in "$@"; do settings+=(--set "$setting"); done

run stapo init --model "$model" --data problems.jsonl --device cpu --out mine.toml
run stapo problems mine.toml
run stapo plan mine.toml --no-measure
run stapo train mine.toml --out run "${settings[@]}"
run stapo report run --out report.html
run stapo export run --out exported

if python3 -c 'import transformers' 2>/dev/null; then
  run python3 - <<'PYTHON'
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("exported")
tokens = AutoTokenizer.from_pretrained("exported")("2 + 3 = ?", return_tensors="pt")
print("transformers continues it with", model.generate(**tokens, max_new_tokens=4)[0].tolist())
PYTHON
else
  echo "transformers is not installed: the exported folder is not loaded there"
fi
