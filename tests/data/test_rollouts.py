"""Samples of several steps: which frames, of which channels, in which iteration, and what may not be among them."""

import h5py
import numpy as np
import pytest
import torch

from tests.data.test_data_loader import read, weather
from tests.helpers import STEP, fields, losses, records, resume_here, run_here, tiny_flags, write_data, write_file
from train import build_model
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.data.files import Files
from utils.errors import Refused
from utils.loss import relative_l2

CURRICULUM = ["--rollout_steps", "2", "3", "--rollout_from", "3", "5", "--num_iters", "9"]
CHANNELS = ["--in_channels", "c", "a", "b", "--out_channels", "b", "a"]  # c is forced


def starts(folder) -> list[tuple[np.ndarray, int]]:
    """Return the frames of the file and the index that each sample of three steps begins with."""
    found = []
    for path in sorted((folder / "train").glob("*.h5")):
        with h5py.File(path) as file:
            frames = file["fields"][:][:, :, :16]
        found += [(frames, t) for t in range(len(frames) - 3)]
    return found


@pytest.mark.parametrize("layout", [{}, {"compression": "gzip", "chunks": (1, 3, 17, 32)}], ids=["plain", "gzip"])
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_sample_has_as_many_frames_as_its_iteration_wants(tmp_path, layout, workers, dtype):
    write_data(tmp_path)
    for i, path in enumerate(sorted(tmp_path.glob("*/*.h5"))):
        write_file(path, fields(9 + i, 3, 17, 32, seed=i).astype(dtype), names=["a", "b", "c"], **layout)
    flags = [*CHANNELS, *CURRICULUM, "--global_batch_size", "4", "--num_data_workers", workers]
    data, samples = weather(tmp_path, *flags), starts(tmp_path)
    assert len(data.train_pairs) == len(samples) == 6 + 7
    mean, std = (np.load(tmp_path / f"stats/global_{name}.npy")[0] for name in ("means", "stds"))
    iteration = 0
    for epoch in range(3):
        for batch, chosen in zip(data.train_loader.epoch(epoch), data.train_loader.order.epoch(epoch), strict=True):
            K = 1 if iteration < 3 else 2 if iteration < 5 else 3
            inp, target, forced = data.to_device(batch)
            assert inp.shape == (4, 3, 16, 32) and target.shape == (K, 4, 2, 16, 32)
            assert forced.shape == (K - 1, 4, 1, 16, 32)
            for b, sample in enumerate(chosen):
                frames, t = samples[sample]
                normal = (frames[t : t + K + 1].astype(np.float32) - mean) / std
                np.testing.assert_allclose(inp[b], normal[0][[2, 0, 1]], atol=1e-5)
                np.testing.assert_allclose(target[:, b], normal[1:][:, [1, 0]], atol=1e-5)
                np.testing.assert_allclose(forced[:, b, 0], normal[1:-1][:, 2], atol=1e-5)
            iteration += 1


def test_samples_of_several_steps_span_no_gap(tmp_path):
    write_file(tmp_path / "2000.h5", fields(12, 1, 4, 8))
    with h5py.File(tmp_path / "2000.h5", "r+") as file:
        file["time"][7:] += STEP
    files = Files.open(str(tmp_path))
    assert files.samples(1, 3)[:, 1].tolist() == [0, 1, 2, 3, 7, 8]
    assert files.samples(2, 2)[:, 1].tolist() == [0, 1, 2, 7]
    assert np.array_equal(files.samples(1, 1), files.samples(1))


def test_times_that_were_computed_from_days_are_whole_seconds(tmp_path):
    """What rounding leaves is no gap, and no minute of the day before."""
    steps = 1000
    write_file(tmp_path / "2000.h5", fields(steps, 1, 4, 8))
    with h5py.File(tmp_path / "2000.h5", "r+") as file:
        del file["time"]
        file["time"] = (36524 + np.arange(steps) / 24 - 25567) * 86400  # days since 1900, hour by hour
        assert len(np.unique(np.diff(file["time"][:]))) > 1
    files = Files.open(str(tmp_path))
    assert files.step_seconds() == 3600 and files.times[0].dtype == np.int64
    assert len(files.samples(1)) == steps - 1 and len(files.stretches(1, 24)) == steps - 24
    assert [files.date(0, t) for t in (0, 1)] == ["2000-01-01 00:00", "2000-01-01 01:00"]


@pytest.mark.parametrize(
    "units",
    [
        "seconds since 1970-01-01",
        "Seconds since 1970-1-1T00:00:00Z",
        "seconds since 1970-01-01 00:00:00.0 UTC",
        "s",
        "",
    ],
)
@pytest.mark.parametrize("stored", [str, np.bytes_, lambda text: [text]])
def test_the_unit_of_times_in_any_spelling(tmp_path, units, stored):
    write_file(tmp_path / "2000.h5", fields(12, 1, 4, 8))
    with h5py.File(tmp_path / "2000.h5", "r+") as file:
        file["time"].attrs["units"] = stored(units)
    assert Files.open(str(tmp_path)).date(0, 1) == "1970-01-01 06:00"


def test_memory_for_one_step_is_what_it_was(tiny):
    ring = weather(tiny).train_loader.reader.ring
    assert ring.nbytes == 8 * 2 * 3 * 16 * 32 * 4  # in the loop: one batch, an input and a target a sample
    assert weather(tiny, *CURRICULUM).train_loader.reader.ring.nbytes == 2 * ring.nbytes
    assert weather(tiny, *CURRICULUM).valid_loader.reader.ring.nbytes == weather(tiny).valid_loader.reader.ring.nbytes


@pytest.mark.parametrize("where, value, told", [([], np.nan, "nan"), (CHANNELS, np.nan, "nan"), ([], 9.97e36, "9.96")])
def test_a_bad_value_of_a_later_frame_is_named(tmp_path, where, value, told):
    """Index 3 is no input and no first target of a sample that begins at 0; of `c` it is read as what is forced."""
    write_data(tmp_path, train={"2001": 4}, names=["a", "b", "c"])
    with h5py.File(tmp_path / "train/2001.h5", "r+") as file:
        file["fields"][2 if where else 3, 2 if where else 0, 5, 6] = value
    flags, place = ["--rollout_steps", "3", "--global_batch_size", "1", *where], "2, 2" if where else "3, 0"
    with pytest.raises(Refused, match=rf"2001.h5, fields\[{place}, 5, 6\] is {told}"):
        run_here(tiny_flags(tmp_path, *flags))


@pytest.mark.parametrize("iteration", [2, 5, 7])
def test_a_curriculum_that_was_interrupted_goes_on(tiny, iteration):
    """In an epoch, in each of its parts: the same bits."""
    whole, resumed = resume_here(tiny_flags(tiny, *CURRICULUM, "--patch_overlap", "2"), iteration)
    assert resumed == whole and len(set(whole)) == 9 - iteration


def test_the_loss_is_the_mean_over_the_steps(tiny):
    """The first iteration's loss, by hand; and before a curriculum begins it is that of a run without one."""
    plain = losses(run_here(tiny_flags(tiny, "--limit_nsamples", "16")))
    late = ["--rollout_steps", "2", "--rollout_from", "3", "--limit_nsamples", "8", "--run_num", "late"]
    same = losses(run_here(tiny_flags(tiny, "--limit_nsamples", "8", "--run_num", "one")))
    run = run_here(tiny_flags(tiny, *late))
    assert losses(run)[:3] == same[:3] and len(plain) == 4
    log = (run / "out.log").read_text()
    assert "Forecasts: of 1 step(s); of 2 from iteration 3 on" in log
    assert log.count("From here on forecasts are of 2 step(s), and were of 1") == 1
    flags = tiny_flags(tiny, "--rollout_steps", "2", "--run_num", "two")
    found, config = losses(run_here(flags))[0], load_config(flags)[0].with_batches(1)
    data = weather(tiny, "--rollout_steps", "2")
    inp, target, _ = data.to_device(next(data.train_loader.epoch()))
    model = build_model(config, data.fields)
    one = model(inp)
    expected = torch.cat([relative_l2(one, target[0]), relative_l2(model(one), target[1])]).mean()
    assert found == pytest.approx(expected.item(), rel=1e-6)


def test_the_next_input_is_what_was_forecast_and_what_is_read(tmp_path):
    write_data(tmp_path, names=["a", "b", "c"])
    config = load_config(tiny_flags(tmp_path, *CHANNELS))[0].with_batches(1)
    fields = weather(tmp_path, *CHANNELS).fields
    b, a, c = torch.randn(3, 2, 16, 32)
    following = build_model(config, fields).next_input(torch.stack([b, a], dim=1), c[:, None])
    assert torch.equal(following, torch.stack([c, a, b], dim=1)) and fields.forced_names == ["c"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--rollout_steps", "2", "4"], "rollout_from is .0. for rollout_steps .2, 4."),
        (["--rollout_steps", "2", "4", "--rollout_from", "3", "3"], "one after the other"),
        (["--conserve_mean", "x"], "conserve_mean names 'x', and the forecast channels are"),
    ],
)
def test_what_cannot_be_is_refused(tiny, flags, words):
    with pytest.raises(ValueError, match=words):
        weather(tiny, *flags)


def test_a_file_that_is_too_short_for_the_steps_is_one_line(tmp_path):
    write_data(tmp_path, train={"2001": 6})
    with pytest.raises(
        ValueError, match="gives 2 samples at dt 1 and 4 rollout_steps, less than one global batch of 8"
    ):
        weather(tmp_path, "--rollout_steps", "4")


def test_validation_is_of_one_step(tiny):
    batches = read(weather(tiny, "--rollout_steps", "3").valid_loader)
    assert {batch.target.shape[0] for batch in batches} == {1}
    assert [b.inp.shape for b in batches] == [b.inp.shape for b in read(weather(tiny).valid_loader)]


def test_what_a_short_run_does_not_reach_is_said(tiny):
    """`--config=demo --num_iters=60` is no error, and neither are its samples those of the longer forecasts."""
    flags = tiny_flags(tiny, "--rollout_steps", "4", "--rollout_from", "4")
    config, remarks = load_config(flags)
    assert remarks == ["rollout_from 4 is not reached: num_iters is 4"] and config.longest_rollout == 1
    assert len(weather(tiny, *flags).train_pairs) == len(weather(tiny).train_pairs)
    assert load_config(tiny_flags(tiny, "--rollout_from", "9"))[1] == [
        "rollout_from changes nothing without --rollout_steps"
    ]
    for workers in ("0", "2"):  # which read beyond the end
        run_here([*flags, "--num_data_workers", workers, "--run_num", workers])


def test_what_is_computed_is_counted(tiny):
    """MFU: the passes of the epoch's iterations, here of 1, 2 and 2 and 2 steps."""
    rows = {}
    for name, flags in {"one": [], "more": ["--rollout_steps", "2", "--rollout_from", "1"]}.items():
        folder = run_here(tiny_flags(tiny, "--global_batch_size", "4", "--run_num", name, *flags))
        (rows[name],) = records(folder, "epoch")
        assert ("Forecasts: of 1 step(s); of 2 from iteration 1 on" in (folder / "out.log").read_text()) == bool(flags)
    work = [row["mfu"] / row["samples_per_sec"] for row in rows.values()]
    assert work[1] == pytest.approx(7 / 4 * work[0])


def test_fields_of_no_data_know_what_is_kept(tiny):
    """The simulation, and the doctor, have no files."""
    config = load_config(tiny_flags(tiny, "--conserve_mean", "msl", "ch0"))[0]
    blank = Fields.blank(config)
    assert blank.out_names == ["ch0", "msl", "ch2"] and blank.kept(config.conserve_mean) == [(1, 1), (0, 0)]
