"""Configuration: defaults < YAML section < command line, casts, refusals, batch sizes."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import ROOT
from utils.config.reader import load_config
from utils.config.settings import AFFECTS, FIELDS, Config, key
from utils.run.folder import check_same_training

# The tutorial's sections: what each sets, beside what it inherits.
OPT = dict(data_loader_config="dali", num_data_workers=8, amp_mode="fp16", enable_jit=True, enable_fused=True)
BATCH_LR = {16: 5e-4, 32: 7.07e-4, 64: 1e-3, 128: 1.41e-3, 256: 2e-3, 512: 2.83e-3, 1024: 4e-3, 2048: 5.66e-3}
MP = {**OPT, "embed_dim": 1024, "global_batch_size": 64, "lr": 1e-3, "enable_jit": False}
SECTIONS = {
    "base": dict(embed_dim=384, depth=12, num_heads=8, patch_size=8, img_size=(360, 720), num_iters=30000, lr=5e-4),
    "short": dict(limit_nsamples=512, limit_nsamples_val=128, num_iters=128, amp_mode="none", enable_jit=False),
    "short_opt": dict(limit_nsamples=512, num_iters=128, **OPT),
    "opt": dict(num_iters=30000, limit_nsamples=None, **OPT),
    **{f"bs{b}_opt": dict(global_batch_size=b, lr=lr, **OPT) for b, lr in BATCH_LR.items()},
    "bs64_opt_short": dict(global_batch_size=64, lr=1e-3, limit_nsamples=2048, limit_nsamples_val=2048, **OPT),
    "bs32_opt_short": dict(global_batch_size=32, lr=7.07e-4, limit_nsamples=2048, limit_nsamples_val=2048, **OPT),
    "mp": MP,
    "mp_bs16": {**MP, "global_batch_size": 16, "lr": 5e-4},
    "mp_bs32": {**MP, "global_batch_size": 32, "lr": 7.07e-4},
    "mp_bs32_short": {**MP, "global_batch_size": 32, "lr": 7.07e-4, "limit_nsamples": 2048, "num_iters": 128},
    "mp_patch4": {**MP, "patch_size": 4},
    "mp_short": {**MP, "limit_nsamples": 2048, "limit_nsamples_val": 2048, "num_iters": 128},
}


def load(*argv: str) -> Config:
    return load_config(list(argv))[0]


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_of_the_tutorial(section):
    config = load("--config", section)
    expected = {"data_loader_config": "pytorch", **SECTIONS[section]}
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.expdir == "/logs" and config.train_data_path == "/data/train" and config.warmup == 0


def test_the_command_line_wins(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base: &b {amp_mode: fp16, enable_jit: true, lr: 1.0}\nchild:\n  <<: *b\n  lr: 5E-4\n")
    flags = ["--yaml_config", str(path), "--config", "child"]
    assert load(*flags).lr == 5e-4 and load(*flags).amp_mode == "fp16"
    config = load(*flags, "--amp_mode", "none", "--no_enable_jit", "--lr=2e-3", "--img_size", "8", "16")
    assert (config.amp_mode, config.enable_jit, config.lr, config.img_size) == ("none", False, 2e-3, (8, 16))


def test_every_field_is_a_flag_and_every_boolean_has_its_no():
    for name, field in FIELDS.items():
        if isinstance(field.default, bool):
            for flag, value in ((f"--{name}", True), (f"--no_{name}", False)):
                assert getattr(load_config([flag], chapter=3)[0], name) is value
    assert load("--limit_nsamples", "None").limit_nsamples is None
    assert load("--clip_grad_norm", "0.5").clip_grad_norm == 0.5


def test_every_key_says_what_it_affects():
    assert {field.metadata["affects"] for field in FIELDS.values()} == set(AFFECTS)
    with pytest.raises(TypeError, match="affects"):
        key(0, "a new key")


def test_a_resumed_run_keeps_what_decides_its_losses():
    """These keys are written down a second time: who takes one off lets it change in the middle of a run."""
    kept = "seed embed_dim depth num_heads patch_size dropout drop_path residual img_size dt n_in_channels".split()
    kept += "n_out_channels in_channels out_channels limit_nsamples num_iters global_batch_size lr lr_schedule".split()
    kept += "warmup clip_grad_norm ema_decay patch_overlap conserve_mean rollout_steps rollout_from loss".split()
    kept += "loss_channels loss_levels loss_latitude loss_gradient optimizer weight_decay constants forcings".split()
    config = Config(img_size=[8, 16])
    for name in FIELDS:
        refusal = pytest.raises(ValueError, match=rf"was trained with {name} another, and now")
        with refusal if name in kept else contextlib.nullcontext():
            check_same_training(Path("run"), {**dataclasses.asdict(config), name: "another"}, config)
    check_same_training(Path("run"), json.loads(json.dumps(dataclasses.asdict(config))), config)
    check_same_training(Path("run"), {}, Config())  # of a time that knew none of them


def test_values_are_cast_by_the_type_of_the_field(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base: {lr: 5E-4, num_iters: 3E4, limit_nsamples: None, enable_jit: 'true', run_num: 7, dt: '2'}")
    config = load("--yaml_config", str(path))
    assert (config.lr, config.num_iters, config.limit_nsamples) == (5e-4, 30000, None)
    assert (config.enable_jit, config.run_num, config.dt) == (True, "7", 2)
    path.write_text("base: {num_iters: 5., img_size: [16.0, 3_2], depth: 010}")
    config = load("--yaml_config", str(path))
    assert (config.num_iters, config.img_size, config.depth) == (5, (16, 32), 10)
    assert load("--seed", "12345678901234567").seed == 12345678901234567  # more digits than a float has


@pytest.mark.parametrize(
    "text", ["00", "010", "1_0", "2026-01-15", "2026-01-15T10:00:00Z", "1:30", "1.50", "0x1F", "+5"]
)
def test_a_run_is_called_as_its_name_is_written(tmp_path, text):
    """YAML 1.1 reads numbers and dates in many a text."""
    (tmp_path / "a.yaml").write_text(f"base: {{run_num: {text}}}")
    config = load("--yaml_config", str(tmp_path / "a.yaml"))
    assert config.run_num == text
    (tmp_path / "b.yaml").write_text(config.to_yaml())
    assert load("--yaml_config", str(tmp_path / "b.yaml")) == config


def test_keys_that_nothing_needs_are_said(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base: {wireup_info: env, wireup_store: tcp, optimizer: Adam, model_backend: pytorch}")
    _, remarks = load_config(["--yaml_config", str(path)])
    assert remarks == ["Keys accepted and not needed: wireup_info, wireup_store"]
    assert load_config(["--yaml_config", str(path), "--wireup_info", "env"])[0].lr == 5e-4


@pytest.mark.parametrize(
    "text, flags, words",
    [
        ("base: {embed_dims: 4}", [], ["embed_dims", "did you mean 'embed_dim'"]),
        ("base: {zzzz: 4}", [], ["zzzz", "the known ones are"]),
        ("base: {lr: fast}", [], ["lr is 'fast'", "float"]),
        ("base: {depth: 1.5}", [], ["depth is 1.5", "int"]),
        ("base: {depth: true}", [], ["depth is True", "int"]),
        ("base: {depth: None}", [], ["depth is None"]),
        ("base: {depth: 0}", [], ["depth is 0", "1 or more"]),
        ("base: {}", ["--bucket_cap_mb", "1048577"], ["bucket_cap_mb is 1048577", "1048576 or less"]),
        ("base: {}", ["--seed", str(2**63)], [f"seed is {2**63}", f"{2**63 - 1} or less"]),
        ("base: {enable_jit: 3}", [], ["enable_jit is 3", "true or false"]),
        ("base: {lr: .nan}", [], ["lr is '.nan'", "float"]),
        ("base: {optimizer: LAMB}", [], ["LAMB", "Adam"]),
        ("base: {model_backend: tensorrt}", [], ["tensorrt", "pytorch, transformer-engine"]),
        ("base: {}", ["--data_loader_config", "daly"], ["pytorch, dali"]),
        ("base: {seed: 1.0e400}", [], ["seed is", "takes int"]),
        ("base: {data: {img_size: 3}}", [], ["unknown key 'data'"]),
        ("base: [1, 2]", [], ["named sections of flat keys"]),
        ("base: {a: b: c}", [], ["not valid YAML"]),
        ("base: {}", ["--config", "bas"], ["unknown section 'bas'", "did you mean 'base'"]),
        ("base: {}", ["--embeddim", "4"], ["unknown flag '--embeddim'", "did you mean '--embed_dim'"]),
        ("base: {}", ["--num", "4"], ["--num on the command line may be --num_heads, ", "write it in full"]),
        ("base: {}", ["--no_num_iter", "4"], ["unknown flag", "--no_num_iter"]),
        ("base: {}", ["extra"], ["'extra' on the command line belongs to no flag"]),
        ("base: {}", ["--tf32", "false"], ["--tf32 takes no value, and 'false' follows it", "or --no_tf32"]),
        ("base: {}", ["5", "--noddp"], ["'5' on the command line belongs to no flag"]),
        ("base: {}", ["--depth", "4", "--enable_fused", "4"], ["--enable_fused takes no value, and '4' follows it"]),
        ("base: {}", ["--"], ["'--' on the command line belongs to no flag"]),
        ("base: {}", ["--tf32=false"], ["--tf32 takes no value, and 'false' follows it", "or --no_tf32"]),
        ("base: {}", ["--no_report=x"], ["--no_report takes no value, and 'x' follows it", "write --report"]),
        ("base: {num_iters: 2026-11-27}", [], ["num_iters is '2026-11-27'", "int"]),
        ("base: {img_size: !!set {64, 128}}", [], ["img_size is {", "int"]),
        ("base: {num_iters: 0x10}", [], ["num_iters is '0x10'", "int"]),
        ("base: {checkpoint_every: 10:00}", [], ["checkpoint_every is '10:00'", "90s, 10m or 1.5h"]),
        ("base: {comm_timeout: 99999999999h}", [], ["comm_timeout is '99999999999h'", "a year at most, 8760h"]),
        ("base: {}", ["--lr"], ["--lr", "expected one argument"]),
        ("base: {}", ["--amp_mode", "fp8"], ["amp_mode is 'fp8'", "none, fp16, bf16"]),
        ("base: {}", ["--img_size", "8"], ["two numbers"]),
        ("base: {}", ["--dropout", "1"], ["below 1"]),
        ("base: {}", ["--clip_grad_norm", "0"], ["clip_grad_norm is 0", "or None"]),
    ],
)
def test_wrong_configuration_is_one_line_with_the_remedy(tmp_path, text, flags, words):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        load_config(["--yaml_config", str(path), *flags])
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    "argv, name, value",
    [(["--num_it=4"], "num_iters", 4), (["--enable_j"], "enable_jit", True), (["--no_tf"], "tf32", False),
     (["--no_val"], "validate_first", False),
     (["--img", "8", "16"], "img_size", (8, 16)), (["--conf", "mp"], "embed_dim", 1024)],
)  # fmt: skip
def test_a_flag_shortened_to_a_unique_beginning_is_taken_and_said(argv, name, value):
    config, remarks = load_config(argv)
    assert getattr(config, name) == value
    assert remarks[0].startswith(f"{argv[0].split('=')[0]} is taken for --")
    full = remarks[0].split()[4].rstrip(":")
    assert load_config([argv[0].replace(argv[0].split("=")[0], full), *argv[1:]]) == (config, remarks[1:])


def test_the_sections_are_found_from_another_folder(tmp_path, monkeypatch):
    """As after `pip install -e .`; a folder's own config/ViT.yaml comes first."""
    here = load("--config", "short")
    monkeypatch.chdir(tmp_path)
    assert load("--config", "short") == here
    (tmp_path / "config").mkdir()
    (tmp_path / "config/ViT.yaml").write_text("short: {embed_dim: 48}")
    assert load("--config", "short").embed_dim == 48


def test_missing_yaml_file():
    with pytest.raises(ValueError, match="check --yaml_config"):
        load("--yaml_config", "nowhere.yaml")


def test_batch_sizes():
    assert load("--global_batch_size", "24").with_batches(4).local_batch_size == 6
    assert load("--local_batch_size", "3", "--accumulation_steps", "2").with_batches(4).global_batch_size == 24
    both = load("--local_batch_size", "3", "--global_batch_size", "12")
    assert both.with_batches(4).local_batch_size == 3
    with pytest.raises(ValueError, match="set only one of the two"):
        both.with_batches(2)
    with pytest.raises(ValueError, match="take 6 or 9"):
        load("--global_batch_size", "8").with_batches(3)
    with pytest.raises(ValueError, match="take 4, or"):
        load("--global_batch_size", "2", "--accumulation_steps", "2").with_batches(2)
    with pytest.raises(ValueError, match="set one of the two"):
        load("--global_batch_size", "None").with_batches(1)


def test_the_last_said_batch_size_decides(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base: {local_batch_size: 4, limit_nsamples: None}")
    flags = ["--yaml_config", str(path)]
    assert load(*flags).with_batches(2).global_batch_size == 8
    assert load(*flags, "--global_batch_size", "6").with_batches(2).local_batch_size == 3
    path.write_text("base: {local_batch_size: None, global_batch_size: 10}")
    assert load(*flags).with_batches(2).local_batch_size == 5
    assert load(*flags, "--local_batch_size", "1").with_batches(2).global_batch_size == 2


def test_data_dir_stands_for_the_front_of_the_paths(tmp_path):
    config = load("--data_dir", "/scratch/era5", "--valid_data_path", "mine/valid")
    assert config.train_data_path == "/scratch/era5/train"
    assert config.global_stds_path == "/scratch/era5/stats/global_stds.npy"
    assert config.valid_data_path == "mine/valid"
    _, remarks = load_config(["--config", "demo", "--data_dir", str(tmp_path)])
    assert remarks[-1] == "data_dir changes nothing: no path of section 'demo' begins with /data"
    assert not any("data_dir" in remark for remark in load_config(["--data_dir", "/data"])[1])  # there or not
    with pytest.raises(
        ValueError, match="data_dir '/nowhere' is not there, and no path of section 'demo' .*: leave it out"
    ):
        load("--config", "demo", "--data_dir", "/nowhere")


def test_the_saved_configuration_repeats_the_run(tmp_path):
    config = load(
        "--config", "demo", "--lr", "3e-3", "--data_dir", str(tmp_path), "--local_batch_size", "4"
    ).with_batches(2)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert list(yaml.safe_load((tmp_path / "config.yaml").read_text())) == ["demo"]
    again = load("--yaml_config", str(tmp_path / "config.yaml"), "--config", "demo")
    assert again.with_batches(2) == Config(**{**vars(config), "data_dir": None})
    assert again.with_batches(4).local_batch_size == 2


@pytest.mark.parametrize("chapter", [1, 2, 3])
def test_help_shows_every_flag_of_the_chapter(capsys, chapter):
    with pytest.raises(SystemExit) as stop:
        load_config(["--help"], chapter)
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for name, field in FIELDS.items():
        assert bool(re.search(rf"--{name}\s", text)) == (field.metadata["chapter"] <= chapter)


def test_help_is_answered_before_torch_is_there(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('too early')")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0'")
    command, env = [sys.executable, str(ROOT / "train.py")], {**os.environ, "PYTHONPATH": str(tmp_path)}
    for flags, said in ((["--help"], ""), (["--lr", "--help"], "too early")):  # the second is an error, said by main
        done = subprocess.run([*command, *flags], env=env, capture_output=True, text=True)
        assert ("--lr FLOAT" in done.stdout) == (not said) and said in done.stderr, done.stderr


def test_a_flag_of_a_later_chapter_is_refused_with_its_script():
    with pytest.raises(ValueError, match="tensor_parallel is 2, and this script does not know it: run train_mp.py"):
        load("--tensor_parallel", "2")
    assert load_config(["--tensor_parallel", "2"], chapter=2)[0].tensor_parallel == 2


@pytest.mark.parametrize(
    "flags, remark",
    [
        (["--drop_path=0.1", "--depth=1"], "drop_path changes nothing without --depth above 1"),
        (["--cp_attention=ulysses"], "cp_attention changes nothing without --context_parallel"),
        (
            ["--keep_checkpoints=3", "--checkpoint_every=None"],
            "keep_checkpoints changes nothing without --checkpoint_every",
        ),
        (["--warmup=9", "--num_iters=8"], "warmup 9 is longer than num_iters 8: lr is never reached"),
    ],
)
def test_what_changes_nothing_is_said(flags, remark):
    assert remark in load_config(["--config=base", *flags], chapter=3)[1]
