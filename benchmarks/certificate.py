"""Is the parallel model the same model? Every grid of 1, 2, 4 and 8 ranks against one process, in float64.

    python benchmarks/certificate.py --json FILE [--ranks 1 2 4 7 8 16] [--images "10 tokens" ...]
                                     [--modes float64 float32 ...] [--named 2]
    python benchmarks/certificate.py --grid tp=2 cp=2          every grid of these sizes, in all modes
    python benchmarks/certificate.py --device cuda             on GPUs with NCCL, of as many ranks as there are GPUs

Each grid trains with train_mp.py's own main on small files and is compared with train.py in float64: the loss, every
parameter's gradient, its norm, the weights after 2 to 5 steps, the validation metrics; with forecasts of one step, of
two and of four, with windows that overlap and without. Ranks that hold the same parameter
must hold the same bits. Five named grids, or the first of them, are then tried in other modes. An error is the largest
difference over the largest reference value, per full tensor. The first one above its bound ends the run and names what
and where. What one process does is in proof/worker.py.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import yaml

from benchmarks.harness.command import errors_in_one_line
from benchmarks.harness.record import write_record
from benchmarks.proof.cases import (
    AXES,
    EVERY,
    EVERYWHERE,
    FULL_IMAGE,
    IMAGES,
    MODES,
    NAMED,
    NAMED_IMAGE,
    SECTION,
    label,
    runs_of,
    runs_on,
    shown,
)
from utils.measure.tables import markdown
from utils.sample_data.write import write_shape

ROOT = Path(__file__).resolve().parent.parent


def failure(result: dict) -> str | None:
    """Return what is wrong with a result, or None."""
    where = f"{label(result['grid'])}; {result['image']}; {result['mode']}"
    if result["faults"]:
        return f"{where}: {result['faults'][0]}"
    for kind, bound in result["bounds"].items():
        error, name = result["errors"][kind]
        if not error <= bound:
            return f"{where}: {name} is off by {error:.1e}, and {bound:.1e} is allowed"


def run_world(folder: str, ranks: int, cases: list[dict]) -> list[dict]:
    """Run the cases of one number of ranks; print each; stop at the first error above its bound."""
    Path(folder, f"cases{ranks}.json").write_text(json.dumps(cases))
    command = [sys.executable, str(ROOT / "benchmarks/proof/worker.py"), folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    port = 12000 + os.getpid() % 15000
    numbers = [[str(rank), str(ranks), str(port)] for rank in range(ranks)]
    processes = [
        subprocess.Popen([*command, *three], env=environment, stdout=subprocess.PIPE, text=True) for three in numbers
    ]
    results = []
    try:
        for line in processes[0].stdout:
            results.append(json.loads(line))
            result = results[-1]
            print(f"  {shown(result):.1e}  {label(result['grid'])}; {result['image']}; {result['mode']}", flush=True)
            if failed := failure(result):
                sys.exit(f"certificate: {failed}")
        if any(process.wait() for process in processes) or len(results) != sum(len(c["runs"]) for c in cases):
            sys.exit(f"certificate: a rank of {ranks} ended early")
    finally:
        for process in processes:
            process.kill()
    return results


def summarise(results: list[dict]) -> tuple[str, dict[str, float], dict[str, list[float]]]:
    """Return the summary in words, the figures and their spread."""
    grids = len({label(result["grid"]) for result in results})
    summary, figures, spread = [f"{len(results)} runs on {grids} grids"], {"grids": grids}, {}
    for dtype in ("float64", "float32"):
        kind = [r for r in results if MODES[r["mode"]].dtype == dtype and not MODES[r["mode"]].times_serial]
        errors = sorted((shown(r), label(r["grid"]), r["image"], r["mode"]) for r in kind if r["bounds"])
        if errors:
            worst, *where = errors[-1]
            figures[f"worst_{dtype}"], spread[f"worst_{dtype}"] = worst, [errors[0][0], worst]
            summary.append(f"{dtype}: worst error of {len(errors)} runs {worst:.1e} ({'; '.join(where)})")
    return ". ".join(summary), figures, spread


def by_grid(results: list[dict], *columns: str) -> dict[str, dict[str, float]]:
    """Return the errors of each grid by `columns`: images, modes, or both."""
    rows: dict[str, dict[str, float]] = {}
    for result in results:
        rows.setdefault(label(result["grid"]), {})[": ".join(result[column] for column in columns)] = shown(result)
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return a table of docs/certificate.md: a row for each grid."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))

    def entry(error: float | None) -> str:
        if not error:
            return "" if error is None else "same bits"
        return f"{error:.0e}" if error < 0.01 else f"{error:.2f}"

    return markdown(["grid", *columns], ([name, *(entry(row.get(c)) for c in columns)] for name, row in rows.items()))


def sizes_of(texts: list[str]) -> dict[str, int]:
    """Return dp, tp and cp of `tp=2 cp=2`, 1 where one is not named. Raises ValueError for others."""
    sizes = dict.fromkeys(AXES, 1)
    for text in texts:
        axis, _, size = text.partition("=")
        if axis not in AXES or not size.isdecimal() or not int(size):
            raise ValueError(f"grid has {text!r}: it takes sizes of axes, such as dp=2 tp=2 cp=2")
        sizes[axis] = int(size)
    for axis, what, there in (("tp", "heads", SECTION["num_heads"]), ("dp", "samples", SECTION["global_batch_size"])):
        if there % sizes[axis]:
            raise ValueError(f"{axis}={sizes[axis]} does not divide the {there} {what} of what is tried")
    return sizes


def ranks_to_try(asked: list[int] | None, sizes: dict[str, int] | None, device: str) -> list[int]:
    """Return the numbers of ranks to try. Raises ValueError where there are less GPUs: NCCL takes one rank a GPU."""
    count = torch.cuda.device_count()
    usual = ([n for n in EVERY if n <= count] or [1]) if device == "cuda" else [1, 2, 4, 7, 8, 16]
    ranks = [math.prod(sizes.values())] if sizes else asked or usual
    if device == "cuda" and max(ranks) > count:
        raise ValueError(f"device cuda needs a GPU for each of {max(ranks)} rank(s), and there are {count}: take less")
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="1 2 4 7 8 16; on GPUs 1 2 4 8, as many as there are")
    parser.add_argument("--grid", nargs="+", metavar="AXIS=SIZE", help="only grids of these sizes: dp=1 tp=2 cp=2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--images", nargs="+", choices=IMAGES, default=[i for i in IMAGES if i != FULL_IMAGE])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--named", type=int, default=len(NAMED), help="named grids to try in other modes")
    args = parser.parse_args()
    with errors_in_one_line():
        sizes = sizes_of(args.grid) if args.grid else None
        ranks_tried = ranks_to_try(args.ranks, sizes, args.device)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        paths = {f"{kind}_data_path": f"/data/{kind}" for kind in ("train", "valid")}
        stats = {f"{kind}_path": f"/data/stats/{kind}.npy" for kind in ("global_means", "global_stds", "time_means")}
        section = {**SECTION, **paths, **stats, "device": args.device}
        Path(folder, "certificate.yaml").write_text(yaml.safe_dump({"certificate": section}))
        images = {image for image, _ in EVERYWHERE} if sizes else {*args.images}
        for image in {*images, NAMED_IMAGE, *({FULL_IMAGE} & set(args.modes))}:
            write_shape(f"{folder}/{image}", (3, *IMAGES[image][:2]), trajectories=3, samples=24)
        subprocess.run([sys.executable, str(ROOT / "benchmarks/proof/worker.py"), folder], check=True)
        results = []
        for ranks in ranks_tried:
            cases = runs_on(sizes, args.modes) if sizes else runs_of(ranks, args.images, args.modes, args.named)
            print(f"{ranks} rank(s), {sum(len(case['runs']) for case in cases)} run(s)", flush=True)
            results += run_world(folder, ranks, cases)
    summary, figures, spread = summarise(results)
    print(f"{summary}. {time.perf_counter() - start:.0f} s")
    if args.json:
        everywhere = {mode for _, mode in EVERYWHERE}
        exact, others = ([r for r in results if (r["mode"] in everywhere) == own] for own in (True, False))
        rows = {"grids": by_grid(exact, "image", "mode"), "modes": by_grid(others, "mode")}
        write_record(args.json, figures, spread, summary=summary, **rows)


if __name__ == "__main__":
    main()
