#!/bin/sh
# Runs the adapters of stapo.environments for real: reasoning-gym, textarena and an OpenEnv server from PyPI.
#
#   python/tests/environments.sh
#
# VENV=FOLDER names a virtual environment that has them already; without one, one is made in target/environments.
set -eu
cd "$(dirname "$0")/../.."

if [ -z "${VENV:-}" ]; then
  VENV="$PWD/target/environments"
  if [ ! -e "$VENV/ready" ]; then
    python3 -m venv "$VENV"
    "$VENV/bin/pip" install --quiet "reasoning-gym==0.1.*" "textarena==0.7.*" "openenv-core==0.3.*"
    touch "$VENV/ready"
  fi
fi
exec "$VENV/bin/python" python/tests/peer_environments.py
