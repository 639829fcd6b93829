"""One run: its folder, its log, its records, its clock. What every run needs beside the lesson."""

import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from utils.config import Config
from utils.data_loader import Batch
from utils.device import allocator_settings
from utils.launch import World, all_ranks_agree, share_error
from utils.logging_utils import close_log, open_log
from utils.plots import forecast_figure, render
from utils.profiling import MemoryWatch, peak_flops, peak_memory_gb, profiler_window
from utils.records import StepRecords, to_json
from utils.weather_data import WeatherData


def make_run_folder(config: Config, name: str) -> Path:
    """Create `<expdir>/<config>/<name>/<run_num>/` and return it; an old folder of that name is renamed aside.

    Raises ValueError where it cannot be written, or where `run_num` is not the name of a folder.
    """
    if config.run_num in ("", ".", "..") or "/" in config.run_num:
        raise ValueError(f"run_num is {config.run_num!r}: it names one folder, such as 00; use --expdir for paths")
    path = Path(config.expdir) / config.config / name / config.run_num
    try:
        if path.exists():
            aside = next(p for n in range(1, 10**6) if not (p := path.with_name(f"{path.name}.{n}")).exists())
            path.rename(aside)
        (path / "logs").mkdir(parents=True)
        config.save(path / "config.yaml")
    except OSError as error:
        raise ValueError(f"cannot write the run folder {path} ({error.strerror}): choose another --expdir") from None
    return path


class Run:
    """Counts the iterations, keeps the records, and says when to stop.

    Losses stay on the device and travel to the host a few at a time: the loop never waits for the step in progress.

    Args:
        flops: floating point operations of one forward pass on one sample.
        name: the folder of the run that tells its size; `<ranks>GPU` by default.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        device: torch.device,
        data: WeatherData,
        flops: int,
        name: str | None = None,
    ):
        self.config, self.world, self.device, self.data = config, world, device, data
        self.iteration = 0  # optimiser steps done
        self.steps = StepRecords(world.size)
        # In fp16 a gradient that overflows is usual: the step is skipped and the scale, at first 2^16, is halved.
        self.overflows, self.overflows_allowed = 0, 30 if config.amp_mode == "fp16" else 0
        self.epoch_losses: list[float] = []
        self.is_first_epoch = True  # of this process
        self.flops = flops
        self.handlers: list[logging.Handler] = []
        self.is_main = world.rank == 0
        with all_ranks_agree():
            if self.is_main:
                self.folder = make_run_folder(config, name or f"{world.size}GPU")
        if self.is_main:
            self.peak, self.peak_source = peak_flops(device, config.amp_mode, config.tf32)
            self.handlers = open_log(self.folder / "out.log")
            self.records = (self.folder / "metrics.jsonl").open("a")
            self.board = SummaryWriter(self.folder / "logs")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if self.is_main:
            if kind is None:
                self._say_result()
                self.log("DONE ---- rank %d", self.world.rank)
            self.records.close()
            self.board.close()
            close_log(self.handlers)

    def log(self, message: str, *args: Any) -> None:
        """Log a line, on rank 0."""
        if self.is_main:
            logging.info(message, *args)

    def describe(self, model: nn.Module, remarks: list[str]) -> None:
        """Log what will be trained, on what, and how fast it could go."""
        config, data = self.config, self.data
        allocator = allocator_settings(config.expandable_segments, self.device)
        for remark in (*remarks, data.warning, allocator and f"GPU memory allocator: {allocator}"):
            if remark:
                self.log(remark)
        C, H, W = data.train_files.shape
        self.log("Run folder: %s", self.folder if self.is_main else "")
        self.log("Device: %s, %d rank(s), %d thread(s) each", self.device, self.world.size, torch.get_num_threads())
        self.log(
            "Data: %d training and %d validation samples of %d channels in, %d out, %d x %d of %d x %d; dt is %s",
            *(len(data.train_pairs), len(data.valid_pairs), len(data.in_names), len(data.out_names)),
            *(*data.img_size, H, W, data.hours),
        )
        self.log("Reading: %s", data.reading)
        self.log(
            "Batch: %d = %d a pass x %d data-parallel rank(s) x %d accumulation step(s); "
            "%d iterations an epoch, %d in all",
            *(config.global_batch_size, config.local_batch_size, data.num_shards, config.accumulation_steps),
            *(len(data.train_loader), config.num_iters),
        )
        self.log(
            "Model: %s parameters on each rank, %.4g GFLOP a sample forward; attention kernel: %s",
            f"{sum(p.numel() for p in model.parameters()):,}",
            self.flops / 1e9,
            model.blocks[0].attn.kernel.replace("auto", "SDPA's choice"),
        )
        if self.is_main:
            self.log("Peak of one device for MFU: %.4g TFLOP/s (%s)", self.peak / 1e12, self.peak_source)

    def watch_memory(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Log the memory in use so far, and in each epoch that after its first forward pass and that of each part."""
        self.log("Scaffolding memory high watermark: %f GB.", peak_memory_gb(self.device))
        self.memory = MemoryWatch(model, optimizer, self.device)

    @property
    def epoch(self) -> int:
        """The epoch in progress, counted from 0."""
        return self.iteration // len(self.data.train_loader)

    @property
    def should_stop(self) -> bool:
        return self.iteration >= self.config.num_iters

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of one epoch, or of what is left of the run; then report the epoch's speed and loss."""
        loader, epoch, waited, loop_start = self.data.train_loader, self.epoch, 0.0, None
        first_end = None
        left = min(len(loader), self.config.num_iters - self.iteration)
        epoch_start = time.perf_counter()
        self.memory.look_again()
        bar = tqdm(total=left, desc=f"epoch {epoch + 1}", leave=False, disable=None if self.is_main else True)
        with bar, profiler_window(epoch + 1, self.world.rank):
            reader = loader.epoch(epoch)
            for _ in range(left):
                asked = time.perf_counter()
                batch = next(reader)
                if loop_start is not None:
                    waited += time.perf_counter() - asked
                else:  # the first batch waits for the reader to start
                    loop_start = time.perf_counter()
                yield batch
                bar.update()
                if first_end is None:
                    first_end = time.perf_counter()
            self._write_steps(self.steps.flush())
        now = time.perf_counter()
        self.epoch_end = now
        rate = left / (now - epoch_start)
        self.summary = {
            "event": "epoch",
            "epoch": epoch + 1,
            "iteration": self.iteration,
            "train_loss": sum(self.epoch_losses) / len(self.epoch_losses),
            "samples_per_sec": rate * self.config.global_batch_size,
            "data_wait_frac": waited / (now - loop_start),
            "memory_gb": self.memory.parts(),
        }
        self.epoch_losses = []
        if self.is_main:
            speed = self.summary["samples_per_sec"]
            self.log("Time taken for epoch %i is %f sec, avg %f samples/sec", epoch + 1, now - epoch_start, speed)
            self.log("  Avg train loss=%f", self.summary["train_loss"])
            self.board.add_scalar("Loss/train", self.summary["train_loss"], self.iteration)
            self.board.add_scalar("Avg iters per sec", rate, self.iteration)
            self.board.add_scalar("Avg samples per sec", speed, self.iteration)
            self.log(" Memory usage after forward pass: %f GB.", self.memory.after_forward)
            parts = self.summary["memory_gb"].items()
            self.log("  Memory by part, GB: %s", ", ".join(f"{name} {size:.3f}" for name, size in parts))
            if self.is_first_epoch:  # what compiles did so in its first iteration
                rest = (now - first_end) / max(left - 1, 1)
                self.log("  First iteration: %f sec, those after it: %f sec each", first_end - epoch_start, rest)
            self.is_first_epoch = False

    def after_step(self, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Count an iteration and keep its loss (mean over this rank's samples) and gradient norm."""
        self.iteration += 1
        self._write_steps(self.steps.keep(self.iteration, lr, loss, grad_norm))

    def _write_steps(self, steps: list[dict[str, Any]]) -> None:
        """Write the records of iterations. Raises Refused, on all ranks, where training broke down."""
        for step in steps:
            iteration, loss, norm = step["iteration"], step["loss"], step["grad_norm"]
            self._record(step)
            self.epoch_losses.append(loss)
            self.overflows = 0 if math.isfinite(norm) else self.overflows + 1
            if not math.isfinite(loss) or self.overflows > self.overflows_allowed:
                self._stop_nonfinite(iteration, loss, norm)
            if self.is_main:
                self.board.add_scalar("Loss/step", loss, iteration)
                self.board.add_scalar("Gradient norm", norm, iteration)
                self.board.add_scalar("Learning Rate", step["lr"], iteration)

    def _stop_nonfinite(self, iteration: int, loss: float, norm: float) -> None:
        """Read the batch again and end the run on every rank, naming the value or the likely cause."""
        epoch, step = divmod(iteration - 1, len(self.data.train_loader))
        found = self.data.train_loader.find_nonfinite(epoch, step)
        share_error(found and f"iteration {iteration}: {found}; mend or remove the file")
        share_error(
            f"iteration {iteration} has loss {loss} and gradient norm {norm}, and its data are finite: training "
            f"diverged; lower --lr, set --clip_grad_norm, or use --amp_mode bf16 in place of fp16"
        )

    def after_epoch(self, scores: dict[str, Any], example: tuple[Tensor, Tensor, Tensor]) -> None:
        """Record a validation: its scores, its time, and the picture of `example` (input, target, forecast)."""
        seconds = time.perf_counter() - self.epoch_end
        if not math.isfinite(scores["loss"]):
            loader = self.data.valid_loader
            found = next(filter(None, (loader.find_nonfinite(0, step) for step in range(len(loader)))), None)
            share_error(found and f"validation: {found}; mend or remove the file")
            share_error(
                f"the validation loss is {scores['loss']}, and the data are finite: training diverged; lower --lr"
            )
        if not self.is_main:
            return
        names, stds = self.data.out_names, self.data.stds[self.data.outputs].tolist()
        rate = self.summary["samples_per_sec"]
        self.summary |= {
            "valid_loss": scores["loss"],
            "valid_samples": scores["samples"],
            "valid_rmse": dict(zip(names, scores["rmse"])),
            "valid_rmse_units": {name: x * std for name, x, std in zip(names, scores["rmse"], stds)},
            "valid_acc_timemean": dict(zip(names, scores["acc"])),
            "persistence_rmse": dict(zip(names, scores["persistence"])),
            "mfu": 3 * self.flops * rate / (self.world.size * self.peak),
            "peak_memory_gb": peak_memory_gb(self.device),
        }
        self._record(self.summary)
        self.log("  Avg val loss={}".format(scores["loss"]))
        self.log("  Total validation time: {} sec".format(seconds))
        self.board.add_scalar("Loss/valid", scores["loss"], self.iteration)
        for name, rmse, acc in zip(names, scores["rmse"], scores["acc"]):
            self.board.add_scalar(f"RMSE({name})/valid", rmse, self.iteration)
            self.board.add_scalar(f"ACC_timemean({name})/valid", acc, self.iteration)
        self.board.add_scalar("MFU", self.summary["mfu"], self.iteration)
        self._draw(example)
        self.board.flush()

    def _record(self, event: dict[str, Any]) -> None:
        if self.is_main:
            self.records.write(to_json(event) + "\n")
            self.records.flush()

    def _draw(self, example: tuple[Tensor, Tensor, Tensor]) -> None:
        """Write `pictures/<channel>.png`, the latest, and keep all of them in TensorBoard."""
        data, (inp, target, forecast) = self.data, example
        (self.folder / "pictures").mkdir(exist_ok=True)
        file, t = data.valid_pairs[0]
        for c in data.plot_channels:
            name, origin = data.out_names[c], data.origins[c]
            fields = {
                "input": None if origin < 0 else data.to_units(inp[origin], c),
                "target": data.to_units(target[c], c),
                "forecast": data.to_units(forecast[c], c),
            }
            title = f"{name}, {data.valid_files.date(file, t)} + {data.hours}, after {self.iteration} iterations"
            figure = forecast_figure(fields, data.latitude, data.longitude, name, data.units[c], title)
            pixels = render(figure)
            matplotlib.image.imsave(self.folder / "pictures" / f"{name}.png", pixels)
            self.board.add_image(f"Visualization, {name}", pixels, self.iteration, dataformats="HWC")

    def _say_result(self) -> None:
        """Log the last validation, channel by channel."""
        rmse, persistence = self.summary["valid_rmse"], self.summary["persistence_rmse"]
        units, names = self.summary["valid_rmse_units"], self.data.out_names
        self.log(
            "Validation after %d iterations, RMSE at %s (normalised; in units; persistence):",
            self.iteration,
            self.data.hours,
        )
        for name, unit in zip(names, self.data.units):
            base = "none" if persistence[name] is None else f"{persistence[name]:.4f}"
            self.log("  %-10s %.4f   %.4g %s   %s", name, rmse[name], units[name], unit, base)
        known = [name for name in names if persistence[name]]
        if known:
            ratio = sum(rmse[n] for n in known) / sum(persistence[n] for n in known)
            self.log("  Mean RMSE over channels: %.3f of persistence's", ratio)
        for c in self.data.plot_channels:
            self.log("  Picture: %s", self.folder / "pictures" / f"{self.data.out_names[c]}.png")
        self.log("  Records: %s", self.folder / "metrics.jsonl")
