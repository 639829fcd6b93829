"""One process of the certificate: train.py as the reference, or one rank of train_mp.py on a list of grids.

python benchmarks/proof/worker.py FOLDER                     the references
python benchmarks/proof/worker.py FOLDER RANK RANKS PORT     one rank
"""

import hashlib
import itertools
import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters  # no public way; a fault of `judged` where they do not count

import train
import train_mp
from benchmarks.proof.cases import EVERYWHERE, FULL_IMAGE, IMAGES, MODES, NAMED_IMAGE, SERIAL, Mode, flags, shapes_of
from distributed.helpers import sliced_dims
from utils.comm import Grid
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.files import read_events
from utils.observers import Observer
from utils.ranks.start import join
from utils.ranks.world import World
from utils.run.run import Run
from utils.shards import whole

OVERFLOWN = "blocks.0.mlp.fc1"  # its weight is sharded over tp
# Before 2.13, PyTorch's flash attention for CPUs fails in float64 where it is compiled.
COMPILED = ["--attention", "math"] if torch.__version__ < "2.13" else []


class Kept(Observer):
    """Keeps the first gradients of a run, its last weights, its records, and the state of its scaler."""

    def __init__(self, overflows: bool):
        self.overflows, self.found, self.has_begun = overflows, {}, False

    def begin(self, run: Run) -> None:
        self.run, self.model = run, run.state.model
        run.state.optimizer.register_step_pre_hook(lambda *_: self.keep_gradients())

    def before_step(self, left: int) -> None:
        if self.overflows and not self.has_begun:
            overflow_once(self.model)
        self.has_begun = True

    def keep_gradients(self) -> None:
        if "gradients" not in self.found:
            grads = {name: whole(p.grad) for name, p in self.model.named_parameters()}
            self.found["gradients"] = {name: grad.to("cpu", torch.float64, copy=True) for name, grad in grads.items()}

    def close(self, error: BaseException | None) -> None:
        state, sharded = self.run.state, sliced_dims(self.model)
        self.found["weights"] = {n: whole(p).to("cpu", copy=True) for n, p in state.parameters.items()}
        self.found["sharded"] = {n: sharded[p] for n, p in self.model.named_parameters() if p in sharded}
        self.found["stacked"] = state.stacked
        self.found["scale"] = state.scaler.get_scale()
        self.found["steps"] = int(state.optimizer.state[next(iter(state.parameters.values()))]["step"])


def overflow_once(model: nn.Module) -> None:
    """Let the gradient of one weight be infinite in the second step, on this rank, before any exchange."""
    calls = []

    def before(layer: nn.Module, _: tuple) -> None:
        calls.append(layer)
        if len(calls) == 2:
            entry.remove()
            hook = layer.weight.register_hook(lambda grad: hook.remove() or torch.full_like(grad, float("inf")))

    entry = model.get_submodule(OVERFLOWN).register_forward_pre_hook(before)


def trained(main: Callable, argv: list[str], world: World, overflows: bool) -> dict:
    """Run a chapter's `main`; return what is kept of it."""
    kept = Kept(overflows)
    main(world, argv, observers=[kept])
    if world.rank == 0:
        events = read_events(kept.run.folder / "metrics.jsonl")
        steps = [event for event in events if event["event"] == "step"]
        last = [event for event in events if event["event"] == "epoch"][-1]
        valid = [last["valid_samples"], last["valid_loss"]]
        for scores in ("valid_rmse", "valid_acc_timemean", "persistence_rmse"):
            valid += last[scores].values()
        kept.found["records"] = {
            "loss": [s["loss"] for s in steps],
            "grad_norm": [s["grad_norm"] for s in steps],
            "validation": valid,
        }
    return kept.found


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
    written = [image for image in IMAGES if Path(folder, image).exists()]
    for image in written:  # the weights that all runs on it begin with: in float32, whatever they train in
        for shapes in {shapes_of(mode) for mode in MODES.values()}:
            argv = [x for x in flags({}, image, Mode(), folder) if not x.startswith("--init_from")]
            config, _ = load_config([*argv, *shapes])
            if 2 * config.patch_overlap <= config.patch_size:
                model = train.build_model(config, Fields.blank(config))
                torch.save(model.state_dict(), f"{folder}/{image}{''.join(shapes)}.pt")
    join(World())
    references = {}
    for name, mode in SERIAL.items():
        torch.set_default_dtype(getattr(torch, mode.dtype))
        images = {NAMED_IMAGE} | {image for image, everywhere in EVERYWHERE if everywhere == name}
        for image in ({FULL_IMAGE} if name == FULL_IMAGE else images) & set(written):
            argv = flags({}, image, mode, folder)
            if mode.dtype == "float64" and "--drop_path" not in mode.flags:  # a GPU draws other numbers
                argv.append("--device=cpu")
            references[image, name] = trained(train.main, argv, World(), overflows=name == "fp16")
            if mode.times_serial:
                error = errors_of(references[image, name], references[image, mode.reference], lambda whole: whole)
                references[image, name]["error"] = error["gradients"][0]
    torch.save(references, f"{folder}/references.pt")
    dist.destroy_process_group()


def digests(weights: dict, sharded: dict[str, int], tp_rank: int) -> dict[str, str]:
    """Return a digest of each parameter; those of replicas have the same name on all their ranks."""
    slot = {name: f"{name}, tp rank {tp_rank}" if name in sharded else name for name in weights}
    return {slot[n]: hashlib.sha256(w.numpy().tobytes()).hexdigest() for n, w in weights.items()}


def slices_of(whole: dict, sharded: dict[str, int], stacked: dict[str, int], tp: int, tp_rank: int) -> dict:
    """Return a tp rank's part of a whole state; q, k and v, which lie stacked, are each cut by themselves."""
    parts = {name: (stacked.get(name, 1), dim) for name, dim in sharded.items()}
    return {
        name: torch.cat([part.chunk(tp, parts[name][1])[tp_rank] for part in x.chunk(parts[name][0])])
        if name in parts
        else x
        for name, x in whole.items()
    }


def findings(mode: Mode, kept: dict, exact: dict | None, alike: dict | None, tp: int, tp_rank: int) -> dict:
    """Return what one rank has to say about its run.

    Args:
        exact, alike: the run of train.py in float64, and the one in this mode, if there is one.
    """
    slices = partial(slices_of, sharded=kept["sharded"], stacked=kept["stacked"], tp=tp, tp_rank=tp_rank)
    errors = errors_of(kept, exact, slices) if exact else {}
    if mode.times_serial:
        errors |= {k: v for k, v in errors_of(kept, alike, slices).items() if k == "loss"}
    return {
        "errors": errors,
        "digests": digests(kept["weights"], kept["sharded"], tp_rank),
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
    if COMPILED and rank == 0:
        print(f"certificate: PyTorch {torch.__version__}: compiled modes take --attention math", file=sys.stderr)
    references = torch.load(f"{folder}/references.pt")
    ports = itertools.count(port)
    for case in json.loads(Path(folder, f"cases{ranks}.json").read_text()):
        for image, name in case["runs"]:
            mode = MODES[name]
            # Each run joins anew, and leaves: the threads of groups that are left over take the cores.
            world = World(rank, ranks, rank, "127.0.0.1", next(ports))
            join(world)
            torch.compiler.reset()
            counters.clear()
            torch.set_default_dtype(getattr(torch, mode.dtype))
            overflows = (mode.like or name) == "fp16" and rank == ranks - 1
            argv = flags(case["grid"], image, mode, folder) + (COMPILED if "--enable_jit" in mode.flags else [])
            kept = trained(train_mp.main, argv, world, overflows)
            exact, alike = references.get((image, mode.reference)), references.get((image, mode.like or name))
            tp, cp, order = (case["grid"][key] for key in ("tensor_parallel", "context_parallel", "parallel_order"))
            everyone, grid = [None] * ranks, Grid(ranks, rank, tp, cp, order)
            dist.all_gather_object(everyone, findings(mode, kept, exact, alike, tp, grid.get_rank("tp")))
            if rank == 0:
                result = judged(mode, everyone, alike, references[NAMED_IMAGE, "float64"]["records"]["loss"])
                print(json.dumps({"grid": case["grid"], "image": image, "mode": name, **result}), flush=True)
            dist.destroy_process_group()


if __name__ == "__main__":
    logging.disable()  # the console costs time, and proves nothing here
    folder, *numbers = sys.argv[1:]
    worker(folder, *map(int, numbers)) if numbers else serial(folder)
