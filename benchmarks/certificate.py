"""Is the parallel model the same model? Every grid of 1, 2, 4 and 8 ranks against one process, in float64.

    python benchmarks/certificate.py --json FILE [--report FILE.md] [--ranks 1 2 4 7 8 16] [--images "10 tokens" ...]
                                     [--modes float64 float32 ...] [--named 2]

Each grid trains with train_mp.py's own main on small files and is compared with train.py in float64: the loss, every
parameter's gradient, its norm, the weights after 5 steps, the validation metrics. Ranks that hold the same parameter
must hold the same bits. Five named grids, or the first of them, are then tried in other modes. An error is the largest
difference over the largest reference value, per full tensor. The first one above its bound ends the run and names what
and where. What one process does is in certificate_worker.py.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# name: rows, columns, patch size. Over 8 shards, 21 and 10 tokens leave ranks that hold padding only.
IMAGES = {
    "32 tokens": (16, 32, 4), "21 tokens": (12, 28, 4), "16 tokens": (16, 64, 8), "10 tokens": (16, 40, 8),
    "4,050 tokens": (360, 720, 8),
}  # fmt: skip
SECTION = dict(
    embed_dim=32, depth=2, num_heads=8, n_in_channels=3, n_out_channels=2, residual=True, global_batch_size=8,
    num_iters=5, lr=1e-3, warmup=2, plot_channels=[],
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """One way to run a grid.

    Attributes:
        flags: what is added to the command line.
        bounds: for each kind of value, the largest error.
        reference: which run of train.py it is compared with; `None` for none.
        times_serial: the bound of the gradients, in errors of train.py itself in this mode. Losses are then compared
            with those of train.py in the same mode.
    """

    flags: tuple[str, ...] = ()
    dtype: str = "float64"
    bounds: tuple[tuple[str, float], ...] = tuple(
        (kind, 1e-12) for kind in ("gradients", "weights", "loss", "grad_norm", "validation")
    )
    reference: str | None = "float64"
    times_serial: float | None = None


HALF = dict(dtype="float32", bounds=(("loss", 1e-3),), times_serial=2.0)
MODES = {
    "float64": Mode(),
    "re-gather": Mode(("--sp_regather",)),
    "accumulation": Mode(("--accumulation_steps", "2")),
    "compile": Mode(("--enable_jit",)),
    "recomputed": Mode(("--activation_checkpoint", "block", "--mlp_chunks", "3")),
    "recomputed, compiled": Mode(("--activation_checkpoint", "mlp", "--enable_jit")),
    "clipping": Mode(("--clip_grad_norm", "0.1"), reference="clipping"),
    "DropPath": Mode(("--drop_path", "0.3"), reference="DropPath"),
    "4,050 tokens": Mode(
        ("--num_iters", "2", "--global_batch_size", "2", "--limit_nsamples_val", "2"), reference="4,050 tokens"
    ),
    "dropout": Mode(("--dropout", "0.1"), bounds=(), reference=None),
    "float32": Mode(
        ("--num_iters", "20"), "float32", (("loss", 2e-6), ("gradients", 1e-5), ("grad_norm", 1e-5)), "20 steps"
    ),
    "bf16": Mode(("--amp_mode", "bf16"), **HALF),
    "fp16": Mode(("--amp_mode", "fp16"), **HALF),
}
# What train.py runs in one process.
SERIAL = {
    "float64": Mode(),
    "20 steps": Mode(("--num_iters", "20")),
    "clipping": MODES["clipping"],
    "4,050 tokens": MODES["4,050 tokens"],
    "DropPath": MODES["DropPath"],
    "bf16": MODES["bf16"],
    "fp16": MODES["fp16"],
}
NAMED_IMAGE, FULL_IMAGE = "10 tokens", "4,050 tokens"  # the latter is a mode too: two steps, two samples


def grid_of(dp: int, tp: int, cp: int, sp: bool, attention: str = "gather", order: str = "tp-cp-dp") -> dict:
    """Return a grid: dp, and the flags of train_mp.py."""
    return dict(
        dp=dp, tensor_parallel=tp, context_parallel=cp, parallel_order=order, sequence_parallel=sp,
        cp_attention=attention,
    )  # fmt: skip


NAMED = [
    grid_of(2, 2, 1, False),
    grid_of(1, 2, 2, True),
    grid_of(1, 2, 2, True, "ulysses", "cp-tp-dp"),
    grid_of(2, 1, 2, False, "ulysses"),
    grid_of(2, 2, 2, True),
]
# On the full image of ERA5, which does not divide over 4, 7 or 16 shards.
FULL = [grid_of(1, 4, 1, True), grid_of(1, 1, 7, False), grid_of(1, 4, 4, True)]
EVERY = (1, 2, 4, 8)  # ranks of which all grids are tried, on all small images


def ranks_of(grid: dict) -> int:
    return grid["dp"] * grid["tensor_parallel"] * grid["context_parallel"]


def grids(ranks: int) -> list[dict]:
    """Return all grids of `ranks` ranks. Orders that give the same grid count once."""
    found = []
    sizes = [s for s in itertools.product(range(1, ranks + 1), repeat=3) if math.prod(s) == ranks]
    for dp, tp, cp in sizes:
        seen = set()
        for order in itertools.permutations(("tp", "cp", "dp")):
            size = dict(dp=dp, tp=tp, cp=cp)
            effective = tuple(axis for axis in order if size[axis] > 1)
            if effective in seen:
                continue
            seen.add(effective)
            for sp in (True, False) if tp > 1 else (False,):
                for attention in ("gather", "ulysses") if cp > 1 else ("gather",):
                    found.append(grid_of(dp, tp, cp, sp, attention, "-".join(order)))
    return found


def runs_of(ranks: int, images: list[str], modes: list[str], named: int) -> list[dict]:
    """Return what to run on `ranks` ranks: grids, each with its pairs of image and mode."""
    pairs = [(grid, [[image, "float64"] for image in images]) for grid in grids(ranks) if ranks in EVERY]
    pairs = pairs if "float64" in modes else []
    pairs += [(grid, [[FULL_IMAGE, FULL_IMAGE]]) for grid in FULL if FULL_IMAGE in modes]
    others = [mode for mode in modes if mode not in ("float64", FULL_IMAGE)]
    pairs += [(grid, [[NAMED_IMAGE, mode] for mode in others if is_allowed(grid, mode)]) for grid in NAMED[:named]]
    return [{"grid": grid, "runs": runs} for grid, runs in pairs if runs and ranks_of(grid) == ranks]


def is_allowed(grid: dict, mode: str) -> bool:
    """Whether train_mp.py takes the mode: plain tensor parallelism has no dropout and nothing to re-gather."""
    return grid["sequence_parallel"] or not (mode == "re-gather" or mode == "dropout" and grid["tensor_parallel"] > 1)


def label(grid: dict) -> str:
    """Return a grid in words: `dp 2 x tp 2 x cp 2, tp-cp-dp, sequence parallel, ulysses`."""
    words = [
        f"dp {grid['dp']} x tp {grid['tensor_parallel']} x cp {grid['context_parallel']}, {grid['parallel_order']}"
    ]
    if grid["tensor_parallel"] > 1:
        words.append("sequence parallel" if grid["sequence_parallel"] else "plain tensor parallel")
    if grid["context_parallel"] > 1:
        words.append(grid["cp_attention"])
    return ", ".join(words)


def flags(grid: dict, image: str, mode: Mode, folder: str) -> list[str]:
    """Return the command line of one grid on one image; the empty grid is train.py's."""
    rows, columns, patch = IMAGES[image]
    argv = ["--yaml_config", f"{folder}/certificate.yaml", "--config", "certificate", "--expdir", f"{folder}/runs"]
    argv += ["--checkpoint_every", "None"]  # to write them is not what is tried here
    argv.append(f"--init_from={folder}/{image}.pt")  # the same weights in every dtype
    argv += ["--data_dir", f"{folder}/{image}", "--img_size", str(rows), str(columns), "--patch_size", str(patch)]
    for name, value in grid.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no_{name}")
        elif name != "dp":
            argv += [f"--{name}", str(value)]
    return [*argv, *mode.flags]


def failure(result: dict) -> str | None:
    """Return what is wrong with a result, or None."""
    where = f"{label(result['grid'])}; {result['image']}; {result['mode']}"
    if result["faults"]:
        return f"{where}: {result['faults'][0]}"
    for kind, bound in result["bounds"].items():
        error, name = result["errors"][kind]
        if not error <= bound:
            return f"{where}: {name} is off by {error:.1e}, and {bound:.1e} is allowed"


def shown(result: dict) -> float:
    """Return the one number of a result: the worst error; in float32 the losses'; else gradients over train.py's."""
    errors, mode = result["errors"], MODES[result["mode"]]
    if mode.times_serial:
        return mode.times_serial * errors["gradients"][0] / result["bounds"]["gradients"]
    return errors["loss"][0] if mode.dtype == "float32" else max((errors[k][0] for k in result["bounds"]), default=0.0)


def run_world(folder: str, ranks: int, cases: list[dict]) -> list[dict]:
    """Run the cases of one number of ranks; print each; stop at the first error above its bound."""
    Path(folder, f"cases{ranks}.json").write_text(json.dumps(cases))
    command = [sys.executable, str(ROOT / "benchmarks/certificate_worker.py"), folder]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 7, 8, 16])
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--report", type=Path, help="tables to write, in Markdown")
    parser.add_argument("--images", nargs="+", choices=IMAGES, default=[i for i in IMAGES if i != FULL_IMAGE])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--named", type=int, default=len(NAMED), help="named grids to try in other modes")
    args = parser.parse_args()
    import yaml

    from benchmarks.certificate_report import report, summarise
    from benchmarks.record import write_record
    from utils.sample_data import write_shape

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        paths = {f"{kind}_data_path": f"/data/{kind}" for kind in ("train", "valid")}
        stats = {f"{kind}_path": f"/data/stats/{kind}.npy" for kind in ("global_means", "global_stds", "time_means")}
        Path(folder, "certificate.yaml").write_text(yaml.safe_dump({"certificate": {**SECTION, **paths, **stats}}))
        for image in {*args.images, NAMED_IMAGE, *({FULL_IMAGE} & set(args.modes))}:
            write_shape(f"{folder}/{image}", (3, *IMAGES[image][:2]), trajectories=3, samples=24)
        subprocess.run([sys.executable, str(ROOT / "benchmarks/certificate_worker.py"), folder], check=True)
        results = []
        for ranks in args.ranks:
            cases = runs_of(ranks, args.images, args.modes, args.named)
            print(f"{ranks} rank(s), {sum(len(case['runs']) for case in cases)} run(s)", flush=True)
            results += run_world(folder, ranks, cases)
    summary, figures, spread = summarise(results)
    print(f"{summary}. {time.perf_counter() - start:.0f} s")
    if args.json:
        write_record(args.json, figures, spread)
    if args.report:
        args.report.write_text(report(summary, results))


if __name__ == "__main__":
    main()
