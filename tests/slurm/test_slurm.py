"""The job scripts under a real Slurm: two ranks in one job, a failure that ends it, flags that arrive unharmed."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import ROOT, records, wait_until

# Stands in for train.py where only the way it is started is in question: one JSON line a rank.
STAND_IN = """
import json, os, sys, time
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
site = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_", "HDF5_"))}
line = json.dumps({"argv": sys.argv[1:], "site": site, **{name: os.environ.get(name) for name in names}})
os.write(1, (line + chr(10)).encode())
if "--fail" in sys.argv:
    sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(300)
"""

# Stands in for nsys and for what runs a container: says how it was called, then runs what follows the marked word.
WRAPPER = """#!/bin/bash
echo "$(basename "$0") $*" >&2
while [ $# -gt 0 ] && [ "$1" != "$STOP" ] && [ "$1" != bash ]; do shift; done
[ "$1" = bash ] || [[ "$1" == */python* ]] || shift
exec "$@"
"""


@pytest.fixture
def repo(tmp_path):
    """A copy of the job scripts with the stand-in for train.py, in a folder whose name has a space."""
    folder = tmp_path / "my clone"
    shutil.copytree(ROOT / "sites", folder / "sites")
    for name in ("submit_pm.sh", "submit_pm_dp.sh", "export_DDP_vars.sh"):
        shutil.copy(ROOT / name, folder)
    (folder / "train.py").write_text(STAND_IN)
    return folder


@pytest.fixture
def python():
    return {"PYTHON": sys.executable}


def ranks(job) -> list[dict]:
    """What the stand-in printed, by rank."""
    found = [json.loads(line) for line in job.output.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda line: line["RANK"])


def tool(folder: Path, name: str, stop: str) -> dict:
    """Put a wrapper of that name on PATH; returns the environment."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(WRAPPER)
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "STOP": stop}


def test_flags_reach_every_rank_unharmed(slurm, repo, python):
    flags = ["--config=short", "--note", "two  words", """it's "quoted" $HOME *""", ""]
    job = slurm.sbatch("-n", 2, "-t", 5, "./submit_pm.sh", *flags, cwd=repo, env=python)
    assert job.exit_code == 0, job.output
    first, second = ranks(job)
    assert first["argv"] == second["argv"] == ["--expdir", str(repo / "runs"), *flags]
    assert (repo / f"vit-era5-{job.id}.out").exists()
    assert [first["RANK"], second["RANK"]] == [first["LOCAL_RANK"], second["LOCAL_RANK"]] == ["0", "1"]
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert first["MASTER_ADDR"] and first["MASTER_PORT"] == second["MASTER_PORT"] == str(10000 + int(job.id) % 20000)


@pytest.mark.parametrize("asked, site", [([], {"TASKS_PER_NODE": "2"}), (["-n", 2], {"TASKS_PER_NODE": "8"})])
def test_whole_nodes_get_one_task_a_gpu(slurm, repo, python, asked, site):
    # The site file says how many; -n on the command line wins.
    env = {**python, **site, "LOGDIR": "some logs", "DATADIR": "sites"}
    job = slurm.sbatch("-N", 1, *asked, "submit_pm_dp.sh", "--data_dir=mine", cwd=repo, env=env)
    assert job.exit_code == 0, job.output
    assert [rank["WORLD_SIZE"] for rank in ranks(job)] == ["2", "2"]
    # The folders come first: train.py lets the last flag win.
    folders = ["--expdir", str(repo / "some logs"), "--data_dir", str(repo / "sites")]
    assert ranks(job)[0]["argv"] == [*folders, "--data_dir=mine"]


def test_a_job_of_an_array_goes_into_the_queue_again_alone(slurm, repo, python):
    # One job of an array has the array's number. It stops in its first life; the other one is done, and stays so.
    (repo / "train.py").write_text(
        "import os, sys, time\n"
        "job, array, task = (os.environ[f'SLURM_{name}'] for name in ('JOB_ID', 'ARRAY_JOB_ID', 'ARRAY_TASK_ID'))\n"
        "open(f'lives-{task}', 'a').write('x')\n"
        "stops = job == array and 'SLURM_RESTART_COUNT' not in os.environ\n"
        "time.sleep(3 * stops)\n"
        "sys.exit(75 * stops)\n"
    )
    done = slurm.run("sbatch", "--parsable", "--array=0-1", "-n", 1, "submit_pm.sh", cwd=repo, env=python)
    wait_until(lambda: not slurm.run("squeue", "-h", "-j", done.stdout.strip()).stdout, 240)
    assert sorted(file.read_text() for file in repo.glob("lives-*")) == ["x", "xx"]


def test_an_evaluation_gets_no_folder_for_runs(slurm, repo, python):
    (repo / "train.py").rename(repo / "evaluate.py")
    env = {**python, "TRAIN_SCRIPT": "./evaluate.py"}
    job = slurm.sbatch("-n", 1, "submit_pm.sh", "--checkpoint=x", cwd=repo, env=env)
    assert ranks(job)[0]["argv"] == ["--checkpoint=x"], job.output


def test_one_failing_rank_ends_the_job(slurm, repo, python):
    job = slurm.sbatch("-n", 2, "submit_pm.sh", "--fail", cwd=repo, env=python)
    assert job.exit_code != 0
    assert job.seconds < 200  # of 300: train.py's own ranks end each other at once; srun takes 20 s


@pytest.mark.parametrize(
    "env, message",
    [
        ({"SITE": "nowhere"}, "submit_pm.sh: SITE=nowhere: there is no sites/nowhere.sh; the folder has: alps.sh"),
        ({"CONTAINER": "docker"}, "submit_pm.sh: CONTAINER=docker: use none, shifter, podman-hpc, apptainer"),
        ({"DATADIR": "/no/such"}, "submit_pm.sh: DATADIR=/no/such: there is no such folder"),
        ({"TRAIN_SCRIPT": "x.py"}, "submit_pm.sh: no x.py in "),
    ],
)
def test_a_wrong_setting_is_one_line(slurm, repo, env, message):
    job = slurm.sbatch("-n", 1, "submit_pm.sh", cwd=repo, env=env)
    assert job.exit_code == 1
    assert job.output.startswith(message) and job.output.count("\n") == 1


def test_a_site_file_that_fails_is_named(slurm, repo, python):
    (repo / "sites/mine.sh").write_text('[ -n "$NOWHERE" ] && export THAT=1\n')
    job = slurm.sbatch("-n", 1, "submit_pm.sh", cwd=repo, env={**python, "SITE": "mine"})
    assert job.exit_code == 1 and job.output.count("\n") == 1
    assert job.output.startswith("submit_pm.sh: sites/mine.sh failed")


def test_profiling_wraps_rank_0_only(slurm, repo, python, tmp_path):
    env = {**python, "ENABLE_PROFILING": "1", "PROFILE_OUTPUT": "my profile"}
    if shutil.which("nsys") is None:
        missing = slurm.sbatch("-n", 2, "submit_pm.sh", cwd=repo, env=env)
        assert missing.exit_code != 0
        assert "submit_pm.sh: ENABLE_PROFILING=1, but there is no nsys on PATH\n" in missing.output
    env.update(tool(tmp_path / "bin", "nsys", stop=sys.executable))
    job = slurm.sbatch("-n", 2, "submit_pm.sh", "two  words", cwd=repo, env=env)
    assert job.exit_code == 0, job.output
    (call,) = re.findall("^nsys profile .*", job.output, re.M)
    assert "--trace=cuda,cublas,nvtx" in call and "-c cudaProfilerApi" in call
    assert f"-o {repo}/runs/my profile " in call
    assert [rank["argv"][-1] for rank in ranks(job)] == ["two  words"] * 2


@pytest.mark.parametrize(
    "name, mount",
    [("shifter", "--volume"), ("podman-hpc", "--volume"), ("apptainer", "--bind"), ("singularity", "--bind")],
)
def test_a_container_gets_data_and_logs(slurm, repo, tmp_path, name, mount):
    env = tool(tmp_path / "bin", name, stop="bash")
    env |= {"CONTAINER": name, "CONTAINER_IMAGE": "an/image:1", "CONTAINER_ARGS": "--gpu --nccl"}
    env |= {"DATADIR": "sites", "PYTHON": sys.executable}
    job = slurm.sbatch("-n", 2, "submit_pm.sh", "two  words", cwd=repo, env=env)
    assert job.exit_code == 0, job.output
    call = re.search(f"^{name} .*", job.output, re.M).group()
    assert "an/image:1" in call and "--gpu --nccl" in call
    assert ("--network=host --ipc=host --pid=host" in call) == (name == "podman-hpc")
    assert f"{mount}={repo}/sites:/data" in call and f"{mount}={repo}/runs:/logs" in call
    assert [rank["argv"] for rank in ranks(job)] == [["--expdir", "/logs", "--data_dir", "/data", "two  words"]] * 2


@pytest.mark.parametrize("site", sorted(path.stem for path in ROOT.glob("sites/*.sh") if path.stem != "local"))
def test_a_site_file_serves_the_login_shell_and_the_job(slurm, repo, python, site):
    # The job part runs here with a stand-in for `module`; the queue options would be refused on this machine.
    login = f"source sites/{site}.sh; env | grep -E '^(SITE|SBATCH_)'"
    shell = subprocess.run(["bash", "-c", login], cwd=repo, text=True, capture_output=True, env=slurm.env, check=True)
    assert f"SITE={site}\n" in shell.stdout and re.search("SBATCH_(PARTITION|QOS)=", shell.stdout)
    assert "set SBATCH_ACCOUNT" in shell.stderr
    env = {**python, "SITE": site, "BASH_FUNC_module%%": "() { echo module $*; }", "SLURM_CPUS_PER_TASK": "1"}
    job = slurm.sbatch("-n", 2, "-c", 1, "submit_pm.sh", cwd=repo, env=env)
    assert job.exit_code == 0, job.output
    first, second = ranks(job)
    exported = re.findall(r"^    export ((?:NCCL|GLOO|HDF5)_\w+)=(\S+)", (repo / f"sites/{site}.sh").read_text(), re.M)
    assert first["site"] == second["site"] == dict(exported)  # not NCCL_NET, which is for several nodes
    assert first["MASTER_ADDR"].endswith("i") == (site == "juwels")  # this machine's name has no i at its end


@pytest.mark.parametrize("site, gpus", [("leonardo", "nv"), ("juwels", "nv"), ("jupiter", "nv"), ("frontier", "rocm")])
@pytest.mark.parametrize("name", ["apptainer", "singularity"])
def test_a_container_sees_the_gpus(site, gpus, name):
    env = {**os.environ, "IN_JOB": "1", "CONTAINER": name, "BASH_FUNC_module%%": "() { :; }"}
    command = ["bash", "-ec", f"source sites/{site}.sh; echo $CONTAINER_ARGS"]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=True)
    assert done.stdout == f"--{gpus}\n"


def test_export_ddp_vars_wants_a_task_of_srun(slurm, repo):
    (repo / "job.sh").write_text("#!/bin/bash\n#SBATCH -o job.out\nsource ./export_DDP_vars.sh || exit 7\n")
    job = slurm.sbatch("-n", 2, "job.sh", cwd=repo)
    assert job.exit_code == 7
    assert job.output.startswith("export_DDP_vars.sh: no SLURM_STEP_NUM_TASKS") and job.output.count("\n") == 1


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("vm", "vm"),
        ("nid[001004-001007,001010]", "nid001004"),
        ("node3,node[5-6]", "node3"),
        ("gpu-a[01-02]-ib,b1", "gpu-a01-ib"),
    ],
)
def test_the_first_host_is_the_master(nodes, first):
    # SLURM_NTASKS is the job's: salloc's shell has 4 there and is itself a step of one task.
    step = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "7"}
    step["SLURM_STEP_ID"] = "2"
    command = ["bash", "-c", "source ./export_DDP_vars.sh; echo $WORLD_SIZE $MASTER_ADDR $MASTER_PORT"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **step}, text=True, capture_output=True, check=True)
    assert done.stdout == f"2 {first} {10007 + 2 * 1009}\n"


# From here on the real train.py, on small data.


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags that name a small data set, made here."""
    return make_data(tmp_path_factory.mktemp("data"), "--trajectories", "2", "--samples", "12", "--spinup_days", "2")


def make_data(parent: Path, *shape: str) -> list[str]:
    folder = parent / "data"
    make = ["-m", "utils.sample_data", "--out", folder, *shape]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *map(str, make)], cwd=ROOT, env=env, check=True, timeout=120)
    flags = [f"--train_data_path={folder}/train", f"--valid_data_path={folder}/valid"]
    flags += [f"--{name}_path={folder}/stats/{name}.npy" for name in ("global_means", "global_stds", "time_means")]
    return [*flags, "--config=demo", "--num_iters=4", "--global_batch_size=8"]


def check_run(folder: Path) -> None:
    assert [event["iteration"] for event in records(folder, "step")] == [1, 2, 3, 4]
    assert "DONE ---- rank 0" in (folder / "out.log").read_text()


def test_a_wrong_config_fails_the_job(slurm, python, tmp_path):
    env = {**python, "LOGDIR": str(tmp_path)}
    job = slurm.sbatch("-n", 2, "-o", tmp_path / "%j.out", "submit_pm.sh", "--config=nonsense", cwd=ROOT, env=env)
    assert job.exit_code != 0
    assert "nonsense" in job.output


def test_plain_srun_trains_on_two_ranks(slurm, data, tmp_path):
    done = slurm.run("srun", "-n", 2, sys.executable, "train.py", *data, "--expdir", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    check_run(tmp_path / "demo" / "2GPU" / "00")


def test_a_batch_script_without_srun_is_one_process(slurm, data, tmp_path):
    # Its shell has SLURM_PROCID=0 and SLURM_NTASKS=2, and yet there is no second rank to wait for.
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/bash\nexec "$@"\n')
    command = [sys.executable, "train.py", *data, "--expdir", tmp_path]
    job = slurm.sbatch("-n", 2, "-o", tmp_path / "%j.out", script, *command, cwd=ROOT)
    assert job.exit_code == 0, job.output
    check_run(tmp_path / "demo" / "1GPU" / "00")


# A job that is signalled, saves, is put into the queue again by its own script, and finishes. (At a real time limit:
# at_the_limit.py.)

SCRIPTS = [("submit_pm.sh", [], "2GPU"), ("submit_pm_mp.sh", ["--tensor_parallel=2"], "2MP")]


@pytest.fixture(scope="module")
def long_data(tmp_path_factory):
    """Flags of a run of 160 iterations in two epochs: some seconds."""
    data = make_data(tmp_path_factory.mktemp("long"), *"--shape 8 64 128 --samples 641".split())
    return [*data, "--num_iters=160", "--limit_nsamples_val=8", "--depth=1", "--plot_channels=None"]


def check_long_run(folder: Path, iterations: int = 160) -> None:
    """Each iteration once, over two lives."""
    assert [event["iteration"] for event in records(folder, "step")] == list(range(1, iterations + 1))
    assert len(records(folder, "resume")) == 1
    assert "DONE ---- rank 0" in (folder / "out.log").read_text()


def has_trained(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_text().splitlines()) > 20


@pytest.mark.parametrize("script, flags, name", SCRIPTS[1:])  # which calls the first
def test_a_signalled_job_goes_on_by_itself(slurm, long_data, python, tmp_path, script, flags, name):
    folder = tmp_path / "demo" / name / "00"

    def signal(job: str) -> None:
        wait_until(lambda: has_trained(folder))
        slurm.run("scancel", "--signal=USR1", job)

    env = {**python, "LOGDIR": str(tmp_path / "unused")}  # the user's own --expdir wins
    argv = ["-n", 2, "-o", tmp_path / "%j.out", script, *long_data, *flags, "--expdir", tmp_path]
    job = slurm.sbatch(*argv, cwd=ROOT, env=env, meanwhile=signal)
    assert job.exit_code == 0, job.output
    check_long_run(folder)
    assert f"job {job.id} is in the queue again" in job.output and "Stopped: --resume auto" in job.output
    assert job.output.count("nodes 1, tasks 2") == 2  # both lives are in one file


def test_a_cancelled_job_saves_and_stays_cancelled(slurm, long_data, python, tmp_path):
    folder = tmp_path / "demo/2GPU/00"

    def cancel(job: str) -> None:
        wait_until(lambda: has_trained(folder))
        slurm.run("scancel", job)

    argv = ["-n", 2, "-o", tmp_path / "%j.out", "submit_pm.sh", *long_data, "--expdir", tmp_path]
    job = slurm.sbatch(*argv, cwd=ROOT, env=python, meanwhile=cancel)
    wait_until(lambda: "Stopped: --resume auto goes on from here" in (tmp_path / f"{job.id}.out").read_text())
    time.sleep(3)
    assert "JobState=CANCELLED" in slurm.run("scontrol", "show", "job", job.id).stdout
    assert list((folder / "checkpoints").glob("*/info.json"))
