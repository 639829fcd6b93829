#!/usr/bin/env bash
# The quick tests with another version of torch, in an environment of its own: TORCH=2.8.0 tests/other_torch.sh
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-torch-${TORCH:?which version? make other-torch TORCH=2.8.0}
made=$env/installed
if [ requirements.txt -nt "$made" ] || [ requirements-prepare.txt -nt "$made" ] || [ requirements-maps.txt -nt "$made" ] || [ requirements-tools.txt -nt "$made" ]; then
    python3 -m venv "$env"
    # Of the tools those that know this torch, too: torchao is made for one version.
    sed "s/^torch==.*/torch==$TORCH/" requirements.txt >"$env/requirements.txt"
    "$env/bin/pip" install --disable-pip-version-check -q -r "$env/requirements.txt" \
        -r requirements-prepare.txt -r requirements-maps.txt -r requirements-tools.txt
    touch "$made"
fi
"$env/bin/python" -c 'import sys, torch; sys.exit(torch.__version__.partition("+")[0] != sys.argv[1])' "$TORCH" ||
    { echo "other_torch.sh: $env has another torch than $TORCH: remove it" >&2; exit 1; }
PYTHON=$env/bin/python tests/run_tests.sh
