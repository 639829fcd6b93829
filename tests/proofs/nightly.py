"""The long proofs, one after the other, and one page that says when each ran last: `make nightly`, some eight hours.

    python tests/proofs/nightly.py [--only soak storage]

Each is a command of its own. What it ended with is written after each, with the date and the commit, so a night that
ends early keeps what it has; docs/nightly.md and the README's table show it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.record import commit_of_code, write_record  # noqa: E402
from utils.measure.tables import markdown  # noqa: E402

RECORD = ROOT / "benchmarks/results/nightly.json"
NEVER = "not yet"
# What it proves, and its command.
STEPS = {
    "tests": ("tests that CI leaves to the night", "make test-nightly"),
    "certificate": ("every grid of ranks is the same model", "make certificate"),
    "mutations": ("the tests notice errors put in on purpose", "make mutations"),
    "faults": ("every fault on every grid", "make faults"),
    "soak": ("2,000 interruptions at random", "make soak"),
    "storage": ("a storage that fails for a while", "make storage"),
    "ranks": ("64 ranks; one is lost, one is slow", "make many-ranks"),
    "combinations": ("flags may be combined", "make combinations"),
    "slurm": ("jobs that reach their time limit", "make slurm"),
    "properties": ("a thousand examples of each property", "make properties"),
    "audit": ("no known vulnerability in what is pinned", "make audit"),
    "torch-2.8": ("the quick tests with the oldest torch", "make other-torch TORCH=2.8.0"),
    "torch-2.11": ("the quick tests with torch 2.11", "make other-torch TORCH=2.11.0"),
    "torch-2.13": ("the quick tests with the pinned torch", "make test"),
}


def table(steps: dict[str, dict[str, str]]) -> str:
    """Return what became of each proof when it ran last, as docs/nightly.md shows it."""
    rows = []
    for name, (what, command) in STEPS.items():
        step = steps.get(name)
        told = [step[key] for key in ("date", "commit", "minutes", "result")] if step else [NEVER, "", "", ""]
        rows.append([what, name, f"`{command}`", *told])
    return markdown(["what", "name", "command", "ran last", "commit", "minutes", "result"], rows)


def figure(step: dict[str, str]) -> str:
    """Return when a proof ran last, and of which commit, as the README's table has it."""
    commit, dirty, _ = step["commit"].partition("-dirty")
    return f"{step['date']}, {commit[:7]}{dirty}" + ", failed" * (step["result"] != "passed")


def ran(command: str) -> dict[str, str]:
    """Run a command; return the date, the minutes, and what became of it."""
    start, date = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%d")
    code = subprocess.call(command, shell=True, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    result = f"failed, code {code}" if code else "passed"
    minutes = f"{(time.monotonic() - start) / 60:.0f}"
    return {"date": date, "minutes": minutes, "result": result}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="proofs to run")
    args = parser.parse_args()
    steps = json.loads(RECORD.read_text())["steps"] if RECORD.exists() else {}
    at = commit_of_code()
    for name in args.only:
        print(f"== {name}: {STEPS[name][1]}", flush=True)
        steps[name] = {"commit": at, **ran(STEPS[name][1])}
        told = {name: figure(step) for name, step in steps.items()}
        write_record(RECORD, dict.fromkeys(STEPS, NEVER) | told, {}, steps=steps)
        print(f"== {name}: {steps[name]['result']}, {steps[name]['minutes']} minutes", flush=True)
        pages = subprocess.run([sys.executable, "docs/make.py"], cwd=ROOT).returncode  # the next tests read them
    failed = [name for name in args.only if steps[name]["result"] != "passed"]
    told = f"; failed: {', '.join(failed)}" * bool(failed) + "; the pages could not be made" * bool(pages)
    print(f"{len(args.only) - len(failed)} of {len(args.only)} passed{told}")
    return int(bool(failed or pages))


if __name__ == "__main__":
    sys.exit(main())
