"""An evaluation inside a job that is signalled: `make slurm`, half a minute."""

import re
import subprocess
import sys

from tests.helpers import wait_until
from tests.slurm.test_slurm import ROOT, long_data, python  # noqa: F401


def test_a_signalled_evaluation_goes_on_by_itself(slurm, long_data, python, tmp_path):  # noqa: F811
    train = [sys.executable, "train.py", *long_data, "--num_iters=1", "--expdir", tmp_path]
    subprocess.run(train, cwd=ROOT, check=True, capture_output=True)
    run = tmp_path / "demo/1GPU/00"
    kept = run / "evaluation/kept"

    def signal(job: str) -> None:
        wait_until(lambda: kept.exists() and len(list(kept.glob("*.npz"))) > 3)
        slurm.run("scancel", "--signal=USR1", job)

    env = {**python, "TRAIN_SCRIPT": "evaluate.py"}
    argv = ["-n", 2, "-o", tmp_path / "%j.out", "submit_pm.sh", "--checkpoint", run, "--local_batch_size=1"]
    argv += [flag.replace("valid_", "inf_", 1) for flag in long_data if flag.startswith("--valid_data_path")]
    job = slurm.sbatch(*argv, cwd=ROOT, env=env, meanwhile=signal)
    assert job.exit_code == 0, job.output
    assert "Stopped by a signal" in job.output and f"job {job.id} is in the queue again" in job.output
    there, forecasts = (
        int(re.search(pattern, job.output)[1]) for pattern in (r"\((\d+) forecasts are", r"RMSE of (\d+)")
    )
    assert 3 < there < forecasts == len(list(kept.glob("*.npz")))
    assert job.output.count("nodes 1, tasks 2") == 2 and (run / "evaluation/skill.json").exists()
