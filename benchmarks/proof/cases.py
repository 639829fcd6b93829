"""The cases of the certificate: images, modes and grids, and how their results are named."""

import itertools
import math
from dataclasses import dataclass

# name: rows, columns, patch size. Over 8 shards, 21 and 10 tokens leave ranks that hold padding only.
IMAGES = {
    "32 tokens": (16, 32, 4), "21 tokens": (12, 28, 4), "16 tokens": (16, 64, 8), "10 tokens": (16, 40, 8),
    "4,050 tokens": (360, 720, 8),
}  # fmt: skip
SECTION = dict(
    embed_dim=32, depth=2, num_heads=8, n_in_channels=3, n_out_channels=2, residual=True, global_batch_size=8,
    num_iters=5, lr=1e-3, warmup=2, plot_channels=[], tf32=False,
    limit_nsamples=16,  # 2 iterations an epoch: what a validation leaves behind counts in those after it
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
        like: the mode that train.py has for this one, where it does not know a flag; by default this one.
    """

    flags: tuple[str, ...] = ()
    dtype: str = "float64"
    bounds: tuple[tuple[str, float], ...] = tuple(
        (kind, 1e-12) for kind in ("gradients", "weights", "loss", "grad_norm", "validation")
    )
    reference: str | None = "float64"
    times_serial: float | None = None
    like: str | None = None


# Forecasts of several steps, windows that overlap, a mean that is kept. Longer forecasts, fewer iterations.
ROLLOUTS = {
    "2 steps": ("--rollout_steps", "2", "--num_iters", "2"),
    "1, then 4 steps": ("--rollout_steps", "4", "--rollout_from", "1", "--num_iters", "2"),  # first gradients: of one
    "overlap": ("--patch_overlap", "2", "--num_iters", "2"),
    "overlap, 2 steps": ("--patch_overlap", "4", "--rollout_steps", "2", "--conserve_mean", "ch0", "--num_iters", "2"),
    "overlap, 4 steps": ("--patch_overlap", "1", "--rollout_steps", "4", "--num_iters", "2"),
}
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
    "weighted loss": Mode(
        ("--loss", "weighted", "--loss_channels", "ch1=3", "--loss_latitude", "--num_iters", "2"),
        reference="weighted loss",
    ),
    "loss of gradients": Mode(("--loss_gradient", "0.5", "--num_iters", "2"), reference="loss of gradients"),
    "beside the state": Mode(
        (
            "--forcings",
            "position",
            "day",
            "year",
            "solar",
            "--rollout_steps",
            "2",
            "--patch_overlap",
            "2",
            "--num_iters",
            "2",
        ),
        reference="beside the state",
    ),
    "4,050 tokens": Mode(
        ("--num_iters", "2", "--global_batch_size", "2", "--limit_nsamples_val", "2"), reference="4,050 tokens"
    ),
    **{name: Mode(flags, reference=name) for name, flags in ROLLOUTS.items()},
    **{
        f"overlap, 2 steps, {name}": Mode((*ROLLOUTS["overlap, 2 steps"], *flags), reference="overlap, 2 steps")
        for name, flags in {
            "accumulation": ("--accumulation_steps", "2"),
            "recomputed": ("--activation_checkpoint", "step"),
            "compile": ("--enable_jit",),
        }.items()
    },
    "dropout": Mode(("--dropout", "0.1"), bounds=(), reference=None),
    "float32": Mode(
        ("--num_iters", "20"), "float32", (("loss", 2e-6), ("gradients", 1e-5), ("grad_norm", 1e-5)), "20 steps"
    ),
    "bf16": Mode(("--amp_mode", "bf16"), **HALF),
    "fp16": Mode(("--amp_mode", "fp16"), **HALF),
    "overlap, 2 steps, fp16": Mode(
        (*ROLLOUTS["overlap, 2 steps"], "--amp_mode", "fp16"), **HALF, reference="overlap, 2 steps"
    ),
}
KV = ("--cp_regather", "--cp_head_groups", "2")  # keys and values gathered again, by groups of heads
MODES |= {
    "cp re-gather": Mode(KV[:1]),
    "groups of heads": Mode(KV[1:]),
    "cp re-gather, groups of heads, compile": Mode((*KV, "--enable_jit")),
    "cp re-gather, groups of heads, recomputed": Mode((*KV, "--activation_checkpoint", "mlp")),
    "cp re-gather, groups of heads, dropout": Mode((*KV, *MODES["dropout"].flags), bounds=(), reference=None),
}
GRADIENTS, WEIGHTS = (("--shard", kind) for kind in ("gradients", "weights"))
MODES |= {
    "shared gradients": Mode(GRADIENTS),
    "shared weights": Mode(WEIGHTS),
    "shared gradients, accumulation": Mode((*GRADIENTS, *MODES["accumulation"].flags)),
    "shared weights, accumulation": Mode((*WEIGHTS, *MODES["accumulation"].flags)),
    "shared gradients, recomputed, compiled": Mode((*GRADIENTS, *MODES["recomputed, compiled"].flags)),
    "shared weights, recomputed": Mode((*WEIGHTS, *MODES["recomputed"].flags)),
    "shared weights, compile": Mode((*WEIGHTS, "--enable_jit")),
    "shared weights, re-gather": Mode((*WEIGHTS, "--sp_regather")),
    "shared gradients, clipping": Mode((*GRADIENTS, *MODES["clipping"].flags), reference="clipping"),
    "shared weights, dropout": Mode((*WEIGHTS, *MODES["dropout"].flags), bounds=(), reference=None),
    "shared gradients, overlap, 2 steps": Mode(
        (*GRADIENTS, *ROLLOUTS["overlap, 2 steps"], "--accumulation_steps", "2"), reference="overlap, 2 steps"
    ),
    "shared gradients, overlap, 4 steps, recomputed": Mode(
        (*GRADIENTS, *ROLLOUTS["overlap, 4 steps"], "--activation_checkpoint", "block"), reference="overlap, 4 steps"
    ),
    "shared weights, overlap, 2 steps": Mode((*WEIGHTS, *ROLLOUTS["overlap, 2 steps"]), reference="overlap, 2 steps"),
    "shared gradients, fp16": Mode((*GRADIENTS, "--amp_mode", "fp16"), **HALF, like="fp16"),
    "shared weights, fp16": Mode((*WEIGHTS, "--amp_mode", "fp16"), **HALF, like="fp16"),
}
# What train.py runs in one process.
OWN = ("clipping", "4,050 tokens", "DropPath", "weighted loss", "loss of gradients", "beside the state", *ROLLOUTS)
SERIAL = {
    "float64": Mode(),
    "20 steps": Mode(("--num_iters", "20")),
    **{name: MODES[name] for name in OWN},
    **{name: mode for name, mode in MODES.items() if mode.times_serial and not mode.like},
}
# What every grid runs.
EVERYWHERE = [
    ("32 tokens", "1, then 4 steps"), ("21 tokens", "overlap"), ("21 tokens", "overlap, 4 steps"),
    ("16 tokens", "2 steps"), ("10 tokens", "float64"), ("10 tokens", "overlap, 2 steps"),
    ("10 tokens", "shared gradients"), ("10 tokens", "shared weights"),
]  # fmt: skip
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
EVERY = (1, 2, 4, 8)  # ranks of which all grids are tried
AXES = ("dp", "tp", "cp")


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


def runs_on(sizes: dict[str, int], modes: list[str]) -> list[dict]:
    """Return what to run on every grid of these sizes, in all modes that it takes."""
    everywhere = [[image, mode] for image, mode in EVERYWHERE if mode in modes]
    others = [mode for mode in modes if mode not in (FULL_IMAGE, *(mode for _, mode in EVERYWHERE))]
    dp, tp, cp = (sizes[axis] for axis in AXES)
    found = [
        grid
        for grid in grids(dp * tp * cp)
        if (grid["dp"], grid["tensor_parallel"], grid["context_parallel"]) == (dp, tp, cp)
        and (grid["cp_attention"] != "ulysses" or SECTION["num_heads"] // tp % cp == 0)
    ]
    return [
        {"grid": grid, "runs": everywhere + [[NAMED_IMAGE, mode] for mode in others if is_allowed(grid, mode)]}
        for grid in found
    ]


def runs_of(ranks: int, images: list[str], modes: list[str], named: int) -> list[dict]:
    """Return what to run on `ranks` ranks: grids, each with its pairs of image and mode."""
    everywhere = [[image, mode] for image, mode in EVERYWHERE if image in images and mode in modes]
    pairs = [(grid, everywhere) for grid in grids(ranks) if ranks in EVERY]
    pairs += [(grid, [[FULL_IMAGE, FULL_IMAGE]]) for grid in FULL if FULL_IMAGE in modes]
    others = [mode for mode in modes if mode not in (FULL_IMAGE, *(mode for _, mode in EVERYWHERE))]
    pairs += [(grid, [[NAMED_IMAGE, mode] for mode in others if is_allowed(grid, mode)]) for grid in NAMED[:named]]
    sizes = ("dp", "tensor_parallel", "context_parallel")
    return [{"grid": g, "runs": runs} for g, runs in pairs if runs and math.prod(g[s] for s in sizes) == ranks]


def is_allowed(grid: dict, mode: str) -> bool:
    """Whether train_mp.py takes the mode: plain tensor parallelism has no dropout, others have nothing to re-gather."""
    drops = "--dropout" in MODES[mode].flags and grid["tensor_parallel"] > 1
    gathers = grid["context_parallel"] > 1 and grid["cp_attention"] == "gather"
    if not gathers and {"--cp_regather", "--cp_head_groups"} & {*MODES[mode].flags}:
        return False
    return grid["sequence_parallel"] or not (drops or "--sp_regather" in MODES[mode].flags)


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
    argv.append(f"--init_from={folder}/{image}{''.join(shapes_of(mode))}.pt")  # the same weights in every dtype
    argv += ["--data_dir", f"{folder}/{image}", "--img_size", str(rows), str(columns), "--patch_size", str(patch)]
    for name, value in grid.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no_{name}")
        elif name != "dp":
            argv += [f"--{name}", str(value)]
    return [*argv, *mode.flags]


def shapes_of(mode: Mode) -> tuple[str, ...]:
    """Return the flags of a mode that decide the shapes of its weights."""
    found, name = [], ""
    for flag in mode.flags:
        name = flag if flag.startswith("--") else name
        found += [flag] if name in ("--patch_overlap", "--forcings") else []
    return tuple(found)


def shown(result: dict) -> float:
    """Return the one number of a result: the worst error; in float32 the losses'; else gradients over train.py's."""
    errors, mode = result["errors"], MODES[result["mode"]]
    if mode.times_serial:
        return mode.times_serial * errors["gradients"][0] / result["bounds"]["gradients"]
    return errors["loss"][0] if mode.dtype == "float32" else max((errors[k][0] for k in result["bounds"]), default=0.0)
