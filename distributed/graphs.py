"""CUDA graphs: a function's kernels are recorded once and replayed, and the host no longer launches them one by one."""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.comm import Grid
from utils.compiler import GRAPH_MODES
from utils.config.settings import Config

# DistributedDataParallel looks at its own timing in its first ten iterations (PyTorch's notes on CUDA graphs).
DDP_WARMUP = 11


def looks_at_times(iterations: int) -> bool:
    """Whether DistributedDataParallel waits for its own timing after so many iterations: it cannot be recorded then.

    (It does so in the first DDP_WARMUP as well.)
    """
    return iterations % 100 in (99, 0)


class CudaGraph:
    """A recording of kernels on the current stream, with the random number generators that they draw from."""

    def __init__(self, generators: list[torch.Generator]):
        self.graph = torch.cuda.CUDAGraph()
        for generator in generators:  # the default one is known already
            self.graph.register_generator_state(generator)

    def record(self) -> AbstractContextManager:
        """Record, and do not run, what is launched inside; the threads of the data loader may go on meanwhile."""
        gc.collect()  # what is collected in the middle of it may free pinned memory, which a recording forbids
        stream = torch.cuda.current_stream()
        return torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local")

    def replay(self) -> None:
        self.graph.replay()


@dataclass(eq=False)
class Captured:
    """A function of tensors that runs as it is for `warmup` calls, is then recorded, and replayed from there on.

    Where the tensors' shapes change, as when forecasts get longer, it begins anew. A recording holds addresses, not
    values: inputs are copied to where they lay when it was made, and the result is copied away before the next call
    overwrites it. All else that the function reads or changes, such as weights and gradients, must stay where it is.
    What it does in Python is done in the recording only.
    """

    function: Callable[..., Tensor]  # from tensors to a tensor
    name: str  # what the log calls it
    warmup: int  # calls before it, for everything that happens only at first: memory, compilation, handles
    make_graph: Callable[[], CudaGraph]  # makes an empty recording
    log: Callable[[str], None] = print  # called with a line when the recording is made
    after: "Captured | None" = None  # the one whose results it reads in place: it begins anew where that one does
    shapes: tuple | None = None
    calls: int = 0  # with these shapes
    launched: int = 0  # calls that were no replays
    graph: CudaGraph | None = None
    inputs: list[Tensor] | None = None
    output: Tensor | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        shapes = [tensor.shape for tensor in tensors], self.after and self.after.shapes
        if shapes != self.shapes:
            self.shapes, self.calls, self.graph, self.inputs, self.output = shapes, 0, None, None, None
        self.calls += 1
        if self.calls <= self.warmup or (not self.graph and looks_at_times(self.launched)):
            self.launched += 1
            return self.function(*tensors)
        if self.graph is None:
            self._record(tensors)
        for static, tensor in zip(self.inputs, tensors):
            static.copy_(tensor)
        self.graph.replay()
        return self.output.clone()

    def _record(self, tensors: tuple[Tensor, ...]) -> None:
        start = time.perf_counter()
        self.inputs = [tensor.clone() for tensor in tensors]
        self.graph, self.launched = self.make_graph(), self.launched + 1
        with self.graph.record():
            self.output = self.function(*self.inputs)
        self.log(f"CUDA graph of the {self.name}: recorded in {time.perf_counter() - start:.2f} sec")


def check_capture(config: Config, grid: Grid, device: torch.device) -> None:
    """Raise ValueError where the step cannot be recorded, with the reason."""
    if device.type != "cuda":
        raise ValueError("train_mp_graphs.py records CUDA graphs, and the device is cpu: run train_mp.py")
    if config.model_backend != "pytorch":
        raise ValueError(
            f"model_backend {config.model_backend} has not been recorded yet, and what its layers do on the host would "
            f"be lost without a word: run train_mp.py, or take --model_backend pytorch"
        )
    if config.shard != "none":
        raise ValueError(
            f"shard {config.shard} has not been recorded yet: it allocates and frees what it gathers in each step; run "
            f"train_mp.py, or take --shard none"
        )
    if config.num_iters <= config.graph_warmup:
        raise ValueError(
            f"num_iters {config.num_iters} leaves nothing to replay after graph_warmup {config.graph_warmup}: "
            f"raise --num_iters, or lower --graph_warmup"
        )
    is_bad = config.graph_warmup < DDP_WARMUP or looks_at_times(config.graph_warmup)
    if grid.get_size("dp-cp") > 1 and not config.noddp and is_bad:
        raise ValueError(
            f"graph_warmup is {config.graph_warmup}: DistributedDataParallel waits for its own timing in its first "
            f"iterations and in every 100th, which cannot be recorded; take {DDP_WARMUP} or more, and not a multiple "
            f"of 100 or one less"
        )
    if config.enable_jit and (modes := config.compile_modes & {*GRAPH_MODES}):
        raise ValueError(
            f"compile_mode {min(modes)} records CUDA graphs of its own, which cannot lie inside another one: "
            f"take default or max-autotune-no-cudagraphs, or run train_mp.py"
        )
    if config.dropout and (config.activation_checkpoint != "none" or config.mlp_chunks > 1 or config.cp_regather):
        raise ValueError(
            f"dropout {config.dropout} with activation_checkpoint, mlp_chunks or cp_regather reads the state of the "
            f"random numbers on the host, which a recording cannot do: take --dropout 0, or run train_mp.py"
        )
    skips = config.amp_mode == "fp16" or config.on_nonfinite == "skip"
    if config.graph_optimizer and skips and not config.enable_fused:
        raise ValueError(
            "graph_optimizer with fp16, or on_nonfinite skip: the host asks the GPU whether a gradient overflowed, "
            "unless Adam is fused: add --enable_fused, or take --amp_mode bf16 and --on_nonfinite stop"
        )
