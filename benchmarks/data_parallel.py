"""train.py with PyTorch's older DataParallel in the place of DDP: one process that drives all GPUs (for ladder.py).

python benchmarks/data_parallel.py --config=demo
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import nn  # noqa: E402

import train  # noqa: E402
from utils.launch import start  # noqa: E402

if __name__ == "__main__":
    train.data_parallel = lambda model, config, group=None: nn.DataParallel(model)
    start(train.main, sys.argv[1:])
