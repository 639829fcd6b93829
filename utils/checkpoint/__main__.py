"""Look at checkpoints, and take the weights out of one: python -m utils.checkpoint {inspect,export} RUN."""

import argparse
import sys
from pathlib import Path

from utils.checkpoint.store import Unreadable, find, is_name, metadata, read_info
from utils.checkpoint.weights import export


def inspect(source: Path) -> str:
    """Return what the checkpoints of a run hold, a line each; of one checkpoint also its tensors.

    Raises ValueError where there is none.
    """
    folders = [source] if is_name(source.name) else find(source / "checkpoints")
    if not folders:
        raise ValueError(f"{source} holds no checkpoint: give the folder of a run, or one of its checkpoints")
    lines = []
    for folder in folders:
        try:
            info = read_info(folder)
        except Unreadable as error:
            lines.append(f"{folder.name:18}  damaged: {error}")
            continue
        layout, best = info["layout"], info["best"]
        size = sum(info["files"].values())
        grid = f"tp {layout['tensor_parallel']}, cp {layout['context_parallel']}"
        notes = ["finished"] * info["is_finished"]
        if best["name"] == folder.name:
            notes.append(f"the best, with a validation loss of {best['loss']:.6f}")
        lines.append(
            f"{folder.name:18}  {info['iteration']} of {info['config']['num_iters']} iterations, "
            f"validated epochs: {info['epochs']}, {size / 1e6:,.1f} MB by {layout['ranks']} rank(s) ({grid}), "
            f"torch {info['versions']['torch']}" + "".join(f"; {note}" for note in notes)
        )
        if folder == source:
            lines += [f"  {name:60} {list(x.size)}" for name, x in metadata(folder).items()]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m utils.checkpoint", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command, help in (
        ("inspect", "show the checkpoints of a run, or what one holds"),
        ("export", "write the weights of a checkpoint, of a run the newest or the best, to one file"),
    ):
        sub = commands.add_parser(command, help=help)
        sub.add_argument("source", type=Path, metavar="RUN", help="folder of a run, or of one of its checkpoints")
    sub.add_argument("out", type=Path, metavar="FILE", help="file to write, such as weights.pt")
    sub.add_argument("--best", action="store_true", help="the checkpoint with the lowest validation loss")
    sub.add_argument("--ema", action="store_true", help="the moving average of the weights")
    given = vars(parser.parse_args(argv))
    try:
        print({"inspect": inspect, "export": export}[given.pop("command")](**given))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
