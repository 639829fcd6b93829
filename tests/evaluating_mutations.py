"""Do the tests of evaluate.py and of the moving average see a wrong line? Change one at a time.

    python tests/evaluating_mutations.py [skill judge ...]       all, or those in some files

`make mutations` runs it, too. A change that no test sees ends the run with code 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.mutate import main

# file, the line as it stands, the line as it is changed to, tests that must see it
MUTATIONS = [
    ("evaluate", "forecast.index_select(1, data.feedback)", "states[name]", "evaluate -k rollout"),
    ("evaluate", "model(states[name])", "models['model'](states[name])", "evaluate -k rollout"),
    (
        "utils/forecast_settings",
        "    find_projection(evaluation.projection)",
        "    pass",
        "evaluate -k xarrays_engines",
    ),
    ("utils/skill", "abs(pole - row) < 1.6 * abs(step)", "True", "skill -k part_of_the_globe"),
    ("utils/skill", "abs(pole - row) < 1.6 * abs(step)", "False", "skill -k part_of_the_globe"),
    ("utils/skill", "dot(a, b), b.sum", "dot(a, a), b.sum", "evaluate -k xarray"),
    ("utils/skill", "square - mean * mean", "square", "evaluate -k xarray"),
    ("utils/skill", 'means["rmse"] = np.sqrt(means["rmse"])', "pass", "evaluate -k xarray"),
    ("utils/skill", '"mean_rmse": np.sqrt(ee)', '"mean_rmse": ee', "evaluate -k xarray"),
    ("utils/skill", "+ np.arange(block)", "+ 0 * np.arange(block)", "skill -k drawn_as_often"),
    (
        "utils/skill",
        "[:forecasts] % forecasts",
        "[:forecasts].clip(max=forecasts - 1)",
        "skill -k drawn_as_often",
    ),
    ("utils/skill", "resampled_counts(forecasts, block)", "resampled_counts(forecasts, 1)", "skill -k together"),
    ("utils/skill", "tail = (1 - INTERVAL) / 2", "tail = 1 - INTERVAL", "skill -k that_of_a_mean"),
    ("utils/skill", '/ means["rmse"][:, :, :1]', '/ means["rmse"][:1, :, :1]', "skill -k same_weather"),
    ("utils/spectra", "power[..., 1 : (W + 1) // 2] *= 2", "power[..., 1:] *= 2", "evaluate -k spectra"),
    ("utils/judge", "data.seconds(n, k + 1)", "data.seconds(n, k)", "evaluate -k each_day"),
    (
        "utils/judge",
        "places = {n: b for b, n in enumerate(numbers)}",
        "places = {n: 0 for n in numbers}",
        "evaluate -k xarray",
    ),
    ("utils/forecast_data", "is_truth=k > 0", "is_truth=True", "evaluate -k one_step"),
    ("utils/forecast_data", "if not np.isfinite(frame).all():", "if False:", "evaluation -k not_finite"),
    (
        "utils/forecast_data",
        " or not math.isclose(self.steps * fields.step_hours, settings.lead_hours, rel_tol=1e-4)",
        "",
        "evaluation -k get_wrong",
    ),
    ("utils/files", "    part_of(path).rename(path)", "    pass", "evaluate -k tables"),
    (
        "utils/forecast_store",
        "if path.exists() and path.read_text() != text",
        "if False",
        "evaluation -k another_setting",
    ),
    ("utils/forecast_writer", "field[self.rows]", "field", "evaluate -k xarray"),
    ("utils/forecast_writer", "[n, k] = field", "[n, 0] = field", "evaluate -k xarray"),
    ("utils/evaluation", "forecasts[rank::ranks]", "forecasts", "evaluation -k shared_out"),
    ("utils/evaluation", "batch + batch[-1:]", "batch", "evaluation -k shared_out"),
    (
        "utils/evaluation",
        "left = [self.store.missing()]",
        "left = [list(range(len(data)))]",
        "evaluation -k killed",
    ),
    ("utils/climatology", '{"hour": hour}', '{"hour": 0}', "evaluate -k each_day"),
    ("utils/climatology", "not days >= set(range(1, 366))", "False", "evaluation -k does_not_fit"),
    (
        "utils/era5",
        "(times[found] == wanted).all(axis=1)",
        "(times[found] >= wanted).all(axis=1)",
        "evaluation -k no_gap",
    ),
    (
        "utils/moving_average",
        "min(self.decay, (1 + steps) / (10 + steps))",
        "self.decay",
        "moving_average -k 'grid and 1GPU'",
    ),
    (
        "utils/moving_average",
        "            self._exchange()\n\n",
        "            pass\n\n",
        "moving_average -k no_training",
    ),
    (
        "utils/moving_average",
        "if self.is_in_place else (held, self.average)",
        "if False else (held, self.average)",
        "moving_average -k stop",
    ),
    (
        "utils/training_state",
        'rest.rpartition(".")[0] if kind == "optimizer" else rest',
        'rest if kind == "model" else rest.rpartition(".")[0]',
        "moving_average -k 'grid and 2MP'",
    ),
    ("utils/config", 'weights: 0.999", "training"', 'weights: 0.999", "run"', "moving_average -k goes_on"),
    ("utils/checkpoint", '"ema" if ema else "model"', '"model"', "moving_average -k exported"),
    (
        "utils/forecast_store",
        "not path.exists() and self.folder.exists() and",
        "False and",
        "evaluation -k left",
    ),
    (
        "utils/forecast_store",
        "            self._take()\n            if path",
        "            if path",
        "evaluation -k second",
    ),
    ("utils/evaluation", "if self.requests.agree_now():", "if False:", "evaluation -k signal"),
    ("utils/skill_report", "    _warn_of_nonfinite(results)\n", "", "evaluate -k breaks_down"),
    ("utils/skill", "if forecasts < 3 * block:", "if False:", "skill -k few_blocks"),
    (
        "utils/judge",
        "lists in kept.items():\n            with self.store.writing():",
        "lists in kept.items():\n            if True:",
        "evaluation -k 'full_disk and none'",
    ),
    (
        "utils/judge",
        "                    with self.store.writing():",
        "                    if True:",
        "evaluation -k 'full_disk and zarr'",
    ),
    (
        "utils/evaluation",
        "with self.store.writing():\n                report",
        "if True:\n                report",
        "evaluation -k 'full_disk and none'",
    ),
    (
        "utils/evaluation",
        "with self.store.writing():\n                writer",
        "if True:\n                writer",
        "evaluation -k 'full_disk and zarr'",
    ),
    ("utils/stop", "self.agree()\n        return self._answer()[0]", "return self.agree()[0]", "evaluation -k signal"),
    ("evaluate", "with autocast(config, data.device):", "if True:", "evaluate -k half_precision"),
    ("evaluate", "if config.enable_jit:", "if False:", "evaluate -k compiled"),
    ("utils/forecast_settings", "config.local_batch_size or 1", "config.global_batch_size", "evaluation -k one_state"),
    ("utils/forecast_settings", 'affecting("machine") + affecting("loop")', 'affecting("loop")', "evaluation -k takes"),
    (
        "utils/forecast_settings",
        'affecting("machine") + affecting("loop")',
        'affecting("machine")',
        "evaluation -k takes",
    ),
    ("utils/forecast_settings", "section], chapter=3", "section], chapter=1", "evaluate -k three_grids"),
    ("utils/fields", "self.stds[used].tolist()", "0", "evaluation -k other_statistics"),
    ("utils/climatology", "(h - date.hour + 12) % 24 - 12", "h - date.hour", "evaluation -k midnight"),
    ("utils/climatology", "if units and other != here:", "if False:", "evaluation -k does_not_fit"),
    ("utils/climatology", "atol=1e-3", "atol=1e3", "evaluation -k does_not_fit"),
    ("utils/climatology", "except (OSError, RuntimeError, ValueError)", "except KeyError", "evaluation -k to_its_end"),
    ("utils/evaluation", '.rglob("*") if file.is_file()', '.rglob("none")', "evaluation -k inside"),
    ("utils/skill_report", " and blocks >= 3", "", "evaluation -k without_intervals"),
    ("utils/forecast_data", "-(-config.img_size[1] // LARGEST_MAP)", "1", "evaluate -k thinned"),
    ("utils/forecast_writer", "except RuntimeError as", "except KeyError as", "evaluation -k 'full_disk and netcdf'"),
    ("utils/launch", 'end_now(f"rank {world.rank}: {error}", NOT_SAVED)', "raise", "evaluation -k full_disk"),
    ("utils/launch", "issubclass(args.exc_type, OSError)", "False", "evaluation -k 'full_disk and none'"),
    ("utils/evaluation", "> SAID_EVERY", "> 1e9", "evaluation -k progress"),
    (
        "utils/judge",
        "            for n, b in places.items():\n",
        "            self.all = [*getattr(self, 'all', []), forecasts]\n            for n, b in places.items():\n",
        "evaluation -k memory_does",
    ),
    ("utils/evaluation", "size = 4 * left", "size = 4 * len(data)", "evaluation -k full_disk"),
]


if __name__ == "__main__":
    sys.exit(main((f"{name}.py", *change) for name, *change in MUTATIONS))
