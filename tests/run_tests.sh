#!/usr/bin/env bash
# Runs the tests: all of them, or what the arguments name (tests/run_tests.sh tests/test_vit.py -k patches).
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m pytest "$@"
