"""Are Python, PyTorch and the packages that everything needs there, and new enough?

Importing anything below utils/ asks this first (utils/__init__.py): an old container then ends with one line, and not
in the middle of an import. So this file is legal in old Pythons, too; and it imports no torch, which takes seconds.
"""

import os
import re
import sys
from importlib.util import find_spec

PYTHON, TORCH = (3, 11), (2, 8)
# As they are imported, with pip's name.
PACKAGES = {name: name for name in ("numpy", "h5py", "tensorboard", "matplotlib", "tqdm", "psutil")}
PACKAGES["yaml"] = "pyyaml"


def missing(python=None):
    """Return a line on what is too old or not there, with the remedy; None where all is well.

    Args:
        python: the version to look at; this one by default.
    """
    python, torch = tuple(python or sys.version_info[:3]), torch_version()
    newer = "take a newer module or image (docs/slurm.md names some), or let `make demo` install what is needed"
    if python[:2] < PYTHON:
        return "Python {} is too old, {} or newer is needed: {}".format(_dotted(python), _dotted(PYTHON), newer)
    if torch is None:
        return "PyTorch is not there, {} or newer is needed: activate the environment that has it, or {}".format(
            _dotted(TORCH), newer
        )
    if torch[0] < TORCH:
        return "PyTorch {} is too old, {} or newer is needed: {}".format(torch[1], _dotted(TORCH), newer)
    lacking = [PACKAGES[name] for name in PACKAGES if find_spec(name) is None]
    if lacking:
        return "{0} not there: {1} -m pip install {0} (in a container with --user)".format(
            " ".join(lacking), os.path.basename(sys.executable)
        )
    return None


def torch_version():
    """Return the version of PyTorch as (major, minor) and as it is written; None where there is no PyTorch."""
    spec = find_spec("torch")
    path = spec and spec.origin and os.path.join(os.path.dirname(spec.origin), "version.py")
    if not path or not os.path.exists(path):
        return None
    with open(path) as file:
        text = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", file.read())
    return (int(text.group(2)), int(text.group(3))), text.group(1)


def _dotted(version):
    return ".".join(map(str, version))


def check():
    """End the process, with a line from each node, where something is missing."""
    line = missing()
    if line:
        places = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
        if all(os.environ.get(name, "0") == "0" for name in places):
            name = "python" if sys.argv[0] in ("", "-m", "-c") else os.path.basename(sys.argv[0])
            sys.stderr.write("{}: error: {}\n".format(name, line))
        sys.exit(2)
