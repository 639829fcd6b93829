"""What benchmarks/gpu_suite.py found, as tables: `make docs` copies them to docs/gpu.md."""

from typing import Any

from utils.measure.tables import markdown

Numbers = dict[str, float]
Ranges = dict[str, list[float]]
SECTIONS = ("base", "mp")
STEPS = {
    "none": "float32", "TF32": "+ TF32", "bf16": "+ bf16", "bf16, fused": "+ fused optimiser",
    "bf16, fused, jit": "+ compiled",
}  # fmt: skip
GRAPHS = ("as it is", "recorded", "jit", "jit, recorded", "jit, reduce-overhead")
KERNELS = ("flash", "efficient", "cudnn", "auto")
SHAPES = (
    "head size 48, 4050 tokens",
    "head size 128, 1013 tokens",
    "head size 128, 4050 tokens",
    "head size 128, 16200 tokens",
)  # of 8 heads each, and 16, 31, 8 and 2 samples
LOADERS = ("in the loop", "1 worker", "4 workers", "dali, 4 workers")


def ranged(name: str, form: str, figures: Numbers, spread: Ranges) -> str:
    """Return a figure with its range."""
    low, high = spread[name]
    return f"{figures[name]:{form}} ({low:{form}} to {high:{form}})"


def of_product(section: str, case: str, figures: Numbers) -> float:
    """Return the FLOP/s of a step over those of the fastest product that was measured in its precision."""
    alike = [other for other in STEPS if other.split(",")[0] == case.split(",")[0]]
    fastest = max(figures[f"{section}, {other}: matmul_tflop_per_sec"] for other in alike)
    return figures[f"{section}, {case}: tflop_per_sec"] / fastest


def steps_table(figures: Numbers, spread: Ranges) -> str:
    """Return what a step takes with one flag more each time, and how near that is to a large matrix product.

    That is the fastest in the section's precision: a GPU that has just worked hard is slower.
    """
    rows = []
    for case, told in STEPS.items():
        rows.append([told])
        for section in SECTIONS:
            name = f"{section}, {case}"
            rows[-1].append(ranged(f"{name}: step_ms", ".0f", figures, spread))
            rows[-1].append(f"{figures[f'{name}: samples_per_sec']:.0f}")
            rows[-1].append(f"{of_product(section, case, figures):.2f}")
            rows[-1].append(f"{figures[f'{name}: fraction_of_datasheet']:.2f}")
    head = [
        f"{section}: {what}" for section in SECTIONS for what in ("ms", "samples/s", "of a product", "of the datasheet")
    ]
    return markdown(["", *head], rows)


def graphs_table(figures: Numbers, spread: Ranges) -> str:
    """Return what a step takes as it is and recorded, in ms."""
    cases = {"base, 1 sample": "`base`, 1 sample", "base": "`base`, 16", "mp": "`mp`, 8"}
    rows = ([mode, *(ranged(f"{case}, {mode}: step_ms", ".1f", figures, spread) for case in cases)] for mode in GRAPHS)
    return markdown(["ms a step", *cases.values()], rows)


def attention_table(figures: Numbers, spread: Ranges) -> str:
    """Return what attention alone takes, forward and backward, in ms."""
    rows = []
    for shape in SHAPES:
        names = [f"attention {kernel}, {shape}" for kernel in KERNELS]
        known = (f"{name}: ms" in figures for name in names)  # not every GPU has every kernel
        rows.append([shape, *(ranged(f"{n}: ms", ".1f", figures, spread) if k else "–" for n, k in zip(names, known))])
        rows[-1].append(f"{figures[f'attention auto, {shape}: tflop_per_sec']:.0f}")
    return markdown(["ms", *KERNELS, "auto, TFLOP/s"], rows)


def loader_table(figures: Numbers, spread: Ranges) -> str:
    """Return how fast the loop of `base` runs, by the way it reads."""
    rows = []
    for way in LOADERS:
        share = ranged(f"loader, {way}: of the step fed from memory", ".2f", figures, spread)
        rows.append([way, share, f"{figures[f'loader, {way}: samples_per_sec']:.0f}"])
    return markdown(["", "of the same loop fed from memory", "samples/s, last round"], rows)


def memory_table(figures: Numbers, cases: dict[str, dict[str, Any]]) -> str:
    """Return the tensors at the peak of a step of `base` with 16 samples, in GB: simulated, and counted on the GPU."""
    rows = []
    for mode, case in {"float32": "none", "bf16": "bf16"}.items():
        simulated, held = cases[f"{case}, 16"]["simulated"]["peak"] / 1e9, figures[f"base, {case}: peak_mb"] / 1e3
        rows.append([mode, f"{simulated:.2f}", f"{held:.2f}", f"{held / simulated - 1:+.1%}"])
    return markdown(["", "simulated", "counted on the GPU", "difference"], rows)


def kernels_table(kernels: dict[str, list[dict[str, Any]]]) -> str:
    """Return what the twelve longest kernels of a compiled step are for, as shares of the time of all kernels."""
    kinds = {"attention (cuDNN)": "cudnn", "matrix products (cuBLAS)": "nvjet", "fused operations (Triton)": "triton"}
    rows = [[kind] for kind in (*kinds, "others of the twelve", "beyond them")]
    for section in SECTIONS:
        found = kernels[f"{section}, bf16, fused, jit"]
        shares = [sum(one["share"] for one in found if one["name"].startswith(word)) for word in kinds.values()]
        others = sum(one["share"] for one in found if not one["name"].startswith((*kinds.values(),)))
        for row, share in zip(rows, [*shares, others, 1 - others - sum(shares)]):
            row.append(f"{share:.0%}")
    return markdown(["", *(f"`{section}`" for section in SECTIONS)], rows)
