"""Check a solution of an exercise, and say what is right and, at the first thing that is not, what to think about.

    python exercises/check.py                                 the exercises, and the minutes that each takes
    python exercises/check.py exercises/prefetcher.py         what is next
    python exercises/check.py exercises/prefetcher.py --hint  the first hint; --hint 2 the first two

Everything runs on a laptop. A copy of an exercise's file may have any name. Exit code 0 if all is right, 1 if not yet,
2 if there is nothing to check.
"""

import argparse
import ast
import importlib
import multiprocessing
import sys
import tempfile
import textwrap
import time
import warnings
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from exercises.checks import common  # noqa: E402

# In the order of the chapters.
EXERCISES = (
    "prefetcher", "collective_gradients", "tensor_parallel_mlp", "context_attention", "missing_reduction",
    "owned_adam", "choose_layout", "frozen_value", "safe_checkpoint", "late_rank",
)  # fmt: skip
STARTING, CHECKING, QUIET = 600, 60, 10  # s: all ranks of one size together; without a word, until it says so


def checks_of(name: str) -> ModuleType:
    """Return what an exercise is held against."""
    return importlib.import_module(f"exercises.checks.{name}")


def title_of(name: str) -> str:
    """Return what an exercise asks for: the first sentence of its file."""
    text = ast.get_docstring(ast.parse((ROOT / f"exercises/{name}.py").read_text()))
    return text.partition(". ")[0].removeprefix("Exercise: ")


def hints_of(name: str) -> list[str]:
    """Return the hints of an exercise, one upon the other."""
    return [" ".join(hint.split()) for hint in checks_of(name).HINTS.split("\n\n")]


def exercise_of(path: Path) -> str:
    """Return the exercise that a file solves, by the names that it defines. Raises ValueError where it is none."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}): name the file of your solution") from None
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python yet: line {error.lineno}, {error.msg}") from None
    except ValueError as error:  # what no text has
        raise ValueError(f"{path} is not Python: {error}") from None
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {
        x.id for node in tree.body if isinstance(node, ast.Assign) for x in node.targets if isinstance(x, ast.Name)
    }
    for name in EXERCISES:
        if checks_of(name).DEFINES in names:
            return name
    known = ", ".join(checks_of(name).DEFINES for name in EXERCISES)
    raise ValueError(f"{path} has none of {known}: begin with the file of an exercise")


def run(name: str, path: str, rank: int, size: int, folder: str, told: Connection, lock: Lock) -> None:
    """Check on one rank, in a process of its own, and tell how it goes, one rank at a time."""

    def tell(kind: str, what: str | None = None) -> None:
        with lock:
            told.send((kind, what))

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of functions that PyTorch renames
    torch.set_default_dtype(torch.float64)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=size)
    common.tell = partial(tell, "right")
    tell("here")
    try:
        checks_of(name).check(path, rank, size)
        wrong = None
    except (common.Wrong, NotImplementedError) as error:
        wrong = str(error) or "a place is not filled in yet: NotImplementedError"
    except BaseException as error:  # sys.exit in a solution as well
        wrong = f"{type(error).__name__}: {error}"
    tell("wrong" if wrong else "done", wrong)
    if size > 1:
        dist.destroy_process_group()


def on_ranks(name: str, path: str, size: int, folder: str) -> str | None:
    """Check on `size` ranks; print what is right, and return what is wrong on the first that says so, or None."""
    context = multiprocessing.get_context("forkserver")
    told, theirs = context.Pipe(duplex=False)
    given = (size, folder, theirs, context.Lock())
    ranks = [context.Process(target=run, args=(name, path, rank, *given), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    left, since, is_told = {"here": size, "done": size}, time.monotonic(), False
    try:
        while left["done"]:
            if not told.poll(1):
                if dead := [process.exitcode for process in ranks if process.exitcode]:
                    return f"a process ended with code {dead[0]}, and said nothing"
                quiet = time.monotonic() - since
                if quiet < (STARTING if left["here"] else CHECKING):
                    if quiet >= QUIET and not left["here"] and not is_told:
                        print(f"  (nothing for {QUIET} s; it ends after {CHECKING})", flush=True)
                        is_told = True
                    continue
                if size == 1:
                    return f"nothing happened for {CHECKING} s: what does it wait for?"
                return "the ranks wait for each other: do all of them call the same collectives, in the same order?"
            kind, what = told.recv()
            since, is_told = time.monotonic(), False
            if kind == "wrong":  # the others may wait for the one that failed
                return what
            if kind == "right":
                print(f"  right: {what}", flush=True)
            else:
                left[kind] -= 1
        return None
    finally:
        for process in ranks:
            process.kill()


def check(name: str, path: str) -> int:
    """Check a solution on all numbers of ranks of its exercise; return the exit code."""
    for size in getattr(checks_of(name), "SIZES", (1,)):
        if size > 1:
            print(f"{size} ranks", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            wrong = on_ranks(name, path, size, folder)
        if wrong:
            print(f"  not yet: {wrong}")
            return 1
    print("all right")
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="the file of your solution")
    parser.add_argument("--hint", nargs="?", type=int, const=1, help="so many hints, and no check")
    args = parser.parse_args(argv)
    if args.hint is not None and args.hint < 1:
        parser.error(f"--hint {args.hint}: take 1 or more")
    if args.path is None:
        for name in EXERCISES:
            print(f"{f'exercises/{name}.py':40} {checks_of(name).MINUTES:3} min  {title_of(name)}")
        return 0
    try:
        name = exercise_of(args.path)
    except ValueError as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 2
    if args.hint is None:
        return check(name, str(args.path.resolve()))
    hints = hints_of(name)
    for i, hint in enumerate(hints[: args.hint], 1):
        print(textwrap.fill(f"{i} of {len(hints)}: {hint}", 100, subsequent_indent="  "))
    return 0


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["exercises.checks.common"])  # PyTorch is loaded once, and not by each rank
    sys.exit(main(sys.argv[1:]))
