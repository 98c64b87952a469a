#!/usr/bin/env bash
# One rank of a run: begins the run, or goes on with it where its folder exists. Every rank must see the folder. No rank
# can find it half made: rank 0 makes it after all ranks have met, and so after each has looked.
#   rank.sh RUN CONFIG [OPTIONS OF stapo train]
set -eu
run=$1
shift
if [ -e "$run" ]; then
    exec "${STAPO:-stapo}" train --resume "$run"
fi
exec "${STAPO:-stapo}" train "$@" --out "$run"
