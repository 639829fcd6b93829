"""The data of a run: training and validation sets, and the way to the device; and what a run is told, the job."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from utils.config.settings import Config
from utils.data.batches import Batch, Reading, Samples
from utils.data.fields import Fields
from utils.data.files import Files
from utils.data.forcings import ForcingFields
from utils.data.frame_sharing import FrameSharing
from utils.data.frames import FrameReader, OpenFiles
from utils.data.loader import Loader
from utils.data.loader_dali import DaliLoader, check_dali
from utils.data.loss_weights import distance
from utils.data.order import SampleOrder
from utils.data.staging import stage
from utils.data.to_device import DeviceCopies, normalisers
from utils.data.token_shard import TokenShard
from utils.metrics import Scores, latitude_weights
from utils.ranks.world import World
from utils.sphere import check_round


@dataclass(eq=False)
class WeatherData:
    """The training and validation sets of a configuration, for one of `num_shards` data-parallel ranks.

    Raises ValueError, in one line with the remedy, for whatever is wrong with the files (see `Files`) and with what
    they stand for (see `Fields`).
    """

    config: Config
    device: torch.device = torch.device("cpu")
    num_shards: int = 1
    shard_id: int = 0
    tokens: TokenShard | None = None  # those of each image that this rank holds; all of them by default
    group: dist.ProcessGroup | None = None  # the data-parallel ranks; all ranks by default
    sharing: FrameSharing | None = None  # the ranks that work on the same samples, where there are several

    def __post_init__(self):
        config, device = self.config, self.device
        if config.data_loader_config == "dali":
            check_dali()
        is_first = self.shard_id == 0
        self.train_files = Files.open(config.train_data_path, "check --data_dir or --train_data_path", is_first)
        self.valid_files = Files.open(config.valid_data_path, "check --data_dir or --valid_data_path", is_first)
        self.valid_files.check_same(self.train_files, "training and validation files must agree")
        steps = [files.step_seconds() for files in (self.train_files, self.valid_files)]
        if None not in steps and steps[0] != steps[1]:
            raise ValueError(
                f"the training files store a step of {steps[0] / 3600:g} h, the validation files "
                f"{steps[1] / 3600:g} h: dt counts stored steps, so they must agree"
            )
        self.fields = Fields.open(config, self.train_files)
        self.fields.forcings.check_times(self.valid_files)
        if config.patch_overlap:
            check_round(self.fields.longitude, "patch_overlap")
        self.tokens = self.tokens or TokenShard(config.img_size, config.patch_size, overlap=config.patch_overlap)
        longest = config.longest_rollout
        self.normalise = normalisers(self.fields, device, config.enable_jit)
        self.beside = ForcingFields(self.fields.forcings, self._cut_input).to(device)
        self.train_pairs = self.train_files.samples(config.dt, longest)[: config.limit_nsamples]
        self.valid_pairs = self.valid_files.samples(config.dt)[: config.limit_nsamples_val]
        if len(self.train_pairs) < config.global_batch_size:
            raise ValueError(
                f"{config.train_data_path} gives {len(self.train_pairs)} samples at dt {config.dt}"
                f"{f' and {longest} rollout_steps' * (longest > 1)}, less than one global batch of "
                f"{config.global_batch_size}: {', '.join(self._advice())}"
            )
        if len(self.valid_pairs) == 0:
            raise ValueError(f"{config.valid_data_path} gives no sample at dt {config.dt}: add files or lower --dt")
        if config.stage_dir is not None:
            self.train_files = stage(self.train_files, self.train_pairs[:, 0], config.stage_dir)
            self.valid_files = stage(self.valid_files, self.valid_pairs[:, 0], config.stage_dir)
        self.copies = DeviceCopies(device) if device.type == "cuda" else None
        self.train_loader = self._loader(self.train_files, self.train_pairs, shuffle=True)
        self.valid_loader = self._loader(self.valid_files, self.valid_pairs, shuffle=False)

    def _advice(self) -> Iterator[str]:
        """Yield what gives more samples, or needs less."""
        config = self.config
        yield "take more files"
        if config.limit_nsamples is not None:
            yield "raise --limit_nsamples"
        if config.dt > 1:
            yield "lower --dt"
        if config.longest_rollout > 1:
            yield "lower --rollout_steps"
        yield "or lower --global_batch_size (or --local_batch_size, --accumulation_steps)"

    @property
    def reading(self) -> str:
        """Who reads, and how much memory that takes, in words."""
        train, valid = self.train_loader, self.valid_loader
        who = "threads" if train.is_direct else "processes"
        how = f"{train.depth} read(s) at once ahead of the loop, by {who}" if train.depth else "in the loop"
        size = train.reader.ring.nbytes + valid.reader.ring.nbytes
        batches = f"{len(train.reader.batches)} training and {len(valid.reader.batches)} validation batches"
        return f"{how}; {self.config.data_loader_config} loader; memory for {batches}, {size / 2**30:.3f} GiB"

    def _loader(self, files: Files, pairs: np.ndarray, shuffle: bool) -> Loader:
        config = self.config
        is_shared = self.sharing is not None and self.sharing.helps(files.chunk_rows)
        H, W = config.img_size
        rows, opened = (range(H),) * 2 if is_shared else (self.tokens.input_rows, self.tokens.rows), OpenFiles(files)
        used = self.fields.inputs, self.fields.outputs, self.fields.forced
        read = zip(used, (rows[0], rows[1], rows[0]))
        readers = tuple(FrameReader(files, channels, there, W, opened) for channels, there in read)
        batch_size = config.global_batch_size if shuffle else config.local_batch_size * self.num_shards
        order = SampleOrder(len(pairs), batch_size, shuffle, config.seed, self.num_shards, self.shard_id)
        share = self.sharing.share(batch_size // self.num_shards) if is_shared else slice(None)
        how = Reading(config.num_data_workers, config.read_depth, self.device.type == "cuda", share)
        samples = Samples(readers, pairs, config.dt)
        if shuffle:
            samples = samples._replace(steps_at=config.steps_at, longest=config.longest_rollout)
        if config.data_loader_config == "dali":
            stats = tuple((self.fields.means[channels], self.fields.stds[channels]) for channels in used)
            return DaliLoader(samples, order, how, stats, self.device)
        return Loader(samples, order, how)

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input [B, C_in, H, W], the targets after each step [K, B, C_out, H, W] and, after each but the
        last, what is read and not forecast, [K-1, B, C_f, H, W]; or their shards; normalised on the device. Channels
        beside the state, for the time of each, are the last of the first and of the third.

        They travel as they are stored (float16 as float16) and arrive in the default dtype. On a GPU the copy goes
        along while the step before computes, and the host waits here for the one before that. What this returns is
        valid until the next batch passes here, and each batch passes once: its memory is used again, on a CPU that of
        the batch itself.
        """
        *raw, times = batch.inp, batch.target, batch.forced, batch.times
        if self.copies is not None:
            self.copies.pace()
            if not batch.is_normalised:
                *raw, times = self.copies.take(batch)
        inp, target, forced = (self._mine(x, batch, is_input) for x, is_input in zip(raw, (True, False, True)))
        if batch.is_normalised:
            inp, target, forced = (x.to(torch.get_default_dtype()) for x in (inp, target, forced))
        else:
            inp, target, forced = (normalise(x) for normalise, x in zip(self.normalise, (inp, target, forced)))
        if not self.fields.forcings.names:
            return inp, target, forced
        times = times.to(self.device, non_blocking=True)
        ahead = 3600 * self.fields.step_hours * torch.arange(1, len(target), device=self.device)
        return self.beside.added(inp, times), target, self.beside.added(forced, times + ahead[:, None])

    def _cut_input(self, image: Tensor) -> Tensor:
        """Return what this rank's input is of an image [..., H, W]."""
        rows = self.tokens.input_rows
        return self.tokens.cut_input(image[..., rows.start : rows.stop, :])

    def _mine(self, x: Tensor, batch: Batch, is_input: bool) -> Tensor:
        """Return this rank's part of what was read of images."""
        if batch.is_shared:
            return self.sharing.exchange(x, len(batch.counts), is_input)
        return self.tokens.cut_input(x) if is_input else self.tokens.cut(x)

    def scores(self) -> Scores:
        """Return empty sums of the validation metrics."""
        return Scores(*self._scored, self.tokens.sum, self.group)

    def distance(self, **shared: Callable) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the distance of forecasts from targets that training makes small, for this rank's tokens.

        Where others hold the rest of an image, `shared` are the functions that bring it in: `total` and `rows`.
        """
        return distance(self.config, self.fields, self.tokens, self.device, **shared)

    @cached_property
    def _scored(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """What scores are counted from, on the device: weights and climatology of this rank's tokens, and origins."""
        kind, (H, W) = {"device": self.device, "dtype": torch.get_default_dtype()}, self.config.img_size
        weights = latitude_weights(torch.tensor(self.fields.latitude, **kind))[:, None].expand(H, W) / (H * W)
        usual, rows = self.fields.climatology, slice(self.tokens.rows.start, self.tokens.rows.stop)
        climatology = None if usual is None else self.tokens.cut(torch.tensor(usual, **kind)[..., rows, :])
        weights = self.tokens.cut(weights[..., rows, :])
        return weights, climatology, torch.tensor(self.fields.origins, device=self.device)


@dataclass(frozen=True)
class Job:
    """What every part of a run is told: what to train, on which ranks, where and with which data."""

    config: Config
    world: World
    device: torch.device
    data: WeatherData
