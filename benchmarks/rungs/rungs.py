"""The rungs of benchmarks/ladder.py: what it runs, and what each is compared with."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.harness.call import all_devices


@dataclass(frozen=True)
class Rung:
    """A run, and the one below it: what it is compared with.

    Args:
        table: where it stands in the report.
        flags: on top of the configuration's.
        batch: samples of a step, over all ranks.
        needs: of the machine, a key of MISSING, or a number of GPUs: `2 GPUs`.
        env: what is set in its environment: `NAME=value`.
    """

    table: str
    name: str
    flags: tuple[str, ...]
    batch: int
    below: str | None = None
    script: str = "train.py"
    ranks: int = 1
    needs: str | None = None
    env: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.table}: {self.name}"


# The baseline has none of what the rungs switch on. Its attention is the one that we would take: with the plain formula
# a large section does not fit into a GPU.
PLAIN = (
    "--num_data_workers=0", "--read_depth=None", "--data_loader_config=pytorch", "--no_tf32", "--amp_mode=none",
    "--no_enable_fused", "--no_enable_jit", "--attention=auto", "--activation_checkpoint=none", "--mlp_chunks=1",
    "--accumulation_steps=1", "--patch_overlap=0", "--rollout_steps=1", "--rollout_from=0", "--conserve_mean=None",
)  # fmt: skip
WORKERS = ("--num_data_workers=4",)
STEPS = {  # in the order of the tutorial
    "workers": WORKERS,
    "prefetch": (*WORKERS, "--read_depth=16"),
    "TF32": ("--tf32",),
    "fused": ("--enable_fused",),
    "bf16": ("--amp_mode=bf16",),
    "compile": ("--enable_jit",),
}
ALONE = {
    **STEPS,
    "plain attention": ("--attention=math",),
    "DALI": (*WORKERS, "--data_loader_config=dali"),
    "fp16": ("--amp_mode=fp16",),
    "checkpoint blocks": ("--activation_checkpoint=block",),
    "checkpoint MLPs": ("--activation_checkpoint=mlp",),
    "chunks": ("--mlp_chunks=4",),
    "two passes": ("--accumulation_steps=2",),
    "two steps": ("--rollout_steps=2",),
    "two steps, one kept": ("--rollout_steps=2", "--activation_checkpoint=step"),
    "the report": ("--report",),  # what looking at a run costs it
}
NEEDS = {"TF32": "TF32", "fp16": "fp16"}
DATA_PARALLEL = "benchmarks/data_parallel.py"
GRAPHS = ("--graph_warmup=4",)
AGAIN = "steps: the same again"
MISSING = {
    "a GPU": "no GPU here",
    "more ranks": "needs --nproc 2 or more",
    "4 ranks": "needs --nproc 4, or 8, 12, ...",
    "2 samples": "needs two samples in a batch, or four, or six, ...",
    "TF32": "needs an NVIDIA GPU with tensor cores (Ampere or later)",
    "fp16": "a CPU only imitates fp16, many times slower",
}


def lacks(needs: str | None, ranks: int = 1) -> str | None:
    """Return what the machine has not, in words; None where it has all that `ranks` ranks need."""
    gpus = torch.cuda.device_count()
    if gpus and ranks > all_devices():
        return f"needs {ranks} GPUs, and here are {all_devices()}"
    if needs and needs.endswith(" GPUs"):  # in this node
        return None if gpus >= int(needs.split()[0]) else f"needs {needs}, and here are {gpus}"
    has_tf32 = gpus > 0 and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 0)
    there = {None: True, "a GPU": gpus > 0, "TF32": has_tf32, "fp16": gpus > 0}
    return None if there.get(needs) else MISSING[needs]


def all_rungs(nproc: int, batch: int, patch_size: int = 8) -> list[Rung]:
    """Return all rungs, each after the one below it; `batch` is that of a step on one rank."""
    rungs = [Rung("steps", "baseline", PLAIN, batch), Rung(*AGAIN.split(": "), PLAIN, batch, "steps: baseline")]
    flags, below = PLAIN, "steps: baseline"
    for name, more in STEPS.items():
        flags = (*flags, *more)
        rungs.append(Rung("steps", f"+ {name}", flags, batch, below, needs=NEEDS.get(name)))
        below = rungs[-1].key
    rungs.append(Rung("steps", "+ graphs", (*flags, *GRAPHS), batch, below, "train_mp_graphs.py", needs="a GPU"))
    odd = {"two passes": "2 samples"} if batch % 2 else {}
    for name, more in {**ALONE, "overlap": (f"--patch_overlap={patch_size // 2}",)}.items():
        needs = (NEEDS | odd).get(name)
        rungs.append(Rung("alone", name, (*PLAIN, *more), batch, "steps: baseline", needs=needs))
    graphs = Rung("alone", "graphs", (*PLAIN, *GRAPHS), batch, "steps: baseline", "train_mp_graphs.py", needs="a GPU")
    rungs += [graphs, Rung("alone", "twice the batch", PLAIN, 2 * batch, "steps: baseline")]
    if nproc == 1:
        return [*rungs, Rung("weak scaling", "2 ranks", flags, 2 * batch, ranks=2, needs="more ranks")]
    tables = (_scaling, _data_parallel, _grids, _links)
    return [*rungs, *(rung for table in tables for rung in table(nproc, batch, flags))]


def _scaling(nproc: int, batch: int, flags: tuple[str, ...]) -> Iterator[Rung]:
    counts = [2**i for i in range(nproc.bit_length()) if 2**i < nproc] + [nproc]
    for table, grows in (("weak scaling", True), ("strong scaling", False)):
        for n in counts:
            first = f"{table}: 1 rank" if n > 1 else None
            name = "1 rank" if n == 1 else f"{n} ranks"
            yield Rung(table, name, flags, batch * n if grows else batch, first, ranks=n)


def _data_parallel(nproc: int, batch: int, flags: tuple[str, ...]) -> Iterator[Rung]:
    table, ddp, batch = "data parallel", f"weak scaling: {nproc} ranks", batch * nproc
    for name, more in {
        "one bucket": ("--bucket_cap_mb=1048576",),  # gradients leave when the backward pass is over
        "buckets of 1 MiB": ("--bucket_cap_mb=1",),
        "no broadcast of buffers": ("--disable_broadcast_buffers",),
        "no gradients sent": ("--noddp",),
    }.items():
        yield Rung(table, name, (*flags, *more), batch, ddp, ranks=nproc)
    for kind in ("gradients", "weights"):
        yield Rung(table, f"shared {kind}", (*flags, f"--shard={kind}"), batch, ddp, "train_mp.py", nproc)
    # DataParallel copies the model in each step, which cannot be compiled, and its threads know no bf16.
    plain, needs = (*flags, "--no_enable_jit", "--amp_mode=none"), f"{nproc} GPUs"
    yield Rung(table, "not compiled", plain, batch, ddp, ranks=nproc, needs=needs)
    mine = (*plain, f"--gpus={nproc}")
    yield Rung(table, "DataParallel", mine, batch, f"{table}: not compiled", DATA_PARALLEL, needs=needs)


def _grids(nproc: int, batch: int, flags: tuple[str, ...]) -> Iterator[Rung]:
    tp, cp, both = f"tp {nproc}", f"cp {nproc}", f"tp 2 x cp {nproc // 2}"
    of_tp, of_cp = f"--tensor_parallel={nproc}", f"--context_parallel={nproc}"
    of_both = ("--tensor_parallel=2", f"--context_parallel={nproc // 2}")
    first, second = (f"--parallel_order={order}" for order in ("tp-cp-dp", "cp-tp-dp"))
    table, script = "model parallel", "train_mp.py"
    yield Rung(table, "1 rank", flags, batch, script=script)
    for name, below, more in (  # each kind over one rank, and another way to do it over the first
        (tp, "1 rank", (of_tp,)),
        (f"{tp}, no sequence parallelism", tp, (of_tp, "--no_sequence_parallel")),
        (cp, "1 rank", (of_cp,)),
        (f"{cp}, Ulysses", cp, (of_cp, "--cp_attention=ulysses")),
        (f"{cp}, re-gather", cp, (of_cp, "--cp_regather")),
        (f"{cp}, 2 groups of heads", cp, (of_cp, "--cp_head_groups=2")),
        (f"{both}, tp-cp-dp", "1 rank", (*of_both, first)),
        (f"{both}, cp-tp-dp", f"{both}, tp-cp-dp", (*of_both, second)),
    ):
        needs = "4 ranks" if name.startswith(both) and nproc % 4 else None
        yield Rung(table, name, (*flags, *more), batch, f"{table}: {below}", script, nproc, needs)


def _links(nproc: int, batch: int, flags: tuple[str, ...]) -> Iterator[Rung]:
    """What links between the GPUs of a node are worth: without them, NCCL and RCCL go through the host's memory."""
    off = {"needs": f"{nproc} GPUs", "env": ("NCCL_P2P_DISABLE=1",)}
    ddp, tp = f"weak scaling: {nproc} ranks", f"model parallel: tp {nproc}"
    yield Rung("links", f"{nproc} ranks, no peer to peer", flags, batch * nproc, ddp, ranks=nproc, **off)
    flags = (*flags, f"--tensor_parallel={nproc}")
    yield Rung("links", f"tp {nproc}, no peer to peer", flags, batch, tp, "train_mp.py", nproc, **off)


def chosen(rungs: list[Rung], names: list[str] | None) -> list[Rung]:
    """Return the baseline, the rungs that have one of the names in theirs, and those that they are compared with.

    Raises ValueError for a name that no rung has.
    """
    if names is None:
        return rungs
    for name in names:
        if not any(name.lower() in rung.key.lower() for rung in rungs):
            raise ValueError(f"no rung is called {name!r}: take words of {', '.join(rung.key for rung in rungs)}")
    by_key = {rung.key: rung for rung in rungs}
    keep = {"steps: baseline", AGAIN}  # which tell what noise is
    for rung in rungs:
        if any(name.lower() in rung.key.lower() for name in names):
            keep.add(rung.key)
            while rung.below:  # down to one that this machine can do
                rung = by_key[rung.below]
                keep.add(rung.key)
                if not lacks(rung.needs, rung.ranks):
                    break
    return [rung for rung in rungs if rung.key in keep]
