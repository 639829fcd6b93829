"""A real Slurm for the tests of this folder: one node on loopback, its own munge, all state in a temp folder.

Debian's packages slurm-wlm and munge are installed where that is allowed. Where it is not, the tests are skipped with
the reason.
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import free_port, is_running
from tests.packages import install

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
FirstJobId={job}
SlurmctldPort={port1}
SlurmdPort={port2}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
MpiDefault=none
ReturnToService=2
KillWait=60
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Install Slurm unless it is there; return why it cannot be used, or None."""
    os.environ["PATH"] += ":/usr/sbin"  # where Debian keeps the daemons
    return "a Slurm of its own needs root" if os.geteuid() != 0 else install(PROGRAMS, "slurm-wlm munge")


@dataclass
class Job:
    id: str
    exit_code: int
    seconds: float
    output: str


class Slurm:
    """The running one-node cluster; every command gets its configuration through SLURM_CONF."""

    def __init__(self, folder: Path):
        self.folder = folder
        # A job that the tests start must not take itself for a part of the job that runs the tests.
        inherited = {k: v for k, v in os.environ.items() if not re.match("SLURM|SBATCH|SRUN", k)}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SCRATCH", "SITE", "CONTAINER"):
            inherited.pop(name, None)
        self.env = {**inherited, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def run(self, *command, env: dict | None = None, timeout: float = 300, **options) -> subprocess.CompletedProcess:
        env = {**self.env, **(env or {})}
        return subprocess.run(
            [str(c) for c in command], env=env, text=True, capture_output=True, timeout=timeout, **options
        )

    def start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)  # munge insists that its socket's folder is open to all
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        port1, port2 = free_port(), free_port()
        host = socket.gethostname().split(".")[0]
        job = random.randrange(1, 20000)  # a run takes its port from it: another cluster here has another
        text = CONFIG.format(folder=folder, host=host, job=job, port1=port1, port2=port2)
        (folder / "slurm.conf").write_text(text)
        for daemon in (["munged", f"--key-file={key}", *munge], ["slurmctld"], ["slurmd"]):
            done = self.run(*daemon)
            assert done.returncode == 0, f"{daemon[0]}: {done.stderr}"
        deadline = time.time() + 300
        while "idle" not in (state := self.run("sinfo", "-h", "-o", "%T").stdout):
            assert time.time() < deadline, f"the node is not idle but {state!r}\n{self.logs()}"
            time.sleep(0.2)

    def stop(self) -> None:
        if (self.folder / "slurmctld.pid").exists():
            self.run("scancel", "--full", "--user=root")
            deadline = time.time() + 10
            while self.run("squeue", "-h").stdout.strip() and time.time() < deadline:
                time.sleep(0.2)
        for name in ("slurmd", "slurmctld", "munge"):
            file = self.folder / f"{name}.pid"
            if not file.exists():
                continue
            pid = int(file.read_text())
            os.kill(pid, signal.SIGTERM)
            deadline = time.time() + 10
            while is_running(pid) and time.time() < deadline:
                time.sleep(0.1)
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-2000:]}" for p in sorted(self.folder.glob("*.log")))

    def sbatch(self, *arguments, cwd: Path, env: dict | None = None, timeout: float = 300, meanwhile=None) -> Job:
        """Submit a job and wait for its end; `meanwhile` is called with its number.

        (sbatch --wait would look after 2 s, then after 10 s.)
        """
        start = time.time()
        done = self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env)
        assert done.returncode == 0, f"sbatch refused: {done.stderr}"
        job = done.stdout.strip()
        if meanwhile:
            meanwhile(job)
        while True:
            record = self.run("scontrol", "show", "job", job).stdout
            state, code, killed_by, output = re.search(
                r"JobState=(\w+).*ExitCode=(\d+):(\d+).*StdOut=([^\n]*)", record, re.S
            ).groups()
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                break
            if time.time() > start + timeout:
                self.run("scancel", job)
                pytest.fail(f"job {job} was {state} after {timeout} s\n{_read(output)}\n{self.logs()}")
            time.sleep(0.2)
        return Job(job, int(code) or int(killed_by), time.time() - start, _read(output))


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


@pytest.fixture(scope="session")
def slurm():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has at most 107 characters
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
