"""Jobs that reach their time limit: `make slurm`, some minutes, because Slurm looks at limits every half minute."""

import pytest

from tests.helpers import wait_until
from tests.slurm.test_slurm import ROOT, SCRIPTS, check_long_run, make_data, python  # noqa: F401


@pytest.mark.parametrize("script, flags, name", SCRIPTS)
def test_a_job_that_reaches_its_limit_goes_on_by_itself(slurm, python, tmp_path, script, flags, name):  # noqa: F811
    data = make_data(tmp_path, *"--shape 8 64 128 --samples 6401".split())
    data += ["--num_iters=3200", "--rollout_steps=1", "--limit_nsamples_val=8", "--depth=1", "--plot_channels=None"]

    def lengthen(job: str) -> None:
        """The second life may take as long as it takes."""

        def is_(state: str) -> bool:
            return f"JobState={state}" in slurm.run("scontrol", "show", "job", job).stdout

        wait_until(lambda: is_("RUNNING"))
        wait_until(lambda: is_("PENDING"))
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")

    # Slurm may send the signal half a minute before the 20 s: between 10 and 40 s after the start of a minute.
    where = ["-n", 2, "-t", 1, "--signal=USR1@20", "-o", tmp_path / "%j.out"]
    argv = [*where, script, *data, *flags, "--expdir", tmp_path]
    job = slurm.sbatch(*argv, cwd=ROOT, env=python, timeout=900, meanwhile=lengthen)
    assert job.exit_code == 0, job.output
    check_long_run(tmp_path / "demo" / name / "00", iterations=3200)
    assert "SIGUSR1" in job.output and f"job {job.id} is in the queue again" in job.output
