#!/usr/bin/env bash
# Runs the tests: all of them, or what the arguments name (tests/run_tests.sh tests/networks/test_vit.py -k patches).
set -euo pipefail
cd "$(dirname "$0")/.."
tests() { "${PYTHON:-python}" -m pytest "$@"; }

if [ $# -gt 0 ]; then
    tests "$@"
    exit
fi

# Those of Slurm wait most of the time: they run beside the others, and Ctrl-C ends them too.
told=$(mktemp)
set -m
tests tests/slurm >"$told" 2>&1 &
slurm=$!
trap 'kill -INT -- -$slurm 2>/dev/null && wait $slurm; rm "$told"' EXIT
set +m
code=0
tests --ignore tests/slurm || code=$?
[ $code != 2 ] || exit 2 # interrupted
wait $slurm || code=$?
cat "$told"
exit $code
