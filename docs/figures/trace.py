"""Draw the trace of docs/example_logs as a viewer shows it: the spans of a step, and its operators.

python docs/figures/trace.py
"""

import gzip
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

ROOT = Path(__file__).resolve().parent.parent.parent
SPANS = {"data copy in": "tab:red", "forward": "tab:blue", "backward": "tab:orange", "optimizer": "tab:green"}
OPERATORS = {  # words of their names, in small letters
    "matrix products": (("linear", "addmm", "mmbackward"), "tab:purple"),
    "attention": (("attention",), "tab:pink"),
    "others": (("",), "0.6"),
}


def outermost(events: list[dict]) -> list[dict]:
    """Return the events that lie in no other one of theirs."""
    found, reached = [], float("-inf")
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] >= reached:
            found.append(event)
            reached = event["ts"] + event["dur"]
    return found


def kind(name: str) -> str:
    return next(kind for kind, (words, _) in OPERATORS.items() if any(word in name.lower() for word in words))


def trace_figure(path: Path) -> Figure:
    """Draw one step of a trace: its spans, and the operators of the thread that trains."""
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    (step,) = (e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("step "))
    mine = [e for e in events if e["tid"] == step["tid"] and 0 <= e["ts"] - step["ts"] < step["dur"]]
    spans = [e for e in mine if e["name"].startswith(tuple(SPANS)) and e["cat"] == "user_annotation"]
    calls = outermost([e for e in mine if e["cat"] == "cpu_op"])
    colours = {e["name"]: next(c for name, c in SPANS.items() if e["name"].startswith(name)) for e in spans}
    rows = [
        [(step, "0.8")],
        [(e, colours[e["name"]]) for e in spans],
        [(e, OPERATORS[kind(e["name"])][1]) for e in calls],
    ]
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    axes = figure.subplots()
    for row, found in enumerate(rows):
        for event, colour in found:
            begin, length = (event["ts"] - step["ts"]) / 1e3, event["dur"] / 1e3
            axes.barh(row, length, left=begin, height=0.85, color=colour)
            if row < 2 and length > 0.05 * step["dur"] / 1e3:
                axes.text(begin + length / 2, row, event["name"], ha="center", va="center")
    keys = [Patch(color=SPANS[name], label=name) for name in ("data copy in", "optimizer")]
    keys += [Patch(color=colour, label=name) for name, (_, colour) in OPERATORS.items()]
    figure.legend(handles=keys, loc="outside upper right", ncols=len(keys), frameon=False, fontsize=9)
    axes.set_yticks(range(3), ["step", "its parts", "operators"])
    axes.invert_yaxis()
    axes.set_xlim(0, step["dur"] / 1e3)
    axes.set_xlabel("ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    return figure


if __name__ == "__main__":
    figure = trace_figure(ROOT / "docs/example_logs/trace/rank0.pt.trace.json.gz")
    FigureCanvasAgg(figure).print_png(ROOT / "docs/figures/trace.png")
