"""The DALI loader gives the batches of the native one, normalised, on any number of ranks."""

import sys

import numpy as np
import pytest
import torch

from tests.data.test_data_loader import weather
from tests.helpers import fields, losses, run_here, tiny_flags, write_data, write_file

pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install -r requirements-dali.txt")
DALI = ["--data_loader_config", "dali"]


def compare(folder, *flags, ranks=1, epochs=(0, 1, 3)):
    """Compare the batches of both loaders on every rank."""
    for rank in range(ranks):
        native = weather(folder, *flags, ranks=ranks, rank=rank)
        dali = weather(folder, *flags, *DALI, ranks=ranks, rank=rank)
        for name in ("train_loader", "valid_loader"):
            for epoch in epochs:
                batches = getattr(dali, name).epoch(epoch)
                for expected in getattr(native, name).epoch(epoch):
                    batch = next(batches)
                    assert torch.equal(batch.counts, expected.counts)
                    for got, wanted in zip(dali.to_device(batch), native.to_device(expected)):
                        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
                assert next(batches, None) is None


@pytest.mark.parametrize("layout", [{}, {"compression": "gzip"}])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_same_batches(tmp_path, layout, workers):
    compare(write_data(tmp_path, **layout), "--num_data_workers", workers)


@pytest.mark.parametrize("ranks, batch", [(1, 1), (1, 21), (2, 2), (3, 6), (4, 20), (7, 7)])
def test_any_batch_and_world_size(tiny, ranks, batch):
    """More ranks than validation samples, one batch an epoch, one sample a batch."""
    compare(tiny, "--global_batch_size", str(batch), ranks=ranks)


def test_float16_files_and_other_channels(tmp_path):
    write_data(tmp_path, names=["a", "b", "c"])
    for path in tmp_path.glob("*/*.h5"):
        write_file(path, fields(9, 3, 17, 32).astype(np.float16), names=["a", "b", "c"])
    compare(tmp_path, "--in_channels", "c", "a", "--out_channels", "b")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_same_samples_of_several_steps(tmp_path, workers):
    """Forecasts get longer in the middle of an epoch, and one channel is read and not forecast."""
    write_data(tmp_path, names=["a", "b", "c"])
    more = ["--rollout_steps", "2", "3", "--rollout_from", "3", "5", "--num_iters", "20", "--global_batch_size", "4"]
    compare(tmp_path, "--in_channels", "c", "a", "--out_channels", "a", "b", *more, "--num_data_workers", workers)
    compare(tmp_path, *more)


def test_the_same_losses(tiny):
    native = losses(run_here(tiny_flags(tiny, "--num_iters", "6")))
    dali = losses(run_here(tiny_flags(tiny, "--num_iters", "6", "--run_num", "dali", "--num_data_workers", "1", *DALI)))
    np.testing.assert_allclose(dali, native, rtol=1e-5)


@pytest.mark.parametrize("cuda, extra", [(None, ""), ("12.8", ""), ("13.0", "-cuda130")])
def test_without_dali_the_remedy_is_named(tiny, monkeypatch, cuda, extra):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ValueError, match=f"pip install -r requirements-dali{extra}.txt"):
        weather(tiny, *DALI)
