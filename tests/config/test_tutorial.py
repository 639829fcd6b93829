"""The command lines of both editions of the tutorial mean here what they mean there."""

import shlex

import pytest

from utils.config.reader import load_config

CHAPTERS = {"submit_pm.sh": 1, "submit_pm_dp.sh": 1, "submit_pm_mp.sh": 2}
DALI = "--num_data_workers 8 --data_loader_config=dali"
ENGINE = {"model_backend": "transformer-engine", "embed_dim": 1024}
# The command from the script's name on, and what it sets.
COMMANDS = {
    # One GPU.
    "submit_pm.sh --config=short": {"num_iters": 128, "data_loader_config": "pytorch", "num_data_workers": 0},
    "submit_pm.sh --config=base": {"num_iters": 30000},
    "submit_pm.sh --config=short --num_data_workers 4": {"num_data_workers": 4},
    f"submit_pm.sh --config=short {DALI}": {"data_loader_config": "dali", "num_data_workers": 8},
    f"submit_pm.sh --config=short {DALI} --amp_mode=fp16": {"amp_mode": "fp16"},
    f"submit_pm.sh --config=short {DALI} --amp_mode=bf16": {"amp_mode": "bf16"},
    f"submit_pm.sh --config=short {DALI} --amp_mode=bf16 --enable_fused": {"enable_fused": True, "enable_jit": False},
    f"submit_pm.sh --config=short {DALI} --amp_mode=bf16 --enable_fused --enable_jit": {"enable_jit": True},
    "submit_pm.sh --config=short_opt": {"amp_mode": "fp16", "enable_jit": True, "enable_fused": True},
    # Data parallel.
    "submit_pm_dp.sh --config=bs64_opt": {"global_batch_size": 64, "lr": 1e-3},
    "submit_pm_dp.sh --config=bs256_opt": {"global_batch_size": 256},
    "submit_pm_dp.sh --config=bs1024_opt": {"global_batch_size": 1024, "lr": 4e-3},
    "submit_pm_dp.sh --config=bs64_opt_short --run_num=profile": {"run_num": "profile", "limit_nsamples": 2048},
    "submit_pm_dp.sh --config=bs64_opt_short --bucket_cap_mb=5 --run_num=profile_bcap2": {"bucket_cap_mb": 5},
    "submit_pm_dp.sh --config=bs32_opt": {"global_batch_size": 32, "lr": 7.07e-4},
    "submit_pm_dp.sh --config=bs32_opt_short --run_num=profile": {"num_iters": 128},
    # Model parallel.
    "submit_pm_mp.sh --config=mp --tensor_parallel=1": {"embed_dim": 1024, "tensor_parallel": 1},
    "submit_pm_mp.sh --config=mp --tensor_parallel=4 --run_num=tp4cp1": {"tensor_parallel": 4, "run_num": "tp4cp1"},
    "submit_pm_mp.sh --config=mp --tensor_parallel=1 --context_parallel=4 --parallel_order=cp-tp-dp": {
        "context_parallel": 4,
        "parallel_order": "cp-tp-dp",
    },
    "submit_pm_mp.sh --config=mp_bs32 --tensor_parallel=2": {"global_batch_size": 32},
    "submit_pm_mp.sh --config=mp_bs32_short --tensor_parallel=2": {"num_iters": 128, "global_batch_size": 32},
    "submit_pm_mp.sh --config=mp_te --tensor_parallel=4": {**ENGINE, "global_batch_size": 64, "amp_mode": "fp16"},
    "submit_pm_mp.sh --config=mp_te_short --tensor_parallel=2 --amp_mode=bf16": {**ENGINE, "num_iters": 128},
    "submit_pm_mp.sh --config=mp_bs32_te --tensor_parallel=2": {**ENGINE, "global_batch_size": 32, "lr": 7.07e-4},
    "submit_pm_mp.sh --config=mp_bs32_te_short --tensor_parallel=2": {**ENGINE, "limit_nsamples": 2048},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_tutorial(command):
    script, *argv = shlex.split(command)
    config, remarks = load_config(argv, CHAPTERS[script])
    assert {name: getattr(config, name) for name in COMMANDS[command]} == COMMANDS[command]
    assert not remarks
