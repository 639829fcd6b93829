"""What a run tells: its log, metrics.jsonl, TensorBoard and pictures. Rank 0 writes them."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from utils.checkpoint import store as checkpoint
from utils.config.settings import Config
from utils.data.dataset import Job, WeatherData
from utils.device import allocator_settings, peak_flops
from utils.errors import Ended
from utils.files import cut_records, to_line
from utils.observers import EpochRecord, Observer
from utils.plots import forecast_figure, render
from utils.reading import is_number
from utils.record.boards import TAGS, Curves
from utils.record.log import close_log, open_log
from utils.shards import own
from utils.spans import in_span


class RunLogger(Observer):
    """The files of a run, in its folder."""

    def __init__(self, folder: Path, job: Job):
        self.folder, self.job = folder, job
        self.handlers = open_log(folder / "out.log")
        self.records: BinaryIO | None = None
        self.unwritten, self.lock = b"", threading.Lock()  # lines that the disk has not taken; two threads write
        self.curves: Curves | None = None
        self.is_first_epoch = True  # of this process
        self.begun_here = 1  # how many processes in a row went on from the same place
        self.last: EpochRecord | None = None

    def open_records(self, iteration: int, epochs: int, resumed: Path | None) -> None:
        """Begin to write after so many iterations and epochs; what an earlier process wrote of later ones is void.

        Args:
            resumed: the checkpoint that the run goes on from. Those after it are void, too.
        """
        # Said before the records of these iterations are cut.
        there = checkpoint.find(self.folder / "checkpoints") if resumed else []
        checkpoint.set_aside(path for path in there if path.name > resumed.name)
        path, is_redone = self.folder / "metrics.jsonl", False
        if iteration:
            kept, void = cut_records(path, iteration, epochs)
            told = [event["event"] for event in reversed(kept) if event["event"] in ("step", "epoch", "resume")]
            self.begun_here += len([*takewhile("resume".__eq__, told)])
            # A validation whose checkpoint was not written: its scores are on the board at the last step that counts.
            is_redone = any(event["event"] == "epoch" and event["iteration"] == iteration for event in void)
        self.records = path.open("ab", buffering=0)
        self.curves = Curves(self.folder, self.job.config, iteration + (not is_redone) if iteration else None)
        if is_redone:
            for step in [event for event in kept if _is_point(event)][-1:]:
                self.curves.points(step)
        if resumed:
            self.write({"event": "resume", "iteration": iteration, "checkpoint": str(resumed)})

    def sync(self) -> None:
        """Bring all records up to here to the disk. Raises OSError where it does not take them."""
        self.curves.sync()
        self._write_lines()
        os.fsync(self.records.fileno())

    def send(self) -> None:
        """Send to trackers what they have not got. In the thread that trains."""
        self.curves.send()

    def close_files(self, error: BaseException | None) -> None:
        """Close the files; out.log gets the error that ends the run."""
        if self.records is not None:
            _close_records(self.records, self.unwritten)
        if self.curves is not None:
            self.curves.close("FINISHED" if error is None else "KILLED" if isinstance(error, Ended) else "FAILED")
        terminal, file = self.handlers
        close_log([terminal])
        if error is not None and not isinstance(error, Ended):
            logging.error("%s: %s", type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())]))
        close_log([file])

    def begin(self, run: Any) -> None:
        self.memory = run.memory

    def describe(self, model: nn.Module) -> None:
        """Log what will be trained, on what, and how fast it could go."""
        config, data, fields = self.job.config, self.job.data, self.job.data.fields
        self.flops = model.flops()
        self.peak, source = peak_flops(self.job.device, config.amp_mode, config.tf32, config.in_8_bits)
        allocator = allocator_settings(config.expandable_segments, self.job.device)
        for remark in (*fields.remarks, allocator and f"GPU memory allocator: {allocator}"):
            if remark:
                logging.info(remark)
        C, H, W = data.train_files.shape
        logging.info("Run folder: %s", self.folder)
        ranks, threads = self.job.world.size, torch.get_num_threads()
        are_shared = ranks > 1 and "OMP_NUM_THREADS" not in os.environ
        shared = "; OMP_NUM_THREADS is not set, so they share the cores" * are_shared
        logging.info("Device: %s, %d rank(s), %d thread(s) each%s", self.job.device, ranks, threads, shared)
        logging.info(
            "Data: %d training and %d validation samples of %d channels in, %d out, %d x %d of %d x %d; dt is %s",
            *(len(data.train_pairs), len(data.valid_pairs), len(fields.in_names), len(fields.out_names)),
            *(*config.img_size, H, W, fields.hours),
        )
        if fields.forcings.names:
            logging.info("Beside the state: %s", ", ".join(fields.forcings.names))
        logging.info("Reading: %s", data.reading)
        logging.info(
            "Batch: %d = %d a pass x %d data-parallel rank(s) x %d accumulation step(s); "
            "%d iterations an epoch, %d in all",
            *(config.global_batch_size, config.local_batch_size, data.num_shards, config.accumulation_steps),
            *(len(data.train_loader), config.num_iters),
        )
        if config.longest_rollout > 1:
            then = zip(config.rollout_from, config.rollout_steps)
            later = "; ".join(f"of {steps} from iteration {first} on" for first, steps in then)
            logging.info("Forecasts: of %d step(s); %s", config.steps_at(-1), later)
        found = (getattr(module, "kernel", None) for module in model.modules())
        kernels = dict.fromkeys(kernel for kernel in found if isinstance(kernel, str))
        logging.info(
            "Model: %s parameters on each rank, %.4g GFLOP a sample forward; attention kernel: %s",
            f"{sum(p.numel() for p in model.parameters()):,}",
            self.flops / 1e9,
            ", ".join(kernels).replace("auto", "SDPA's choice") or "none",
        )
        owned = sum(own(p).numel() for p in model.parameters())
        if config.shard != "none":
            logging.info("Shared out: %s; rank 0 owns %s parameters and their moments", config.shard, f"{owned:,}")
        logging.info("Peak of one device for MFU: %.4g TFLOP/s (%s)", self.peak / 1e12, source)

    def step_is_known(self, record: dict[str, Any]) -> None:
        """Record an iteration; log where forecasts become longer, for speed and loss change there."""
        if remark := _longer_forecasts(self.job.config, record["iteration"]):
            logging.info(remark)
        self.write(record)
        self.curves.points(record)

    @in_span("logging")
    def after_training(self, record: EpochRecord) -> None:
        """Log how fast the iterations of an epoch were, and their loss."""
        if record.iterations:
            speed, seconds = record.samples_per_sec, record.seconds
            logging.info("Time taken for epoch %i is %.2f sec, avg %.2f samples/sec", record.epoch, seconds, speed)
            speeds = {"iters_per_sec": record.iterations / seconds, "samples_per_sec": speed}
            self.curves.points({"event": "speed", "iteration": record.iteration, **speeds})
        logging.info("  Avg train loss=%.4g", record.train_loss)
        logging.info("  Memory usage after forward pass: %.3f GiB", self.memory.after_forward)
        parts = record.memory_gb.items()
        logging.info("  Memory by part, GiB: %s", ", ".join(f"{name} {size:.3f}" for name, size in parts))
        if self.is_first_epoch and record.iterations:  # what compiles did so in its first iteration
            first = record.first_iteration_sec
            rest = (record.seconds - first) / max(record.iterations - 1, 1)
            logging.info("  First iteration: %.3g sec, those after it: %.3g sec each", first, rest)
            self.is_first_epoch = False

    def after_first_validation(self, record: EpochRecord, example: tuple[Tensor, Tensor, Tensor]) -> None:
        """Record the validation before the first step."""
        logging.info("Before the first step:")
        self._tell_of_validation(record, example)

    def after_epoch(self, record: EpochRecord, example: tuple[Tensor, Tensor, Tensor]) -> None:
        """Record an epoch and its validation."""
        speed, self.last = record.samples_per_sec, record
        passes = self.job.config.mean_steps(range(record.iteration - record.iterations, record.iteration))
        record.mfu = speed and 3 * self.flops * passes * speed / (self.job.world.size * self.peak)
        self._tell_of_validation(record, example)

    @in_span("logging")
    def _tell_of_validation(self, record: EpochRecord, example: tuple[Tensor, Tensor, Tensor]) -> None:
        """Record a validation, and draw `example` (input, target, forecast)."""
        self.write(record.event())
        logging.info("  Avg val loss=%.4g", record.valid_loss)
        if record.valid_loss_ema is not None:
            logging.info("  Avg val loss of the moving average=%.4g", record.valid_loss_ema)
        logging.info("  Total validation time: %.2f sec", record.validation_seconds)
        self.curves.points(record.event())
        for name, pixels in _pictures(self.job.data, example, f"after {record.iteration} iterations"):
            self.curves.image(name, pixels, record.iteration)
        self.curves.sync()
        self.curves.send()

    def write(self, event: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl. What the disk does not take waits, and no checkpoint counts meanwhile."""
        with self.lock:
            self.unwritten += to_line(event).encode()
        with contextlib.suppress(OSError):
            self._write_lines()

    def _write_lines(self) -> None:
        with self.lock:
            while self.unwritten:
                self.unwritten = self.unwritten[self.records.write(self.unwritten) :]

    @in_span("logging")
    def costs(self, record: dict[str, Any]) -> None:
        """Record what an epoch cost: its time by part, or what it took of the machine."""
        self.write(record)
        self.curves.points(record)

    def tables(self, lines: list[str], step: int) -> None:
        """Show lines that are laid out already, as text beside the curves."""
        self.curves.text("Report", "\n".join(f"    {line}" for line in lines), step)

    def close(self, error: BaseException | None) -> None:
        """Log the last validation of a run that came to its end, channel by channel."""
        if error is not None or self.last is None:
            return
        rmse, persistence, units = self.last.valid_rmse, self.last.persistence_rmse, self.last.valid_rmse_units
        fields, names = self.job.data.fields, self.job.data.fields.out_names
        text = "Validation after %d iterations, RMSE at %s (normalised; in units; persistence):"
        logging.info(text, self.last.iteration, fields.hours)
        for name, unit in zip(names, fields.units):
            base = "none" if persistence[name] is None else f"{persistence[name]:.4f}"
            logging.info("  %-10s %.4f   %.4g %s   %s", name, rmse[name], units[name], unit, base)
        known = [name for name in names if persistence[name]]
        if known:
            ratio = sum(rmse[n] for n in known) / sum(persistence[n] for n in known)
            logging.info("  Mean RMSE over channels: %.3f of persistence's", ratio)
        for c in fields.plot_channels:
            logging.info("  Picture: %s", self.folder / "pictures" / f"{names[c]}.png")
        logging.info("  Records: %s", self.folder / "metrics.jsonl")


def _is_point(event: dict[str, Any]) -> bool:
    """Is this what a run writes of a step?"""
    return event["event"] == "step" and all(x is None or is_number(x) for x in map(event.get, TAGS["step"]))


def _close_records(records: BinaryIO, lines: bytes) -> None:
    """Write what the disk has not taken so far, say so where it still does not, and close the file."""
    with contextlib.suppress(OSError):
        while lines:
            lines = lines[records.write(lines) :]
    if lines:
        logging.warning("%s: the disk did not take the last %d line(s)", records.name, lines.count(b"\n"))
    try:
        records.close()
    except OSError as error:  # what a network file system was sent before may be lost, too
        logging.warning("%s: its last lines may be lost (%s)", records.name, error)


def _longer_forecasts(config: Config, iteration: int) -> str | None:
    """Return what to say after an iteration, counted from 1, if forecasts have another length since."""
    before, steps = (config.steps_at(max(iteration - i, 0)) for i in (2, 1))
    if steps == before:
        return None
    return (
        f"From here on forecasts are of {steps} step(s), and were of {before}: an iteration takes longer, and its "
        "loss is the mean over all steps"
    )


def _pictures(data: WeatherData, example: tuple[Tensor, Tensor, Tensor], when: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and pixels of each channel that is shown of a forecast."""
    (inp, target, forecast), fields = example, data.fields
    date = data.valid_files.date(*data.valid_pairs[0])
    for c in fields.plot_channels:
        name, origin = fields.out_names[c], fields.origins[c]
        shown = {
            "input": None if origin < 0 else fields.to_units(inp[origin], c),
            "target": fields.to_units(target[c], c),
            "forecast": fields.to_units(forecast[c], c),
        }
        title = f"{name}, {date} + {fields.hours}, {when}"
        yield name, render(forecast_figure(shown, fields.latitude, fields.longitude, name, fields.units[c], title))
