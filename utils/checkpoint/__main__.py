"""Look at checkpoints, and take a model out of one.

python -m utils.checkpoint inspect RUN
python -m utils.checkpoint export RUN weights.pt      the weights alone
python -m utils.checkpoint export RUN FOLDER/         all that forecasts need (utils/forecast/trained.py)
"""

import argparse
import sys
from pathlib import Path

import torch

from utils.checkpoint.info import Unreachable, Unreadable, is_checkpoint, read_info
from utils.checkpoint.store import find, metadata
from utils.checkpoint.weights import export, run_of
from utils.errors import ReadError, one_line
from utils.reading import check_own

WEIGHTS_ALONE = (".pt", ".pth", ".bin", ".safetensors")


def inspect(source: Path) -> str:
    """Return what the checkpoints of a run hold, a line each; of one checkpoint also its tensors.

    Raises ValueError where there is none, and Unreadable for one that is damaged.
    """
    check_own(run_of(source))
    folders = [source] if is_checkpoint(source) else find(source / "checkpoints")
    if not folders:
        raise ValueError(f"{source} holds no checkpoint: give the folder of a run, or one of its checkpoints")
    lines, best = [], None
    for folder in folders:
        try:
            info = read_info(folder)
        except Unreadable as error:
            if folder == source:
                raise
            what = "out of reach" if isinstance(error, Unreachable) else "damaged"
            lines.append(f"{folder.name:18}  {what}: {error}")
            continue
        layout, best = info["layout"], best or info["best"]  # the newest one knows
        size = sum(info["files"].values())
        grid = f"tp {layout['tensor_parallel']}, cp {layout['context_parallel']}"
        notes = ["finished"] * info["is_finished"]
        if best["name"] == folder.name:
            notes.append(f"the best{' so far' * (folder == source)}, with a validation loss of {best['loss']:.6f}")
        lines.append(
            f"{folder.name:18}  {info['iteration']} of {info['config']['num_iters']} iterations, "
            f"validated epochs: {info['epochs']}, {size / 1e6:,.1f} MB by {layout['ranks']} rank(s) ({grid}), "
            f"torch {info['versions']['torch']}" + "".join(f"; {note}" for note in notes)
        )
        if folder == source:
            lines += [f"  {name:60} {list(x.size)}" for name, x in metadata(folder).state_dict_metadata.items()]
    return "\n".join(map(one_line, lines))  # texts of files stand in them


def export_model(
    source: Path, out: Path, best: bool, ema: bool, torch_export: bool = False, data_dir: str | None = None
) -> str:
    """Write the model of a run to a file of weights, or to a folder with all that it needs; return a line on it.

    Raises ValueError where there is none, and where `out` cannot be written.
    """
    if out.suffix in WEIGHTS_ALONE:
        if torch_export or data_dir:
            raise ValueError(f"torch_export and data_dir go with a folder, and {out} is a file: give a folder")
        return export(source, out, best, ema)
    from forecast import forecaster  # it knows the model, and this room does not
    from utils.forecast.model import write_program
    from utils.forecast.trained import Trained

    trained = Trained.open(source.resolve(), best, ema, data_dir)

    def add(folder: Path) -> None:
        if torch_export:
            write_program(forecaster(trained, trained.config, torch.device("cpu")), folder / "model.pt2")

    trained.write(out, add)
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    return f"{trained.source}: wrote the model after {trained.about['iteration']} iterations to {out} ({names})"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m utils.checkpoint", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument("source", type=Path, metavar="RUN", help="folder of a run, or of one of its checkpoints")
    commands.add_parser("inspect", parents=[source], help="show the checkpoints of a run, or what one holds")
    told = "write the model of a checkpoint, of a run the newest or the best, to carry it home"
    carry = commands.add_parser("export", parents=[source], help=told)
    where = f"folder for all that forecasts need; or a file for the weights alone ({', '.join(WEIGHTS_ALONE)})"
    carry.add_argument("out", type=Path, metavar="FOLDER", help=where)
    carry.add_argument("--best", action="store_true", help="the checkpoint with the lowest validation loss")
    carry.add_argument("--ema", action="store_true", help="the moving average of the weights")
    carry.add_argument("--torch_export", action="store_true", help="also one step as a program of torch.export")
    carry.add_argument("--data_dir", help="where the data that /data stood for in training lie now")
    given = vars(parser.parse_args(argv))
    try:
        print({"inspect": inspect, "export": export_model}[given.pop("command")](**given))
    except (ValueError, ReadError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
