"""Do the tests of evaluate.py and of the moving average see a wrong line? Change one at a time.

    python tests/evaluating_mutations.py [skill judge ...]       all, or those in some files

`make mutations` runs it, too. A change that no test sees ends the run with code 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.mutate import run_tests, try_mutations

# file, the line as it stands, the line as it is changed to, tests that must see it
MUTATIONS = [
    ("evaluate", "forecast[:, data.feedback]", "data.normalised(initial)", "evaluate -k rollout"),
    ("evaluate", "model(states[name])", "models['model'](states[name])", "evaluate -k rollout"),
    ("evaluate", "        dist.barrier()\n", "", "evaluate -k ranks_share"),
    ("utils/skill", "np.pi / 2 * np.sign(angle[0] - angle[-1])", "np.pi / 2", "skill -k area_weights"),
    ("utils/skill", "a * b, b, b * b", "a * a, b, b * b", "evaluate -k xarray"),
    ("utils/skill", "aa - a * a", "aa", "evaluate -k xarray"),
    ("utils/skill", 'if score == "rmse" else mean', 'if score == "none" else mean', "evaluate -k xarray"),
    ("utils/skill", '"mean_rmse": np.sqrt(ee)', '"mean_rmse": ee', "evaluate -k xarray"),
    ("utils/skill", "np.where(aa > 0,", "np.where(aa >= 0,", "evaluate -k xarray"),
    ("utils/skill", "+ np.arange(block)", "+ 0 * np.arange(block)", "skill -k drawn_as_often"),
    (
        "utils/skill",
        "[:, :forecasts] % forecasts",
        "[:, :forecasts].clip(max=forecasts - 1)",
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
    ("utils/forecast_data", "raw.clone()", "raw", "evaluate -k xarray"),
    ("utils/forecast_data", "is_truth=k > 0", "is_truth=True", "evaluate -k one_step"),
    ("utils/forecast_data", "if not np.isfinite(frame).all():", "if False:", "evaluate -k not_finite"),
    ("utils/forecast_data", "not steps.is_integer() or ", "", "evaluate -k get_wrong"),
    ("utils/forecast_store", "        part.rename(self._path(forecast))", "        pass", "evaluate -k tables"),
    ("utils/forecast_store", "path.read_text() != text", "False", "evaluate -k another_setting"),
    ("utils/forecast_writer", "field[self.rows]", "field", "evaluate -k xarray"),
    ("utils/forecast_writer", "[n, k] = field", "[n, 0] = field", "evaluate -k xarray"),
    ("utils/evaluation", "forecasts[rank::ranks]", "forecasts", "evaluate -k shared_out"),
    ("utils/evaluation", "batch + batch[-1:]", "batch", "evaluate -k shared_out"),
    ("utils/evaluation", "left = [store.missing()]", "left = [list(range(len(data)))]", "evaluate -k killed"),
    ("utils/climatology", 'where["hour"] = date.hour', 'where["hour"] = 0', "evaluate -k each_day"),
    ("utils/climatology", "not days >= set(range(1, 366))", "False", "evaluate -k does_not_fit"),
    (
        "utils/era5",
        "(times[found] == wanted).all(axis=1)",
        "(times[found] >= wanted).all(axis=1)",
        "evaluate -k no_gap",
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
]


def main(names: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not names or Path(m[0]).name in names]
    return try_mutations([(f"{name}.py", old, new, tests) for name, old, new, tests in chosen], run_tests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
