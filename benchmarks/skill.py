"""Why do forecasts get better? The same training without, and with, each of what chapter 6 adds; and its control.

    python benchmarks/skill.py --config=demo --json benchmarks/results/skill_demo.json [--seeds 0 1]
    python benchmarks/skill.py --config=era5_djf --json benchmarks/results/skill_era5_djf.json

Each case trains (train.py) and is judged (evaluate.py), once a seed: about half an hour for a section on 2 cores. A
case whose runs are in the record, of the same flags, is not run again. Figures of a case: RMSE over persistence's, the
mean over channels, at 6, 24, 48 and 120 h; the hours up to which its RMSE is below climatology's, the mean over
channels; `noise`, the power of the last channel to plot beyond 31 waves after the first step, over the whole power of
the truth; the bias at 120 h of each channel in standard deviations; seconds of training; model passes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.call import ROOT
from benchmarks.harness.record import Figures, write_record
from utils.config.reader import load_config
from utils.files import read_events
from utils.measure.tables import markdown

ONE, FLAT, FREE = ("--rollout_steps=1", "--rollout_from=0"), ("--patch_overlap=0",), ("--conserve_mean=None",)
WINDOWS, LATE = ("--patch_overlap=4",), ("--rollout_steps=4", "--rollout_from=200")
BEST = (*LATE, *WINDOWS, "--conserve_mean=msl")
CASES = {  # all that is tried is said, whatever the section has
    "demo": {
        "neither": (*ONE, *FLAT),
        "neither, depth 6: the FLOPs of overlap": (*ONE, *FLAT, "--depth=6"),
        "overlap": (*ONE, *WINDOWS),
        "overlap, and as many passes as the next": (*ONE, *WINDOWS, "--num_iters=1050"),
        "overlap + four steps in the last 150": (*WINDOWS, "--rollout_steps=4", "--rollout_from=450"),
    },
    "era5_djf": {
        "neither": (*ONE, *FLAT, *FREE),
        "neither, twice the iterations": (*ONE, *FLAT, *FREE, "--num_iters=600"),
        "overlap": (*ONE, *WINDOWS, *FREE),
        "four steps in the last 100": (*LATE, *FLAT, *FREE),
        "overlap + four steps": (*LATE, *WINDOWS, *FREE),
        "overlap + four steps + the mean of pressure kept": BEST,
        "the same, rows of the loss weighted by latitude": (*BEST, "--loss=weighted", "--loss_latitude"),
        "the same, channels of the loss weighted by `auto`": (*BEST, "--loss=weighted", "--loss_channels=auto"),
    },
}
STRIDE = {"demo": 4, "era5_djf": 1}
HOURS = (6, 24, 48, 120)
WAVES = 32  # from here on the truth of the built-in data has next to nothing


def trial(section: str, flags: tuple[str, ...], seed: int) -> dict[str, float]:
    """Train, judge, and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--config={section}", f"--expdir={folder}", f"--seed={seed}", *flags]
        run(["train.py", *own, "--plot_channels=None"])
        (trained,) = Path(folder).glob("*/1GPU/00")
        run(["evaluate.py", f"--checkpoint={trained}", f"--stride={STRIDE[section]}"])
        skill = json.loads((trained / "evaluation/skill.json").read_text())
        epochs = [event for event in read_events(trained / "metrics.jsonl") if event["event"] == "epoch"]
    config, _ = load_config(own)
    samples = config.num_iters * config.global_batch_size
    speed = statistics.fmean(1 / epoch["samples_per_sec"] for epoch in epochs)  # seconds a sample
    passes = config.num_iters * config.mean_steps(range(config.num_iters))
    return figures_of(skill, (config.plot_channels or [""])[-1]) | {"passes": passes, "seconds": samples * speed}


def run(command: list[str]) -> None:
    """Run a script of ours. Ends the program where it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"skill.py: {' '.join(command)} ended with code {done.returncode}: {done.stderr[-500:]}")


def figures_of(skill: dict[str, Any], noisy: str) -> dict[str, float]:
    """Return what an evaluation found; `noisy` is the channel whose small waves are looked at."""
    scores, names, leads = skill["scores"], list(skill["channels"]), skill["lead_hours"]

    def value(source: str, score: str, name: str, hours: float) -> float:
        return scores[source][score]["cos"][name][leads.index(hours)][0]

    def useful(name: str) -> float:
        """The last hour up to which the model is below climatology."""
        good = [value("model", "rmse", name, h) < value("climatology", "rmse", name, h) for h in leads]
        return leads[good.index(False) - 1] * (good[0] is True) if False in good else leads[-1]

    found = {}
    for hours in HOURS:
        ratios = {name: value("model", "rmse_over_persistence", name, hours) for name in names}
        found |= {f"{hours} h": statistics.fmean(ratios.values())} | {f"{hours} h, {n}": x for n, x in ratios.items()}
    found["hours"] = statistics.fmean(map(useful, names))
    found |= {f"hours, {name}": useful(name) for name in names}
    waves = {source: skill["spectra"][source][noisy][0] for source in ("model", "truth")}
    found["noise"] = sum(waves["model"][WAVES:]) / sum(waves["truth"])
    return found | {f"bias, {n}": value("model", "bias", n, HOURS[-1]) / skill["stds"][n] for n in names}


def table(cases: dict[str, dict[str, Any]], section: str) -> str:
    """Return the table of chapter 6; where there are several seeds, each."""
    columns = [*(f"{hours} h" for hours in HOURS), "hours", "noise"]
    if section == "era5_djf":
        columns = ["24 h, msl", "48 h, msl", "120 h, msl", "hours, msl", "bias, msl", "24 h, vo850"]
    forms = {"hours": ".0f", "hours, msl": ".0f", "noise": ".1e", "bias, msl": ".3f"}
    rows = []
    for name, case in cases.items():
        runs = case["seeds"].values()
        told = (" / ".join(format(found[column], forms.get(column, ".3f")) for found in runs) for column in columns)
        passes, seconds = (statistics.fmean(found[what] for found in runs) for what in ("passes", "seconds"))
        rows.append([name, f"{passes:,.0f}", f"{seconds:.0f}", *told])
    return markdown(["", "passes", "seconds", *columns], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--config", choices=CASES, default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--cases", nargs="+", help="words of the cases to run; default: all")
    parser.add_argument("--json", type=Path, required=True, help="file to write; what it has already is kept")
    args = parser.parse_args()
    before = json.loads(args.json.read_text())["cases"] if args.json.exists() else {}
    cases: dict[str, dict[str, Any]] = {}
    for name, flags in CASES[args.config].items():
        known = before.get(name, {"flags": list(flags), "seeds": {}})
        cases[name] = known if known["flags"] == list(flags) else {"flags": list(flags), "seeds": {}}
    for seed in args.seeds:
        for name, flags in CASES[args.config].items():
            wanted = not args.cases or any(word in name for word in args.cases)
            if wanted and str(seed) not in cases[name]["seeds"]:
                cases[name]["seeds"][str(seed)] = trial(args.config, flags, seed)
                write(args.json, cases)
                print(f"{name}, seed {seed}: done", flush=True)
    print(table({name: case for name, case in cases.items() if case["seeds"]}, args.config))


def write(path: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Write the record: of each case the medians over its seeds, and their range."""
    figures = Figures()
    done = {name: case for name, case in cases.items() if case["seeds"]}
    for name, case in done.items():
        for what in next(iter(case["seeds"].values())):
            figures.add(f"{name}: {what}", [found[what] for found in case["seeds"].values()])
    write_record(path, figures, figures.spread, cases=done)


if __name__ == "__main__":
    main()
