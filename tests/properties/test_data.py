"""Any data: every sample once, every token on one rank, and what is read is what h5py reads."""

import itertools
from datetime import UTC, datetime
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
from utils.data.staging import stage
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


@given(
    samples=st.integers(4, 40), batch=st.integers(1, 4), begin=st.integers(0, 60), seed=st.integers(0, 99),
    before=st.integers(1, 4), after=st.integers(1, 4), shuffle=st.booleans(),
)  # fmt: skip
def test_a_run_goes_on_in_its_order_from_any_point(samples, batch, begin, seed, before, after, shuffle):
    """On another number of ranks, too: each global batch after the point is that of one rank that never stopped."""
    batch *= before * after
    assume(not shuffle or samples >= batch)
    order = SampleOrder(samples, batch, shuffle, seed)
    whole = np.concatenate([order.epoch(epoch) for epoch in range(begin // len(order) + 3)])
    for shards, first, count in ((before, 0, begin), (after, begin, len(order))):
        parts = [
            list(itertools.islice(SampleOrder(samples, batch, shuffle, seed, shards, i).from_iteration(first), count))
            for i in range(shards)
        ]
        found = [np.concatenate(of_one) for of_one in zip(*parts)]
        assert np.array_equal(np.reshape(found, (count, batch)), whole[first : first + count])


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
    """Any chunks, filters, dtype, header, channels, rows and columns; from a copy in the node, too."""
    T, C, H, W = shape = [data.draw(st.integers(1 + (label == "H"), 5), label) for label in "TCHW"]
    dtype = data.draw(st.sampled_from(["<f4", "<f2", ">f4"]))
    chunks = data.draw(st.none() | st.tuples(*(st.integers(1, n) for n in shape)))
    filters = {"compression": data.draw(st.sampled_from([None, "gzip", "lzf"]))} if chunks else {}
    filters |= {name: True for name in ("shuffle", "fletcher32") if chunks and data.draw(st.booleans(), name)}
    block = data.draw(st.sampled_from([0, 512]))
    values = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal(shape).astype(dtype)
    path = tmp_path_factory.mktemp("data") / "2000.h5"
    with h5py.File(path, "w", userblock_size=block) as file:
        file.create_dataset("fields", data=values, chunks=chunks, **filters)
    channels = data.draw(st.lists(st.integers(0, C - 1), min_size=1, max_size=4))
    first = data.draw(st.integers(0, H))
    rows, columns = range(first, data.draw(st.integers(first, H))), data.draw(st.integers(1, W))
    with h5py.File(path) as file:
        expected = file["fields"][:][:, channels, rows.start : rows.stop, :columns]
    files = Files.open(str(path.parent))
    for source in (files, stage(files, [0], str(path.parent / "node"))):
        reader = FrameReader(source, channels, rows, columns)
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


# How a file may write its times, with the seconds of a unit and the time that it counts from.
UNITS = {
    "minutes since 1999-12-31": (60, 0), "hours since 1999-12-31 00:00:00": (3600, 0),
    "days since 1999-12-30": (86400, -86400), "seconds since 1970-01-01": (1, -946598400),
}  # fmt: skip


def archive(path: Path, minutes: list[int], unit: str, calendar: str) -> np.ndarray:
    """Write a file with these minutes since 1999-12-31; return its values, of which each minute has its own."""
    size, begin = UNITS[unit]
    counts = (60 * np.array(minutes, "i8") - begin) / size
    time = xarray.Variable("time", counts, {"units": unit, "calendar": calendar})
    values = np.array(minutes, "f4")[:, None, None] * 10 + np.arange(8, dtype="f4").reshape(2, 4)
    axes = {"time": time, "latitude": [45.0, -45.0], "longitude": [0.0, 90.0, 180.0, 270.0]}
    dataset = xarray.Dataset({"t2m": (tuple(axes), values)}, axes)
    dataset.to_zarr(path, consolidated=False) if path.suffix == ".zarr" else dataset.to_netcdf(path)
    return values


@given(
    files=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), min_size=1, max_size=3),
    step=st.sampled_from([360, 360, 60, 30, 1, 1440]), gaps=st.booleans(), unit=st.sampled_from([*UNITS]),
    suffix=st.sampled_from([".nc", ".nc", ".zarr"]),
    calendar=st.sampled_from(["standard", "proleptic_gregorian", "standard", "noleap", "360_day"]),
)  # fmt: skip
def test_any_time_axes_are_prepared_rightly_or_refused(tmp_path_factory, files, step, gaps, unit, suffix, calendar):
    """Times that go back, come twice, overlap, leave gaps, of any unit and step: each step has the values of its time.

    A calendar of other days is refused.
    """
    folder = tmp_path_factory.mktemp("archive")
    files = [[step * n for n in own] for own in files]
    known = {}
    for number, minutes in enumerate(files):
        for minute, values in zip(minutes, archive(folder / f"{number}{suffix}", minutes, unit, calendar)):
            known[minute] = values
    argv = [*map(str, sorted(folder.glob(f"*{suffix}"))), "--out", str(folder / "out"), *["--allow_gaps"] * gaps]
    everything = list(itertools.chain.from_iterable(files))
    once = len(set(everything)) == len(everything)
    if main(argv) != 0:
        assert not (folder / "out").exists()
        in_order = all(a < b for a, b in itertools.pairwise(itertools.chain(*sorted(files))))  # no file within another
        steps = {b - a for a, b in itertools.pairwise(sorted(everything))}
        odd = calendar in ("noleap", "360_day")
        assert odd or not once or not in_order or len(steps) != 1  # else it should have been prepared
        return
    assert calendar in ("standard", "proleptic_gregorian")
    stored = {}
    for path in (folder / "out").rglob("*.h5"):
        with h5py.File(path) as file:
            for time, values in zip(file["time"][:], file["fields"][:, 0]):
                assert str(datetime.fromtimestamp(int(time), UTC).year) == path.stem
                stored[(int(time) - 946598400) // 60] = values
    assert once and stored.keys() == set(everything)
    assert all(np.array_equal(values, known[minute]) for minute, values in stored.items())
