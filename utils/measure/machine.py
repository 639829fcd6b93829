"""What a run takes of the machine: cores, memory, disk, network, and the GPU's use and energy (`--report`)."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch

try:
    import psutil
except ImportError:  # a machine's own Python may lack it
    psutil = None


INTERVAL = 1.0  # s between two looks
GPU = {  # what PyTorch asks of NVML or amdsmi, in units of the report
    "gpu_use": lambda device: torch.cuda.utilization(device) / 100,
    "gpu_memory_gb": lambda device: torch.cuda.device_memory_used(device) / 2**30,
    # NVML tells milliwatts, amdsmi watts.
    "gpu_watts": lambda device: torch.cuda.power_draw(device) / (1 if torch.version.hip else 1e3),
}


def check_psutil() -> None:
    """Raise ValueError, with the remedy, where the machine cannot be looked at."""
    if psutil is None:
        raise ValueError("report needs psutil, which is not installed: `pip install psutil`, or leave --report out")


class SystemWatch:
    """Looks at this process and at its GPU once a second, in a thread of its own.

    Reader processes of this one count with it, but not their memory, most of which is this one's. What the node sends
    and receives is that of all its processes, but not what RDMA moves past the system. What cannot be known is left
    out: drivers and containers may hide some of it.
    """

    def __init__(self, device: torch.device, folder: Path = Path()):
        self.device, self.folder, self.process = device, folder, psutil.Process()
        self.looks = {
            "memory_gb": lambda: self.process.memory_info().rss / 2**30,
            "node_memory": lambda: psutil.virtual_memory().percent / 100,
        }
        self.gpu_looks = {}
        if device.type == "cuda":
            self.gpu_looks = {name: (lambda ask=ask: ask(device)) for name, ask in GPU.items()}
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.newest: dict[str, tuple[float, float]] = {}  # value, and when
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.begin, self.counters = time.perf_counter(), self._counters()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def take(self) -> dict[str, float]:
        """Return what was used since this was called last.

        cores: CPU seconds over seconds. memory_gb: resident, at the most. node_memory: share in use, at the most.
        read_gb, written_gb: of storage; the system's own memory of files is none. sent_gb, received_gb: of the node.
        disk_used, disk_free_gb: of the run's file system, now (a quota of yours it does not know).
        gpu_use: share of the time in which a kernel ran. gpu_memory_gb: at the most. joules: of the GPU.
        """
        self._look(self.looks)  # not at the GPU: a driver that does not answer holds up its own thread alone
        now, before, self.counters = time.perf_counter(), self.counters, self._counters()
        with self.lock:
            samples, self.samples = self.samples, defaultdict(list)
            for name in set(self.gpu_looks) & set(self.newest) - set(samples):  # since then nobody looked
                value, moment = self.newest[name]
                if now - moment < 3 * INTERVAL:
                    samples[name] = [value]
        seconds, self.begin = now - self.begin, now
        used: dict[str, float] = defaultdict(float)
        for (name, owner), total in self.counters.items():
            # What a process did before it was seen first is of this time, too: it is a reader that has just begun.
            used[name] += total - before.get((name, owner), 0.0 if owner else total)
        found = {"seconds": seconds, "cores": used.pop("cpu_seconds") / seconds, **used}
        found |= {name: max(values) for name, values in samples.items() if name.endswith(("memory", "memory_gb"))}
        with contextlib.suppress(OSError):
            disk = psutil.disk_usage(str(self.folder))
            found |= {"disk_used": disk.percent / 100, "disk_free_gb": disk.free / 2**30}
        if "gpu_use" in samples:
            found["gpu_use"] = fmean(samples["gpu_use"])
        if "gpu_watts" in samples:
            found["joules"] = seconds * fmean(samples["gpu_watts"])
        return found

    def close(self) -> None:
        self.ended.set()
        self.thread.join(timeout=5)

    def _watch(self) -> None:
        while True:
            self._look(self.looks | self.gpu_looks)
            if self.ended.wait(INTERVAL):
                return

    def _look(self, looks: dict[str, Callable[[], float]]) -> None:
        for name, look in looks.items():
            try:
                value = look()
            except Exception:  # of a driver, of a library that is not installed
                self.gpu_looks.pop(name, None)
                continue
            with self.lock:
                self.samples[name].append(value)
                self.newest[name] = value, time.perf_counter()

    def _counters(self) -> dict[tuple[str, int], float]:
        """Return CPU seconds and GiB by storage of each process, and by network of the node (0), since their start."""
        totals: dict[tuple[str, int], float] = {}
        processes = [self.process]
        with contextlib.suppress(psutil.Error, OSError):  # a node may hide processes
            processes += self.process.children(recursive=True)
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it has just ended
                times = process.cpu_times()
                totals["cpu_seconds", process.pid] = times.user + times.system
                with contextlib.suppress(AttributeError, OSError):  # not on every platform
                    io = process.io_counters()
                    totals["read_gb", process.pid] = io.read_bytes / 2**30
                    totals["written_gb", process.pid] = io.write_bytes / 2**30
        with contextlib.suppress(OSError):
            interfaces = psutil.net_io_counters(pernic=True).items()
            if network := [counters for name, counters in interfaces if not name.startswith("lo")]:
                totals["sent_gb", 0] = sum(one.bytes_sent for one in network) / 2**30
                totals["received_gb", 0] = sum(one.bytes_recv for one in network) / 2**30
        return totals
