"""The figures of chapter 6's text, from two evaluations, and the pictures and the table of the second:

    python docs/figures/forecasts.py runs/demo/1GPU/00/evaluation runs/era5_djf/1GPU/average/evaluation

The first is that of `make demo`; the chapter has the commands of the second.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)  # not this folder, whose tensorboard.py would hide the package

# Bands of zonal wavenumbers, the last one included.
BANDS = {
    "demo": {"1-9": (1, 9), "12-20": (12, 20), "over 31": (32, 64)},
    "era5": {"1-10": (1, 10), "over 36": (37, 72)},
}
SHOWN = ("skill_msl.png", "spectra_msl.png", "spectra_vo850.png")


def figures_of(name: str, skill: dict[str, Any]) -> dict[str, float]:
    """Return the figures of an evaluation: `NAME CHANNEL HOURS WHAT`, rows weighted by the cosine of the latitude."""
    leads, found = skill["lead_hours"], {}
    for channel in skill["channels"]:

        def value(source: str, score: str, i: int, bound: int = 0, channel: str = channel) -> float:
            return skill["scores"][source][score]["cos"][channel][i][bound]

        worse = [hours for i, hours in enumerate(leads) if value("model", "rmse", i) > value("climatology", "rmse", i)]
        found[f"{name} {channel} hours below climatology"] = min(worse, default=leads[-1] + leads[0]) - leads[0]
        lost = [hours for i, hours in enumerate(leads) if value("model", "rmse_over_persistence", i, 1) > 1]
        found[f"{name} {channel} hours to clearly worse than persistence"] = min(lost, default=float("inf"))
        for i, hours in enumerate(leads):
            about = f"{name} {channel} {hours:.0f}"
            found[f"{about} acc"] = value("model", "acc", i)
            found[f"{about} acc of persistence"] = value("persistence", "acc", i)
            found[f"{about} bias"] = value("model", "bias", i)
            found[f"{about} climatology over persistence"] = value("climatology", "rmse", i) / value(
                "persistence", "rmse", i
            )
            activity = value("model", "activity", i), value("model", "truth_activity", i)
            found |= {f"{about} activity": activity[0], f"{about} activity over the truth's": activity[0] / activity[1]}
        spectra = skill["spectra"]
        for i, hours in enumerate(spectra["lead_hours"]):
            truth, model = (spectra[source][channel][i] for source in ("truth", "model"))
            for band, (first, last) in BANDS[name].items():
                about = f"{name} {channel} {hours:.0f} waves {band}"
                power, there = sum(model[first : last + 1]), sum(truth[first : last + 1])
                found[f"{about}, of the truth's waves"] = power / sum(truth[1:])
                if there > 1e-6 * sum(truth[1:]):
                    found[f"{about}, kept"] = power / there
    return found


def main() -> None:
    from benchmarks.harness.record import write_record
    from utils.files import read_events

    if len(sys.argv) != 3:
        sys.exit(f"forecasts.py: error: name two folders, as in\n{__doc__.splitlines()[2]}")
    folders = [Path(path) for path in sys.argv[1:]]
    figures: dict[str, float] = {}
    for name, folder in zip(BANDS, folders):
        figures |= figures_of(name, json.loads((folder / "skill.json").read_text()))
        last = [event for event in read_events(folder.parent / "metrics.jsonl") if event["event"] == "epoch"][-1]
        for channel, error in last["valid_rmse"].items():
            figures[f"{name} {channel} validation"] = error
            figures[f"{name} {channel} validation of persistence"] = last["persistence_rmse"][channel]
    for picture in SHOWN:
        shutil.copy(folders[1] / "pictures" / picture, ROOT / "docs/era5_djf" / picture)
    shutil.copy(folders[1] / "skill.csv", ROOT / "docs/era5_djf/skill.csv")
    write_record(ROOT / "benchmarks/results/forecasts.json", figures, {})


if __name__ == "__main__":
    main()
