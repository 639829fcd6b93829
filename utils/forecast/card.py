"""The model card of an exported model, in Markdown: what it is, what it was trained on, how good it is.

After Mitchell et al. 2019, Model Cards for Model Reporting.
"""

from typing import Any

from utils.config.settings import Config
from utils.measure.tables import markdown

TEXT = """\
# A forecast of the weather, {hours:g} hours ahead

A vision transformer that reads the state of the atmosphere and returns it {hours:g} hours later; given its own forecast
to read, it goes on for days. `weights.safetensors` holds its weights, `model.json` its channels, units and grid,
`statistics/` the means and standard deviations that it normalises with.

## The model

{model}

{channels}

## Its training

{training}

## How good it is

{scores}

Beyond the days that it was judged on, nothing is known. It is no substitute for the forecast of a weather service.

## To use it

With the code that trained it:

```bash
python forecast.py --checkpoint THIS_FOLDER --initial STATE.nc --lead_hours 120
```

```python
from forecast import load

model = load("THIS_FOLDER")
after = model.step({state})  # {shape}, in units
```
"""


def card(config: Config, about: dict[str, Any]) -> str:
    """Return the text of README.md; `about` is `model.json`."""
    return TEXT.format(
        hours=about["step_hours"],
        state="state, time" if about["beside_the_state"]["needs_time"] else "state",
        shape=[len(about["inputs"]), len(about["latitude"]), len(about["longitude"])],
        model=_list(_model(config, about)),
        channels=_channels(about),
        training=_list(_training(config, about)),
        scores="\n\n".join(_scores(about)),
    )


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _model(config: Config, about: dict[str, Any]) -> list[str]:
    P, o, D = config.patch_size, config.patch_overlap, config.embed_dim
    latitude, longitude = about["latitude"], about["longitude"]
    lines = [
        f"{about['parameters']:,} parameters: {config.depth} blocks of width {D} with {config.num_heads} heads",
        f"Patches of {P} x {P} points" + (f", whose windows overlap by {o}" if o else ""),
        f"Grid: {len(latitude)} x {len(longitude)}, latitudes from {latitude[0]:g} to {latitude[-1]:g}, "
        f"longitudes from {longitude[0]:g} to {longitude[-1]:g}",
        f"It forecasts the {'change' if config.residual else 'state'}; matrix products in `{config.amp_mode}`",
    ]
    if config.conserve_mean:
        lines.append(f"It keeps the global mean of {', '.join(config.conserve_mean)}")
    forecast = {x["name"] for x in about["forecasts"]}
    if forced := [x["name"] for x in about["inputs"] if x["name"] not in forecast]:
        lines.append(f"It reads and does not forecast {', '.join(forced)}: they must be given at each step")
    if (beside := about["beside_the_state"])["channels"]:
        names = ", ".join(beside["channels"])
        lines.append(f"Beside the state it reads {names}, which it has in `statistics/`, or makes of place and time")
    return lines


def _channels(about: dict[str, Any]) -> str:
    channels = {x["name"]: x for x in (*about["inputs"], *about["forecasts"])}.values()
    rows = [[x["name"], x["long_name"], x["standard_name"] or "", x["units"]] for x in channels]
    return markdown(["channel", "what it is", "standard name", "units"], rows)


def _training(config: Config, about: dict[str, Any]) -> list[str]:
    training, versions, steps = about["training"], about["versions"], config.longest_rollout
    return [
        f"{training['samples']:,} samples, from {training['first']} to {training['last']}",
        f"{about['iteration']:,} of {config.num_iters:,} iterations of {config.global_batch_size} samples, seed "
        f"{config.seed}" + (f"; in the end forecasts of {steps} steps" if steps > 1 else ""),
        f"Weights: {about['weights']}",
        f"torch {versions['torch']}; code: {versions.get('commit') or 'commit unknown'}",
    ]


def _scores(about: dict[str, Any]) -> list[str]:
    """Return what is known of its skill, in paragraphs."""
    texts = ["It was not evaluated (`evaluate.py`, then export it once more)."]
    if (scores := about["scores"]) is not None:
        names = {"rmse": "RMSE", "rmse_over_persistence": "over persistence", "acc": "correlation"}
        names = {score: name for score, name in names.items() if score in scores}

        def cells(score: str, channel: str) -> str:
            return " / ".join("-" if x is None else f"{x:.3g}" for x in scores[score][channel])

        known = scores["climatology"]
        usual = "the mean over time" if known == "time_means" else f"the climatology {known}"
        rows = [[channel, *(cells(score, channel) for score in names)] for channel in scores["rmse"]]
        texts = [
            f"{scores['forecasts']} forecasts from {scores['first']} to {scores['last']}, rows weighted by "
            f"cos(latitude): RMSE, the same over persistence's"
            f"{f', and the correlation of anomalies from {usual}' if 'acc' in scores else ''}, at "
            f"{', '.join(f'{h:g}' for h in scores['hours'])} hours; `scores.csv` has more, with intervals:",
            markdown(["channel", *names.values()], rows),
        ]
    if (found := about["validation"]) is not None:
        rmse, same = found["rmse"], found["persistence"]
        worst = max(rmse, key=lambda name: rmse[name])
        beside = "" if same[worst] is None else f" (persistence's is {same[worst]:.3g})"
        texts.append(
            f"One step ahead, on all validation files: a loss of {found['loss']:.4g}; the largest normalised RMSE is "
            f"that of {worst}, {rmse[worst]:.3g}{beside}."
        )
    return texts
