"""The ladder inside a job: `make slurm`, about a minute, because its ranks compile."""

import json
import sys

from tests.slurm.test_slurm import ROOT, data  # noqa: F401


def test_the_ladder_starts_its_runs_with_srun(slurm, data, tmp_path):  # noqa: F811
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/bash\nexec "$@"\n')
    few = [
        "--iterations=5",
        "--repeats=1",
        "--nproc=2",
        "--rungs",
        "strong scaling: 2",
        "--json",
        tmp_path / "ladder.json",
    ]
    command = [sys.executable, "benchmarks/ladder.py", *data, "--global_batch_size=2", *few]
    job = slurm.sbatch("-n", 2, "-o", tmp_path / "%j.out", script, *command, cwd=ROOT)
    assert job.exit_code == 0, job.output
    done = {row["name"]: row for row in json.loads((tmp_path / "ladder.json").read_text())["rungs"]}
    assert done["2 ranks"]["ranks"] == 2 and done["2 ranks"]["gain"] > 0, job.output
