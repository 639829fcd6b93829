"""What a run takes of the machine: cores, memory, disk, network, and the GPU's use and energy (`--report`)."""

import contextlib
import threading
import time
from statistics import fmean
from typing import Any

import torch

try:
    import psutil
except ImportError:  # a machine's own Python may lack it
    psutil = None


INTERVAL = 1.0  # s between two looks
GPU = {  # what PyTorch asks of NVML or amdsmi, in units of the report
    "gpu_use": lambda device: torch.cuda.utilization(device) / 100,
    "gpu_memory_gb": lambda device: torch.cuda.device_memory_used(device) / 2**30,
    "gpu_watts": lambda device: torch.cuda.power_draw(device) / 1e3,
}


def check_psutil() -> None:
    """Raise ValueError, with the remedy, where the machine cannot be looked at."""
    if psutil is None:
        raise ValueError("report needs psutil, which is not installed: `pip install psutil`, or leave --report out")


class SystemWatch:
    """Looks at this process and at its GPU once a second, in a thread of its own.

    Reader processes of this one count with it. What the node sends and receives is that of all its processes.
    """

    def __init__(self, device: torch.device):
        self.device, self.process = device, psutil.Process()
        self.gpu = {}
        if device.type == "cuda":
            for name, ask in GPU.items():
                # Without nvidia-ml-py or amdsmi, or on a part of a GPU, some of it cannot be known.
                with contextlib.suppress(Exception):
                    ask(device)
                    self.gpu[name] = ask
        self.samples: list[dict[str, float]] = []
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.begin, self.counters = time.perf_counter(), self._counters()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def take(self) -> dict[str, float]:
        """Return what was used since this was called last.

        cores: CPU seconds over seconds. memory_gb: resident, at the most. node_memory: share in use, at the most.
        read_gb, written_gb: of storage; the system's own memory of files is none. sent_gb, received_gb: of the node.
        gpu_use: share of the time in which a kernel ran. gpu_memory_gb: at the most. joules: of the GPU.
        """
        self._look()
        now, counters = time.perf_counter(), self._counters()
        with self.lock:
            samples, self.samples = self.samples, []
        seconds, self.begin = now - self.begin, now
        used = {name: counters[name] - before for name, before in self.counters.items() if name in counters}
        self.counters = counters
        found = {"seconds": seconds, "cores": used.pop("cpu_seconds") / seconds}
        found |= {name: size / 2**30 for name, size in used.items()}
        for name in ("memory_gb", "node_memory", "gpu_memory_gb"):
            if name in samples[0]:
                found[name] = max(sample[name] for sample in samples)
        if "gpu_use" in self.gpu:
            found["gpu_use"] = fmean(sample["gpu_use"] for sample in samples)
        if "gpu_watts" in self.gpu:
            found["joules"] = seconds * fmean(sample["gpu_watts"] for sample in samples)
        return found

    def close(self) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(INTERVAL):
            self._look()

    def _look(self) -> None:
        sample = {
            "memory_gb": self.process.memory_info().rss / 2**30,
            "node_memory": psutil.virtual_memory().percent / 100,
            **{name: ask(self.device) for name, ask in self.gpu.items()},
        }
        with self.lock:
            self.samples.append(sample)

    def _counters(self) -> dict[str, float]:
        """Return CPU seconds, and bytes by storage and network, since the start of the processes and of the node."""
        totals: dict[str, Any] = {"cpu_seconds": 0.0, "read_gb": 0, "written_gb": 0}
        for process in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                times = process.cpu_times()
                totals["cpu_seconds"] += times.user + times.system
                with contextlib.suppress(AttributeError):  # not on every platform
                    io = process.io_counters()
                    totals["read_gb"] += io.read_bytes
                    totals["written_gb"] += io.write_bytes
        network = psutil.net_io_counters()
        return totals | {"sent_gb": network.bytes_sent, "received_gb": network.bytes_recv}
