"""train.py with PyTorch's older DataParallel in the place of DDP: one process that drives all GPUs (for ladder.py).

python benchmarks/data_parallel.py --config=demo [--gpus 4]      the first so many of them; flags of train.py go along
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import train  # noqa: E402
from benchmarks.harness.command import errors_in_one_line, parser_of  # noqa: E402
from utils.ranks.start import start  # noqa: E402


class SamplesFirst(nn.Module):
    """A model whose forecasts of several steps, and what is known of these, have the samples as their first axis.

    DataParallel cuts along that one, and puts together along it.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, *known: Tensor) -> Tensor:
        return _swap(self.model(x, *map(_swap, known))) if known else self.model(x)


class DataParallel(nn.DataParallel):
    """The same model on several GPUs: a forecast [K, B, C, H, W] of x [B, C, H, W]."""

    def __init__(self, model: nn.Module, device_ids: list[int] | None = None):
        super().__init__(SamplesFirst(model), device_ids)

    def forward(self, x: Tensor, *known: Tensor) -> Tensor:
        return _swap(super().forward(x, *map(_swap, known))) if known else super().forward(x)


def _swap(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


if __name__ == "__main__":
    parser = parser_of(__doc__, "train.py")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    args, flags = parser.parse_known_args()
    with errors_in_one_line():
        if torch.cuda.device_count() < args.gpus:
            raise ValueError(f"--gpus is {args.gpus}, and this process sees {torch.cuda.device_count()}: take fewer")
    wrap = lambda model, config: DataParallel(model, list(range(args.gpus)))  # noqa: E731
    start(partial(train.main, wrap=wrap), flags, train.load_config)
