#!/bin/sh
# Runs the adapters for other trainers for real, on the CPU: PyTorch, TRL, verl, W&B and MLflow from PyPI.
#
#   python/tests/peers.sh
#
# VENV=FOLDER names a virtual environment that has them already; without one, one is made in target/peers (6 GB).
# STAPO=PROGRAM names the program whose numbers the adapters must give; target/release/stapo or target/debug/stapo.
set -eu
cd "$(dirname "$0")/../.."

if [ -z "${VENV:-}" ]; then
  VENV="$PWD/target/peers"
  if [ ! -e "$VENV/ready" ]; then
    python3 -m venv "$VENV"
    "$VENV/bin/pip" install --quiet torch "trl==1.16.*" "verl==0.9.1" "TransferQueue>=0.1.10" pyzmq msgspec wandb mlflow-skinny numpy
    touch "$VENV/ready"
  fi
fi
if [ -z "${STAPO:-}" ]; then
  for STAPO in "$PWD/target/release/stapo" "$PWD/target/debug/stapo"; do
    [ ! -x "$STAPO" ] || break
  done
  [ -x "$STAPO" ] || { echo "no stapo in target/; cargo build, or STAPO=PROGRAM" >&2; exit 2; }
fi
export STAPO

# The package: installed in the virtual environment, or built from this checkout.
if ! "$VENV/bin/python" -c "import stapo" 2>/dev/null; then
  "$VENV/bin/pip" install --quiet .
fi

out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline WANDB_SILENT=true
# Warnings of other packages go to a file; it is shown if something fails.
run() {
  name="$1"
  shift
  if ! "$@" > "$out/$name.log" 2>&1; then
    tail -n 60 "$out/$name.log" >&2
    echo "$name failed" >&2
    exit 1
  fi
  grep -a "^$name" "$out/$name.log"
}
ranks() {
  "$VENV/bin/python" -m torch.distributed.run --standalone --nproc_per_node "$@"
}
cd python/tests
run torch ranks 3 peer_torch.py
run follow "$VENV/bin/python" peer_follow.py "$out/follow"
run trl ranks 2 peer_trl.py "$out/trl"
run verl ranks 2 peer_verl.py "$out/verl"
run verl "$VENV/bin/python" peer_verl_losses.py
