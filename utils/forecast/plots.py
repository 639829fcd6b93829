"""Pictures of an evaluation: skill by lead time, power spectra, a scorecard; and the maps of utils/forecast/maps.py.

Shapes:  S sources of forecasts   K lead times   C channels
"""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from utils.forecast.data import ForecastData
from utils.forecast.ensemble import CONTROL, MEAN, MEMBER
from utils.forecast.maps import Maps
from utils.forecast.results import Results
from utils.forecast.skill import INTERVAL
from utils.sphere import go_round

COLOURS = {"persistence": "tab:gray", "climatology": "tab:green", "model": "tab:blue", "ema": "tab:orange"}
COLOURS |= {CONTROL: "tab:blue", f"{MEMBER}01": "tab:blue", MEAN: "tab:red"}
LINES = dict.fromkeys(COLOURS, "-") | {"ema": "--"}


def draw_all(results: Results) -> list[Path]:
    """Draw everything below `pictures/`, and return the paths."""
    data, folder, source = results.data, results.folder / "pictures", results.models[0]
    scores, spectra = results.scores, results.spectra
    folder.mkdir(exist_ok=True)
    fields = results.store.read(0, "maps")  # [K; truth, persistence and models; C shown, H, W]
    maps = Maps(data, results.settings.projection)
    figures: dict[str, Figure] = {}
    for i, c in enumerate(data.fields.plot_channels):
        name, truths, forecasts = data.fields.out_names[c], fields[:, 0, i], fields[:, 2, i]
        figures[f"skill_{name}"] = skill_figure(data, c, results.sources, scores)
        figures[f"maps_{name}"] = maps.figure(c, data.shown_steps, forecasts, truths, source)
        figures[f"spectra_{name}"] = spectra_figure(data, c, results.models, np.delete(spectra[:, :, c], 1, axis=1))
        if results.members:
            figures[f"ensemble_{name}"] = ensemble_figure(results, c)
    for s, model in enumerate(results.models, 1):
        figures[f"scorecard_{model}"] = scorecard_figure(data, model, scores["rmse_over_persistence"][:, :, s, :, 0])
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values()):
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=100)
    for i, c in enumerate(data.fields.plot_channels):
        start = fields[: int(data.fields.origins[c] >= 0), 1, i]  # persistence, where there is such a thing
        forecasts, truths = (np.concatenate([start, fields[:, s, i]]) for s in (2, 0))
        paths.append(folder / f"forecast_{data.fields.out_names[c]}.gif")
        maps.animate(paths[-1], c, forecasts, truths, source)
    return paths


def skill_figure(data: ForecastData, c: int, sources: list[str], scores: dict) -> Figure:
    """Draw RMSE and, where a climatology is known, anomaly correlation of channel `c` by lead time, with intervals."""
    shown = ["rmse", "acc"] if data.climate.name else ["rmse"]
    figure = Figure(figsize=(11 if len(shown) == 2 else 8, 4.2), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    days = np.array(data.lead_hours) / 24
    for s, source in enumerate(sources):
        for one, score in zip(axes, shown):
            value, low, high = scores[score][:, :, s, c, 0]
            if np.isfinite(value).any():
                marker = "." if len(days) < 40 else ""
                one.plot(days, value, LINES[source], color=COLOURS[source], label=source, marker=marker)
                one.fill_between(days, low, high, color=COLOURS[source], alpha=0.2, linewidth=0)
    axes[0].set(ylabel=f"RMSE, {data.fields.label(c)}", ylim=(0, None), title="error: lower is better")
    for one in axes[1:]:
        one.set(ylabel=f"anomaly correlation, from {data.climate.name}", title="correlation: higher is better")
        one.axhline(0, color="black", linewidth=0.5)
    for one in axes:
        one.set(xlabel="lead time [days]", xlim=(0, None))
        one.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.suptitle(f"{data.fields.out_names[c]}: {data.period}; bands hold {INTERVAL:.0%}", fontsize=10)
    return figure


def ensemble_figure(results: Results, c: int) -> Figure:
    """Draw the spread of channel `c` beside the error of the mean, and where among the members the truth lies."""
    data, days = results.data, np.array(results.data.lead_hours) / 24
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    error = results.scores["rmse"][:, :, results.sources.index(MEAN), c, 0]
    for values, label, colour in (
        (error, "RMSE of the mean", COLOURS[MEAN]),
        (results.ensemble["spread"][..., c, 0], "spread", "tab:purple"),
        (results.ensemble["crps"][..., c, 0], "fair CRPS", "tab:brown"),
    ):
        axes[0].plot(days, values[0], color=colour, label=label, marker="." if len(days) < 40 else "")
        axes[0].fill_between(days, *values[1:], color=colour, alpha=0.2, linewidth=0)
    axes[0].set(ylabel=data.fields.label(c), xlabel="lead time [days]", xlim=(0, None), ylim=(0, None))
    axes[0].set_title("spread and error should agree")
    places = np.arange(results.members + 1)
    for i, k in enumerate(data.shown_steps):
        alpha = 0.35 + 0.65 * i / max(len(data.shown_steps) - 1, 1)
        label = f"{data.lead_hours[k]:g} h"
        axes[1].stairs(
            results.ranks[i, c], np.arange(len(places) + 1) - 0.5, label=label, color="tab:purple", alpha=alpha
        )
    axes[1].axhline(1 / len(places), color="black", linewidth=0.8)
    axes[1].set(xlabel="members below the truth", ylabel="part of the globe", ylim=(0, None))
    axes[1].set_title("flat is right; high at the ends: too little spread")
    for one in axes:
        one.grid(alpha=0.3)
        one.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{data.fields.out_names[c]}: {results.members} members, {data.period}", fontsize=10)
    return figure


def spectra_figure(data: ForecastData, c: int, models: list[str], spectra: np.ndarray) -> Figure:
    """Draw the power of forecasts at each scale, and as a part of the truth's.

    Args:
        spectra: of the truth and the models at the lead times shown, [lead times, S, wavenumbers].
    """
    steps, figure = data.shown_steps, Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    waves = slice(1, (len(data.fields.longitude) + 1) // 2)  # the last one of an even number stands for itself alone
    wavenumbers, is_round = np.arange(waves.start, waves.stop), go_round(data.fields.longitude)
    shown = spectra[..., waves]
    axes[0].loglog(wavenumbers, shown[-1, 0], color="black", label="truth")
    for s, name in enumerate(models, 1):
        for i, k in enumerate(steps):
            alpha = 0.35 + 0.65 * i / max(len(steps) - 1, 1)
            style = {"color": COLOURS[name], "alpha": alpha, "linestyle": LINES[name]}
            axes[0].loglog(wavenumbers, shown[i, s], label=f"{name}, {data.lead_hours[k]:g} h", **style)
            axes[1].semilogx(wavenumbers, shown[i, s] / shown[i, 0], **style)
    axes[0].set(
        ylabel=f"power [({data.fields.units[c] or '1'})²]",
        title="power along circles of latitude" if is_round else "power along rows",
    )
    # Some data hold nothing at the smallest scales, and a forecast that broke down has no power at any.
    axes[0].set_ylim(bottom=max(shown[np.isfinite(shown)].min(), 1e-7 * shown[:, 0].max()))
    axes[1].set(ylabel="power over the truth's", ylim=(0, 2), title="below 1: too weak at this scale")
    axes[1].axhline(1, color="black", linewidth=0.8)
    for one in axes:
        one.set(xlabel="zonal wavenumber (waves along a circle of latitude)" if is_round else "waves along a row")
        one.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{data.fields.out_names[c]}: mean over {data.period}", fontsize=10)
    return figure


def scorecard_figure(data: ForecastData, model: str, ratio: np.ndarray) -> Figure:
    """Draw the RMSE of all channels and lead times over persistence's; what is in doubt is in brackets.

    Args:
        ratio: value, low and high, [3, K, C].
    """
    C, K = len(data.fields.out_names), data.steps
    figure = Figure(figsize=(2 + 0.55 * K, 1.4 + 0.32 * C), layout="constrained")
    axes = figure.subplots()
    value, low, high = ratio.transpose(0, 2, 1)
    image = axes.imshow(value, cmap="RdBu_r", norm=LogNorm(0.5, 2), aspect="auto")
    for c in range(C):
        for k in range(K):
            doubt = low[c, k] <= 1 <= high[c, k]
            text = f"({value[c, k]:.2f})" if doubt else f"{value[c, k]:.2f}"
            colour = "white" if abs(np.log(value[c, k])) > 0.45 else "black"  # on dark blue and red
            axes.text(k, c, text, ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(K), [f"{hours:g}" for hours in data.lead_hours])
    axes.set_yticks(range(C), data.fields.out_names)
    axes.set(xlabel="lead time [h]")
    bar = figure.colorbar(image, ax=axes, ticks=[0.5, 0.7, 1, 1.4, 2], format="%g", extend="both", pad=0.01)
    bar.ax.minorticks_off()
    brackets = f"; in brackets where the {INTERVAL:.0%} interval holds 1" if np.isfinite(low).any() else ""
    axes.set_title(f"{model}: RMSE over persistence's, {data.period}\nblue is better{brackets}", fontsize=9)
    return figure
