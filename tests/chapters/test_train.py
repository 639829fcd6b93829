"""Training, end to end on small data: schedule, equality, reproducibility, records, flags that act."""

import contextlib
import functools
import json
import math
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import train
from tests.data.test_data_loader import weather
from tests.helpers import (
    ERA5,
    group_of_one,
    losses,
    norms,
    records,
    run_folder,
    run_here,
    run_ranks,
    tiny_flags,
    write_data,
    write_file,
)
from utils import spans
from utils.config.reader import load_config
from utils.config.settings import Config
from utils.observers import Observer
from utils.ranks.start import start
from utils.ranks.world import World


def test_learning_rate():
    config = Config(lr=2.0, warmup=4, num_iters=12)
    rates = [train.learning_rate(i, config) for i in range(12)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]  # the last iteration of the warm-up uses lr
    assert rates[4] == 2.0 and rates[8] == pytest.approx(1.0) and rates == rates[:4] + sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(1 + math.cos(math.pi * 7 / 8))
    constant = Config(lr=2.0, warmup=2, num_iters=12, lr_schedule="none")
    assert [train.learning_rate(i, constant) for i in range(4)] == [1.0, 2.0, 2.0, 2.0]
    assert train.learning_rate(0, Config(lr=2.0, num_iters=5)) == 2.0
    assert train.learning_rate(5, Config(lr=2.0, warmup=50, num_iters=6)) == pytest.approx(0.24)


def test_a_run_leaves_what_a_user_sees(tiny, caplog):
    argv = tiny_flags(tiny, "--num_iters", "5", "--warmup", "2", "--plot_channels", "ch2", "ch0")
    folder = run_here(argv)
    log = (folder / "out.log").read_text()
    for line in (
        "Starting Training Loop...",
        "Time taken for epoch 1 is ",
        "  Avg train loss=",
        "  Memory by part, GiB: weights 0.000, gradients 0.000, optimizer 0.000, activations ",
        "  Avg val loss=",
        "  Total validation time: ",
        "DONE ---- rank 0",
    ):
        assert f" INFO {line}" in log
    assert log.count("  First iteration: ") == 1 and "attention kernel: SDPA's choice" in log
    steps, epochs = records(folder, "step"), records(folder, "epoch")
    assert [s["iteration"] for s in steps] == [1, 2, 3, 4, 5]  # exactly num_iters, across epochs of 2
    assert [(e["epoch"], e["iteration"]) for e in epochs] == [(1, 2), (2, 4), (3, 5)]
    config = load_config(argv)[0]
    model = train.build_model(config, train.WeatherData(config.with_batches(1)).fields)
    weights, held = 4 * sum(p.numel() for p in model.parameters()) / 2**30, epochs[-1]["memory_gb"]
    assert held["weights"] == pytest.approx(weights, rel=1e-3) and held["gradients"] == pytest.approx(weights)
    assert held["optimizer"] == pytest.approx(2 * weights, rel=2e-3) and held["peak"] > held["activations"] >= 0
    assert [s["lr"] for s in steps] == [train.learning_rate(i, config) for i in range(5)]
    assert epochs[0]["train_loss"] == pytest.approx(np.mean([s["loss"] for s in steps[:2]]))
    for key in ("valid_rmse", "persistence_rmse", "valid_rmse_units", "valid_acc_timemean"):
        assert set(epochs[0][key]) == {"ch0", "ch1", "ch2"}
    for key in ("valid_loss", "samples_per_sec", "data_wait_frac", "mfu", "peak_memory_gb"):
        assert epochs[0][key] > 0
    assert (folder / "config.yaml").exists()
    assert sorted(p.name for p in (folder / "pictures").iterdir()) == ["ch0.png", "ch2.png"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "logs"))
    board.Reload()
    tags = {"Loss/train", "Loss/valid", "RMSE(ch1)/valid", "Learning Rate", "Avg iters per sec", "Avg samples per sec"}
    assert tags <= set(board.Tags()["scalars"])
    assert [e.step for e in board.Scalars("Loss/valid")] == [2, 4, 5]
    assert {"Visualization, ch2", "Visualization, ch0"} == set(board.Tags()["images"])


def test_a_run_shorter_than_an_epoch_trains_and_validates(tiny):
    folder = run_here(tiny_flags(tiny, "--num_iters", "1"))
    assert len(losses(folder)) == 1 and len(records(folder, "epoch")) == 1


def test_two_runs_give_identical_losses_and_the_old_folder_is_kept(tiny):
    argv = tiny_flags(tiny, "--dropout", "0.1", "--drop_path", "0.1")
    first = losses(run_here(argv))
    folder = run_here(argv)
    assert losses(folder) == first == losses(folder.with_name("00.1"))
    assert losses(run_here([*argv, "--seed", "1"])) != first


def test_the_loop_fits_the_data(tiny):
    steps = losses(run_here(tiny_flags(tiny, "--num_iters", "12", "--lr", "1e-2")))
    assert steps[-1] < 0.7 * steps[0]


def test_accumulation_equals_one_large_batch(tiny):
    whole = run_here(tiny_flags(tiny, "--num_iters", "6"))
    parts = run_here(tiny_flags(tiny, "--num_iters", "6", "--accumulation_steps", "4", "--run_num", "b"))
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=2e-6)
    np.testing.assert_allclose(norms(parts), norms(whole), rtol=1e-5)


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_mixed_precision_follows_float32(tiny, mode):
    plain = run_here(tiny_flags(tiny, "--num_iters", "2", "--lr", "1e-4"))
    mixed = run_here(tiny_flags(tiny, "--num_iters", "2", "--lr", "1e-4", "--amp_mode", mode, "--run_num", "b"))
    np.testing.assert_allclose(losses(mixed), losses(plain), rtol=0.02)
    np.testing.assert_allclose(norms(mixed), norms(plain), rtol=0.05)  # not those of the scaled loss
    assert losses(mixed) != losses(plain)


def test_an_fp16_overflow_skips_the_step_and_lowers_the_scale(tiny):
    """With a loss scale of 2^40 fp16 gradients overflow: the weights stay as they are, and the scale halves."""
    config = load_config(tiny_flags(tiny, "--amp_mode", "fp16"))[0].with_batches(1)
    data = train.WeatherData(config)
    model = train.ViT((16, 32), 4, 3, 3, 32, 2, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [p.clone() for p in model.parameters()]

    class Once:
        iteration, log = 0, staticmethod(lambda *a: None)
        should_stop = property(lambda self: self.iteration > 0)
        batches = staticmethod(lambda: [next(data.train_loader.epoch())])
        validation_batches = staticmethod(lambda: data.valid_loader.epoch())
        weights, after_epoch = staticmethod(lambda: ["raw"]), staticmethod(lambda *a: None)

        def after_step(self, loss, norm, lr):
            self.iteration, self.norm, self.loss = 1, norm, loss

    run, data.scores = Once(), lambda: _NoScores()
    step = functools.partial(train.forward_backward, model, scaler=scaler, config=config)
    train.train(step, functools.partial(train.update_weights, optimizer, scaler, config), model, data, config, run)
    assert not torch.isfinite(run.norm) and torch.isfinite(run.loss)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert scaler.get_scale() == 2.0**39


class _NoScores:
    def update(self, *args):
        pass

    def reduce(self):
        return {}


def test_fused_adam_gives_the_same_losses(tiny):
    plain = losses(run_here(tiny_flags(tiny)))
    fused = losses(run_here(tiny_flags(tiny, "--enable_fused", "--run_num", "b")))
    np.testing.assert_allclose(fused, plain, rtol=1e-6)


def test_a_seed_gives_the_same_weights_whatever_kernel_is_tried(tiny):
    weights = []
    for more in (["--attention=auto"], ["--attention=math"], ["--attention=math", "--dropout=0.1"]):
        data = weather(tiny, *more)
        weights.append(train.build_model(data.config, data.fields, data.device).head.weight)
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_flags_reach_the_optimiser(tiny, monkeypatch):
    seen, original = [], torch.optim.Adam

    def adam(*args, **kwargs):
        seen.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.optim, "Adam", adam)
    run_here(tiny_flags(tiny, "--num_iters", "1"))
    run_here(tiny_flags(tiny, "--num_iters", "1", "--enable_fused"))
    assert [(k["betas"], k["fused"]) for k in seen] == [((0.9, 0.95), None), ((0.9, 0.95), True)]


def test_dropout_is_on_in_training_and_off_in_validation(tiny, monkeypatch):
    modes = []

    class Watched(train.ViT):
        def forward(self, *tensors):
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(*tensors)

    monkeypatch.setattr(train, "ViT", Watched)
    run_here(tiny_flags(tiny, "--num_iters", "3"))  # two iterations and a validation; one and another
    assert modes == [(on, on) for on in (True, True, False, True, False)]


def test_clipping_bounds_the_gradient_and_records_the_norm_before(tiny, monkeypatch):
    clipped, original = [], torch.optim.Adam.step

    def step(self, *args, **kwargs):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        clipped.append(torch.nn.utils.get_total_norm(grads).item())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    free = norms(run_here(tiny_flags(tiny, "--num_iters", "1")))
    bound = norms(run_here(tiny_flags(tiny, "--num_iters", "1", "--clip_grad_norm", "1e-3")))
    assert free == bound and clipped[0] == pytest.approx(free[0]) and clipped[1] == pytest.approx(1e-3, rel=1e-2)


def test_ranges_of_the_timeline(tiny):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_here(tiny_flags(tiny, "--num_iters", "2"))
    names = [event.name for event in profile.events()]
    expected = ("step 0", "data copy in 0", "step 1", "data copy in 1", "forward", "backward", "optimizer")
    assert [names.count(name) for name in expected] == [1, 1, 1, 1, 2, 2, 2]


def test_profiler_window_opens_in_the_fourth_epoch_on_rank_0(monkeypatch):
    """Spans are told there, and nowhere else."""
    from utils.measure import clock

    opened = mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.profiler, "profile", opened)
    told = []
    for epoch, rank in [(epoch, rank) for epoch in range(1, 7) for rank in (0, 1)]:
        with clock.profiler_window(epoch, rank):
            told += [(epoch, rank)] * spans.nsight
    assert told == [(4, 0)] and opened.call_count == 1 and not spans.nsight


@pytest.mark.parametrize(
    "files, flags",
    [
        (dict(valid={"2003": 3}), []),  # a validation set smaller than a batch
        (dict(train={"first": 9, "second": 6}, valid={"x": 4}), []),  # no year in the file stems
        (dict(train={"2001": 3, "2002": 17, "2003": 1, "2004": 2}), []),  # years of unequal length, one too short
        (dict(channels=1), ["--n_in_channels", "1", "--n_out_channels", "1"]),
        (dict(channels=5), ["--in_channels", "ch4", "--out_channels", "ch0", "ch4"]),
        (dict(rows=16), ["--dt", "3"]),
        (dict(constant=1), []),  # a channel that never changes, such as orography
    ],
)
def test_data_that_must_work(tmp_path, files, flags):
    folder = run_here(tiny_flags(write_data(tmp_path, **files), *flags))
    assert len(losses(folder)) == 4 and np.isfinite(losses(folder)).all()


def test_float16_files_train_alike(tmp_path):
    plain = losses(run_here(tiny_flags(write_data(tmp_path / "a"))))
    write_data(tmp_path / "b")
    import h5py

    for path in (tmp_path / "b").glob("*/*.h5"):
        data = h5py.File(path)["fields"][:]
        write_file(path, data.astype(np.float16))
    np.testing.assert_allclose(losses(run_here(tiny_flags(tmp_path / "b"))), plain, rtol=1e-3)


def test_a_users_yaml_trains_unchanged(tmp_path):
    """Anchors, the string None, 5E-4, and the tutorial's keys that nothing needs."""
    write_data(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        f"""
        base: &base
          embed_dim: 32
          depth: 2
          dropout: 0.0
          patch_size: 4
          num_heads: 4
          img_size: [16, 32]
          dt: 1
          global_batch_size: 8
          num_iters: 30000
          amp_mode: none
          enable_fused: false
          enable_jit: false
          expdir: {tmp_path / "logs"}
          lr_schedule: cosine
          lr: 5E-4
          warmup: 0
          optimizer: Adam
          data_loader_config: pytorch
          num_data_workers: 0
          n_in_channels: 3
          n_out_channels: 3
          train_data_path: {tmp_path / "train"}
          valid_data_path: {tmp_path / "valid"}
          inf_data_path: {tmp_path / "test"}
          time_means_path: {tmp_path / "stats/time_means.npy"}
          global_means_path: {tmp_path / "stats/global_means.npy"}
          global_stds_path: {tmp_path / "stats/global_stds.npy"}
          limit_nsamples: None
          limit_nsamples_val: None
          wireup_info: env
          wireup_store: tcp
        mine: &mine
          <<: *base
          limit_nsamples: 16
          num_iters: 3
        """
    )
    argv = ["--yaml_config", str(tmp_path / "mine.yaml"), "--config", "mine", "--expdir", str(tmp_path / "logs")]
    folder = run_here(argv)
    assert len(losses(folder)) == 3 and records(folder, "step")[0]["lr"] == 5e-4
    assert "Keys accepted and not needed: wireup_info, wireup_store" in (folder / "out.log").read_text()


def test_ddp_flags_reach_ddp(tiny, monkeypatch):
    """What DDP is built with where there are two ranks; on real ranks see below."""
    seen = []

    class Fake:
        def __new__(cls, model, **kwargs):
            seen.append(kwargs)
            return model

    monkeypatch.setattr(train.nn.parallel, "DistributedDataParallel", Fake)
    monkeypatch.setattr(train, "settle_buckets", lambda model: model)
    monkeypatch.setattr(train.dist, "get_world_size", lambda group: 2)
    for flags in (["--bucket_cap_mb", "3", "--disable_broadcast_buffers"], [], ["--noddp"]):
        model = torch.nn.Linear(1, 1)
        assert train.data_parallel(model, load_config(tiny_flags(tiny, *flags))[0], group="a group") is model
    assert [(k["bucket_cap_mb"], k.get("broadcast_buffers")) for k in seen] == [(3, False), (25, None)]
    assert all(k["process_group"] == "a group" for k in seen)


class FirstGradients(Observer):
    """Keeps the gradients of the first step."""

    def __init__(self):
        self.kept = []

    def begin(self, run):
        run.state.optimizer.register_step_pre_hook(self.keep)

    def keep(self, optimizer, *_):
        self.kept = self.kept or [p.grad.clone() for p in optimizer.param_groups[0]["params"]]


def train_and_keep(dtype, path, argv):
    """Train; `path` gets the first step's gradients and the number of calls of DDP's `no_sync`."""
    torch.set_default_dtype(getattr(torch, dtype))
    observer, no_sync = FirstGradients(), DistributedDataParallel.no_sync
    with mock.patch.object(DistributedDataParallel, "no_sync", autospec=True, side_effect=no_sync) as counted:
        start(functools.partial(train.main, observers=[observer]), argv)
    torch.save({"gradients": observer.kept, "no_sync": counted.call_count}, path)


def serial_and_parallel(tmp_path, ranks, *flags, dtype="float32", iterations="20"):
    """Train on one rank and on several with the same global batch; return both folders and both first gradients."""
    folder = write_data(tmp_path, train={"2001": 30, "2002": 21})
    results = []
    for n in (1, ranks):
        argv = tiny_flags(folder, "--num_iters", iterations, "--residual", "--warmup", "5", *flags)
        grads = tmp_path / f"grads{n}.pt"
        for result in run_ranks(n, train_and_keep, dtype, grads, argv):
            assert result.returncode == 0, result.stderr
        results.append((run_folder(argv, f"{n}GPU"), torch.load(grads)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("ranks, accumulation", [(4, 1), (2, 4)])
def test_ranks_follow_one_process(tmp_path, ranks, accumulation):
    (one, _), (many, kept) = serial_and_parallel(tmp_path, ranks, "--accumulation_steps", str(accumulation))
    assert kept["no_sync"] == 20 * (accumulation - 1)  # gradients are sent once a step
    np.testing.assert_allclose(losses(many), losses(one), rtol=2e-6)
    np.testing.assert_allclose(norms(many), norms(one), rtol=1e-5)
    valid = [records(folder, "epoch")[-1]["valid_rmse"]["ch1"] for folder in (one, many)]
    assert valid[0] == pytest.approx(valid[1], rel=1e-5)


@pytest.mark.slow
def test_gradients_in_float64_equal_the_serial_ones(tmp_path):
    flags = ["--accumulation_steps", "2"]
    (one, serial), (many, parallel) = serial_and_parallel(tmp_path, 4, *flags, dtype="float64", iterations="5")
    assert len(serial["gradients"]) == 30  # all parameters
    for a, b in zip(serial["gradients"], parallel["gradients"], strict=True):
        assert a.dtype == torch.float64 and (a - b).abs().max() <= 1e-12 * a.abs().max()
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-12)


@pytest.mark.nightly
def test_compiled_blocks_under_ddp_follow_one_process(tmp_path):
    flags = ["--enable_jit", "--bucket_cap_mb", "1", "--embed_dim", "128"]  # several buckets: some end inside a block
    (one, _), (many, _) = serial_and_parallel(tmp_path, 2, *flags, iterations="3")
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-5)


@pytest.mark.slow
def test_noddp_lets_the_ranks_drift(tmp_path):
    (one, _), (many, _) = serial_and_parallel(tmp_path, 2, "--noddp")
    assert losses(many)[0] == pytest.approx(losses(one)[0], rel=2e-6)
    assert max(abs(a - b) for a, b in zip(losses(many), losses(one))) > 1e-4


@pytest.mark.nightly
@pytest.mark.skipif(not ERA5.exists(), reason="the ERA5 sample is not beside this checkout")
def test_real_era5_beats_persistence_early(tmp_path):
    argv = ["--config", "era5_djf", "--expdir", str(tmp_path), "--num_iters", "50", "--no_enable_fused"]
    argv += ["--data_dir", str(tmp_path)]  # this section's paths are its own
    last = records(run_here(argv), "epoch")[-1]
    assert last["persistence_rmse"]["msl"] == pytest.approx(0.1948, abs=1e-4)
    assert last["persistence_rmse"]["vo850"] == pytest.approx(0.9526, abs=1e-4)
    assert last["valid_rmse"]["vo850"] < 0.9


def test_records_are_json_even_where_a_norm_is_not_finite(tiny, monkeypatch):
    infinite = functools.partial(train.update_weights, total_norm=lambda grads: torch.tensor(float("inf")))
    monkeypatch.setattr(train, "update_weights", infinite)
    folder = run_here(tiny_flags(tiny, "--amp_mode", "fp16", "--num_iters", "2"))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines) and norms(folder) == [None] * 2


def test_overflow_without_end_stops_the_run(tiny):
    """In fp16 some steps are skipped; a run that only skips must not end as if it had trained."""
    with run_of_one(tiny, "--amp_mode", "fp16") as run:
        overflow = [torch.tensor(1.0), torch.tensor(float("inf")), 1e-3]
        for i in range(50):  # in two rows of 25
            run.after_step(*overflow)
            if i == 24:
                run.after_step(torch.tensor(1.0), torch.tensor(1.0), 1e-3)
        with pytest.raises(ValueError, match="training diverged"):
            for _ in range(30):
                run.after_step(*overflow)
    with run_of_one(tiny, "--run_num", "b") as run, pytest.raises(ValueError, match="gradient norm inf"):
        for _ in range(20):
            run.after_step(*overflow)


@contextlib.contextmanager
def run_of_one(folder, *flags):
    """A run that begins, in a group of one."""
    config = load_config(tiny_flags(folder, *flags))[0].with_batches(1)
    device = torch.device("cpu")
    with group_of_one():
        data = train.WeatherData(config, device)
        model = train.build_model(config, data.fields)
        optimizer, scaler = train.build_optimizer(model, config), train.build_scaler(config, device)
        run = train.Run(train.Job(config, World(), device, data), train.build_model)
        run.begin(train.TrainingState(model, optimizer, scaler), [])
        yield run
        run.__exit__(KeyboardInterrupt, None, None)
