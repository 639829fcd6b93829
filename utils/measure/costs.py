"""What a run costs, and where: time, memory, operators, the machine, and what to try next (`--report`).

Rank 0 writes it below `report/` in the run's folder, as tables of numbers (CSV) and all together (report.json).
"""

import contextlib
import json
import logging
import platform
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import nn

from utils.data.dataset import Job
from utils.device import cached_gb, cores_in_reach, has_bf16, peak_memory_gb
from utils.errors import harmless
from utils.files import read_events, to_json, write_text
from utils.measure import system_table, tables
from utils.measure.layers import Layer, summary_table
from utils.measure.machine import SystemWatch
from utils.measure.memory_timeline import most_of_parts, parts_at_peak
from utils.measure.module_times import ObserverTimes
from utils.measure.step_profile import StepProfile
from utils.measure.time_table import TimeReport
from utils.measure.verdict import Measured, verdict
from utils.spans import span, stop_timeline

QUICK = 0.6  # of the median of other steps


class RunCosts:
    """Measures a run from here on. All ranks call the same methods.

    Args:
        layers: those of the model as it would be on one device.
        iteration: iterations done so far.
        logger: on rank 0, what writes the run's files.
    """

    def __init__(self, job: Job, model: nn.Module, layers: list[Layer], iteration: int, logger: Any | None):
        self.job, self.layers, self.logger, self.wanted = job, layers, logger, job.config.report
        self.folder = logger and logger.folder / "report"
        if logger:
            with harmless("the folder of the report"):
                self.folder.mkdir(exist_ok=True)
        self.time = TimeReport(model if self.wants("time") else None, job.device, iteration, logger and logger.costs)
        self.system: SystemWatch | None = None
        if self.wants("system"):
            with harmless("looking at the machine"):
                self.system = SystemWatch(job.device, logger.folder if logger else Path(job.config.expdir))
        self.places: list[tuple[str, set[int]]] = [("", set())] * job.world.size  # node and cores of each rank
        dist.all_gather_object(self.places, (platform.node(), cores_in_reach()))
        self.systems: list[dict[str, Any]] = []
        self.of_ranks: list[list[dict[str, float]]] = []  # of each of these records: the figures of all ranks
        self.step: StepProfile | None = None  # of this rank
        self.observers = ObserverTimes(())
        self.took = 0.0  # seconds of that step
        self.usual: list[float] = []  # of those that nobody looked at
        self.steps: list[tuple[float | None, float] | None] = [None] * job.world.size

    def wants(self, *tables: str) -> bool:
        """Whether one of these tables was asked for."""
        return any(table in self.wanted for table in tables)

    def keep(self, step: StepProfile | None, took: float) -> None:
        """Keep what a profiled step did, None where it is not known, and the seconds that it took."""
        self.step, self.took = step, took
        dist.all_gather_object(self.steps, step and (step.working, step.waiting))

    def record(self, epoch: int, iteration: int) -> None:
        """Record what was used since the last record: an epoch, or what was done of it."""
        iterations = iteration - self.time.iteration
        self.time.record(epoch, iteration)
        if not self.wants("system"):
            return
        mine, ranks = {}, [{}] * self.job.world.size
        with span("profiling"):
            if self.system:
                with harmless("looking at the machine"):
                    mine = self.system.take()
            dist.all_gather_object(ranks, mine)
        found = {"event": "system", "epoch": epoch, "iteration": iteration, "seconds": self.time.records[-1]["wall"]}
        found |= system_table.together(ranks, self.nodes)
        if "joules" in found and iterations:
            found["joules_per_sample"] = found["joules"] / (iterations * self.job.config.global_batch_size)
        self.systems.append(found)
        if self.logger:
            self.of_ranks.append(ranks)
            self.logger.costs(found)

    @property
    def nodes(self) -> list[str]:
        """The node of each rank."""
        return [node for node, _ in self.places]

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
        if self.wants("model"):
            yield f"Model, for one sample on one device ({self.job.world.size} rank(s) share the work):"
            yield from summary_table(self.layers)
        if self.wants("speed"):
            yield from tables.speed(self._speeds())
        if self.wants("time"):
            yield from self.time.table()
            yield from tables.observers(self.observers.rows())
        if self.step and self.step.modules and self.wants("time"):
            yield from tables.modules(self.step.modules)
        if self.wants("system"):
            warm, on_gpu = self.time.warm, self.job.device.type == "cuda"
            yield from system_table.lines(self.systems[warm], self._ranks(), warm, on_gpu)
        if self.step and self.wants("memory"):
            yield from tables.memory(self._memory())
        if self.step and self.wants("operators"):
            yield from tables.operators(self.step, self.took, median(self.usual) if self.usual else None)
        if self.wants("time"):
            yield "Verdict: " + self.verdict()

    def verdict(self) -> str:
        """Return what bounds the run, and what to try."""
        config, is_recorded = self.job.config, bool(self.step and self.step.is_recorded)
        node, _ = self.places[0]
        together = [cores for name, cores in self.places if name == node]
        # A step that was much faster than most, though a profiler looked on, met a machine that these did not.
        usual = median(self.usual) if self.usual else 0.0
        is_odd = self.step is not None and self.took < QUICK * usual
        measured = Measured(
            self.time.by_rank(),
            [None] * len(self.steps) if is_odd else self.steps,
            self.time.iterations,
            on_gpu=self.job.device.type == "cuda",
            is_recorded=is_recorded,
            is_blind=is_recorded or config.enable_jit and config.tensor_parallel * config.context_parallel > 1,
            is_direct=self.job.data.train_loader.is_direct,
            has_bf16=has_bf16(self.job.device),
            cores=max(len(set.union(*together)) // len(together), 1),
            nodes=self.nodes,
            mfu=self.logger.last and self.logger.last.mfu,
        )
        doubt = (
            f" (The profiled step took {1e3 * self.took:.4g} ms, the others {1e3 * usual:.4g} (median): something "
            f"else used the cores, and what these steps waited for cannot be told. Repeat it on a quiet machine.)"
        )
        return verdict(measured, config) + doubt * is_odd

    def _speeds(self) -> list[dict[str, Any]]:
        """Return the speeds of all epochs of the run, those of earlier processes, too."""
        names, events = ("epoch", "iteration", *tables.SPEEDS), read_events(self.folder.parent / "metrics.jsonl")
        rows = [{name: event.get(name) for name in names} for event in events if event["event"] == "epoch"]
        return rows + tables.speed_means([row for row in rows if row["iteration"]])

    def _ranks(self) -> list[dict[str, Any]]:
        """Return what each rank took of the machine, means of the warm epochs."""
        return system_table.rank_rows(self.of_ranks[self.time.warm], self.nodes)

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
        """Write all tables, beside those that an earlier process of this run was asked for, and this one was not.

        Raises OSError where the disk does not take them.
        """
        folder, events = self.folder, read_events(self.folder.parent / "metrics.jsonl")
        found, step = {}, self.step
        if self.wants("speed"):
            found |= {"speed": self._speeds(), "rates": [event for event in events if event["event"] == "rate"]}
        if self.wants("time"):
            found["time"] = [row for event in events if event["event"] == "time" for row in tables.time_rows(event)]
            found["observers"] = self.observers.rows()
            found |= {"modules": step.modules} if step and step.modules else {}
        if self.wants("system"):
            found["system"] = [event for event in events if event["event"] == "system"]
            found["system_ranks"] = self._ranks()
            found["system_nodes"] = system_table.node_rows(found["system_ranks"])
        if self.wants("model"):
            found["model"] = [vars(layer) for layer in self.layers]
        if step and self.wants("memory"):
            found["memory"] = self._memory()
        if step and self.wants("operators"):
            found["operators"] = [
                {"operator": name, "calls": step.calls[name]}
                | {"seconds": step.seconds.get(name, 0.0), "bytes": step.allocated.get(name, 0)}
                for name in {**step.seconds, **step.allocated}
            ]
        for name, rows in found.items():
            tables.write_csv(folder / f"{name}.csv", rows)
        verdict = {"verdict": self.verdict()} if self.wants("time") else {}
        path, earlier = folder / "report.json", {}
        if path.exists():
            with contextlib.suppress(ValueError):
                earlier = json.loads(path.read_text())
        write_text(path, to_json(earlier | found | verdict, indent=1))
