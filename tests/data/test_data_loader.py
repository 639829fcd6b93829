"""The loader: which samples, in which order, on which rank, with which values."""

import copy
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.helpers import STEP, fields, tiny_flags, write_data, write_file
from utils.config.reader import load_config
from utils.data.dataset import WeatherData
from utils.data.files import ERA5_CHANNELS, Files, channel_indices, check_crop
from utils.data.order import epoch_order, shard


def weather(folder, *flags, ranks=1, rank=0):
    config = load_config(tiny_flags(folder, *flags))[0].with_batches(ranks)
    return WeatherData(config, num_shards=ranks, shard_id=rank)


def read(loader, *position):
    """All batches of an epoch, kept: the loader uses their memory again."""
    return [copy.deepcopy(batch) for batch in loader.epoch(*position)]


def stored(folder, kind):
    """All (input, target) pairs of a set, read plainly: the reference."""
    pairs = []
    for path in sorted((folder / kind).glob("*.h5")):
        with h5py.File(path) as file:
            data = file["fields"][:]
        pairs += [(data[t], data[t + 1]) for t in range(len(data) - 1)]
    return pairs


def test_samples_are_all_pairs_inside_a_file_each_once(tmp_path):
    write_data(tmp_path, train={"a_1999": 5, "1998": 3, "zz": 4})
    files = Files.open(str(tmp_path / "train"))
    assert [p.split("/")[-1] for p in files.paths] == ["1998.h5", "a_1999.h5", "zz.h5"]  # by year, then by name
    assert files.samples(1).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [1, 3], [2, 0], [2, 1], [2, 2]]
    assert files.samples(3).tolist() == [[1, 0], [1, 1], [2, 0]]


def test_a_pair_that_spans_a_gap_is_no_sample(tmp_path):
    write_file(tmp_path / "2000.h5", fields(6, 1, 4, 8))
    with h5py.File(tmp_path / "2000.h5", "r+") as file:
        file["time"][3:] += STEP
    files = Files.open(str(tmp_path))
    assert files.samples(1)[:, 1].tolist() == [0, 1, 3, 4]
    assert files.samples(2)[:, 1].tolist() == [0, 3]
    assert files.step_seconds() == STEP


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_number_of_ranks_sees_the_same_global_batches(ranks):
    order = epoch_order(22, seed=3, epoch=5)[:16]
    assert sorted(epoch_order(22, 3, 5)) == list(range(22))
    assert (order != epoch_order(22, 3, 6)[:16]).any() and (order != epoch_order(22, 4, 5)[:16]).any()
    whole = np.concatenate([shard(order, 8, ranks, rank) for rank in range(ranks)], axis=1)
    assert whole.tolist() == order.reshape(2, 8).tolist()


def test_batches_hold_the_values_of_the_files_normalised(tiny):
    data, pairs = weather(tiny), stored(tiny, "train")
    means, stds = (np.load(tiny / f"stats/global_{name}.npy") for name in ("means", "stds"))
    batches = read(data.train_loader, 2)
    assert len(batches) == len(data.train_loader) == 2  # 21 samples, batches of 8: the tail is dropped
    for batch, samples in zip(batches, data.train_loader.order.epoch(2)):
        inp, (target,), _ = data.to_device(batch)
        for b, sample in enumerate(samples):
            for got, raw in zip((inp, target), pairs[sample]):
                expected = ((raw - means[0]) / stds[0])[:, :16]  # the 17th row is cropped
                np.testing.assert_allclose(got[b].numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_normalising_in_one_pass_changes_nothing(tmp_path, dtype):
    write_data(tmp_path)
    for path in tmp_path.glob("*/*.h5"):
        write_file(path, fields(9, 3, 17, 32).astype(dtype))
    plain, compiled = weather(tmp_path), weather(tmp_path, "--enable_jit")
    for a, b in zip(plain.train_loader.epoch(), compiled.train_loader.epoch(), strict=True):
        assert a.inp.dtype == getattr(torch, dtype)  # float16 up to the device
        for x, y in zip(plain.to_device(a), compiled.to_device(b)):
            assert x.dtype == torch.float32 and torch.equal(x, y)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_normalising_uses_its_memory_again(tmp_path, dtype):
    write_data(tmp_path)
    for path in tmp_path.glob("*/*.h5"):
        write_file(path, fields(9, 3, 17, 32).astype(dtype))
    data = weather(tmp_path)
    memory = [[x.data_ptr() for x in data.to_device(batch)[:2]] for batch in data.train_loader.epoch()]
    assert len(memory) > 1 and memory == memory[:1] * len(memory) and len(set(memory[0])) == 2


def test_files_follow_by_the_year_that_their_names_end_in(tmp_path):
    """A month in such digits is no year: those names follow by name, as all others."""
    names = ["a1980", "1979", "b_1978", "era5_199912", "era5_200001", "late"]
    write_data(tmp_path)
    source = next((tmp_path / "valid").glob("*.h5"))
    (tmp_path / "years").mkdir()
    for name in names:
        shutil.copy(source, tmp_path / f"years/{name}.h5")
    found = [Path(path).stem for path in Files.open(tmp_path / "years").paths]
    assert found == ["b_1978", "1979", "a1980", "era5_199912", "era5_200001", "late"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_validation_is_complete_and_in_order(tiny, ranks):
    seen, steps = [], set()
    loaders = [weather(tiny, "--global_batch_size", "6", ranks=ranks, rank=r).valid_loader for r in range(ranks)]
    for parts in zip(*(loader.epoch() for loader in loaders)):
        steps.update(part.inp.shape for part in parts)
        seen += [frame for part in parts for frame in part.inp[part.counts > 0]]
    pairs = stored(tiny, "valid")
    assert len(loaders[0]) == 2
    assert len(seen) == len(pairs) == 7 and len(steps) == 1  # padded to equal shapes
    assert all(np.array_equal(frame, inp[:, :16]) for frame, (inp, _) in zip(seen, pairs))


def test_reading_leaves_the_random_state_alone(tiny):
    data = weather(tiny)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    read(data.train_loader, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_limits_and_a_later_start(tiny):
    data = weather(tiny, "--limit_nsamples", "9", "--limit_nsamples_val", "2", "--global_batch_size", "3")
    assert len(data.train_pairs) == 9 and len(data.valid_pairs) == 2 and len(data.train_loader) == 3
    assert data.train_loader.order.epoch(1).max() < 9
    later = read(data.train_loader, 1, 2)
    assert len(later) == 1 and torch.equal(later[0].inp, read(data.train_loader, 1)[2].inp)


def test_channels_by_name_and_their_origins(tmp_path):
    write_data(tmp_path, names=["a", "b", "c"])
    data = weather(tmp_path, "--in_channels", "c", "a", "--out_channels", "a", "b", "--plot_channels", "b")
    assert (data.fields.inputs, data.fields.outputs, data.fields.origins) == ([2, 0], [0, 1], [1, -1])
    assert data.fields.plot_channels == [1] and data.fields.units == ["m s-1"] * 2
    assert weather(tmp_path, "--channel_names", "x", "y", "z").fields.in_names == ["x", "y", "z"]
    with pytest.raises(ValueError, match="'b' is not: add it"):
        weather(tmp_path, "--in_channels", "c", "a", "--out_channels", "a", "b", "--residual")


def test_assumed_names(tmp_path):
    write_file(tmp_path / "a/2000.h5", fields(2, 20, 4, 8))
    names, warning = Files.open(str(tmp_path / "a")).names(None)
    assert names == tuple(ERA5_CHANNELS) and "assumed" in warning
    write_file(tmp_path / "b/2000.h5", fields(2, 3, 4, 8))
    assert Files.open(str(tmp_path / "b")).names(None) == (("ch0", "ch1", "ch2"), None)


def test_grid_where_the_file_stores_none(tmp_path):
    write_file(tmp_path / "even/2000.h5", fields(2, 1, 4, 8))
    write_file(tmp_path / "odd/2000.h5", fields(2, 1, 5, 8))
    even, odd = (Files.open(str(tmp_path / name)) for name in ("even", "odd"))
    assert even.latitude.tolist() == [90, 45, 0, -45] and odd.latitude.tolist() == [90, 45, 0, -45, -90]
    assert even.longitude.tolist() == [0, 45, 90, 135, 180, 225, 270, 315]
    both = "the files store no latitude and no longitude: latitude from 90 to -45 and longitude from 0 to 315 degrees"
    assert even.assumed_grid == f"{both} are assumed"


def test_the_log_says_which_part_of_the_grid_is_assumed(tmp_path):
    """A region would have the weights of the whole globe."""
    write_data(tmp_path)
    (remark,) = weather(tmp_path).fields.remarks
    assert remark.startswith("the files store no latitude and no longitude: latitude from 90 to -90 and")
    for path in tmp_path.glob("*/*.h5"):
        with h5py.File(path, "r+") as file:
            file["latitude"] = np.linspace(80, -80, 17)
    (remark,) = weather(tmp_path).fields.remarks
    assert remark == "the files store no longitude: longitude from 0 to 348.75 degrees are assumed"
    for path in tmp_path.glob("*/*.h5"):
        with h5py.File(path, "r+") as file:
            file["longitude"] = np.arange(32.0)
    assert weather(tmp_path).fields.remarks == ()


def test_stored_grid_and_lead_time_are_used(tmp_path):
    write_data(tmp_path)
    for path in tmp_path.glob("*/*.h5"):
        with h5py.File(path, "r+") as file:
            file["latitude"] = np.linspace(80, -80, 17)
    data = weather(tmp_path, "--dt", "2")
    assert data.fields.latitude[0] == 80 and len(data.fields.latitude) == 16 and data.fields.hours == "12 h"
    for path in tmp_path.glob("*/*.h5"):
        write_file(path, fields(9, 3, 17, 32), start=None)
    assert weather(tmp_path).fields.hours.startswith("6 h (assumed")


def test_time_diff_stds_scale_the_residual(tiny):
    np.save(tiny / "diff.npy", np.full((1, 3, 1, 1), 0.5, np.float32))
    data = weather(tiny, "--residual", "--time_diff_stds_path", str(tiny / "diff.npy"))
    np.testing.assert_allclose(
        data.fields.residual_scale, 0.5 / np.load(tiny / "stats/global_stds.npy")[0, :, 0, 0], rtol=1e-6
    )
    with pytest.raises(ValueError, match="add --residual"):
        weather(tiny, "--time_diff_stds_path", str(tiny / "diff.npy"))


def test_crop_rule(tmp_path):
    write_file(tmp_path / "2000.h5", fields(2, 1, 17, 32))
    files = Files.open(str(tmp_path))
    check_crop(files, (16, 32), patch_size=4)
    for size, words in (
        ((12, 32), "a patch"),
        ((16, 28), "a patch"),
        ((20, 32), "at most that"),
        ((16, 36), "at most that"),
    ):
        with pytest.raises(ValueError, match=words):
            check_crop(files, size, patch_size=4)


def test_units_and_statistics(tiny):
    data = weather(tiny)
    field = torch.randn(16, 32)
    expected = field.double().numpy() * data.fields.stds[2] + data.fields.means[2]
    np.testing.assert_allclose(data.fields.to_units(field, 2), expected)
    with pytest.raises(ValueError, match="did you mean 't2m'"):
        channel_indices(("t2m", "u10m"), ("t2n",), 0, "in_channels")


def test_a_value_that_is_not_finite_is_named(tiny):
    with h5py.File(tiny / "train/2002.h5", "r+") as file:
        file["fields"][3, 1, 2, 5] = np.nan
    data = weather(tiny, "--global_batch_size", "21")
    assert data.train_loader.find_nonfinite(0, 0).endswith("2002.h5, fields[3, 1, 2, 5] is nan")
    assert data.valid_loader.find_nonfinite(0, 0) is None
