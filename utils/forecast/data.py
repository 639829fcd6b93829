"""The data of an evaluation: the states that forecasts start from, and what happened afterwards.

Shapes:  B forecasts of one batch   K lead times   C channels   H W rows, columns
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from utils.config.settings import Config
from utils.data.batches import Batch, BatchReader, Reading, Samples
from utils.data.fields import Fields, unlike
from utils.data.files import Files
from utils.data.forcings import ForcingFields
from utils.data.frames import FrameReader, OpenFiles
from utils.data.loader import read_ahead
from utils.data.read_ahead import Read
from utils.data.to_device import DeviceCopies, normalisers
from utils.data.variables import missing
from utils.errors import ReadError
from utils.forecast.climatology import Climatology
from utils.forecast.ensemble import MEMBER, Perturbations
from utils.forecast.model import InUnits
from utils.forecast.settings import Evaluation

SHOWN_HOURS = (24, 72)
LARGEST_MAP = 720  # columns


class StepReader(BatchReader):
    """Reads forecasts step by step: a batch is their initial states, as inputs, or what is true later.

    That are targets, and what a model reads and does not forecast.
    """

    both = False

    @staticmethod
    def frames_of(steps: int) -> tuple[int, int, int]:
        return 1, 1, 1

    def jobs(self, slot: int, frames: Sequence[np.ndarray], k: int) -> list[Read]:
        """Return the reads for rows (file, t), which are the k-th step of forecasts."""
        self.note_times(slot, frames)
        return [
            Read(slot, part, place, int(file), int(t), request)
            for place, (file, t) in enumerate(frames)
            for part in ((1, 2) if k else (0,))
            for request in self.readers[part].requests
        ]


class Forecasts:
    """What forecasts of a model have in common, however they begin.

    Args:
        longest: lead time, in hours.
        origin: what they start from, in words.

    Raises ValueError where the longest lead time is no multiple of a step.
    """

    def __init__(self, fields: Fields, longest: float, origin: str):
        self.fields, self.origin, self.steps = fields, origin, round(longest / fields.step_hours)
        if self.steps < 1 or not math.isclose(self.steps * fields.step_hours, longest, rel_tol=1e-4):
            raise ValueError(f"lead_hours is {longest:g}, and a step {fields.hours}: take a multiple of it")
        self.lead_hours = [fields.step_hours * (k + 1) for k in range(self.steps)]
        self.map_stride = -(-len(fields.longitude) // LARGEST_MAP)  # of the rows and columns that maps show
        # What is shown in pictures and as spectra: the first step, the last one, and some between.
        shown = (k for k, hours in enumerate(self.lead_hours) if hours in SHOWN_HOURS)
        self.shown_steps = sorted({0, self.steps - 1, *shown})

    def date(self, forecast: int, k: int = 0) -> str:
        """Return the date that a forecast starts from, or that its k-th step is for."""
        raise NotImplementedError

    def seconds(self, forecast: int, k: int = 0) -> int | None:
        """Return the same in seconds since 1970-01-01; None where nobody knows."""
        raise NotImplementedError

    def __len__(self) -> int:
        """The number of forecasts, N."""
        raise NotImplementedError

    @property
    def period(self) -> str:
        """How many forecasts there are, and when they begin."""
        if len(self) == 1:
            return f"1 forecast that starts from {self.date(0)}"
        return f"{len(self)} forecasts that start from {self.date(0)} to {self.date(len(self) - 1)}"

    def begin(self, batches: list[list[int]]) -> None:
        """Begin to read the states of these forecasts."""

    def close(self) -> None:
        """End what reads."""


class ForecastData(Forecasts):
    """The files of `inf_data_path`, as forecasts of a model and the truth beside them.

    Args:
        settings: says how far forecasts go, where they begin, and from what anomalies are counted.
        info: of the checkpoint, which tells what the training files held; None where nobody knows.

    Raises ValueError, in one line with the remedy, where the files do not fit the model, and where they are too short.
    """

    def __init__(self, config: Config, settings: Evaluation, device: torch.device, info: dict | None = None):
        valid = (info or {}).get("config", {}).get("valid_data_path")
        other = f" (such as {valid}, those of the validation)" if valid and Path(valid).is_dir() else ""
        if config.inf_data_path is None:
            raise ValueError(f"inf_data_path is None: give the folder of the files to forecast, --inf_data_path{other}")
        files = self.files = Files.open(config.inf_data_path, f"check --data_dir, or give --inf_data_path{other}")
        fields = Fields.open(config, files)
        self.config, self.device = config, device
        self.normalise, _, self.normalise_forced = normalisers(fields, device, config.enable_jit)  # in place
        super().__init__(fields, settings.lead_hours, config.inf_data_path)
        self._compare((info or {}).get("data", {}))
        if fields.has_time and any(times is None for times in files.times):
            raise ValueError(f"some files in {config.inf_data_path} store time, and some not: give files of one kind")
        self.origins = torch.tensor(fields.origins, device=device)
        self.stretches = files.stretches(config.dt, self.steps)[:: settings.stride]
        if not len(self.stretches):
            raise ValueError(
                f"{config.inf_data_path} holds no {self.steps * config.dt + 1} steps in a row (files of "
                f"{', '.join(map(str, files.steps[:5]))} steps), and {settings.lead_hours:g} h take as many: "
                f"lower --lead_hours, or give longer files"
            )
        opened, (rows, columns) = OpenFiles(files), config.img_size
        used = fields.inputs, fields.outputs, fields.forced
        self.readers = tuple(FrameReader(files, channels, range(rows), columns, opened) for channels in used)
        self.frames: Iterator[Batch] | None = None
        self.copies = DeviceCopies(device) if device.type == "cuda" else None
        self.climate = Climatology(fields, settings.climatology, device, config.local_batch_size + 1)
        self.in_units = InUnits(fields, device)
        self.beside = ForcingFields(fields.forcings).to(device)
        is_forecast = np.isin(fields.inputs, fields.outputs)
        scale = np.where(is_forecast, fields.stds[fields.inputs], 0)
        self.perturbations = Perturbations(self.readers[0], settings.perturb or 0, scale, device)

    def __len__(self) -> int:
        return len(self.stretches)

    def close(self) -> None:
        """End the readers, and close the climatology."""
        if self.frames is not None:
            self.frames.close()
        self.climate.close()

    def _compare(self, trained: dict) -> None:
        """Raise ValueError where the training files held something else than these."""
        what = unlike(self.fields, trained)
        if what == "statistics":
            raise ValueError(
                f"{self.config.global_means_path} and its neighbours are not the statistics that the model was "
                f"trained with: give those (--global_means_path, --global_stds_path, or --data_dir)"
            )
        if what:
            raise ValueError(
                f"{self.files.paths[0]} has the {what} {self.fields.description[what]}, and the model was trained on "
                f"{trained[what]}: give files of the same kind (--inf_data_path)"
            )

    def date(self, forecast: int, k: int = 0) -> str:
        return self.files.date(*self.stretches[forecast, k])

    def seconds(self, forecast: int, k: int = 0) -> int | None:
        file, t = self.stretches[forecast, k]
        return int(self.files.times[file][t]) if self.fields.has_time else None

    def begin(self, batches: list[list[int]]) -> None:
        """Begin to read the frames of these forecasts, ahead of `read`.

        Raises OSError where the buffers do not fit into memory.
        """
        depth = max(self.config.num_data_workers, 1)
        if all(reader.is_direct for reader in self.readers):
            depth = self.config.read_depth or depth
        samples = Samples(self.readers, self.stretches[:, 0], self.config.dt)
        size = max(map(len, batches), default=1)
        slots = 2 + -(-depth // (size * len(self.readers[1].requests)))  # in use, ready, and what keeps readers busy
        reader = StepReader(samples, size, slots, Reading(depth, pin=self.device.type == "cuda"))
        steps = ((self.stretches[numbers, k], k) for numbers in batches for k in range(self.steps + 1))
        self.frames = read_ahead(reader, itertools.chain(steps, itertools.repeat(((), 0))), depth, in_use=1)

    def read(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the initial states [B, C_in, H, W], then the truth at each lead time [B, C_out, H, W], as stored.

        With each comes, normalised, [B, C, H, W], what else is known of its time: with the truth the inputs that are
        not forecast, with both the channels beside the state. They are those of the next batch of `begin`, on the
        device, each valid until the next one is asked for. Raises ReadError for a file that cannot be read.
        """
        for k in range(self.steps + 1):
            batch = next(self.frames)
            raw = [batch.target, batch.forced, batch.times] if k else [batch.inp, batch.times]
            if self.copies is not None:
                self.copies.pace()
                raw = self.copies.take(batch, *raw)
            known = self.normalise_forced(raw[1]) if k else raw[0][:, :0].to(torch.get_default_dtype())
            yield raw[0], self.beside.added(known, raw[-1])

    def as_input(self, raw: Tensor, known: Tensor) -> Tensor:
        """Return what the model reads first, normalised, of initial states and what else is known of their time."""
        x = self.normalise(raw.clone())  # a frame is valid until the next one comes
        return torch.cat([x, known], dim=1) if known.shape[1] else x

    def begun(self, name: str, first: Tensor, numbers: list[int]) -> Tensor:
        """Return what a model of this name reads first, of what all would read: members of an ensemble, their own."""
        if not (self.perturbations.size and name.startswith(MEMBER)):
            return first
        state = first.clone()
        state[:, : len(self.fields.inputs)] += self.perturbations.at(numbers, int(name.removeprefix(MEMBER)) - 1)
        return state

    def find_nonfinite(self, forecast: int) -> None:
        """Raise ReadError, with the place, for the first missing value, not finite or huge, of a forecast's frames."""
        for k, (file, t) in enumerate(self.stretches[forecast]):
            for part in (1, 2) if k else (0,):
                frame = self.readers[part].read_frame(file, t)
                if (bad := missing(frame)).any():
                    c, y, x = np.argwhere(bad)[0]
                    name = (self.fields.in_names, self.fields.out_names, self.fields.forced_names)[part][c]
                    raise ReadError(
                        f"{self.files.paths[file]}: frame {t}, channel {name!r}, row {y}, column {x} is "
                        f"{frame[c, y, x]}: mend the file, or leave it out"
                    )

    def persistence(self, raw: Tensor) -> Tensor:
        """Return initial states as a forecast, [B, C_out, H, W]: nothing changes. NaN for what is no input."""
        fields = raw.index_select(1, self.origins.clamp(min=0))
        return fields.masked_fill_((self.origins < 0).view(-1, 1, 1), torch.nan)
