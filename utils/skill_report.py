"""What an evaluation found: tables (JSON, CSV, the log), curves in TensorBoard, pictures.

Shapes:  S sources of forecasts   K lead times   C channels   A weightings of the rows
"""

import csv
import io
import itertools
import json
import logging
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.image
import numpy as np
from torch.utils.tensorboard import SummaryWriter

from utils.plots import label
from utils.skill import INTERVAL, RESAMPLES, WEIGHTINGS, summarise
from utils.skill_plots import draw_all

FEW_BLOCKS = 10  # below this intervals are said to be rough

if TYPE_CHECKING:
    from utils.evaluation import EvaluationRun


def report(run: "EvaluationRun") -> None:
    """Write everything that is made of the forecasts kept."""
    data, store, folder = run.data, run.store, run.folder
    _warn_of_nonfinite(run)
    block = block_size(run)
    results = summarise(store.all("moments"), len(data), block)
    spectra = sum(store.all("spectra")) / len(data)
    _write_json(run, results, spectra, block)
    _write_csv(run, results)
    _log(run, results, block)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of each animation
    pictures = draw_all(run, results, spectra)
    _show(run, results, pictures)
    for path in (folder / "skill.json", folder / "skill.csv", *pictures):
        logging.info("  %s", path)


def block_size(run: "EvaluationRun") -> int:
    """Return how many forecasts that follow each other the bootstrap draws together."""
    data = run.data
    if not data.has_time or len(data) < 2:
        hours = data.step_hours / data.config.dt * run.settings.stride
    else:
        hours = float(np.median(np.diff([data.seconds(n) for n in range(len(data))]))) / 3600
    return min(max(1, round(run.settings.block_hours / hours)), len(data))


def _warn_of_nonfinite(run: "EvaluationRun") -> None:
    """Log which models broke down: what is not finite in one forecast is so in the mean of all."""
    data = run.data
    for s, name in enumerate(run.models, 1):
        bad = [(n, k) for n, kept in enumerate(run.store.all("moments")) for k in _bad_steps(kept[:, s])[:1]]
        if bad:
            n, k = bad[0]
            logging.warning(
                "%s: %d of %d forecasts are not finite, the first that of %s after %g h: there scores are empty",
                *(name, len(bad), len(data), data.date(n), data.lead_hours[k]),
            )


def _bad_steps(moments: np.ndarray) -> np.ndarray:
    """Return the steps at which moments [K, C, A, M] are not finite."""
    return np.flatnonzero(~np.isfinite(moments).all(axis=(1, 2, 3)))


def _write_json(run: "EvaluationRun", results: dict, spectra: np.ndarray, block: int) -> None:
    data = run.data
    text = {
        "checkpoint": run.settings.checkpoint,
        "iteration": run.info and run.info["iteration"],
        "forecasts": len(data),
        "first": data.date(0),
        "last": data.date(len(data) - 1),
        "lead_hours": data.lead_hours,
        "channels": dict(zip(data.out_names, data.units)),
        "stds": dict(zip(data.out_names, data.stds[data.outputs].tolist())),
        "climatology": data.climate.name,
        "interval": INTERVAL,
        "resamples": RESAMPLES,
        "forecasts_drawn_together": block,
        "blocks": len(data) / block,
        "scores": {
            source: {
                score: {
                    weighting: {name: values[:, :, s, c, a].T for c, name in enumerate(data.out_names)}
                    for a, weighting in enumerate(WEIGHTINGS)
                }
                for score, values in results.items()
            }
            for s, source in enumerate(run.sources)
        },
        "spectra": {
            "lead_hours": [data.lead_hours[k] for k in data.shown_steps],
            **{
                source: {name: spectra[:, s, c] for c, name in enumerate(data.out_names)}
                for s, source in enumerate(["truth", *run.sources[:-1]])
            },
        },
    }
    _write(run.folder / "skill.json", json.dumps(_plain(text), indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text, newline="")
    part.rename(path)


def _plain(value: Any) -> Any:
    """Return the value as JSON has it: lists for arrays, null for what is not finite."""
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, np.ndarray)):
        return [_plain(x) for x in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return value


def _write_csv(run: "EvaluationRun", results: dict) -> None:
    data, text = run.data, io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["source", "channel", "units", "lead_hours", "score", "weighting", "value", "low", "high"])
    axes = map(enumerate, (run.sources, data.out_names, data.lead_hours, WEIGHTINGS))
    for (score, values), *places in itertools.product(results.items(), *axes):
        (s, source), (c, name), (k, hours), (a, weighting) = places
        units = data.units[c] if score not in ("acc", "rmse_over_persistence") else ""
        table.writerow([source, name, units, hours, score, weighting, *values[:, k, s, c, a]])
    _write(run.folder / "skill.csv", text.getvalue())


def _log(run: "EvaluationRun", results: dict, block: int) -> None:
    """Log the RMSE of the shown channels at some lead times, and what it comes to."""
    data, rmse, ratio = run.data, results["rmse"][0, ..., 0], results["rmse_over_persistence"][..., 0]
    shown = [k for k, hours in enumerate(data.lead_hours) if k == 0 or hours % 24 == 0 or k == data.steps - 1]
    blocks = len(data) / block
    logging.info(
        "RMSE of %d forecasts (rows weighted by cos(latitude)), and over persistence's (with its %g%% interval)",
        *(len(data), 100 * INTERVAL),
    )
    if blocks < FEW_BLOCKS:
        logging.info(
            "  %s: the forecasts make %.3g blocks of %g h of weather",
            "There are no intervals" if blocks < 3 else "The intervals are rough, and rather too narrow",
            *(blocks, run.settings.block_hours),
        )
    for c in data.plot_channels:
        logging.info("%s", label(data.out_names[c], data.units[c]))
        logging.info("  %24s%s", run.sources[0], "".join(f"{name:>12}{'':22}" for name in run.sources[1:]).rstrip())
        for k in shown:
            cells = [f"{data.lead_hours[k]:10g} h {rmse[k, 0, c]:11.4g}"]
            for s in range(1, len(run.sources)):
                value, low, high = ratio[:, k, s, c]
                cells.append(f"{rmse[k, s, c]:12.4g}  {value:5.2f} ({low:.2f} to {high:.2f})")
            logging.info("  %s", "".join(cells))
    for (s, name), c in itertools.product(enumerate(run.models, 1), data.plot_channels):
        climatology = _longest(data.lead_hours, rmse[:, s, c] / rmse[:, -1, c])
        text = f"its RMSE is below climatology's up to {climatology:g} h"
        if data.origins[c] >= 0 and blocks >= 3:
            persistence = _longest(data.lead_hours, ratio[2, :, s, c])
            text += f", and the whole interval below persistence's up to {persistence:g} h"
        logging.info("%s, %s: %s", name, data.out_names[c], text)


def _longest(lead_hours: list[float], ratios: np.ndarray) -> float:
    """Return the lead time up to which all ratios are below 1."""
    last = 0.0
    for hours, ratio in zip(lead_hours, ratios):
        if not ratio < 1:
            break
        last = hours
    return last


def _show(run: "EvaluationRun", results: dict, pictures: list[Path]) -> None:
    """Write the curves and pictures for TensorBoard: the steps are lead times in hours, or where need be in minutes."""
    data, logs = run.data, run.folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)  # of an earlier look at the same forecasts
    unit = 1 if all(float(hours).is_integer() for hours in data.lead_hours) else 60
    for s, source in enumerate(run.sources):
        with SummaryWriter(logs / source) as board:
            axes = map(enumerate, (data.out_names, data.lead_hours))
            for (score, values), (c, name), (k, hours) in itertools.product(results.items(), *axes):
                board.add_scalar(f"{score}/{name}", values[0, k, s, c, 0], round(unit * hours))
    with SummaryWriter(logs / "pictures") as board:
        for path in pictures:
            if path.suffix == ".png":
                board.add_image(path.stem, matplotlib.image.imread(path)[..., :3], 0, dataformats="HWC")
