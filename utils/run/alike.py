"""Do all ranks train the same model on the same data? Each reads the configuration and looks at the files by itself.

A node may see an older state of a shared folder, and a copy on its own disk may not be whole. Ranks that know of other
samples would draw other batches than the log says, and leave an epoch after other steps.
"""

import zlib
from typing import Any

import numpy as np

from utils.config.settings import affecting
from utils.data.dataset import Job
from utils.data.files import Files
from utils.files import to_json
from utils.ranks.agree import check_same


def check_alike(job: Job) -> None:
    """Raise Refused, on all ranks, where one has another configuration, other files or statistics than rank 0 has."""
    data, fields = job.data, job.data.fields
    means = None if fields.time_means is None else zlib.crc32(np.ascontiguousarray(fields.time_means))
    views = {
        "configuration": _checksum({key: getattr(job.config, key) for key in affecting("training")}),
        "training files": _checksum(_of_files(data.train_files, data.train_pairs)),
        "validation files": _checksum(_of_files(data.valid_files, data.valid_pairs)),
        "statistics": _checksum([fields.description, means]),
    }
    check_same(views, "give all ranks the same; a copy on a node's own disk must be whole on each")


def _of_files(files: Files, pairs: np.ndarray) -> list[Any]:
    grid = [files.latitude, files.longitude]
    return [files.steps, files.times, files.shape, files.channel_names, files.units, *grid, len(pairs)]


def _checksum(value: Any) -> int:
    return zlib.crc32(to_json(value).encode())
