"""What does an ensemble bring? Forecasts by one model, by several seeds, and by one from perturbed states.

    python benchmarks/ensembles.py --json benchmarks/results/ensembles.json [--seeds 0 1 2 3]

Trains `demo` with each seed and judges every ensemble (evaluate.py): about fifteen minutes on 2 cores. Figures of a
case, means over the channels, at 6, 24, 48 and 120 h: RMSE of the ensemble's mean over persistence's; and spread over
the error of the mean, with the factor that makes 1 right for any number of members.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.record import Figures, write_record
from benchmarks.skill import HOURS, STRIDE, run
from utils.measure.tables import markdown

SECTION = "demo"
# How many of the seeds, and the flags of evaluate.py.
CASES = {
    "one model": (1, ()),
    "one model, 8 states, 0.05": (1, ("--perturb=0.05",)),
    "one model, 8 states, 0.2": (1, ("--perturb=0.2",)),
    "four seeds": (4, ()),
    "four seeds, 2 states each, 0.2": (4, ("--perturb=0.2", "--members=2")),
}


def figures_of(skill: dict[str, Any]) -> dict[str, float]:
    """Return what an evaluation found."""
    names, leads, found = list(skill["channels"]), skill["lead_hours"], {}
    source = "mean" if "ensemble" in skill else "model"
    for hours in HOURS:
        k = leads.index(hours)
        ratios = [skill["scores"][source]["rmse_over_persistence"]["cos"][name][k][0] for name in names]
        found[f"{hours} h"] = statistics.fmean(ratios)
    if "ensemble" in skill:
        scores = skill["ensemble"]["scores"]["spread_skill"]["cos"]
        for hours in HOURS:
            found[f"spread/error {hours} h"] = statistics.fmean(scores[name][leads.index(hours)][0] for name in names)
        found["members"] = skill["ensemble"]["members"]
    return found


def table(cases: dict[str, dict[str, float]]) -> str:
    """Return the table of chapter 6."""
    columns = [*(f"{hours} h" for hours in HOURS), *(f"spread/error {hours} h" for hours in HOURS)]
    rows = [
        [name, f"{found.get('members', 1):g}", *(f"{found[x]:.3f}" if x in found else "" for x in columns)]
        for name, found in cases.items()
    ]
    return markdown(["", "members", *columns], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--runs", type=Path, help="folder of the trainings, which are kept there and used again")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    cases, figures = {}, Figures()
    with tempfile.TemporaryDirectory() as scratch:
        runs = args.runs or Path(scratch)
        sources = [runs / SECTION / "1GPU" / f"seed{seed}" for seed in args.seeds]
        for seed, source in zip(args.seeds, sources):
            flags = [f"--config={SECTION}", f"--expdir={runs}", f"--seed={seed}", f"--run_num=seed{seed}"]
            run(["train.py", *flags, "--resume=auto"])
            print(f"{source}: trained", flush=True)
        for name, (count, flags) in CASES.items():
            out = Path(scratch) / name
            how = [f"--stride={STRIDE[SECTION]}", f"--out={out}", "--plot_channels=None", *flags]
            run(["evaluate.py", "--checkpoint", *map(str, sources[:count]), *how])
            cases[name] = figures_of(json.loads((out / "skill.json").read_text()))
            for what, value in cases[name].items():
                figures.add(f"{name}: {what}", [value])
            print(f"{name}: done", flush=True)
    write_record(args.json, figures, figures.spread, cases=cases)
    print(table(cases))


if __name__ == "__main__":
    main()
