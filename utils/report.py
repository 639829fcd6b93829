"""What a run tells: its log, metrics.jsonl, TensorBoard and pictures. Rank 0 writes them."""

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib.image
import torch
from torch import Tensor, nn

from utils.config import Config
from utils.curves import Curves
from utils.device import allocator_settings
from utils.errors import Ended
from utils.files import cut_records, to_json
from utils.launch import World
from utils.logging_utils import close_log, open_log
from utils.plots import forecast_figure, render
from utils.profiling import peak_flops
from utils.timeline import span
from utils.weather_data import WeatherData


class Report:
    """The files of a run.

    Args:
        folder: the run's.
        flops: floating point operations of one forward pass on one sample.
    """

    def __init__(self, folder: Path, config: Config, world: World, device: torch.device, data: WeatherData, flops: int):
        self.folder, self.config, self.world, self.device, self.data = folder, config, world, device, data
        self.flops = flops
        self.peak, self.peak_source = peak_flops(device, config.amp_mode, config.tf32)
        self.handlers = open_log(folder / "out.log")
        self.records: BinaryIO | None = None
        self.unwritten, self.lock = b"", threading.Lock()  # lines that the disk has not taken; two threads write
        self.curves: Curves | None = None
        self.last: dict[str, Any] = {}  # the record of the last epoch

    def open_records(self, iteration: int, epochs: int) -> None:
        """Begin to write after so many iterations and epochs; what an earlier process wrote of later ones is void."""
        path, is_redone = self.folder / "metrics.jsonl", False
        if iteration:
            kept, void = cut_records(path, iteration, epochs)
            # A validation whose checkpoint was not written: its scores are on the board at the last step that counts.
            is_redone = any(event["event"] == "epoch" and event["iteration"] == iteration for event in void)
        self.records = path.open("ab", buffering=0)
        self.curves = Curves(self.folder, self.config, iteration + (not is_redone) if iteration else None)
        if is_redone:
            self._plot_step(next(event for event in reversed(kept) if event["event"] == "step"))

    def sync(self) -> None:
        """Bring all records up to here to the disk. Raises OSError where it does not take them."""
        self.curves.sync()
        self._write_lines()
        os.fsync(self.records.fileno())

    def send(self) -> None:
        """Send to trackers what they have not got. In the thread that trains."""
        self.curves.send()

    def close(self, error: BaseException | None = None) -> None:
        """Close the files; out.log gets the error that ends the run."""
        if self.records is not None:
            self.records.close()
        if self.curves is not None:
            self.curves.close("FINISHED" if error is None else "KILLED" if isinstance(error, Ended) else "FAILED")
        terminal, file = self.handlers
        close_log([terminal])
        if error is not None and not isinstance(error, Ended):
            logging.error("%s: %s", type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())]))
        close_log([file])

    def describe(self, model: nn.Module) -> None:
        """Log what will be trained, on what, and how fast it could go."""
        config, data = self.config, self.data
        allocator = allocator_settings(config.expandable_segments, self.device)
        for remark in (data.warning, allocator and f"GPU memory allocator: {allocator}"):
            if remark:
                logging.info(remark)
        C, H, W = data.train_files.shape
        logging.info("Run folder: %s", self.folder)
        logging.info("Device: %s, %d rank(s), %d thread(s) each", self.device, self.world.size, torch.get_num_threads())
        logging.info(
            "Data: %d training and %d validation samples of %d channels in, %d out, %d x %d of %d x %d; dt is %s",
            *(len(data.train_pairs), len(data.valid_pairs), len(data.in_names), len(data.out_names)),
            *(*data.img_size, H, W, data.hours),
        )
        logging.info("Reading: %s", data.reading)
        logging.info(
            "Batch: %d = %d a pass x %d data-parallel rank(s) x %d accumulation step(s); "
            "%d iterations an epoch, %d in all",
            *(config.global_batch_size, config.local_batch_size, data.num_shards, config.accumulation_steps),
            *(len(data.train_loader), config.num_iters),
        )
        logging.info(
            "Model: %s parameters on each rank, %.4g GFLOP a sample forward; attention kernel: %s",
            f"{sum(p.numel() for p in model.parameters()):,}",
            self.flops / 1e9,
            model.blocks[0].attn.kernel.replace("auto", "SDPA's choice"),
        )
        logging.info("Peak of one device for MFU: %.4g TFLOP/s (%s)", self.peak / 1e12, self.peak_source)

    def step(self, record: dict[str, Any]) -> None:
        """Record an iteration."""
        self.write(record)
        self._plot_step(record)

    def _plot_step(self, record: dict[str, Any]) -> None:
        names = {"Loss/step": "loss", "Gradient norm": "grad_norm", "Learning Rate": "lr"}
        self.curves.scalars({name: record[key] for name, key in names.items()}, record["iteration"])

    @span("logging")
    def speed(self, summary: dict[str, Any], seconds: float, iterations: int, after_forward: float) -> None:
        """Log how fast the iterations of an epoch were, and their loss."""
        at, rate = summary["iteration"], summary["samples_per_sec"]
        if iterations:
            logging.info("Time taken for epoch %i is %f sec, avg %f samples/sec", summary["epoch"], seconds, rate)
            self.curves.scalars({"Avg iters per sec": iterations / seconds, "Avg samples per sec": rate}, at)
        logging.info("  Avg train loss=%f", summary["train_loss"])
        logging.info(" Memory usage after forward pass: %f GB.", after_forward)
        parts = summary["memory_gb"].items()
        logging.info("  Memory by part, GB: %s", ", ".join(f"{name} {size:.3f}" for name, size in parts))

    @span("logging")
    def validation(
        self,
        summary: dict[str, Any],
        scores: dict[str, Any],
        example: tuple[Tensor, Tensor, Tensor],
        seconds: float,
        averaged: dict[str, Any] | None,
    ) -> None:
        """Record an epoch and its validation, and draw `example` (input, target, forecast).

        `averaged` are the scores of the moving average of the weights, where there is one.
        """
        names, stds = self.data.out_names, self.data.stds[self.data.outputs].tolist()
        at, rate = summary["iteration"], summary["samples_per_sec"]
        self.last = summary | {
            "valid_loss": scores["loss"],
            "valid_samples": scores["samples"],
            "valid_rmse": dict(zip(names, scores["rmse"])),
            "valid_rmse_units": {name: x * std for name, x, std in zip(names, scores["rmse"], stds)},
            "valid_acc_timemean": dict(zip(names, scores["acc"])),
            "persistence_rmse": dict(zip(names, scores["persistence"])),
            "mfu": rate and 3 * self.flops * rate / (self.world.size * self.peak),
        }
        if averaged:
            self.last["valid_loss_ema"] = averaged["loss"]
            self.last["valid_rmse_ema"] = dict(zip(names, averaged["rmse"]))
        self.write(self.last)
        logging.info("  Avg val loss={}".format(scores["loss"]))
        if averaged:
            logging.info("  Avg val loss of the moving average={}".format(averaged["loss"]))
        logging.info("  Total validation time: {} sec".format(seconds))
        curves = {"Loss/train": summary["train_loss"], "Loss/valid": scores["loss"]}
        curves |= {f"Memory/{part} [GiB]": size for part, size in summary["memory_gb"].items()}
        speeds = {"Speed/validation": "valid_samples_per_sec", "Speed/readers": "loader_samples_per_sec"}
        curves |= {name: summary[key] for name, key in speeds.items() if summary[key]}
        for name, rmse, acc in zip(names, scores["rmse"], scores["acc"]):
            curves |= {f"RMSE({name})/valid": rmse, f"ACC_timemean({name})/valid": acc}
        if averaged:
            curves |= {f"RMSE({name})/valid_ema": rmse for name, rmse in zip(names, averaged["rmse"])}
            curves["Loss/valid_ema"] = averaged["loss"]
        self.curves.scalars(curves | ({"MFU": self.last["mfu"]} if self.last["mfu"] else {}), at)
        self._draw(example, at)
        self.curves.sync()
        self.curves.send()

    def write(self, event: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl. What the disk does not take waits, and no checkpoint counts meanwhile."""
        with self.lock:
            self.unwritten += (to_json(event) + "\n").encode()
        with contextlib.suppress(OSError):
            self._write_lines()

    def _write_lines(self) -> None:
        with self.lock:
            while self.unwritten:
                self.unwritten = self.unwritten[self.records.write(self.unwritten) :]

    def _draw(self, example: tuple[Tensor, Tensor, Tensor], iteration: int) -> None:
        """Write `pictures/<channel>.png`, the latest, and keep all of them with the curves."""
        data, (inp, target, forecast) = self.data, example
        file, t = data.valid_pairs[0]
        for c in data.plot_channels:
            name, origin = data.out_names[c], data.origins[c]
            fields = {
                "input": None if origin < 0 else data.to_units(inp[origin], c),
                "target": data.to_units(target[c], c),
                "forecast": data.to_units(forecast[c], c),
            }
            title = f"{name}, {data.valid_files.date(file, t)} + {data.hours}, after {iteration} iterations"
            figure = forecast_figure(fields, data.latitude, data.longitude, name, data.units[c], title)
            pixels = render(figure)
            with self.curves.if_there_is_room():
                (self.folder / "pictures").mkdir(exist_ok=True)
                matplotlib.image.imsave(self.folder / "pictures" / f"{name}.png", pixels)
            self.curves.image(f"Visualization, {name}", pixels, iteration)

    @span("logging")
    def costs(self, record: dict[str, Any]) -> None:
        """Record what an epoch cost: its time by part, or what it took of the machine."""
        self.write(record)
        if record["event"] == "time":
            curves = {f"Time/{part} [s]": seconds for part, seconds in record["seconds"].items()}
        else:
            names = set(record) - {"event", "epoch", "iteration", "seconds"}
            curves = {f"System/{name}": record[name] for name in sorted(names)}
        self.curves.scalars(curves, record["iteration"])

    def tables(self, lines: list[str], step: int) -> None:
        """Show lines that are laid out already, as text beside the curves."""
        self.curves.text("Report", "\n".join(f"    {line}" for line in lines), step)

    def result(self) -> None:
        """Log the last validation, channel by channel."""
        rmse, persistence = self.last["valid_rmse"], self.last["persistence_rmse"]
        units, names = self.last["valid_rmse_units"], self.data.out_names
        logging.info(
            "Validation after %d iterations, RMSE at %s (normalised; in units; persistence):",
            self.last["iteration"],
            self.data.hours,
        )
        for name, unit in zip(names, self.data.units):
            base = "none" if persistence[name] is None else f"{persistence[name]:.4f}"
            logging.info("  %-10s %.4f   %.4g %s   %s", name, rmse[name], units[name], unit, base)
        known = [name for name in names if persistence[name]]
        if known:
            ratio = sum(rmse[n] for n in known) / sum(persistence[n] for n in known)
            logging.info("  Mean RMSE over channels: %.3f of persistence's", ratio)
        for c in self.data.plot_channels:
            logging.info("  Picture: %s", self.folder / "pictures" / f"{self.data.out_names[c]}.png")
        logging.info("  Records: %s", self.folder / "metrics.jsonl")
