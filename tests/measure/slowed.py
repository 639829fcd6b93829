"""Runs that something makes slow."""

import functools
import importlib
import os
import time

import torch
import torch.distributed as dist

import train
from distributed import mappings
from networks.vit import Block
from utils.config.settings import Config
from utils.data.dataset import WeatherData
from utils.data.frames import FrameReader
from utils.measure.step_profile import StepProfiler
from utils.ranks.start import start


def slowed(owner, name, seconds=0.03, times=0):
    """Let a function take longer, after it did its work: so long, and so many times what passed since its last call."""
    original, last = getattr(owner, name), time.perf_counter()

    @functools.wraps(original)
    def slow(*args, **kwargs):
        nonlocal last
        result = original(*args, **kwargs)
        time.sleep(max(seconds, min(times * (time.perf_counter() - last), 1)))
        last = time.perf_counter()
        return result

    setattr(owner, name, slow)


def reduce_slowly(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own mean of a bucket, and some time."""
    mean = bucket.buffer().div_(dist.get_world_size())

    def late(future: torch.futures.Future) -> torch.Tensor:
        time.sleep(0.1)
        return future.value()[0]

    return dist.all_reduce(mean, async_op=True).get_future().then(late)


def send_slowly(model: torch.nn.Module, config: Config) -> torch.nn.Module:
    """Wrap a model as train.py does, and reduce its gradients slowly."""
    model = train.data_parallel(model, config)
    model.register_comm_hook(None, reduce_slowly)
    return model


def run_slowed(case, script, argv):
    """Run a script as one rank, with what `case` names."""
    main, is_last = importlib.import_module(script.removesuffix(".py")).main, os.environ["RANK"] == "1"
    if case == "slow disk" or (case == "slow disk of rank 1" and is_last):
        slowed(FrameReader, "read")
    elif case == "slow copies":
        slowed(WeatherData, "to_device", times=5)
    elif case == "slow copies of rank 1" and is_last:
        slowed(WeatherData, "to_device", 0.15, times=5)
    elif case == "slow launches":
        slowed(Block, "forward")
    elif case == "slow rank" and is_last:
        slowed(train, "learning_rate", times=5)
    elif case == "slow all-reduce":
        slowed(dist, "all_reduce", 0.01)
    elif case == "slow gradients":
        main = functools.partial(main, wrap=send_slowly)
    elif case == "no profile of rank 0" and not is_last:
        del StepProfiler.start
    elif case == "slow collectives":
        for name in ("all_gather_single", "reduce_scatter_single"):
            slowed(mappings, name)
    start(main, argv)
