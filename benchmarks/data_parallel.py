"""train.py with PyTorch's older DataParallel in the place of DDP: one process that drives all GPUs (for ladder.py).

python benchmarks/data_parallel.py --config=demo [--gpus 4]      the first so many of them; flags of train.py go along
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import train  # noqa: E402
from benchmarks.harness.command import errors_in_one_line, parser_of  # noqa: E402
from utils.ranks.start import start  # noqa: E402

if __name__ == "__main__":
    parser = parser_of(__doc__, "train.py")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    args, flags = parser.parse_known_args()
    with errors_in_one_line():
        if torch.cuda.device_count() < args.gpus:
            raise ValueError(f"--gpus is {args.gpus}, and this process sees {torch.cuda.device_count()}: take fewer")
    wrap = lambda model, config: nn.DataParallel(model, list(range(args.gpus)))  # noqa: E731
    start(partial(train.main, wrap=wrap), flags, train.load_config)
