"""The data of an evaluation: the states that forecasts start from, and what happened afterwards.

Shapes:  B forecasts of one batch   K lead times   C channels   H W rows, columns
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from utils.config.settings import Config
from utils.data.fields import Fields
from utils.data.files import Files
from utils.data.frames import FrameReader, OpenFiles
from utils.data.to_device import normalisers
from utils.errors import ReadError
from utils.forecast.climatology import Climatology
from utils.forecast.settings import Evaluation

SHOWN_HOURS = (24, 72)
LARGEST_MAP = 720  # columns


class ForecastData:
    """The files of `inf_data_path`, as forecasts of a model and the truth beside them.

    Args:
        settings: says how far forecasts go, where they begin, and from what anomalies are counted.
        info: of the checkpoint, which tells what the training files held; None where nobody knows.

    Raises ValueError, in one line with the remedy, where the files do not fit the model, and where they are too short.
    """

    def __init__(self, config: Config, settings: Evaluation, device: torch.device, info: dict | None = None):
        if config.inf_data_path is None:
            raise ValueError("inf_data_path is None: give the folder of the files to forecast from (--inf_data_path)")
        files = self.files = Files.open(config.inf_data_path, "check --data_dir or --inf_data_path")
        fields = Fields.open(config, files)
        self.config, self.device, self.fields = config, device, fields
        self.normalise, _ = normalisers(fields, device, config.enable_jit)  # in place
        self._compare((info or {}).get("data", {}))
        self.steps = round(settings.lead_hours / fields.step_hours)
        if self.steps < 1 or not math.isclose(self.steps * fields.step_hours, settings.lead_hours, rel_tol=1e-4):
            raise ValueError(f"lead_hours is {settings.lead_hours:g}, and a step {fields.hours}: take a multiple of it")
        if fields.has_time and any(times is None for times in files.times):
            raise ValueError(f"some files in {config.inf_data_path} store time, and some not: give files of one kind")
        self.lead_hours = [fields.step_hours * (k + 1) for k in range(self.steps)]
        if self.steps > 1 and set(fields.in_names) != set(fields.out_names):
            raise ValueError(
                f"the model reads {len(fields.in_names)} channels and forecasts {len(fields.out_names)}, not the same "
                f"ones: its forecast is no input for a next step; take one step, --lead_hours {fields.step_hours:g}"
            )
        # The next input's channels among those of a forecast.
        places = [fields.out_names.index(name) for name in fields.in_names] if self.steps > 1 else []
        self.feedback = torch.tensor(places, dtype=torch.int64, device=device)
        self.map_stride = -(-config.img_size[1] // LARGEST_MAP)  # of the rows and columns that maps show
        # What is shown in pictures and as spectra: the first step, the last one, and some between.
        shown = (k for k, hours in enumerate(self.lead_hours) if hours in SHOWN_HOURS)
        self.shown_steps = sorted({0, self.steps - 1, *shown})
        self.stretches = files.stretches(config.dt, self.steps)[:: settings.stride]
        if not len(self.stretches):
            raise ValueError(
                f"{config.inf_data_path} holds no {self.steps * config.dt + 1} steps in a row (files of "
                f"{', '.join(map(str, files.steps[:5]))} steps), and {settings.lead_hours:g} h take as many: "
                f"lower --lead_hours, or give longer files"
            )
        opened, (rows, columns) = OpenFiles(files), config.img_size
        self.readers = [FrameReader(files, c, range(rows), columns, opened) for c in (fields.inputs, fields.outputs)]
        self.ahead = ThreadPoolExecutor(1, "reading")
        self.climate = Climatology(fields, settings.climatology, device, config.local_batch_size + 1)
        stats = (x[fields.outputs].astype(np.float64) for x in (fields.means, fields.stds))
        self.out_mean, self.out_std = (torch.from_numpy(x).to(device).view(-1, 1, 1) for x in stats)

    def __len__(self) -> int:
        """The number of forecasts, N."""
        return len(self.stretches)

    def close(self) -> None:
        """End the thread that reads, and close the climatology."""
        self.ahead.shutdown()
        self.climate.close()

    def _compare(self, trained: dict) -> None:
        """Raise ValueError where the training files held something else than these."""
        here = self.fields.description
        for what, there in trained.items():
            if here[what] == there or None in (here[what], there):
                continue
            if what == "statistics":
                raise ValueError(
                    f"{self.config.global_means_path} and its neighbours are not the statistics that the model was "
                    f"trained with: give those (--global_means_path, --global_stds_path, or --data_dir)"
                )
            raise ValueError(
                f"{self.files.paths[0]} has the {what} {here[what]}, and the model was trained on {there}: "
                f"give files of the same kind (--inf_data_path)"
            )

    @property
    def period(self) -> str:
        """How many forecasts there are, and when they begin."""
        return f"{len(self)} forecasts that start from {self.date(0)} to {self.date(len(self) - 1)}"

    def date(self, forecast: int, k: int = 0) -> str:
        """Return the date that a forecast starts from, or that its k-th step is for."""
        return self.files.date(*self.stretches[forecast, k])

    def seconds(self, forecast: int, k: int = 0) -> int | None:
        """Return the same in seconds since 1970-01-01; None where the files store no time."""
        file, t = self.stretches[forecast, k]
        return int(self.files.times[file][t]) if self.fields.has_time else None

    def read(self, forecasts: list[int]) -> Iterator[Tensor]:
        """Yield the initial states [B, C_in, H, W], then the truth at each lead time [B, C_out, H, W], as stored.

        On the device. The next one is read meanwhile. Raises ReadError for a file that cannot be read.
        """
        frames = self.stretches[forecasts]

        def fetch(k: int) -> Tensor:
            return torch.from_numpy(np.stack([self._frame(file, t, is_truth=k > 0) for file, t in frames[:, k]]))

        coming = self.ahead.submit(fetch, 0)
        for k in range(self.steps + 1):
            raw = coming.result()
            if k < self.steps:
                coming = self.ahead.submit(fetch, k + 1)
            yield raw.to(self.device)

    def _frame(self, file: int, t: int, is_truth: bool) -> np.ndarray:
        """Return what a file holds. Raises ReadError, also for values that are not finite."""
        frame = self.readers[is_truth].read_frame(file, t)
        if not np.isfinite(frame).all():
            c, y, x = np.argwhere(~np.isfinite(frame))[0]
            name = (self.fields.out_names if is_truth else self.fields.in_names)[c]
            raise ReadError(
                f"{self.files.paths[file]}: frame {t}, channel {name!r}, row {y}, column {x} is {frame[c, y, x]}: "
                f"mend the file, or leave it out"
            )
        return frame

    def persistence(self, raw: Tensor) -> Tensor:
        """Return initial states as a forecast, [B, C_out, H, W]: nothing changes. NaN for what is no input."""
        fields = raw[:, self.fields.origins]
        fields[:, [c for c, origin in enumerate(self.fields.origins) if origin < 0]] = torch.nan
        return fields

    def in_units(self, forecast: Tensor) -> Tensor:
        """Return normalised forecasts [B, C_out, H, W] in units, in float32: what is written, and what is judged."""
        return (forecast.double() * self.out_std + self.out_mean).float()
