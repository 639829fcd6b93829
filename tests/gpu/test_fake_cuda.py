"""Where there is no GPU: no step mixes devices, or waits for one. See fake_cuda.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this torch knows GPUs")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_no_device_is_mixed_and_nothing_waits(tmp_path):
    torch_folder, library = Path(torch.__path__[0]), tmp_path / "libfake_cuda.so"
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(ROOT / "tests/gpu/fake_cuda.cpp"), "-o", str(library)]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, f"-Wl,-rpath,{torch_folder}/lib"], check=True)
    run = [sys.executable, "-m", "tests.gpu.fake_cuda", str(library)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "23 cases\n"
