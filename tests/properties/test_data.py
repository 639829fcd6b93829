"""Any data: every sample once, every token on one rank, and what is read is what h5py reads."""

import itertools
from datetime import datetime, timezone
from pathlib import Path

import h5py
import numpy as np
import torch
import xarray
from hypothesis import assume, given
from hypothesis import strategies as st

from utils.data.files import Files
from utils.data.frames import FrameReader
from utils.data.order import SampleOrder
from utils.data.token_shard import TokenShard
from utils.prepare_data.prepare import main

SIZE = st.integers(1, 5)


@given(
    samples=st.integers(1, 60), per_shard=st.integers(1, 5), shards=st.integers(1, 6), shuffle=st.booleans(),
    epoch=st.integers(0, 3), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_every_sample_comes_once_and_every_grid_has_the_same_batches(samples, per_shard, shards, shuffle, epoch, seed):
    batch = per_shard * shards
    assume(not shuffle or samples >= batch)
    parts = [SampleOrder(samples, batch, shuffle, seed, shards, i).epoch(epoch) for i in range(shards)]
    batches = np.concatenate(parts, axis=1)
    assert np.array_equal(batches, SampleOrder(samples, batch, shuffle, seed).epoch(epoch))
    seen = batches[batches >= 0]
    assert len(np.unique(seen)) == len(seen) == (samples // batch * batch if shuffle else samples)
    assert len(batches) == len(SampleOrder(samples, batch, shuffle, seed)) and seen.max() < samples


@given(samples=st.integers(4, 40), batch=st.integers(1, 4), begin=st.integers(0, 60), seed=st.integers(0, 99))
def test_a_run_goes_on_in_its_order_from_any_point(samples, batch, begin, seed):
    order = SampleOrder(samples, batch, True, seed)
    whole = np.concatenate([order.epoch(epoch) for epoch in range(begin // len(order) + 3)])
    found = list(itertools.islice(order.from_iteration(begin), len(order)))
    assert np.array_equal(found, whole[begin : begin + len(order)])


@given(rows=SIZE, columns=SIZE, patch=st.integers(1, 4), shards=st.integers(1, 7), data=st.data())
def test_token_shards_are_a_partition(rows, columns, patch, shards, data):
    overlap = data.draw(st.integers(0, patch))
    H, W = rows * patch, columns * patch
    image = torch.arange(2.0 * H * W, dtype=torch.float64).view(1, 2, H, W) + 1
    total, held = torch.zeros_like(image), 0
    for i in range(shards):
        shard = TokenShard((H, W), patch, shards, i).with_overlap(overlap)
        own = shard.own(shard.cut_input(image[..., shard.input_rows.start : shard.input_rows.stop, :]))
        assert own.shape[-2:] == shard.shape
        total += shard.place(own)
        held += shard.count
        if shards > 1:
            placed = shard.place_in_rows(own)
            window = shard.place(own)[..., shard.input_rows.start : shard.input_rows.stop, :]
            assert torch.equal(placed, window)
    assert torch.equal(total, image) and held == rows * columns


@given(data=st.data())
def test_any_reader_reads_what_h5py_reads(tmp_path_factory, data):
    """Any chunks, compression, dtype, header, channels, rows and columns."""
    T, C, H, W = shape = [data.draw(st.integers(1 + (label == "H"), 5), label) for label in "TCHW"]
    dtype = data.draw(st.sampled_from(["<f4", "<f2", ">f4"]))
    chunks = data.draw(st.none() | st.tuples(*(st.integers(1, n) for n in shape)))
    compression = data.draw(st.sampled_from([None, "gzip", "lzf"])) if chunks else None
    block = data.draw(st.sampled_from([0, 512]))
    values = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal(shape).astype(dtype)
    path = tmp_path_factory.mktemp("data") / "2000.h5"
    with h5py.File(path, "w", userblock_size=block) as file:
        file.create_dataset("fields", data=values, chunks=chunks, compression=compression)
    channels = data.draw(st.lists(st.integers(0, C - 1), min_size=1, max_size=4))
    first = data.draw(st.integers(0, H))
    rows, columns = range(first, data.draw(st.integers(first, H))), data.draw(st.integers(1, W))
    with h5py.File(path) as file:
        expected = file["fields"][:][:, channels, rows.start : rows.stop, :columns]
    reader = FrameReader(Files.open(str(path.parent)), channels, rows, columns)
    for t in range(T):
        assert np.array_equal(reader.read_frame(0, t), expected[t])


def slow_pairs(times: list[list[int]], dt: int, steps: int, step: int) -> set[tuple[int, int]]:
    """Return where a sample begins, by definition: all its frames are in the file, dt steps after each other."""
    found = set()
    for file, own in enumerate(times):
        for t in range(len(own)):
            frames = range(t, t + dt * steps + 1, dt)
            if frames[-1] < len(own) and all(own[b] - own[a] == dt * step for a, b in itertools.pairwise(frames)):
                found.add((file, t))
    return found


@given(
    gaps=st.lists(st.lists(st.sampled_from([1, 1, 1, 2, 5]), min_size=0, max_size=12), min_size=1, max_size=3),
    dt=st.integers(1, 3), steps=st.integers(1, 3),
)  # fmt: skip
def test_no_sample_spans_a_gap(tmp_path, gaps, dt, steps):
    times, begin = [], 0
    for path in tmp_path.glob("*.h5"):
        path.unlink()
    for number, own in enumerate(gaps):
        times.append([begin + 3600 * sum(own[:i]) for i in range(len(own) + 1)])
        begin = times[-1][-1] + 3600 * 3
        with h5py.File(tmp_path / f"{2000 + number}.h5", "w") as file:
            file["fields"], file["time"] = np.zeros((len(own) + 1, 1, 2, 2), "f4"), np.array(times[-1])
    files = Files.open(str(tmp_path))
    step = files.step_seconds()
    found = {tuple(pair) for pair in files.samples(dt, steps).tolist()}
    assert found == (slow_pairs(times, dt, steps, int(step)) if step else set())
    everything = sorted(itertools.chain.from_iterable(times))
    place = {t: (file, i) for file, own in enumerate(times) for i, t in enumerate(own)}
    if step:
        wanted = [[t + k * dt * int(step) for k in range(steps + 1)] for t in everything]
        expected = [[place[t] for t in row] for row in wanted if all(t in place for t in row)]
        assert [[tuple(frame) for frame in row] for row in files.stretches(dt, steps).tolist()] == expected


def archive(path: Path, hours: list[int]) -> np.ndarray:
    """Write a file with these hours since 1999-12-31; return its values, of which each hour has its own."""
    times = np.datetime64("1999-12-31", "ns") + np.array(hours, "timedelta64[h]")
    values = np.array(hours, "f4")[:, None, None] * 10 + np.arange(8, dtype="f4").reshape(2, 4)
    axes = {"time": times, "latitude": [45.0, -45.0], "longitude": [0.0, 90.0, 180.0, 270.0]}
    xarray.Dataset({"t2m": (tuple(axes), values)}, axes).to_netcdf(path)
    return values


@given(
    files=st.lists(st.lists(st.integers(0, 12).map(lambda n: 6 * n), min_size=1, max_size=6), min_size=1, max_size=3),
    gaps=st.booleans(),
)
def test_any_time_axes_are_prepared_rightly_or_refused(tmp_path_factory, files, gaps):
    """Times that go back, come twice, overlap, leave gaps: each stored step has the values of its time."""
    folder = tmp_path_factory.mktemp("archive")
    known = {}
    for number, hours in enumerate(files):
        for hour, values in zip(hours, archive(folder / f"{number}.nc", hours)):
            known[hour] = values
    argv = [*map(str, sorted(folder.glob("*.nc"))), "--out", str(folder / "out"), *["--allow_gaps"] * gaps]
    everything = list(itertools.chain.from_iterable(files))
    once = len(set(everything)) == len(everything)
    if main(argv) != 0:
        assert not (folder / "out").exists()
        in_order = all(a < b for own in files for a, b in itertools.pairwise(own))
        steps = {b - a for a, b in itertools.pairwise(sorted(everything))}
        assert not once or not in_order or len(steps) != 1  # else it should have been prepared
        return
    stored = {}
    for path in (folder / "out").rglob("*.h5"):
        with h5py.File(path) as file:
            for time, values in zip(file["time"][:], file["fields"][:, 0]):
                assert str(datetime.fromtimestamp(int(time), timezone.utc).year) == path.stem
                stored[(int(time) - 946598400) // 3600] = values
    assert once and stored.keys() == set(everything)
    assert all(np.array_equal(values, known[hour]) for hour, values in stored.items())
