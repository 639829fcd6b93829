"""What the certificate found, in one line, in figures, and as the page docs/certificate.md."""

from benchmarks.certificate_cases import MODES, label, shown

PAGE = """\
# The parallel model is the same model

Written by `make certificate`. Each grid of ranks trains 5 steps with `train_mp.py` in float64 and is compared with
`train.py` on one process: loss, every parameter's gradient, its norm, the weights after the steps, the validation
metrics. An entry is the largest difference over the largest reference value of a full tensor, the worst of them all;
1e-12 is allowed. Ranks that hold the same parameter hold the same bits. 21 and 10 tokens do not divide over the ranks;
32 and 21 are patches of 4 x 4 points, 16 and 10 of 8 x 8.

{summary}.

{grids}

## Other modes

Five grids with 10 tokens. The model in one process is in float64 and without the mode, but for
clipping and DropPath, which draws the same numbers on every grid.

- re-gather, accumulation (2 parts), compile (each block in one graph), clipping, DropPath: as above, 1e-12 is allowed.
- 4,050 tokens: the full image, over shards that do not divide them; 2 steps of 2 samples, 1e-12 is allowed.
- dropout: each rank draws its own masks. Ranks that hold the same parameter still hold the same bits. (Plain tensor
  parallelism refuses dropout, and has nothing to re-gather.)
- float32: the losses of 20 steps, 2e-6 is allowed; first gradients and all norms agree to 1e-5.
- bf16, fp16: the worst error of a first gradient over that of `train.py` itself in this mode; 2 is allowed. Losses
  agree with those of `train.py` in this mode to 1e-3. In fp16 a gradient overflows on one rank in the second step: all
  ranks skip that step and halve the scale, as one process does.

{modes}
"""


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


def table(results: list[dict], column: str) -> str:
    """Return a table: a row for each grid, a column for each value of `column`."""
    rows: dict[str, dict[str, float]] = {}
    for result in results:
        rows.setdefault(label(result["grid"]), {})[result[column]] = shown(result)
    columns = list(dict.fromkeys(result[column] for result in results))

    def entry(value: float | None) -> str:
        return (
            "" if value is None else "same bits" if value == 0 else f"{value:.0e}" if value < 0.01 else f"{value:.2f}"
        )

    lines = ["| grid | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    lines += (f"| {name} | " + " | ".join(entry(row.get(c)) for c in columns) + " |" for name, row in rows.items())
    return "\n".join(lines)


def report(summary: str, results: list[dict]) -> str:
    """Return the page: all grids in float64, and the named grids in the other modes."""
    exact, others = ([r for r in results if (r["mode"] == "float64") == plain] for plain in (True, False))
    return PAGE.format(summary=summary, grids=table(exact, "image"), modes=table(others, "mode"))
