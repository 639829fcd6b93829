#!/usr/bin/env bash
# Runs the tests but those marked slow or nightly and those that need Slurm; --all runs these, too, but the nightly
# ones; other arguments name some (tests/run_tests.sh tests/networks/test_vit.py -k patches). Two at a time: who is done
# takes of the other's.
# tests/run_tests.sh tp=2 cp=2 [dp=2] [--device cuda] tries every grid of these sizes against one process, in all modes.
set -euo pipefail
cd "$(dirname "$0")/.."
"${PYTHON:-python}" -c 'import pytest' 2>/dev/null || {
    echo "tests/run_tests.sh: ${PYTHON:-python} has no pytest: make test installs the tests' tools" >&2
    exit 2
}
tests() { "${PYTHON:-python}" -m pytest "$@"; }
some=(-n 2 --dist worksteal --ignore tests/slurm)

if [[ ${1-} =~ ^(dp|tp|cp)= ]]; then
    exec "${PYTHON:-python}" benchmarks/certificate.py --grid "$@"
elif [ $# = 0 ]; then
    tests "${some[@]}" -m "not slow and not nightly"
    exit
elif [ "$1" != --all ]; then
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
tests "${some[@]}" -m "not nightly" || code=$?
[ $code != 2 ] || exit 2 # interrupted
wait $slurm || code=$?
cat "$told"
exit $code
