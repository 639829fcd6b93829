"""Run the laptop commands of README.md and of the chapters as they are written: their ```bash blocks, in order.

    python tests/readme_commands.py [ITERATIONS]      no run is longer than this many, but those that stop and go on,
                                                      and the doctor has a shorter look

Blocks that begin with `# on a cluster`, `# on a GPU` or `# by hand` are left out: they need Slurm, a GPU, or a person.
Two commands run side by side, each on half of the cores: most of a short run is its start, which takes one.
"""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/[1-6]-*.md"))]
ROWS = ([0, 1], [4, 6], [5], [2, 3])  # of pages, the longest first: chapter 6 takes up what chapter 4 trained
ERA5 = ROOT.parent / "shared/data/era5_djf"


def commands(text: str) -> list[str]:
    """Return the commands of all blocks that a laptop runs; a backslash joins lines."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = []
    for block in blocks:
        if not block.startswith(("# on a cluster", "# on a GPU", "# by hand")):
            lines += [line.split("  # ")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def shortened(command: str, iterations: int) -> str:
    """Return a command with no more iterations than these, unless it stops before its end, goes on, or is profiled."""
    if command == "make doctor":
        return f'{command} ARGS="--config=demo --seconds 5"'
    if "--time_limit" in command or "--resume" in command or "--profile" in command:
        return command
    return re.sub(r"(?<=--num_iters )\d+", lambda found: str(min(int(found[0]), iterations)), command)


def run(pages: list[Path], iterations: int | None) -> bool:
    """Run the commands of some pages, one after another; return whether all succeeded."""
    # `python` and `torchrun` of the pages are those of the environment that runs this.
    here = str(Path(sys.executable).parent)
    threads = str(max(1, (os.cpu_count() or 2) // 2))  # a half of the cores for each of two commands
    env = {"OMP_NUM_THREADS": threads, **os.environ, "PATH": here + os.pathsep + os.environ["PATH"]}
    for command in commands("".join(page.read_text() for page in pages)):
        if command.startswith(("make demo", "make test", "git ", "cd ", "source ")):
            continue  # CI calls `make demo` and `make test` itself; the others begin a clone of one's own
        if "era5_djf" in command and not ERA5.exists():
            print(f"skipped, for want of {ERA5}: {command}", flush=True)
            continue
        if iterations:
            command = shortened(command, iterations)
        start = time.perf_counter()
        done = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
        print(f"$ {command}\n  {time.perf_counter() - start:.0f} s", flush=True)
        if done.returncode != 0:
            print(f"{done.stdout}{done.stderr}\nthis command ended with code {done.returncode}: {command}", flush=True)
            return False
    return True


def main(iterations: int | None = None) -> int:
    rows = [[PAGES[i] for i in row] for row in ROWS]
    with ThreadPoolExecutor(2) as pool:
        return 0 if all([*pool.map(partial(run, iterations=iterations), rows)]) else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
