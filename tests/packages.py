"""Programs of the operating system that some tests need: Debian's packages, installed where that is allowed."""

import os
import shutil
import subprocess
from pathlib import Path


def install(programs: tuple[str, ...], packages: str) -> str | None:
    """Install packages unless their programs are there; return why that cannot be done, or None.

    As root, in a container: no systemd, so that no service of the host is started or changed.
    """
    if all(map(shutil.which, programs)):
        return None
    if os.geteuid() != 0 or shutil.which("apt-get") is None or Path("/run/systemd/system").exists():
        return f"no {programs[0]} here; tests install it only as root in a Debian container: apt-get install {packages}"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ("update", f"install -y --no-install-recommends {packages}"):
        arguments = ["apt-get", "-o", "DPkg::Lock::Timeout=60", "-q", *command.split()]
        try:
            done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=250)
        except subprocess.TimeoutExpired:
            return f"apt-get {command}: no end after 250 s"
        if done.returncode != 0:
            return f"apt-get {command} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    missing = [name for name in programs if shutil.which(name) is None]
    return f"{packages}: installed, but there is no {missing[0]}" if missing else None
