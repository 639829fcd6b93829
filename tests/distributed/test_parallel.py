"""Model parallelism: the grid, shards of tokens, mappings, and every grid against one process."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train_mp
from benchmarks import certificate
from benchmarks.proof.cases import FULL_IMAGE, MODES, runs_on
from distributed.borders import borders_of
from distributed.parallelize import check_parallel, parallelize, shard_tokens, share_frames
from networks.overlap import repeat_at_poles, windows
from networks.vit import MLP, Attention, Block, DropPath, ViT
from tests.distributed.mapping_checks import (
    check_forwards,
    check_gathered_linear,
    check_gradients,
    check_graph,
    check_halo,
    check_slopes,
    on_two_ranks,
)
from tests.helpers import (
    ROOT,
    clean_environment,
    group_of_one,
    records,
    run_folder,
    run_here,
    run_ranks,
    tiny_flags,
    write_data,
)
from utils.comm import GROUPS, Grid, rank_groups
from utils.config.reader import load_config
from utils.data.dataset import WeatherData
from utils.data.frame_sharing import FrameSharing
from utils.data.frames import FrameReader
from utils.data.token_shard import TokenShard
from utils.ranks.start import join
from utils.ranks.world import find_world


def test_groups_of_the_worked_example():
    sizes = dict(dp=2, tp=4, cp=1, pp=1)
    assert rank_groups(sizes, "tp-cp-dp", "tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rank_groups(sizes, "tp-cp-dp", "dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert rank_groups(sizes, "tp-cp-dp", "tp-cp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rank_groups(sizes, "tp-cp-dp", "cp") == [[r] for r in range(8)]


@pytest.mark.parametrize("order", ["-".join(o) for o in itertools.permutations(("dp", "tp", "cp"))])
def test_groups_of_16_ranks_in_every_order(order):
    sizes, stride = dict(dp=4, tp=2, cp=2), {}
    step = 1
    for axis in order.split("-"):
        stride[axis], step = step, step * sizes[axis]
    for axis in sizes:  # ranks of an axis are its stride apart, and every rank is in one group
        groups = rank_groups(sizes, order, axis)
        assert all(np.diff(group).tolist() == [stride[axis]] * (sizes[axis] - 1) for group in groups)
        assert sorted(sum(groups, [])) == list(range(16))
    for pair in ("tp-cp", "dp-cp"):
        a, b = pair.split("-")
        for group in rank_groups(sizes, order, pair):
            first = group[0]
            places = [i * stride[a] + j * stride[b] for i in range(sizes[a]) for j in range(sizes[b])]
            assert group == sorted(first + place for place in places)
    for axes in GROUPS:  # a rank knows its own without looking at all others
        for group in rank_groups(sizes | {"pp": 1}, f"{order}-pp", axes):
            assert all(Grid(16, rank, 2, 2, order).get_ranks(axes) == group for rank in group)


def test_a_rank_knows_its_place():
    grid = Grid(8, 5, tp=2, cp=2, order="cp-tp-dp")
    assert [grid.get_size(a) for a in ("dp", "tp", "cp", "pp", "tp-cp", "dp-cp")] == [2, 2, 2, 1, 4, 4]
    assert grid.get_ranks("cp") == [4, 5] and grid.get_ranks("tp") == [5, 7] and grid.get_ranks("dp") == [1, 5]
    assert [grid.get_rank(a) for a in ("dp", "tp", "cp", "tp-cp")] == [1, 0, 1, 1]


@pytest.mark.parametrize(
    "args, words",
    [
        (dict(world_size=3, tp=2), "does not divide the 3 rank.s. of this run: take .* from 1x1, 1x3, 3x1"),
        (dict(world_size=4, tp=2, cp=4), "tensor_parallel 2 x context_parallel 4 does not divide"),
        (dict(world_size=360, tp=7), "product is one of 1, 2, 3"),
        (dict(world_size=4, order="tp-dp"), "names dp, cp and tp once each"),
        (dict(world_size=4, order="tp-cp-cp"), "names dp, cp and tp once each"),
        (dict(world_size=4, pp=2), "pipeline parallelism is not implemented"),
    ],
)
def test_grids_that_do_not_fit(args, words):
    with pytest.raises(ValueError, match=words):
        Grid(rank=0, **args)


@pytest.mark.parametrize(
    "rows, columns, patch, shards",
    [(16, 32, 4, 1), (16, 32, 4, 8), (12, 28, 4, 8), (16, 40, 8, 8), (8, 16, 8, 5), (24, 16, 4, 16)]
    + [(360, 720, 8, shards) for shards in (4, 7, 16)],
)
def test_shards_make_up_the_image(rows, columns, patch, shards):
    image = torch.arange(2.0 * rows * columns).view(2, rows, columns)
    parts = [TokenShard((rows, columns), patch, shards, i) for i in range(shards)]
    assert sum(part.count for part in parts) == parts[0].total and len({part.length for part in parts}) == 1
    whole = torch.zeros_like(image)
    for part in parts:
        shard = part.cut(image[:, part.rows.start : part.rows.stop])
        assert shard.shape == (2, *part.shape)
        whole += part.place(shard)
        touched = part.place(torch.ones_like(shard)).any(0).any(1).nonzero().flatten().tolist()
        assert touched == list(part.rows)  # the rows that it needs, and no others
    assert torch.equal(whole, image)


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize(
    "rows, columns, patch, shards",
    [(16, 32, 4, 4), (16, 32, 4, 3), (12, 28, 4, 8), (8, 16, 4, 8), (24, 16, 4, 16), (8, 40, 4, 3), (12, 4, 4, 2)],
)
def test_borders_bring_what_windows_need(rows, columns, patch, shards, overlap):
    """All ranks in one process: borders that span rows and ranks, wrap round, and are all that a rank has; padding.

    The chunks of the group's ranks are in another order than its ranks, as with --parallel_order cp-tp-dp.
    """
    image = torch.randn(1, 2, rows, columns)
    chunks = np.random.default_rng(0).permutation(shards).tolist()
    parts = [TokenShard((rows, columns), patch, shards, chunk, overlap=overlap) for chunk in chunks]
    borders = [borders_of(part, chunks) for part in parts]
    own = [part.cut(image[..., part.rows.start : part.rows.stop, :]).flatten(-2) for part in parts]
    sent = [x[..., b.sent].split(b.sent_counts, -1) for x, b in zip(own, borders)]
    whole = windows(repeat_at_poles(image, overlap), patch, overlap)
    for rank, (part, border) in enumerate(zip(parts, borders)):
        assert border.received_counts == [b.sent_counts[rank] for b in borders]
        assert border.sent_counts[rank] == 0 and len(border.places.unique()) == len(border.places)
        if not part.count:
            assert not border.sent_counts or not sum(border.sent_counts + border.received_counts)
            continue
        received = torch.cat([pieces[rank] for pieces in sent], -1)
        own_rows = part.place_in_rows(own[rank].unflatten(-1, part.shape))
        found = own_rows.flatten(-2).index_copy(-1, border.places, received).view_as(own_rows)
        poles = part.input_rows.start == 0, part.input_rows.stop == rows
        tokens = windows(repeat_at_poles(found, overlap, *poles), patch, overlap)
        begin = part.first % part.columns
        mine = whole[:, part.first : part.first + part.count]
        assert torch.equal(tokens[:, begin : begin + part.count], mine)
        read = image[..., part.input_rows.start : part.input_rows.stop, :]  # as the first step has it
        assert torch.equal(
            windows(repeat_at_poles(read, overlap, *poles), patch, overlap)[:, begin:][:, : part.count], mine
        )
        assert torch.equal(part.own(read).flatten(-2), own[rank])
        if part.count % part.columns == 0 and begin == 0:  # whole rows: `overlap` rows on each side but the poles
            assert sum(border.received_counts) == (2 - sum(poles)) * overlap * columns


def test_a_shard_is_in_the_order_of_the_tokens():
    part = TokenShard((4, 6), 2, 4, 1)  # 6 tokens, 2 a shard: the third of the first row, the first of the second
    image = torch.arange(24).view(4, 6)
    assert part.cut(image[part.rows.start : part.rows.stop]).tolist() == [[4, 5, 12, 13], [10, 11, 18, 19]]


def test_a_parallel_model_keeps_what_the_serial_one_has(tiny):
    """It is made in place, so what a model is given one day is not forgotten here."""
    serial = ViT((16, 32), 4, 3, 3, 32, 3, 4, dropout=0.1, drop_path=0.2, residual=[0, 1, 2], mlp_chunks=2)
    modules = [m for m in serial.modules() if isinstance(m, (ViT, Block, Attention, MLP, DropPath))]
    assert len(modules) == 1 + 3 * 3 + 2 * 2
    for i, module in enumerate(modules):
        module.given = i
    names, held = list(serial.state_dict()), [set(vars(module)) for module in modules]
    with group_of_one():
        config, grid = load_config(tiny_flags(tiny), chapter=2)[0], Grid(1, 0)
        grid.create_groups()
        model = parallelize(serial, config, grid, shard_tokens(config, grid), torch.device("cpu"))
    kept = [module for module in model.modules() if hasattr(module, "given")]
    assert [module.given for module in kept] == list(range(len(modules))) and list(model.state_dict()) == names
    assert all(before <= set(vars(module)) for before, module in zip(held, kept))


def test_mappings_on_two_ranks():
    for done in run_ranks(
        2, on_two_ranks, check_slopes, check_gradients, check_forwards, check_halo, check_gathered_linear
    ):
        assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_mappings_compile_into_one_graph():
    for done in run_ranks(2, on_two_ranks, check_graph):
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flags", [[], ["--amp_mode", "bf16"], ["--drop_path", "0.3", "--accumulation_steps", "2"]])
def test_chapter_2_on_one_rank_is_chapter_1(tiny, flags):
    """Bit for bit: the same loop, the same draws. Only the squares of the norm are added in another order."""
    argv = tiny_flags(tiny, *flags)
    first, second = run_here(argv), run_here(argv, train_mp.main, "1MP")
    for event, keys in (("step", ("loss",)), ("epoch", ("valid_loss", "valid_rmse", "persistence_rmse"))):
        a, b = ([[line[key] for key in keys] for line in records(folder, event)] for folder in (first, second))
        assert a == b and a
    a, b = ([line["grad_norm"] for line in records(folder, "step")] for folder in (first, second))
    np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_grid_of_four_ranks_equals_one_process():
    """In float64; and one of them in float32, bf16, fp16 with an overflow, with dropout and so on.

    (`make certificate` does it compiled, too.)
    """
    command = [sys.executable, "benchmarks/certificate.py", "--ranks", "4", "--images", "10 tokens", "--named", "1"]
    left_out = "compile", "shared gradients", "groups of heads", FULL_IMAGE
    command += ["--modes", *(mode for mode in MODES if not any(words in mode for words in left_out))]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "80 runs on 21 grids." in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_slopes_across_shards_are_those_of_one_process():
    """The loss of gradients needs rows of other ranks."""
    command = [sys.executable, "benchmarks/certificate.py", "--ranks", "2", "--grid", "dp=1", "tp=1", "cp=2"]
    command += ["--modes", "loss of gradients"]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "2 runs on 2 grids." in done.stdout, done.stdout + done.stderr


def train_on(ranks, tmp_path, *flags, script="train_mp.py"):
    folder = tmp_path if (tmp_path / "train").exists() else write_data(tmp_path, train={"2001": 30, "2002": 21})
    argv = tiny_flags(folder, "--num_iters", "20", "--warmup", "5", "--residual", *flags)
    for done in run_ranks(ranks, [str(ROOT / script), *argv]):
        assert done.returncode == 0, done.stderr
    return argv


@pytest.mark.nightly
def test_a_run_in_float32_follows_one_process(tmp_path):
    alike = ["--drop_path", "0.3", "--plot_channels", "ch0"]
    one = run_folder(train_on(1, tmp_path, *alike, "--run_num", "one", script="train.py"))
    flags = ["--tensor_parallel", "2", "--context_parallel", "2", "--sp_regather", *alike]
    many = run_folder(train_on(4, tmp_path, *flags), "4MP")
    a, b = ([step["loss"] for step in records(folder, "step")] for folder in (one, many))
    np.testing.assert_allclose(b, a, rtol=2e-6)
    a, b = ([step["grad_norm"] for step in records(folder, "step")] for folder in (one, many))
    np.testing.assert_allclose(b, a, rtol=1e-5)
    log = (many / "out.log").read_text()
    epochs = len(records(many, "epoch"))
    assert log.count(" Memory usage after forward pass: ") == epochs and "Scaffolding memory high watermark: " in log
    import matplotlib.image

    pictures = [matplotlib.image.imread(folder / "pictures/ch0.png") for folder in (one, many)]
    assert np.mean(pictures[0] != pictures[1]) < 0.01  # the whole image is drawn


@pytest.mark.nightly
def test_fewer_tokens_than_ranks_work(tmp_path):
    """Two patches on four ranks: the others hold padding, read nothing, and follow."""
    write_data(tmp_path, train={"2001": 30, "2002": 21}, rows=8, columns=16)
    shape = ["--img_size", "8", "16", "--patch_size", "8"]
    one = run_folder(train_on(1, tmp_path, *shape, "--run_num", "one", script="train.py"))
    four = run_folder(train_on(4, tmp_path, *shape, "--tensor_parallel", "2", "--context_parallel", "2"), "4MP")
    a, b = ([(step["loss"], step["grad_norm"]) for step in records(folder, "step")] for folder in (one, four))
    np.testing.assert_allclose(b, a, rtol=1e-5)


@pytest.mark.parametrize(
    "ranks, flags, words",
    [
        (3, ["--tensor_parallel", "3"], "num_heads 4 does not divide over tensor_parallel 3: take 1, 2 or 4"),
        (3, ["--context_parallel", "3", "--cp_attention", "ulysses"], r"shares out the 4 head\(s\)"),
        (2, ["--context_parallel", "2", "--cp_head_groups", "3"], "does not divide the 4 head.*take 1, 2 or 4"),
        (2, ["--tensor_parallel", "2", "--cp_head_groups", "2"], "cp_head_groups 2 with context_parallel 1"),
        (2, ["--context_parallel", "2", "--cp_attention", "ulysses", "--cp_regather"], "cp_regather with context_para"),
        (
            2,
            ["--context_parallel", "2", "--cp_regather", "--activation_checkpoint", "block"],
            "leave --cp_regather out",
        ),
        (2, ["--context_parallel", "2", "--noddp"], "leave --noddp out"),
        (2, ["--tensor_parallel", "2", "--no_sequence_parallel", "--dropout", "0.1"], "needs --sequence_parallel"),
        (
            2,
            ["--tensor_parallel", "2", "--no_sequence_parallel", "--sp_regather"],
            "needs sequence parallelism, and tensor_parallel is 2",
        ),
        (2, ["--context_parallel", "2", "--sp_regather"], "needs sequence parallelism, and tensor_parallel is 1"),
    ],
)
def test_a_model_that_cannot_be_shared_out_is_refused(ranks, flags, words):
    config, _ = load_config(["--num_heads", "4", *flags], chapter=2)
    with pytest.raises(ValueError, match=words):
        check_parallel(config, Grid(ranks, 0, config.tensor_parallel, config.context_parallel))


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, flags, words",
    [
        (3, ["--tensor_parallel", "2"], "take tensor_parallel x context_parallel from 1x1, 1x3, 3x1"),  # of the grid
        (2, ["--context_parallel", "2", "--noddp"], "leave --noddp out"),  # of the model
        (2, ["--context_parallel", "2", "--patch_size", "48"], "16 x 32 does not divide into patches of 48"),  # of data
    ],
)
def test_wrong_sizes_are_one_line_on_all_ranks(tmp_path, ranks, flags, words):
    argv = tiny_flags(write_data(tmp_path), "--global_batch_size", "6", *flags)
    results = run_ranks(ranks, [str(ROOT / "train_mp.py"), *argv])
    assert [done.returncode for done in results] == [2] * ranks
    assert len(results[0].stderr.splitlines()) == 1 and words in results[0].stderr, results[0].stderr
    assert not any(done.stderr for done in results[1:]) and not (tmp_path / "runs").exists()


def share(folder, flags):
    """One of 4 ranks: print "right" where its batches are those of one process, and the frames that it decoded."""
    world = find_world(os.environ)
    join(world)
    argv = tiny_flags(folder, "--tensor_parallel", "2", "--context_parallel", "2", *flags)
    config = load_config(argv, 2)[0].with_batches(1)
    grid = Grid(world.size, world.rank, 2, 2)
    grid.create_groups()
    shard = shard_tokens(config, grid)
    alone = WeatherData(config)

    decoded, original = [], FrameReader.read
    FrameReader.read = lambda self, *job: decoded.append(job[:2]) or original(self, *job)
    data = WeatherData(config, tokens=shard, sharing=share_frames(config, grid))
    right = True
    for loader, whole in ((data.train_loader, alone.train_loader), (data.valid_loader, alone.valid_loader)):
        batches = []
        for batch in loader.epoch():
            batches.append([x.clone() for x in data.to_device(batch)] + [batch.counts.clone()])
        FrameReader.read, kept = original, FrameReader.read
        for mine, batch in zip(batches, whole.epoch(), strict=True):
            *expected, counts = *alone.to_device(batch), batch.counts
            right &= torch.equal(mine[-1], counts)
            read, own = (field[..., r.start : r.stop, :] for field, r in zip(expected, (shard.input_rows, shard.rows)))
            right &= torch.equal(mine[0], shard.cut_input(read)) and torch.equal(mine[1], shard.cut(own))
        FrameReader.read = kept
    print("right" if right else "wrong", len(decoded))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "flags", [[], ["--no_sequence_parallel", "--patch_overlap", "2"], ["--global_batch_size", "3", "--dt", "2"]]
)
@pytest.mark.parametrize("workers", ["0", "1"])
def test_compressed_frames_are_decoded_once_in_a_group(tmp_path, flags, workers):
    """Chunks of whole frames: 4 ranks decode as many frames as one. (Those of other processes are not counted.)"""
    write_data(tmp_path, chunks=(1, 3, 17, 32), compression="gzip")
    results = []
    for done in run_ranks(4, share, tmp_path, ["--num_data_workers", workers, *flags]):
        assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
        results.append(done.stdout.split())
    assert [right for right, _ in results] == ["right"] * 4
    B, training, validation = (3, 19, 6) if flags[-2:] == ["--dt", "2"] else (8, 21, 7)
    frames = 2 * B * (training // B + -(-validation // B))
    assert sum(int(count) for _, count in results) == (frames if workers == "0" else 0)


def test_chunks_of_a_few_rows_are_read_by_those_who_need_them():
    shards = [TokenShard((64, 128), 8, 4, i) for i in range(4)]
    assert [FrameSharing(shards, 0, None).helps(rows) for rows in (None, 8, 16, 17, 64)] == [False] * 3 + [True] * 2
    same = [TokenShard((64, 128), 8, 1, 0)] * 4  # plain tensor parallelism: all need all
    assert [FrameSharing(same, 0, None).helps(rows) for rows in (None, 8, 64)] == [False, True, True]
    shares = [FrameSharing(shards, i, None).share(6) for i in range(4)]
    assert [list(range(6)[share]) for share in shares] == [[0], [1, 2], [3], [4, 5]]
    assert [FrameSharing(shards, i, None).share(1) for i in range(4)] == [slice(0, 0)] * 3 + [slice(0, 1)]


def test_a_grid_of_sizes_that_one_names():
    """`tests/run_tests.sh tp=2 cp=3`: all its orders and modes, but what it cannot be; and what is no grid."""
    sizes = certificate.sizes_of(["tp=2", "cp=3"])
    assert sizes == {"dp": 1, "tp": 2, "cp": 3} and certificate.ranks_to_try(None, sizes, "cpu") == [6]
    found = runs_on(sizes, ["float64", "dropout", "re-gather"])
    assert {case["grid"]["cp_attention"] for case in found} == {"gather"}  # 4 heads a rank are not for 3 ranks
    assert {case["grid"]["parallel_order"][:2] for case in found} == {"tp", "cp"}
    modes = {case["grid"]["sequence_parallel"]: [mode for _, mode in case["runs"]] for case in found}
    assert modes == {True: ["float64", "dropout", "re-gather"], False: ["float64"]}
    for texts, message in ((["tp=3"], "tp=3 does not divide the 8 heads"), (["pp=2"], "grid has 'pp=2'")):
        with pytest.raises(ValueError, match=message):
            certificate.sizes_of(texts)
    with pytest.raises(ValueError, match="needs a GPU for each of 64 rank"):
        certificate.ranks_to_try([64], None, "cuda")
