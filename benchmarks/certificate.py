"""Is the parallel model the same model? Every grid of 1, 2, 4 and 8 ranks against one process, in float64.

    python benchmarks/certificate.py --json FILE [--report FILE.md] [--ranks 1 2 4 8] [--images "10 tokens" ...]

Each grid trains 5 steps with train_mp.py's own main on small files, and is compared with train.py's: the loss,
every parameter's gradient, its norm, the weights after the steps, and the validation metrics. An error is the largest
difference over the largest reference value, per full tensor. The first one above the bound ends the run and names
parameter and grid.
"""

import argparse
import itertools
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

BOUND = 1e-12
# name: rows, columns, patch size. Over 8 shards, 21 and 10 tokens leave ranks that hold padding only.
IMAGES = {"32 tokens": (16, 32, 4), "21 tokens": (12, 28, 4), "16 tokens": (16, 64, 8), "10 tokens": (16, 40, 8)}
SECTION = dict(
    embed_dim=32, depth=2, num_heads=8, n_in_channels=3, n_out_channels=2, residual=True, global_batch_size=8,
    num_iters=5, lr=1e-3, warmup=2,
)  # fmt: skip


def grids(ranks: int) -> list[dict]:
    """Return all grids of `ranks` ranks, each as flags of train_mp.py. Orders that give the same grid count once."""
    found = []
    sizes = [s for s in itertools.product(range(1, ranks + 1), repeat=3) if s[0] * s[1] * s[2] == ranks]
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
                    found.append(
                        dict(
                            dp=dp, tensor_parallel=tp, context_parallel=cp, parallel_order="-".join(order),
                            sequence_parallel=sp, cp_attention=attention,
                        )
                    )  # fmt: skip
    return found


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


def flags(grid: dict, image: str, folder: str) -> list[str]:
    """Return the command line of one grid on one image."""
    rows, columns, patch = IMAGES[image]
    argv = ["--yaml_config", f"{folder}/certificate.yaml", "--config", "certificate", "--expdir", f"{folder}/runs"]
    argv += ["--data_dir", f"{folder}/{image}", "--img_size", str(rows), str(columns), "--patch_size", str(patch)]
    for name, value in grid.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no_{name}")
        elif name != "dp":
            argv += [f"--{name}", str(value)]
    return argv


def trained(main, module, argv: list[str], world) -> dict:
    """Run a chapter's `main` and return its first gradients, its last weights and its records."""
    import train

    kept = {}

    def keep(step, model, optimizer, scaler, data, config, run, *norm):
        module_of_ranks = getattr(model, "module", model)

        def keeping_step(*args):
            loss = step(*args)
            if "gradients" not in kept:
                kept["gradients"] = {n: p.grad.detach().clone() for n, p in module_of_ranks.named_parameters()}
            return loss

        original(keeping_step, model, optimizer, scaler, data, config, run, *norm)
        kept["weights"] = {n: p.detach().clone() for n, p in module_of_ranks.named_parameters()}
        kept["folder"] = run.folder if run.is_main else None

    original, module.train = train.train, keep
    try:
        main(world, argv)
    finally:
        module.train = original
    if kept["folder"]:
        lines = [json.loads(line) for line in (kept["folder"] / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["event"] == "step"]
        last = [line for line in lines if line["event"] == "epoch"][-1]
        valid = [last["valid_loss"], *last["valid_rmse"].values(), *last["valid_acc_timemean"].values()]
        kept["records"] = {
            "loss": [s["loss"] for s in steps],
            "grad_norm": [s["grad_norm"] for s in steps],
            "validation": valid + list(last["persistence_rmse"].values()),
        }
    return kept


def quiet() -> None:
    """Leave out what costs time and proves nothing here: the console, pictures, the peak of the device."""
    import utils.run

    utils.run.peak_flops = lambda *_: (1.0, "not measured")
    utils.run.Run._draw = lambda *_: None
    logging.disable()


def serial_reference(folder: str) -> None:
    """Train every image on one process with train.py and keep what the grids are compared with."""
    import train
    from utils.launch import World, join

    quiet()
    torch.set_default_dtype(torch.float64)
    join(World())
    for image in IMAGES:
        kept = trained(train.main, train, flags({}, image, folder), World())
        del kept["folder"]
        torch.save(kept, f"{folder}/{image}.pt")
    dist.destroy_process_group()


def errors_of(kept: dict, reference: dict, config, grid, shard) -> list[tuple[float, str]]:
    """Return this rank's errors, each with its name."""
    from distributed.parallelize import ParallelViT
    from networks.vit import ViT

    found = []
    for kind in ("gradients", "weights"):
        serial = ViT(
            config.img_size, config.patch_size, SECTION["n_in_channels"], SECTION["n_out_channels"], config.embed_dim,
            config.depth, config.num_heads,
        )  # fmt: skip
        serial.load_state_dict(reference[kind])
        own_slices = dict(ParallelViT(serial, config, grid, shard).named_parameters())
        for name, value in kept[kind].items():
            error = (value - own_slices[name]).abs().max() / reference[kind][name].abs().max()
            found.append((error.item(), f"{kind} {name}"))
    for name in kept.get("records", ()):
        a, b = (torch.tensor(x["records"][name]) for x in (kept, reference))
        found.append((((a - b).abs() / b.abs()).max().item(), name))
    return found


def worker(folder: str, rank: int, ranks: int, port: int) -> None:
    """One rank: train all grids of the list and write the worst error of each."""
    import train_mp
    from utils.launch import World, join

    quiet()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    references = {image: torch.load(f"{folder}/{image}.pt") for image in IMAGES}
    built, original = [], train_mp.ParallelViT

    def remember(serial, *args):
        built.append(args)
        return original(serial, *args)

    train_mp.ParallelViT = remember
    for i, case in enumerate(json.loads(Path(folder, f"cases{ranks}.json").read_text())):
        world = World(rank, ranks, rank, "127.0.0.1", port + i)
        join(world)
        for image in case["images"]:
            kept = trained(train_mp.main, train_mp, flags(case["grid"], image, folder), world)
            everyone = [None] * ranks
            dist.all_gather_object(everyone, errors_of(kept, references[image], *built.pop()))
            worst, name = max(nan_first(pair) for found in everyone for pair in found)
            if rank == 0:
                print(json.dumps({"grid": case["grid"], "image": image, "error": worst, "where": name}), flush=True)
        dist.destroy_process_group()


def nan_first(pair: tuple[float, str]) -> tuple[float, str]:
    return (float("inf") if pair[0] != pair[0] else pair[0], pair[1])


def run_world(folder: str, ranks: int, cases: list[dict]) -> list[dict]:
    """Run the cases of one number of ranks; print each; stop at the first error above the bound."""
    Path(folder, f"cases{ranks}.json").write_text(json.dumps(cases))
    command = [sys.executable, __file__, "--worker", folder]
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
            print(f"  {results[-1]['error']:.1e}  {label(results[-1]['grid'])}; {results[-1]['image']}", flush=True)
            if not results[-1]["error"] <= BOUND:
                sys.exit(f"certificate: {label(results[-1]['grid'])}, {results[-1]['image']}: {results[-1]['where']}")
        if any(process.wait() for process in processes) or len(results) != sum(len(c["images"]) for c in cases):
            sys.exit(f"certificate: a rank of {ranks} ended early")
    finally:
        for process in processes:
            process.kill()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--report", type=Path, help="table to write, in Markdown")
    parser.add_argument("--images", nargs="+", choices=IMAGES, default=list(IMAGES))
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--serial", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        folder, *numbers = args.worker
        return worker(folder, *map(int, numbers))
    if args.serial:
        return serial_reference(args.serial)
    import yaml

    from utils.sample_data import write_shape

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        paths = {f"{kind}_data_path": f"/data/{kind}" for kind in ("train", "valid")}
        stats = {f"{kind}_path": f"/data/stats/{kind}.npy" for kind in ("global_means", "global_stds", "time_means")}
        Path(folder, "certificate.yaml").write_text(yaml.safe_dump({"certificate": {**SECTION, **paths, **stats}}))
        for image, (rows, columns, _) in IMAGES.items():
            write_shape(f"{folder}/{image}", (3, rows, columns), trajectories=3, samples=24)
        subprocess.run([sys.executable, __file__, "--serial", folder], check=True)
        results = []
        for ranks in args.ranks:
            cases = [{"grid": grid, "images": args.images} for grid in grids(ranks)]
            print(f"{ranks} rank(s), {len(cases)} grid(s)", flush=True)
            results += run_world(folder, ranks, cases)
    worst, count = max(results, key=lambda r: r["error"]), len({label(r["grid"]) for r in results})
    summary = (
        f"{len(results)} runs on {count} grids, worst error {worst['error']:.1e} "
        f"({label(worst['grid'])}; {worst['image']}; {worst['where']})"
    )
    print(f"{summary}, {time.perf_counter() - start:.0f} s")
    if args.json:
        record = {
            "machine": {"cpu_count": os.cpu_count(), "platform": platform.platform()},
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "command": " ".join(["python", *sys.argv]),
            "figures": {"grids": count, "worst_float64": worst["error"]},
            "spread": {"worst_float64": [min(r["error"] for r in results), worst["error"]]},
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.report:
        args.report.write_text(report(summary, results))


def report(summary: str, results: list[dict]) -> str:
    """Return the table: a row for each grid, a column for each image."""
    rows: dict[str, dict[str, float]] = {}
    for result in results:
        rows.setdefault(label(result["grid"]), {})[result["image"]] = result["error"]
    images = list(dict.fromkeys(result["image"] for result in results))
    lines = [
        "# The parallel model is the same model",
        "",
        "Written by `make certificate`. Each grid of ranks trains 5 steps in float64 and is compared with one process:",
        "loss, every parameter's gradient, its norm, the weights after the steps, the validation metrics. An entry is",
        "the largest difference over the largest reference value of a full tensor, the worst of them all. 21 and 10",
        "tokens do not divide over the ranks; 32 and 21 are patches of 4 x 4 points, 16 and 10 of 8 x 8.",
        "",
        summary + ".",
        "",
        "| grid | " + " | ".join(images) + " |",
        "|---|" + "---|" * len(images),
        *(f"| {name} | " + " | ".join(f"{row[i]:.0e}" for i in images) + " |" for name, row in rows.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
