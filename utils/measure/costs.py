"""What a run costs, and where: time, memory, operators, the machine, and what to try next (`--report`).

Rank 0 writes it below `report/` in the run's folder, as tables of numbers (CSV) and all together (report.json).
"""

import logging
import platform
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import torch.distributed as dist
from torch import nn

from utils.data.dataset import Job
from utils.device import cached_gb, cores_in_reach, has_bf16, peak_memory_gb
from utils.errors import harmless
from utils.files import read_events, to_json, write_text
from utils.measure import tables
from utils.measure.layers import Layer, summary_table
from utils.measure.machine import SystemWatch
from utils.measure.memory_timeline import most_of_parts, parts_at_peak
from utils.measure.step_profile import StepProfile
from utils.measure.time_table import TimeReport
from utils.measure.verdict import Measured, verdict
from utils.spans import span, stop_timeline


class RunCosts:
    """Measures a run from here on. All ranks call the same methods.

    Args:
        layers: those of the model as it would be on one device.
        iteration: iterations done so far.
        logger: on rank 0, what writes the run's files.
    """

    def __init__(self, job: Job, model: nn.Module, layers: list[Layer], iteration: int, logger: Any | None):
        self.job, self.layers, self.logger = job, layers, logger
        self.folder = logger and logger.folder / "report"
        if logger:
            with harmless("the folder of the report"):
                self.folder.mkdir(exist_ok=True)
        self.time = TimeReport(model, job.device, iteration, logger and logger.costs)
        self.system: SystemWatch | None = None
        with harmless("looking at the machine"):
            self.system = SystemWatch(job.device)
        self.places: list[tuple[str, set[int]]] = [("", set())] * job.world.size  # node and cores of each rank
        dist.all_gather_object(self.places, (platform.node(), cores_in_reach()))
        self.systems: list[dict[str, Any]] = []
        self.step: StepProfile | None = None  # of this rank
        self.took = 0.0  # seconds of that step
        self.usual: list[float] = []  # of those that nobody looked at
        self.steps: list[tuple[float | None, float] | None] = [None] * job.world.size

    def keep(self, step: StepProfile | None, took: float) -> None:
        """Keep what a profiled step did, None where it is not known, and the seconds that it took."""
        self.step, self.took = step, took
        dist.all_gather_object(self.steps, step and (step.working, step.waiting))

    def record(self, epoch: int, iteration: int) -> None:
        """Record what was used since the last record: an epoch, or what was done of it."""
        iterations = iteration - self.time.iteration
        self.time.record(epoch, iteration)
        mine, ranks = {}, [{}] * self.job.world.size
        with span("profiling"):
            if self.system:
                with harmless("looking at the machine"):
                    mine = self.system.take()
            dist.all_gather_object(ranks, mine)
        found = {"event": "system", "epoch": epoch, "iteration": iteration, "seconds": self.time.records[-1]["wall"]}
        found |= self.together(ranks)
        if "joules" in found and iterations:
            found["joules_per_sample"] = found["joules"] / (iterations * self.job.config.global_batch_size)
        self.systems.append(found)
        if self.logger:
            self.logger.costs(found)

    def together(self, ranks: list[dict[str, float]]) -> dict[str, float]:
        """Return the figures of all ranks; not those that a rank does not know."""
        nodes = {node: rank for (node, _), rank in zip(self.places, ranks)}.values()  # one rank of each
        ways = {
            "added": (sum, ranks),
            "added over nodes": (sum, nodes),
            "largest": (max, ranks),
            "mean": (fmean, ranks),
        }
        known = {name: ways[way] for name, (way, _) in tables.SYSTEM.items() if all(name in rank for rank in ranks)}
        return {name: combine(rank[name] for rank in over) for name, (combine, over) in known.items()}

    def close(self) -> None:
        stop_timeline()
        if self.system:
            self.system.close()

    def show(self) -> None:
        """Log all tables, show them in TensorBoard, and write them. On rank 0."""
        lines = list(self.lines())
        for line in lines:
            logging.info(line)
        self.logger.tables(lines, self.time.iteration)
        try:
            self.write()
            logging.info("  All of it as tables: %s", self.folder)
        except OSError as error:
            logging.warning("The tables of the report are not written (%s); metrics.jsonl has its figures", error)

    def lines(self) -> Iterator[str]:
        """Yield all tables of the run, and the verdict. On rank 0."""
        yield f"Model, for one sample on one device ({self.job.world.size} rank(s) share the work):"
        yield from summary_table(self.layers)
        yield from tables.speed(self._speeds())
        yield from self.time.table()
        yield from tables.system(self.systems, self.time.warm, self.job.device)
        if self.step:
            yield from tables.memory(self._memory())
            yield from tables.operators(self.step, self.took, median(self.usual) if self.usual else None)
        yield "Verdict: " + self.verdict()

    def verdict(self) -> str:
        """Return what bounds the run, and what to try."""
        config, is_recorded = self.job.config, bool(self.step and self.step.is_recorded)
        node, _ = self.places[0]
        together = [cores for name, cores in self.places if name == node]
        measured = Measured(
            self.time.by_rank(),
            self.steps,
            self.time.iterations,
            on_gpu=self.job.device.type == "cuda",
            is_recorded=is_recorded,
            is_blind=is_recorded or config.enable_jit and config.tensor_parallel * config.context_parallel > 1,
            is_direct=self.job.data.train_loader.is_direct,
            has_bf16=has_bf16(self.job.device),
            cores=max(len(set.union(*together)) // len(together), 1),
            nodes=[node for node, _ in self.places],
            mfu=self.logger.last and self.logger.last.mfu,
        )
        return verdict(measured, config)

    def _speeds(self) -> list[dict[str, Any]]:
        """Return the speeds of all epochs of the run, those of earlier processes, too."""
        names = ("epoch", "iteration", "samples_per_sec", "valid_samples_per_sec", "loader_samples_per_sec", "mfu")
        events = read_events(self.folder.parent / "metrics.jsonl")
        return [{name: event.get(name) for name in names} for event in events if event["event"] == "epoch"]

    def _memory(self) -> list[dict[str, Any]]:
        """Return the bytes of each part when a step needs most, and its own most; their sum, and what to compare."""
        parts, most = parts_at_peak(self.step.blocks), most_of_parts(self.step.blocks)
        rows = [{"part": part, "bytes": size, "most_bytes": most[part]} for part, size in parts.items()]
        others = {"sum": sum(parts.values())}
        if self.job.device.type == "cuda":
            others |= {"allocator": self.step.peak, "cached": round(cached_gb(self.job.device) * 2**30)}
        else:
            others["process"] = round(peak_memory_gb(self.job.device) * 2**30)
        return rows + [{"part": part, "bytes": size} for part, size in others.items()]

    def write(self) -> None:
        """Write all tables. Raises OSError where the disk does not take them."""
        folder, events = self.folder, read_events(self.folder.parent / "metrics.jsonl")
        found = {
            "speed": self._speeds(),
            "time": [row for event in events if event["event"] == "time" for row in tables.time_rows(event)],
            "system": [event for event in events if event["event"] == "system"],
            "model": [vars(layer) for layer in self.layers],
        }
        if step := self.step:
            found["memory"] = self._memory()
            found["operators"] = [
                {"operator": name, "calls": step.calls[name]}
                | {"seconds": step.seconds.get(name, 0.0), "bytes": step.allocated.get(name, 0)}
                for name in {**step.seconds, **step.allocated}
            ]
        for name, rows in found.items():
            tables.write_csv(folder / f"{name}.csv", rows)
        write_text(folder / "report.json", to_json(found | {"verdict": self.verdict()}, indent=1))
