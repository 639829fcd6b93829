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
    ("evaluate", "        find_projection(evaluation.projection)\n", "", "evaluate -k xarrays_engines"),
    ("utils/skill", "abs(pole - row) < 1.6 * abs(step)", "True", "skill -k part_of_the_globe"),
    ("utils/skill", "abs(pole - row) < 1.6 * abs(step)", "False", "skill -k part_of_the_globe"),
    ("utils/skill", "dot(a, b), b.sum", "dot(a, a), b.sum", "evaluate -k xarray"),
    ("utils/skill", "square - mean * mean", "square", "evaluate -k xarray"),
    ("utils/skill", 'if score == "rmse" else mean', 'if score == "none" else mean', "evaluate -k xarray"),
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
        " or not math.isclose(self.steps * self.step_hours, evaluation.lead_hours, rel_tol=1e-4)",
        "",
        "evaluation -k get_wrong",
    ),
    ("utils/forecast_store", "        part.rename(self._path(forecast))", "        pass", "evaluate -k tables"),
    ("utils/forecast_store", "path.read_text() != text", "False", "evaluation -k another_setting"),
    ("utils/forecast_writer", "field[self.rows]", "field", "evaluate -k xarray"),
    ("utils/forecast_writer", "[n, k] = field", "[n, 0] = field", "evaluate -k xarray"),
    ("utils/evaluation", "forecasts[rank::ranks]", "forecasts", "evaluation -k shared_out"),
    ("utils/evaluation", "batch + batch[-1:]", "batch", "evaluation -k shared_out"),
    (
        "utils/evaluation",
        "found[0][1] = self.store.missing()",
        "found[0][1] = list(range(len(data)))",
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
    ("utils/run_folder", '"clip_grad_norm", "ema_decay"', '"clip_grad_norm"', "moving_average -k goes_on"),
    ("utils/checkpoint", '"ema" if ema else "model"', '"model"', "moving_average -k exported"),
    (
        "utils/forecast_store",
        "elif self.folder.exists() and any(other",
        "elif False and any(other",
        "evaluation -k left",
    ),
    ("utils/forecast_store", "                self.lock = self._lock()\n", "", "evaluation -k two_eval"),
    ("utils/evaluation", "if self.requests.agree()[0]:", "if False:", "evaluation -k signal"),
    ("utils/skill_report", "    _warn_of_nonfinite(evaluation)\n", "", "evaluate -k breaks_down"),
    ("utils/skill", "if forecasts < 3 * block:", "if False:", "skill -k few_blocks"),
    ("utils/forecast_store", "self.lock or self._lock()", "self._lock()", "evaluation -k two_eval"),
    (
        "utils/judge",
        "            with self.store.writing():",
        "            if True:",
        "evaluation -k 'full_disk and zarr'",
    ),
    (
        "utils/judge",
        "                    with self.store.writing():",
        "                    if True:",
        "evaluation -k 'full_disk and zarr'",
    ),
    ("utils/evaluation", "with self.store.writing():", "if True:", "evaluation -k 'full_disk and none'"),
    ("utils/forecast_writer", "except RuntimeError as", "except KeyError as", "evaluation -k 'full_disk and netcdf'"),
    ("utils/launch", 'end_now(f"rank {world.rank}: {error}", NOT_SAVED)', "raise", "evaluation -k full_disk"),
    ("utils/tensorboard", "threading.excepthook = _told_by_the_next_call", "", "evaluation -k 'full_disk and none'"),
    ("utils/evaluation", "> SAID_EVERY", "> 1e9", "evaluation -k progress"),
    ("utils/evaluation", "size = 4 * left", "size = 4 * len(data)", "evaluation -k full_disk"),
]


if __name__ == "__main__":
    sys.exit(main((f"{name}.py", *change) for name, *change in MUTATIONS))
