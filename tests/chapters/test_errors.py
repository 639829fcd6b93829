"""Every wrong input: one line that names the remedy, exit code 2, on all ranks, with no hang."""

import contextlib
import io
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml

import train
from tests.helpers import ROOT, TINY, fields, run_ranks, tiny_flags, write_data, write_file
from utils.ranks.start import start

CASES = {}


def case(*words):
    """Register a function that spoils a good data folder and returns flags; `words` are what the message must say."""

    def register(function):
        CASES[function.__name__] = (function, words)
        return function

    return register


def rewrite(path, change):
    np.save(path, change(np.load(path)))


@case("no data folder", "train_data_path", "python -m utils.sample_data")
def no_data_folder(folder):
    shutil.rmtree(folder / "train")


@case("no *.h5 file", "check --data_dir or --valid_data_path")
def empty_folder(folder):
    (folder / "valid/2003.h5").unlink()


@case("2002.h5 has no dataset 'fields'", "[time, channel, lat, lon]")
def file_without_fields(folder):
    with h5py.File(folder / "train/2002.h5", "w") as file:
        file["other"] = [1]


@case("cannot read", "2001.h5 as HDF5", "truncated", "copy it again")
def truncated_file(folder):
    path = folder / "train/2001.h5"
    path.write_bytes(path.read_bytes()[:-5000])


@case("int64", "must be float32 or float16")
def wrong_dtype(folder):
    write_file(folder / "train/2001.h5", fields(4, 3, 17, 32).astype(np.int64))


@case("2002.h5 has the shape [ 3 9 32]", "all files of a folder must agree")
def files_that_differ(folder):
    write_file(folder / "train/2002.h5", fields(4, 3, 9, 32))


@case("valid/2003.h5 has the shape [ 4 17 32]", "training and validation files must agree")
def sets_that_differ(folder):
    write_file(folder / "valid/2003.h5", fields(4, 4, 17, 32))


@case("2002.h5 has the channel_names ['b' 'a' 'c']", "2001.h5 ['a' 'b' 'c']", "must agree")
def channels_in_another_order(folder):
    for path in folder.glob("*/*.h5"):
        write_file(path, fields(9, 3, 17, 32), names=["b", "a", "c"] if path.stem == "2002" else ["a", "b", "c"])


@case("a step of 6 h, the validation files 1 h", "dt counts stored steps")
def steps_that_differ(folder):
    with h5py.File(folder / "valid/2003.h5", "r+") as file:
        file["time"][:] = file["time"][:] // 6


@case("begins there", "turn the files round")
def rows_from_the_south(folder):
    for path in folder.glob("*/*.h5"):
        with h5py.File(path, "r+") as file:
            file["latitude"] = np.linspace(-90, 90, 17)


@case("cannot read", "global_means.npy", "check --global_means_path")
def stats_missing(folder):
    (folder / "stats/global_means.npy").unlink()


@case("global_stds.npy has the shape [3]", "must be [1, 3, 1, 1]")
def stats_of_the_wrong_shape(folder):
    rewrite(folder / "stats/global_stds.npy", np.ravel)


@case("time_means.npy has the shape", "[1, 3, 17, 32] or [1, 3, 16, 32]")
def time_means_of_the_wrong_shape(folder):
    rewrite(folder / "stats/time_means.npy", lambda a: a[..., :5])


@case("cannot read", "global_stds.npy")
def stats_cut_short(folder):
    path = folder / "stats/global_stds.npy"
    path.write_bytes(path.read_bytes()[:-4])


@case("standard deviation of 0.0", "'ch1'", "must be above 0")
def std_of_zero(folder):
    rewrite(folder / "stats/global_stds.npy", lambda a: a * np.array([1, 0, 1], np.float32).reshape(1, 3, 1, 1))


@case("not finite", "compute global_means_path anew")
def mean_that_is_not_finite(folder):
    rewrite(folder / "stats/global_means.npy", lambda a: a * np.nan)


@case("train/2002.h5, fields[4, 1, 3, 7] is nan", "mend or remove")
def nan_in_the_training_data(folder):
    with h5py.File(folder / "train/2002.h5", "r+") as file:
        file["fields"][4, 1, 3, 7] = np.nan


@case("valid/2003.h5, fields[7, 2, 0, 0] is inf", "mend or remove")
def infinity_in_the_validation_data(folder):
    with h5py.File(folder / "valid/2003.h5", "r+") as file:
        file["fields"][7, 2, 0, 0] = np.inf


@case("training diverged", "--lr")
def divergence(folder):
    return ["--lr", "1e30", "--num_iters", "12"]


@case("img_size asks for 20 rows", "holds 17", "at most that")
def image_larger_than_the_file(folder):
    return ["--img_size", "20", "32"]


@case("img_size 12 of 17 rows would crop 5, a patch (4) or more")
def crop_of_a_patch(folder):
    return ["--img_size", "12", "32"]


@case("16 x 32 does not divide into patches of 5", "patch_size")
def patches_that_do_not_divide(folder):
    return ["--patch_size", "5"]


@case("embed_dim 32 does not divide into 5 heads")
def heads_that_do_not_divide(folder):
    return ["--num_heads", "5"]


@case("unknown section 'tinny'", "did you mean 'tiny'")
def unknown_section(folder):
    return ["--config", "tinny"]


@case("unknown key 'embed_dimm'", "did you mean 'embed_dim'")
def unknown_key(folder):
    path = folder / "tiny.yaml"
    path.write_text(path.read_text() + "  embed_dimm: 3\n")


@case("unknown flag '--batch_size'", "did you mean '--")
def unknown_flag(folder):
    return ["--batch_size", "3"]


@case("global_batch_size 7 does not divide over 2 data-parallel rank(s)", "take 6 or 8")
def batch_that_does_not_divide(folder):
    return ["--global_batch_size", "7"]


@case("21 samples at dt 1, less than one global batch of 22", "lower --global_batch_size")
def batch_larger_than_the_data(folder):
    return ["--global_batch_size", "22"]


@case("gives no sample at dt 9", "lower --dt")
def validation_without_a_sample(folder):
    return ["--dt", "9", "--global_batch_size", "2"]


@case("cannot write", "Not a directory", "choose another --expdir")
def expdir_not_writable(folder):
    (folder / "runs").write_text("a file in its way")


@case("n_in_channels is 4, but the files hold 3")
def fewer_channels_than_asked(folder):
    return ["--n_in_channels", "4"]


@case("unknown channel 'ch9' in out_channels", "did you mean 'ch")
def unknown_channel(folder):
    return ["--out_channels", "ch0", "ch9"]


@case("unknown channel 't2m' in plot_channels", "the files hold ch0, ch1, ch2")
def unknown_picture(folder):
    return ["--plot_channels", "t2m"]


@case("loss_channels names 'ch9'", "the forecast channels are ch0, ch1, ch2")
def a_weight_for_an_unknown_channel(folder):
    return ["--loss", "weighted", "--loss_channels", "ch9=3"]


@case("2002.h5: channel_names has 't' twice", "give each a name of its own")
def files_that_name_a_channel_twice(folder):
    for path in (*folder.glob("train/*.h5"), *folder.glob("valid/*.h5")):
        with h5py.File(path, "r+") as file:
            file["fields"].attrs["channel_names"] = ["t", "t", "z"]
    (folder / "train/2001.h5").unlink()
    return ["--global_batch_size", "2"]


@case("in_channels ch0 ch0 names one twice", "name each once")
def an_input_twice(folder):
    return ["--in_channels", "ch0", "ch0"]


@case("conserve_mean ch1 ch1 names one twice", "name each once")
def a_mean_kept_twice(folder):
    return ["--conserve_mean", "ch1", "ch1"]


@case("loss_channels ch1 ch1 names one twice", "name each once")
def a_channel_with_two_weights(folder):
    return ["--loss", "weighted", "--loss_channels", "ch1=1", "ch1=3"]


def in_yaml(folder, **keys):
    """Write a section of the data's own, with these keys; return the flags that name it."""
    path = folder / "own.yaml"
    section = yaml.safe_load(TINY)["tiny"]
    path.write_text(yaml.safe_dump({"tiny": section | keys}))
    return ["--yaml_config", str(path)]


@case("out_channels is empty: name one or more")
def no_forecast_channel(folder):
    return in_yaml(folder, out_channels=[])


@case("rollout_from is [] for rollout_steps []")
def no_rollout(folder):
    return in_yaml(folder, rollout_steps=[], rollout_from=[])


@case("compile_modules is empty: name some, or leave --enable_jit out")
def nothing_to_compile(folder):
    return in_yaml(folder, enable_jit=True, compile_modules=[])


def change_times(folder, change):
    for path in folder.glob("train/*.h5"):
        with h5py.File(path, "r+") as file:
            times = change(file["time"][:])
            del file["time"]
            file["time"] = times


@case("times that do not rise at step 1", "put its time steps in order")
def times_that_run_backwards(folder):
    change_times(folder, lambda times: times[::-1])


@case("times that do not rise at step 1", "put its time steps in order")
def times_that_are_all_the_same(folder):
    change_times(folder, np.zeros_like)


@case("2001.h5 has times of float32, which are minutes apart", "int64 or float64")
def times_that_are_rounded(folder):
    change_times(folder, lambda times: times.astype("f4"))


@case("2001.h5 has times in 'hours since 1900-01-01': write them as seconds since 1970-01-01, in UTC")
def times_in_hours(folder):
    for path in folder.glob("train/*.h5"):
        with h5py.File(path, "r+") as file:
            file["time"].attrs["units"] = "hours since 1900-01-01"


@case("2001.h5 has times in 'seconds since 1970-01-01 12:00:00': write them as seconds since 1970-01-01, in UTC")
def times_from_noon(folder):
    for path in folder.glob("train/*.h5"):
        with h5py.File(path, "r+") as file:
            file["time"].attrs["units"] = ["seconds since 1970-01-01 12:00:00"]  # as netCDF4's strings


@case("channel_names has 2 names, and", "3 channels: name them all")
def too_few_names(folder):
    return ["--channel_names", "a", "b"]


@case("device is 'cuda'", "--device cpu")
def no_gpu(folder):
    return ["--device", "cuda"]


@case("attention 'cudnn' does not run on cpu", "--attention auto")
def attention_that_needs_a_gpu(folder):
    return ["--attention", "cudnn"]


@case("compile_modules names 'Blocks'", "the model has Attention, Block, ", "take some")
def a_module_that_the_model_lacks(folder):
    return ["--enable_jit", "--compile_modules", "Blocks"]


@case("compile_mode reduce-overhead replays CUDA graphs", "the device is cpu: take default")
def a_mode_for_gpus(folder):
    return ["--enable_jit", "--compile_mode", "reduce-overhead"]


@case("graph_optimizer is True", "run train_mp_graphs.py")
def a_flag_of_chapter_3(folder):
    return ["--graph_optimizer"]


@case("attention 'flash' does not run on cpu", "dropout 0.1", "--attention auto")
def attention_that_has_no_dropout(folder):
    return ["--attention", "flash", "--dropout", "0.1"]


@case("run_num is '..'", "names one folder")
def run_num_that_is_a_path(folder):
    return ["--run_num", ".."]


@case("run_num is ''", "names one folder")
def run_num_that_is_empty(folder):
    return ["--run_num", ""]


@case("run_num is 'a\\nb'", "names one folder")
def run_num_of_two_lines(folder):
    return ["--run_num", "a\nb"]


def run_cases(cases, path):
    """Run train.py on each command line in turn: `path` and the rank gets exit code, message and time of each."""
    sys.argv, path = ["train.py"], Path(path + os.environ["RANK"])
    port, results = int(os.environ["MASTER_PORT"]), []
    for i, argv in enumerate(cases):
        os.environ["MASTER_PORT"] = str(port + i)
        begin, output, code = time.perf_counter(), io.StringIO(), 0
        with contextlib.redirect_stderr(output):
            try:
                start(train.main, argv)
            except SystemExit as end:
                code = end.code
        results.append({"code": code, "message": output.getvalue(), "seconds": time.perf_counter() - begin})
    path.write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of all cases on two ranks: name -> (rank 0's, rank 1's)."""
    root, command_lines = tmp_path_factory.mktemp("errors"), []
    for name, (spoil, _) in CASES.items():
        folder = write_data(root / name)
        flags = tiny_flags(folder)
        command_lines.append(flags + (spoil(folder) or []))
    for done in run_ranks(2, run_cases, command_lines, str(root / "result"), timeout=300):
        assert done.returncode == 0, done.stderr
    ranks = [json.loads((root / f"result{rank}").read_text()) for rank in (0, 1)]
    return dict(zip(CASES, zip(*ranks)))


@pytest.mark.parametrize("name", CASES)
def test_wrong_input(results, name):
    first, second = results[name]
    words = CASES[name][1]
    if name == "no_gpu":
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    line = first["message"].splitlines()[-1]
    assert (first["code"], second["code"]) == (2, 2), first["message"]
    assert line.startswith("train.py: error: ") and all(word in line for word in words), line
    assert max(first["seconds"], second["seconds"]) < 120
    assert "error" not in second["message"] and "Traceback" not in first["message"]
    if "nan" not in name and "infinity" not in name and "divergence" not in name:
        # Found before training: the line stands alone, and no run folder is left.
        assert len(first["message"].splitlines()) == 1


def test_nothing_is_left_half_written(tmp_path):
    folder = write_data(tmp_path)
    code = [str(ROOT / "train.py"), *tiny_flags(folder, "--patch_size", "5")]
    (done,) = run_ranks(1, code)
    assert done.returncode == 2 and not (folder / "runs").exists()
    assert re.fullmatch(r"train.py: error: .*\n", done.stderr) and done.stdout == ""
