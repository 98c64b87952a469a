#!/usr/bin/env bash
# From a model and a file of problems to an exported policy, in an empty folder; prints every command and its seconds.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: examples/first_hour/run.sh MODEL FOLDER [SETTING...], with stapo on the PATH
  MODEL    a Hugging Face folder, a GGUF file, or builtin
  FOLDER   an empty or new folder for everything that is written
  SETTING  KEY=VALUE of the training run, as in steps=2
TEXT
}

if [ $# -ge 1 ] && { [ "$1" = --help ] || [ "$1" = -h ]; }; then
  usage
  exit 0
fi
if [ $# -lt 2 ]; then
  usage >&2
  exit 2
fi
if ! command -v stapo > /dev/null; then
  echo "stapo is not on the PATH: cargo install --locked --path crates/stapo-cli" >&2
  exit 2
fi
if [ "$1" = builtin ]; then
  model=builtin
elif [ -e "$1" ]; then
  model=$(realpath "$1")
else
  echo "model $1: no such file or folder" >&2
  exit 2
fi
folder=$2
shift 2

mkdir -p "$folder"
cd "$folder"
if [ -n "$(ls -A)" ]; then
  echo "the folder $folder is not empty; name an empty or a new one" >&2
  exit 2
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
    printf '{"question": "%d+%d=", "answer": "%d"}\n' "$a" "$b" $((a + b))
  done
done > problems.jsonl

settings=()
for setting in "$@"; do settings+=(--set "$setting"); done

if [ "$model" = builtin ]; then
  # The built-in model reads arithmetic and hardly a word, so the instruction in the prompts that init writes is not for it.
  echo "mine.toml is written here, in place of stapo init, with prompts that the built-in model can read"
  cat > mine.toml <<'TOML'
name = "mine"
steps = 20
model = "builtin"

[task]
kind = "jsonl"
path = "problems.jsonl"
template = "{{ problem }}"
held_out_share = 0.2

[rollout]
problems_per_step = 16

[update]
problems_per_minibatch = 8
TOML
else
  run stapo init --model "$model" --data problems.jsonl --device cpu --out mine.toml
fi
run stapo problems mine.toml -n 3
run stapo plan mine.toml --no-measure
run stapo train mine.toml --out run "${settings[@]}"
run stapo report run --out report.html
run stapo export run --out exported

if python3 -c 'import transformers, torch' 2>/dev/null; then
  run python3 - <<'PYTHON'
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("exported")
tokens = AutoTokenizer.from_pretrained("exported")("2+3=", return_tensors="pt")["input_ids"]
print("transformers continues it with", model.generate(tokens, max_new_tokens=4)[0].tolist())
PYTHON
else
  echo "transformers is not installed: the exported folder is not loaded there"
fi
