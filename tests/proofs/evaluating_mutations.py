"""Do the tests of evaluate.py and of the moving average see a wrong line? Change one at a time.

    python tests/proofs/evaluating_mutations.py [skill judge ...]       all, or those in some files

`make mutations` runs it, too. A change that no test sees ends the run with code 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.proofs.mutate import main

# file, the line as it stands, the line as it is changed to, tests that must see it
MUTATIONS = [
    ("evaluate", "forecast.index_select(1, data.feedback)", "states[name]", "evaluate -k rollout"),
    ("evaluate", "model(states[name])", "models['model'](states[name])", "evaluate -k rollout"),
    (
        "utils/forecast/settings",
        "    find_projection(evaluation.projection)",
        "    pass",
        "evaluate -k xarrays_engines",
    ),
    ("utils/forecast/skill", "abs(pole - row) < 1.6 * abs(step)", "True", "skill -k part_of_the_globe"),
    ("utils/forecast/skill", "abs(pole - row) < 1.6 * abs(step)", "False", "skill -k part_of_the_globe"),
    ("utils/forecast/skill", "dot(a, b), b.sum", "dot(a, a), b.sum", "evaluate -k xarray"),
    ("utils/forecast/skill", "square - mean * mean", "square", "evaluate -k xarray"),
    ("utils/forecast/skill", 'means["rmse"] = np.sqrt(means["rmse"])', "pass", "evaluate -k xarray"),
    ("utils/forecast/skill", '"mean_rmse": np.sqrt(ee)', '"mean_rmse": ee', "evaluate -k xarray"),
    ("utils/forecast/skill", "+ np.arange(block)", "+ 0 * np.arange(block)", "skill -k drawn_as_often"),
    (
        "utils/forecast/skill",
        "[:forecasts] % forecasts",
        "[:forecasts].clip(max=forecasts - 1)",
        "skill -k drawn_as_often",
    ),
    (
        "utils/forecast/skill",
        "resampled_counts(forecasts, block)",
        "resampled_counts(forecasts, 1)",
        "skill -k together",
    ),
    ("utils/forecast/skill", "tail = (1 - INTERVAL) / 2", "tail = 1 - INTERVAL", "skill -k that_of_a_mean"),
    ("utils/forecast/skill", '/ means["rmse"][:, :, :1]', '/ means["rmse"][:1, :, :1]', "skill -k same_weather"),
    ("utils/forecast/skill", "power[..., 1 : (W + 1) // 2] *= 2", "power[..., 1:] *= 2", "evaluate -k spectra"),
    ("utils/forecast/judge", "data.seconds(n, k + 1)", "data.seconds(n, k)", "evaluate -k each_day"),
    (
        "utils/forecast/judge",
        "places = {n: b for b, n in enumerate(numbers)}",
        "places = {n: 0 for n in numbers}",
        "evaluate -k xarray",
    ),
    ("utils/forecast/data", "is_truth=k > 0", "is_truth=True", "evaluate -k one_step"),
    ("utils/forecast/data", "if not np.isfinite(frame).all():", "if False:", "evaluation -k not_finite"),
    (
        "utils/forecast/data",
        " or not math.isclose(self.steps * fields.step_hours, settings.lead_hours, rel_tol=1e-4)",
        "",
        "evaluation -k get_wrong",
    ),
    ("utils/files", "    part_of(path).rename(path)", "    pass", "evaluate -k tables"),
    (
        "utils/forecast/store",
        "if path.exists() and path.read_text() != text",
        "if False",
        "evaluation -k another_setting",
    ),
    ("utils/forecast/writer", "field[self.rows]", "field", "evaluate -k xarray"),
    ("utils/forecast/writer", "[n, k] = field", "[n, 0] = field", "evaluate -k xarray"),
    ("utils/forecast/evaluation", "forecasts[rank::ranks]", "forecasts", "evaluation -k shared_out"),
    ("utils/forecast/evaluation", "batch + batch[-1:]", "batch", "evaluation -k shared_out"),
    (
        "utils/forecast/evaluation",
        "left = [self.store.missing()]",
        "left = [list(range(len(data)))]",
        "evaluation -k killed",
    ),
    ("utils/forecast/climatology", '{"hour": hour}', '{"hour": 0}', "evaluate -k each_day"),
    ("utils/forecast/climatology", "not days >= set(range(1, 366))", "False", "evaluation -k does_not_fit"),
    (
        "utils/data/files",
        "(times[found] == wanted).all(axis=1)",
        "(times[found] >= wanted).all(axis=1)",
        "evaluation -k no_gap",
    ),
    (
        "utils/ema",
        "min(self.decay, (1 + steps) / (10 + steps))",
        "self.decay",
        "moving_average -k 'grid and 1GPU'",
    ),
    (
        "utils/ema",
        "            self._exchange()\n\n",
        "            pass\n\n",
        "moving_average -k no_training",
    ),
    (
        "utils/ema",
        "if self.is_in_place else (held, self.average)",
        "if False else (held, self.average)",
        "moving_average -k stop",
    ),
    (
        "utils/checkpoint/state",
        'rest.rpartition(".")[0] if kind == "optimizer" else rest',
        'rest if kind == "model" else rest.rpartition(".")[0]',
        "moving_average -k 'grid and 2MP'",
    ),
    ("utils/config/settings", 'weights: 0.999", "training"', 'weights: 0.999", "run"', "moving_average -k goes_on"),
    ("utils/checkpoint/weights", '"ema" if ema else "model"', '"model"', "moving_average -k exported"),
    (
        "utils/forecast/store",
        "not path.exists() and self.folder.exists() and",
        "False and",
        "evaluation -k left",
    ),
    (
        "utils/forecast/store",
        "            self._take()\n            if path",
        "            if path",
        "evaluation -k second",
    ),
    ("utils/forecast/evaluation", "if self.requests.agree_now():", "if False:", "evaluation -k signal"),
    ("utils/forecast/report", "    _warn_of_nonfinite(results)\n", "", "evaluate -k breaks_down"),
    ("utils/forecast/skill", "if forecasts < 3 * block:", "if False:", "skill -k few_blocks"),
    (
        "utils/forecast/judge",
        "lists in kept.items():\n            with self.store.writing():",
        "lists in kept.items():\n            if True:",
        "evaluation -k 'full_disk and none'",
    ),
    (
        "utils/forecast/judge",
        "                    with self.store.writing():",
        "                    if True:",
        "evaluation -k 'full_disk and zarr'",
    ),
    (
        "utils/forecast/evaluation",
        "with self.store.writing():\n                report",
        "if True:\n                report",
        "evaluation -k 'full_disk and none'",
    ),
    (
        "utils/forecast/evaluation",
        "with self.store.writing():\n                writer",
        "if True:\n                writer",
        "evaluation -k 'full_disk and zarr'",
    ),
    (
        "utils/ranks/stop",
        "self.agree()\n        return self._answer()[0]",
        "return self.agree()[0]",
        "evaluation -k signal",
    ),
    ("evaluate", "with autocast(config, data.device):", "if True:", "evaluate -k half_precision"),
    ("evaluate", "if config.enable_jit:", "if False:", "evaluate -k compiled"),
    ("utils/forecast/settings", "config.local_batch_size or 1", "config.global_batch_size", "evaluation -k one_state"),
    ("utils/forecast/settings", 'affecting("machine") + affecting("loop")', 'affecting("loop")', "evaluation -k takes"),
    (
        "utils/forecast/settings",
        'affecting("machine") + affecting("loop")',
        'affecting("machine")',
        "evaluation -k takes",
    ),
    ("utils/forecast/settings", "section], chapter=3", "section], chapter=1", "evaluate -k three_grids"),
    ("utils/data/fields", "self.stds[used].tolist()", "0", "evaluation -k other_statistics"),
    ("utils/forecast/climatology", "(h - date.hour + 12) % 24 - 12", "h - date.hour", "evaluation -k midnight"),
    ("utils/forecast/climatology", "if units and other != here:", "if False:", "evaluation -k does_not_fit"),
    ("utils/forecast/climatology", "atol=1e-3", "atol=1e3", "evaluation -k does_not_fit"),
    (
        "utils/forecast/climatology",
        "except (OSError, RuntimeError, ValueError)",
        "except KeyError",
        "evaluation -k to_its_end",
    ),
    ("utils/forecast/evaluation", '.rglob("*") if file.is_file()', '.rglob("none")', "evaluation -k inside"),
    ("utils/forecast/report", " and blocks >= 3", "", "evaluation -k without_intervals"),
    ("utils/forecast/data", "-(-config.img_size[1] // LARGEST_MAP)", "1", "evaluate -k thinned"),
    ("utils/forecast/writer", "except RuntimeError as", "except KeyError as", "evaluation -k 'full_disk and netcdf'"),
    ("utils/ranks/start", 'end_now(f"rank {world.rank}: {error}", NOT_SAVED)', "raise", "evaluation -k full_disk"),
    ("utils/ranks/start", "issubclass(args.exc_type, OSError)", "False", "evaluation -k 'full_disk and none'"),
    ("utils/forecast/evaluation", "> SAID_EVERY", "> 1e9", "evaluation -k progress"),
    (
        "utils/forecast/judge",
        "            for n, b in places.items():\n",
        "            self.all = [*getattr(self, 'all', []), forecasts]\n            for n, b in places.items():\n",
        "evaluation -k memory_does",
    ),
    ("utils/forecast/evaluation", "size = 4 * left", "size = 4 * len(data)", "evaluation -k full_disk"),
]


if __name__ == "__main__":
    sys.exit(main((f"{name}.py", *change) for name, *change in MUTATIONS))
