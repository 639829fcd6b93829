"""One process of the certificate: train.py as the reference, or one rank of train_mp.py on a list of grids.

python benchmarks/certificate_worker.py FOLDER                     the references
python benchmarks/certificate_worker.py FOLDER RANK RANKS PORT     one rank
"""

import hashlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters  # no public way; `judged` finds a fault where they no longer count

import train
import train_mp
from benchmarks.certificate import FULL_IMAGE, IMAGES, MODES, NAMED_IMAGE, SECTION, SERIAL, Mode, flags
from distributed.helpers import sliced_dims
from distributed.parallelize import parallelize
from networks.vit import ViT
from utils import report
from utils.launch import World, join

OVERFLOWN = "blocks.0.mlp.fc1.weight"  # sharded over tp


def quiet() -> None:
    """Leave out what costs time and proves nothing here: the console, pictures, the peak of the device."""
    mock.patch.object(report, "peak_flops", lambda *_: (1.0, "not measured")).start()
    mock.patch.object(report.Report, "_draw", lambda *_: None).start()
    logging.disable()


def overflow_once(model: nn.Module) -> None:
    """Let the gradient of one weight be infinite in the second step, on this rank, before any exchange."""
    calls = []

    def hook(grad):
        calls.append(grad)
        return torch.full_like(grad, float("inf")) if len(calls) == 2 else grad

    model.get_parameter(OVERFLOWN).register_hook(hook)


def trained(module, argv: list[str], world: World, overflows: bool) -> dict:
    """Run a chapter's `main`; return its first gradients, last weights, records, and the state of its scaler."""
    kept = {}
    original, original_build = module.train, module.build_model

    def build(config, data):
        """The same weights in every dtype: drawn in float32."""
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return original_build(config, data).to(dtype)
        finally:
            torch.set_default_dtype(dtype)

    def keep(step, update, model, data, config, run):
        optimizer, scaler, *_ = update.args
        whole = getattr(model, "module", model)
        if overflows:
            overflow_once(whole)

        def keeping_step(*args):
            loss = step(*args)
            if "gradients" not in kept:
                scale = scaler.get_scale()
                kept["gradients"] = {n: p.grad.double() / scale for n, p in whole.named_parameters()}
            return loss

        original(keeping_step, update, model, data, config, run)
        kept["weights"] = {n: p.detach().clone() for n, p in whole.named_parameters()}
        sharded = sliced_dims(whole)
        kept["sharded"] = {n for n, p in whole.named_parameters() if p in sharded}
        kept["folder"] = run.folder if run.report else None
        kept["scale"] = scaler.get_scale()
        kept["steps"] = int(optimizer.state[next(whole.parameters())]["step"])

    module.train, module.build_model = keep, build
    try:
        module.main(world, argv)
    finally:
        module.train, module.build_model = original, original_build
    folder = kept.pop("folder")
    if folder:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["event"] == "step"]
        last = [line for line in lines if line["event"] == "epoch"][-1]
        valid = [
            last["valid_samples"],
            last["valid_loss"],
            *last["valid_rmse"].values(),
            *last["valid_acc_timemean"].values(),
        ]
        kept["records"] = {
            "loss": [s["loss"] for s in steps],
            "grad_norm": [s["grad_norm"] for s in steps],
            "validation": valid + list(last["persistence_rmse"].values()),
        }
    return kept


def errors_of(kept: dict, reference: dict, slices: Callable[[dict], dict]) -> dict[str, tuple[float, str]]:
    """Return the worst error of each kind, with its name; `slices` gives a rank's part of a whole state."""
    found = []
    for kind in ("gradients", "weights"):
        own = slices(reference[kind])
        for name, value in kept[kind].items():
            error = (value - own[name]).abs().max() / reference[kind][name].abs().max()
            found.append((kind, error.item(), f"{kind} {name}"))
    for kind in kept.get("records", ()):
        a, b = (torch.tensor([float("nan") if v is None else v for v in x["records"][kind]]) for x in (kept, reference))
        found.append((kind, ((a - b).abs() / b.abs()).max().item() if a.shape == b.shape else float("nan"), kind))
    return worst_of(found)


def worst_of(found: list[tuple[str, float, str]]) -> dict[str, tuple[float, str]]:
    """Return the worst error of each kind; one that is not a number is the worst of all."""
    worst: dict[str, tuple[float, str]] = {}
    for kind, error, name in found:
        error = float("inf") if error != error else error
        worst[kind] = max(worst.get(kind, (0.0, "")), (error, name))
    return worst


def serial(folder: str) -> None:
    """Train with train.py all that the grids are compared with, and keep it in FOLDER."""
    join(World())
    references = {}
    written = [image for image in IMAGES if Path(folder, image).exists()]
    for name, mode in SERIAL.items():
        torch.set_default_dtype(getattr(torch, mode.dtype))
        images = {"float64": [i for i in written if i != FULL_IMAGE], FULL_IMAGE: [FULL_IMAGE]}.get(name, [NAMED_IMAGE])
        for image in set(images) & set(written):
            argv = flags({}, image, mode, folder)
            references[image, name] = trained(train, argv, World(), overflows=name == "fp16")
            if mode.times_serial:
                error = errors_of(references[image, name], references[image, "float64"], lambda whole: whole)
                references[image, name]["error"] = error["gradients"][0]
    torch.save(references, f"{folder}/references.pt")
    dist.destroy_process_group()


def digests(weights: dict, sharded: set[str], tp_rank: int) -> dict[str, str]:
    """Return a digest of each parameter; those of replicas have the same name on all their ranks."""
    slot = {name: f"{name}, tp rank {tp_rank}" if name in sharded else name for name in weights}
    return {slot[n]: hashlib.sha256(w.numpy().tobytes()).hexdigest() for n, w in weights.items()}


def findings(mode: Mode, kept: dict, exact: dict | None, alike: dict | None, config, grid, shard, device) -> dict:
    """Return what one rank has to say about its run.

    Args:
        exact, alike: the run of train.py in float64, and the one in this mode, if there is one.
    """
    torch.set_default_dtype(torch.float64)
    sizes = (SECTION["n_in_channels"], SECTION["n_out_channels"], config.embed_dim, config.depth, config.num_heads)

    def slices(state: dict) -> dict:
        whole = ViT(config.img_size, config.patch_size, *sizes)
        whole.load_state_dict(state)
        return dict(parallelize(whole, config, grid, shard, device).named_parameters())

    errors = errors_of(kept, exact, slices) if exact else {}
    if mode.times_serial:
        errors |= {k: v for k, v in errors_of(kept, alike, slices).items() if k == "loss"}
    return {
        "errors": errors,
        "digests": digests(kept["weights"], kept["sharded"], grid.get_rank("tp")),
        "scaler": (kept["steps"], kept["scale"]),
        "losses": kept.get("records", {}).get("loss"),
        "seed": torch.initial_seed(),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def judged(mode: Mode, everyone: list[dict], alike: dict | None, plain_losses: list[float]) -> dict:
    """Return the errors of all ranks, their bounds, and the faults that have no size.

    Args:
        alike: the run of train.py in this mode, if there is one.
        plain_losses: those of train.py without any flag.
    """
    faults, errors, digest = [], [], {}
    if "--dropout" in mode.flags:
        pairs = zip(everyone[0]["losses"], plain_losses)
        if all(abs(a - b) < 1e-6 * b for a, b in pairs):
            faults.append("dropout changes nothing")
        if len({found["seed"] for found in everyone}) < len(everyone):
            faults.append("two ranks draw the same masks")
    for found in everyone:
        if found["breaks"] or "--enable_jit" in mode.flags and not found["graphs"]:
            faults.append(f"{found['graphs']} compiled graphs, {found['breaks']} graph breaks")
        errors += [(kind, *pair) for kind, pair in found["errors"].items()]
        for slot, value in found["digests"].items():
            if digest.setdefault(slot, value) != value:
                faults.append(f"{slot} differs between the ranks that hold it")
        if mode.times_serial and found["scaler"] != (alike["steps"], alike["scale"]):
            faults.append(f"a rank took {found['scaler'][0]} steps and has the scale {found['scaler'][1]}")
    bounds = dict(mode.bounds)
    if mode.times_serial:
        bounds["gradients"] = mode.times_serial * alike["error"]
    return {"errors": worst_of(errors), "bounds": bounds, "faults": faults}


def worker(folder: str, rank: int, ranks: int, port: int) -> None:
    """One rank: run all cases; rank 0 prints a line of JSON for each."""
    torch.set_num_threads(1)
    references = torch.load(f"{folder}/references.pt")
    built, original = [], train_mp.parallelize

    def remember(serial, *args):
        built.append(args)
        return original(serial, *args)

    train_mp.parallelize = remember
    for i, case in enumerate(json.loads(Path(folder, f"cases{ranks}.json").read_text())):
        world = World(rank, ranks, rank, "127.0.0.1", port + i)
        join(world)
        for image, name in case["runs"]:
            mode = MODES[name]
            torch.compiler.reset()
            counters.clear()
            torch.set_default_dtype(getattr(torch, mode.dtype))
            overflows = name == "fp16" and rank == ranks - 1
            kept = trained(train_mp, flags(case["grid"], image, mode, folder), world, overflows)
            exact, alike = references.get((image, mode.reference)), references.get((image, name))
            everyone = [None] * ranks
            dist.all_gather_object(everyone, findings(mode, kept, exact, alike, *built.pop()))
            if rank == 0:
                result = judged(mode, everyone, alike, references[NAMED_IMAGE, "float64"]["records"]["loss"])
                print(json.dumps({"grid": case["grid"], "image": image, "mode": name, **result}), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    quiet()
    folder, *numbers = sys.argv[1:]
    worker(folder, *map(int, numbers)) if numbers else serial(folder)
