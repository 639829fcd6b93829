"""What an evaluation found: tables (JSON, CSV, the log), curves in TensorBoard, pictures.

Shapes:  S sources of forecasts   K lead times   C channels   A weightings of the rows
"""

import csv
import io
import itertools
import logging
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
from torch.utils.tensorboard import SummaryWriter

from utils.files import to_json, write_text
from utils.forecast.plots import draw_all
from utils.forecast.results import Results
from utils.forecast.skill import INTERVAL, RESAMPLES, WEIGHTINGS

FEW_BLOCKS = 10  # below this intervals are said to be rough


def report(results: Results) -> None:
    """Write everything that is made of the forecasts kept."""
    _warn_of_nonfinite(results)
    _write_json(results)
    _write_csv(results)
    _log(results)
    if results.members:
        _log_ensemble(results)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of each animation
    pictures = draw_all(results)
    _show(results, pictures)
    for path in (results.folder / "skill.json", results.folder / "skill.csv", *pictures):
        logging.info("  %s", path)


def _warn_of_nonfinite(results: Results) -> None:
    """Log which models broke down: what is not finite in one forecast is so in the mean of all."""
    data = results.data
    for s, name in enumerate(results.models, 1):
        bad = list(results.nonfinite(s))
        if bad:
            n, k = bad[0]
            logging.warning(
                "%s: %d of %d forecasts are not finite, the first that of %s after %g h: there scores are empty",
                *(name, len(bad), len(data), data.date(n), data.lead_hours[k]),
            )


def _write_json(results: Results) -> None:
    data, spectra = results.data, results.spectra
    text = {
        "checkpoint": results.settings.checkpoint[0]
        if len(results.settings.checkpoint) == 1
        else results.settings.checkpoint,
        "iteration": results.iteration,
        "forecasts": len(data),
        "first": data.date(0),
        "last": data.date(len(data) - 1),
        "lead_hours": data.lead_hours,
        "channels": dict(zip(data.fields.out_names, data.fields.units)),
        "stds": dict(zip(data.fields.out_names, data.fields.stds[data.fields.outputs].tolist())),
        "climatology": data.climate.name,
        "interval": INTERVAL,
        "resamples": RESAMPLES,
        "forecasts_drawn_together": results.block,
        "blocks": results.blocks,
        "scores": {
            source: {
                score: {
                    weighting: {name: values[:, :, s, c, a].T for c, name in enumerate(data.fields.out_names)}
                    for a, weighting in enumerate(WEIGHTINGS)
                }
                for score, values in results.scores.items()
            }
            for s, source in enumerate(results.sources)
        },
        "spectra": {
            "lead_hours": [data.lead_hours[k] for k in data.shown_steps],
            **{
                source: {name: spectra[:, s, c] for c, name in enumerate(data.fields.out_names)}
                for s, source in enumerate(["truth", "persistence", *results.models])
            },
        },
    }
    if results.members:
        text["ensemble"] = {
            "members": results.members,
            "perturb": results.settings.perturb,
            "scores": {
                score: {
                    weighting: {name: values[:, :, c, a].T for c, name in enumerate(data.fields.out_names)}
                    for a, weighting in enumerate(WEIGHTINGS)
                }
                for score, values in results.ensemble.items()
            },
            "ranks": {
                "lead_hours": [data.lead_hours[k] for k in data.shown_steps],
                **{name: results.ranks[:, c] for c, name in enumerate(data.fields.out_names)},
            },
        }
    write_text(results.folder / "skill.json", to_json(text, indent=1) + "\n")


def _write_csv(results: Results) -> None:
    data, text = results.data, io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["source", "channel", "units", "lead_hours", "score", "weighting", "value", "low", "high"])
    axes = [list(enumerate(x)) for x in (results.sources, data.fields.out_names, data.lead_hours, WEIGHTINGS)]
    for (score, values), *places in itertools.product(results.scores.items(), *axes):
        (s, source), (c, name), (k, hours), (a, weighting) = places
        units = data.fields.units[c] if score not in ("acc", "acc_pooled", "rmse_over_persistence") else ""
        table.writerow([source, name, units, hours, score, weighting, *values[:, k, s, c, a]])
    for (score, values), *places in itertools.product(results.ensemble.items(), *axes[1:]) if results.members else ():
        (c, name), (k, hours), (a, weighting) = places
        units = "" if score == "spread_skill" else data.fields.units[c]
        table.writerow(["ensemble", name, units, hours, score, weighting, *values[:, k, c, a]])
    write_text(results.folder / "skill.csv", text.getvalue())


def _log(results: Results) -> None:
    """Log the RMSE of the shown channels at some lead times, and what it comes to."""
    data, blocks, scores, (first, *others) = results.data, results.blocks, results.scores, results.sources
    rmse, ratio = scores["rmse"][0, ..., 0], scores["rmse_over_persistence"][..., 0]
    shown = [k for k, hours in enumerate(data.lead_hours) if k == 0 or hours % 24 == 0 or k == data.steps - 1]
    logging.info(
        "RMSE of %d forecasts (rows weighted by cos(latitude)), and over persistence's (with its %g%% interval)",
        *(len(data), 100 * INTERVAL),
    )
    if blocks < FEW_BLOCKS:
        logging.info(
            "  %s: the forecasts make %.3g blocks of %g h of weather",
            "There are no intervals" if blocks < 3 else "The intervals are rough, and rather too narrow",
            *(blocks, results.block_hours),
        )
    for c in data.fields.plot_channels:
        logging.info("%s", data.fields.label(c))
        logging.info("  %24s%s", first, "".join(f"{name:>12}{'':22}" for name in others).rstrip())
        for k in shown:
            cells = [f"{data.lead_hours[k]:10g} h {rmse[k, 0, c]:11.4g}"]
            for s in range(1, 1 + len(others)):
                value, low, high = ratio[:, k, s, c]
                cells.append(f"{rmse[k, s, c]:12.4g}  {value:5.2f} ({low:.2f} to {high:.2f})")
            logging.info("  %s", "".join(cells))
    for (s, name), c in itertools.product(enumerate(results.models, 1), data.fields.plot_channels):
        found = []
        if data.climate.name:
            climatology = _longest(data.lead_hours, rmse[:, s, c] / rmse[:, -1, c])
            found.append(f"its RMSE is below climatology's up to {climatology:g} h")
        if data.fields.origins[c] >= 0 and blocks >= 3:
            persistence = _longest(data.lead_hours, ratio[2, :, s, c])
            found.append(f"the whole interval below persistence's up to {persistence:g} h")
        if found:
            logging.info("%s, %s: %s", name, data.fields.out_names[c], ", and ".join(found))


def _log_ensemble(results: Results) -> None:
    """Log the ensemble's scores of the shown channels at some lead times."""
    data, found = results.data, results.ensemble
    logging.info(
        "Ensemble of %d: spread over the error of its mean (1 is right), fair CRPS, and where the truth lies outside",
        results.members,
    )
    for c, (i, k) in itertools.product(data.fields.plot_channels, enumerate(data.shown_steps)):
        ratio, crps = (found[score][0, k, c, 0] for score in ("spread_skill", "crps"))
        outside = results.ranks[i, c, 0] + results.ranks[i, c, -1]
        logging.info(
            "  %s, %g h: %.2f; %.4g; %.0f%% of the globe, where %.0f%% would be right",
            *(data.fields.label(c), data.lead_hours[k], ratio, crps, 100 * outside, 200 / (results.members + 1)),
        )


def _longest(lead_hours: list[float], ratios: np.ndarray) -> float:
    """Return the lead time up to which all ratios are below 1."""
    last = 0.0
    for hours, ratio in zip(lead_hours, ratios):
        if not ratio < 1:
            break
        last = hours
    return last


def _show(results: Results, pictures: list[Path]) -> None:
    """Write the curves and pictures for TensorBoard: the steps are lead times in hours, or where need be in minutes."""
    data, logs = results.data, results.folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)  # of an earlier look at the same forecasts
    unit = 1 if all(float(hours).is_integer() for hours in data.lead_hours) else 60
    for s, source in enumerate(results.sources):
        with SummaryWriter(logs / source) as board:
            axes = map(enumerate, (data.fields.out_names, data.lead_hours))
            for (score, values), (c, name), (k, hours) in itertools.product(results.scores.items(), *axes):
                board.add_scalar(f"{score}/{name}", values[0, k, s, c, 0], round(unit * hours))
    with SummaryWriter(logs / "pictures") as board:
        for path in pictures:
            if path.suffix == ".png":
                board.add_image(path.stem, matplotlib.image.imread(path)[..., :3], 0, dataformats="HWC")
