"""The rooms of the code, from its imports: on which floor each lies, and what it stands on.

    python docs/figures/rooms.py [FOLDER]      of another checkout

Writes rooms.png beside this file. A room is a folder of utils/, a file that lies in utils/ itself, another folder, or a
script; a room lies one floor above the highest that it imports. Circles have no floor: they are told, of files, too.
"""

import ast
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("utils", "networks", "distributed", "benchmarks")
SCRIPTS = ("train", "train_mp", "train_mp_graphs", "evaluate", "forecast")
Arrows = dict[str, set[str]]  # what imports what


def modules(root: Path) -> dict[str, Path]:
    """Return the files that the rooms are made of, by the names under which they are imported."""
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*.py") if path.name != "__init__.py"]
    paths += [root / f"{script}.py" for script in SCRIPTS]
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(paths)}


def imports(source: str) -> set[str]:
    """Return what a file imports, wherever in it: modules, and names in modules, with dots."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def arrows(root: Path) -> Arrows:
    """Return the files that each file imports."""
    known = modules(root)
    found: Arrows = {}
    for name, path in known.items():
        wanted = {module if module in known else module.rpartition(".")[0] for module in imports(path.read_text())}
        found[name] = (wanted & known.keys()) - {name}
    return found


def room(module: str) -> str:
    """Return the room of a file: a script that lies in one (__main__.py) stands for itself."""
    if module.endswith("__main__"):
        return module
    return ".".join(module.split(".")[: 2 if module.startswith("utils.") else 1])


def between_rooms(files: Arrows) -> Arrows:
    """Return the rooms that each room imports."""
    found: Arrows = defaultdict(set)
    for name, wanted in files.items():
        found[room(name)] |= {room(other) for other in wanted} - {room(name)}
    return dict(found)


def circles(found: Arrows) -> list[list[str]]:
    """Return the circles, each once, as a depth-first search meets them."""
    done, way, met = set(), [], []

    def follow(name: str) -> None:
        if name in way:
            met.append(way[way.index(name) :])
        elif name not in done:
            way.append(name)
            for other in sorted(found[name]):
                follow(other)
            done.add(way.pop())

    for name in sorted(found):
        follow(name)
    return met


def floors(found: Arrows) -> list[list[str]]:
    """Return the rooms of each floor, the ground floor first. Raises ValueError where there is a circle."""
    if met := circles(found):
        raise ValueError(f"circles: {'; '.join(' -> '.join([*circle, circle[0]]) for circle in met)}")

    @cache
    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in found[name]), default=-1)

    return [sorted(name for name in found if floor(name) == n) for n in range(1 + max(map(floor, found)))]


def draw(found: Arrows, path: Path) -> None:
    """Draw the rooms floor by floor, an arrow for each import that no other way gives."""
    from matplotlib.figure import Figure

    levels = floors(found)
    places = {}
    for n, level in enumerate(levels):
        places |= {name: ((i + 0.5) / len(level) * 10, n + 0.25 * (i % 2)) for i, name in enumerate(level)}

    @cache
    def below(name: str) -> frozenset[str]:
        return frozenset().union(*({other} | below(other) for other in found[name]))

    figure = Figure(figsize=(13, 1.1 * len(levels)), layout="constrained")
    axes = figure.subplots()
    for name, wanted in found.items():
        for other in wanted:
            if not any(other in below(third) for third in wanted):
                axes.annotate("", places[other], places[name], arrowprops={"arrowstyle": "->", "color": "0.75"})
    for name, (x, y) in places.items():
        box = {"boxstyle": "round", "facecolor": "#e8f0fa", "edgecolor": "#30507a"}
        label = f"{name}.py" if name in SCRIPTS else name.removeprefix("utils.")
        axes.text(x, y, label, ha="center", va="center", bbox=box, fontsize=9)
    axes.set(xlim=(0, 10), ylim=(-0.4, len(levels) - 0.4), yticks=range(len(levels)), ylabel="floor", xticks=[])
    figure.savefig(path, dpi=110)


def main(root: Path) -> None:
    files = arrows(root)
    found = between_rooms(files)
    for what, met in (("rooms", circles(found)), ("files", circles(files))):
        print(f"{len(met)} circle(s) of {what}", *(" -> ".join([*c, c[0]]) for c in met), sep="\n    ")
    print(f"{len(found)} rooms, {sum(map(len, found.values()))} arrows between them, {len(files)} files")
    if not circles(found):
        for n, level in reversed(list(enumerate(floors(found)))):
            print(f"floor {n}: {', '.join(level)}")
        draw(found, Path(__file__).with_name("rooms.png") if root == ROOT else Path("rooms.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT)
