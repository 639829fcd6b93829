"""What benchmarks/ladder.py found: tables, a picture, one page. `make docs` copies the tables to docs/ladder.md.

python benchmarks/ladder_report.py benchmarks/results/ladder_demo.json     writes all of it anew from the record
"""

import base64
import html
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from benchmarks.harness.record import write_record  # noqa: E402
from utils.measure.tables import markdown as markdown_table  # noqa: E402

TITLES = {
    "steps": "One after another",
    "alone": "Each alone, over the baseline",
    "weak scaling": "Weak scaling: each rank has the batch of one",
    "strong scaling": "Strong scaling: one batch, shared out",
    "data parallel": "Data parallelism",
    "model parallel": "Model parallelism: the same model and batch",
    "links": "Without links between GPUs: all goes through the host's memory",
}
HEAD = ["rung", "samples/s", "gain", "over", "range", "memory GiB", "MFU", "data wait", "compile s", "loss change"]
Row = dict[str, Any]


def cells(row: Row) -> list[str]:
    """Return a line of a table; what is not known is empty."""
    if "without" in row:
        return [row["name"], row["without"].replace("|", "/")]
    gain, span = "", ""
    if "gain" in row:
        gain = f"{row['gain']:.2f}" + (", noise" if row["is_noise"] else "")
        span = "{:.2f} to {:.2f}".format(*row["gain_range"])
    change = row.get("loss_change")
    return [
        row["name"],
        f"{row['samples_per_sec']:.1f}" if row["samples_per_sec"] >= 10 else f"{row['samples_per_sec']:.3g}",
        gain,
        row.get("below", ""),
        span,
        f"{row['memory_gb']:.2f}",
        f"{row['mfu']:.1%}" if row["mfu"] else "",
        f"{row['data_wait_frac']:.1%}",
        f"{row['compile_sec']:.1f}",
        "" if change is None else f"{change:.0e}" if change else "none",
    ]


def tables(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the title of each table and its rows."""
    for table, title in TITLES.items():
        found = [row for row in rows if row["table"] == table]
        if found:
            yield title, found


def anchor(ladder: str, row: Row) -> str:
    """Return what a link to a rung is called: `ladder-demo-alone-bf16`, of the record `ladder_demo`."""
    return re.sub(r"[^a-z0-9]+", "-", f"{ladder} {row['table']} {row['name']}".lower()).strip("-")


def machine(record: dict[str, Any]) -> str:
    """Return on what, by what, and how a record came about, and how sure it is."""
    about = record["about"]
    where = f"{about['device']}, {about['cores']} cores, PyTorch {about['torch']}, commit {about['commit']}"
    error = about["standard_error"]
    told = f" A gain's standard error, by rungs that are the same command: {error:.1%}." if error else ""
    return f"{where}: `{record['command']}`.{told}"


def markdown(ladder: str, record: dict[str, Any]) -> str:
    """Return all tables in Markdown, with a place to link to in each line."""
    rows, parts = record["rungs"], [machine(record)]
    for title, found in tables(rows):
        lines = []
        for row in found:
            first, *rest = cells(row)
            line = [f'<a id="{anchor(ladder, row)}"></a>{first}', *rest]
            lines.append(line + [""] * (len(HEAD) - len(line)))
        parts += [f"**{title}**", markdown_table(HEAD, lines)]
        if told := own_flags(found):
            parts.append(told)
    return "\n\n".join(parts)


def own_flags(found: list[Row]) -> str:
    """Return what each rung of a table runs that others of it do not: flags, a script; of one after another nothing."""
    if any(row["name"].startswith("+ ") for row in found):
        return ""
    shared = set.intersection(*(set(row["flags"].split()) for row in found))
    told = []
    for row in found:
        script = [] if row["script"] in ("train.py", "train_mp.py") else [row["script"]]
        if own := script + [flag for flag in row["flags"].split() if flag not in shared]:
            told.append(f"{row['name']}: `{' '.join(own)}`")
    return f"(Flags: {'; '.join(told)}.)" if told else ""


def picture(rows: list[Row], title: str) -> Figure:
    """Draw the speed of each rung as a bar, with its range; noise is pale."""
    shown = [(name, [row for row in found if "without" not in row]) for name, found in tables(rows)]
    shown = [(name, found) for name, found in shown if found]
    heights = [len(found) + 1.5 for _, found in shown]
    figure = Figure(figsize=(9, 0.32 * sum(heights) + 0.6), layout="constrained")
    for axes, (name, found) in zip(figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False).flat, shown):
        speeds = [row["samples_per_sec"] for row in found]
        errors = [[abs(row["range"][end] - speed) for row, speed in zip(found, speeds)] for end in (0, 1)]
        colours = ["tab:blue" if not row.get("is_noise") else "lightsteelblue" for row in found]
        bars = axes.barh([row["name"] for row in found], speeds, xerr=errors, color=colours, ecolor="0.4", capsize=2)
        axes.bar_label(bars, [f" {row['gain']:.2f} x" if "gain" in row else "" for row in found], padding=4, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("samples per second: median, and range of the repeats; pale bars are within noise")
    figure.suptitle(title)
    return figure


def page(rows: list[Row], image: bytes, title: str, about: dict[str, Any]) -> str:
    """Return one page of HTML that needs nothing beside itself."""
    body = [f"<h1>{html.escape(title)}</h1>", "<ul>"]
    body += [f"<li>{html.escape(name)}: {html.escape(str(value))}</li>" for name, value in about.items()]
    body += ["</ul>", f'<img alt="speed of each rung" src="data:image/png;base64,{base64.b64encode(image).decode()}">']
    for name, found in tables(rows):
        body.append(f"<h2>{html.escape(name)}</h2><table><tr>{''.join(f'<th>{h}</th>' for h in HEAD)}</tr>")
        for row in found:
            first, *rest = (html.escape(cell) for cell in cells(row))
            told = f'<td colspan="{len(HEAD) - 1}">{rest[0]}</td>' if "without" in row else ""
            told = told or "".join(f"<td>{cell}</td>" for cell in rest)
            kind = "without" if "without" in row else "noise" if row.get("is_noise") else ""
            flags = html.escape(f"{row['script']} {row['flags']}")
            body.append(f'<tr class="{kind}"><td title="{flags}">{first}</td>{told}</tr>')
        body.append("</table>")
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}"
        "table{border-collapse:collapse}th,td{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}"
        "td:first-child,th:first-child,.without td{text-align:left}.noise,.without{color:#888}img{max-width:100%}"
    )
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def write(path: Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Write the record, and what shows it."""
    done = {f"{row['table']}: {row['name']}": row for row in rows if "without" not in row}
    figures = {f"samples_per_sec of {key}": row["samples_per_sec"] for key, row in done.items()}
    spread = {f"samples_per_sec of {key}": row["range"] for key, row in done.items()}
    for key, row in done.items():
        if "gain" in row:
            figures[f"gain of {key}"], spread[f"gain of {key}"] = row["gain"], row["gain_range"]
    write_record(path, figures, spread, rungs=rows, about=about)
    show(path)


def show(path: Path) -> None:
    """Write tables (.md), bars (.png) and one page of all (.html) beside a record."""
    record = json.loads(path.read_text())
    rows, about = record["rungs"], record["about"]
    path.with_suffix(".md").write_text(markdown(path.stem, record) + "\n")
    title = f"{about['config']} on {about['device']}"
    figure, image = picture(rows, title), io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    path.with_suffix(".png").write_bytes(image.getvalue())
    path.with_suffix(".html").write_text(page(rows, image.getvalue(), title, about))


def check_place(page: Path, record: Path) -> None:
    """Raise ValueError where a page has no place for the tables of a record of benchmarks/results."""
    mark = f"<!-- from: {record.stem} -->"
    if mark not in page.read_text() or record.resolve().parent != ROOT / "benchmarks/results":
        raise ValueError(
            f"{page} shows the records of benchmarks/results for which it has a place, and none for {record}: "
            f"write lines of {mark} and <!-- end --> there, and leave --json out"
        )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        show(Path(name))
