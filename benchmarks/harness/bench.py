"""A training step of any configuration, on random data, with a clock at its parts (for step.py and gpu_suite.py)."""

import math
import time
from functools import partial

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import train
from benchmarks.harness.data import PLAIN
from benchmarks.harness.memory import LiveMemory
from networks.attention import attention
from utils.compiler import compile_modules
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.data.loss_weights import distance
from utils.data.token_shard import TokenShard
from utils.device import synchronize
from utils.measure.first_profile import use_profiler_once
from utils.optimizers import kept_of
from utils.run.setup import prepare

# 2.58 GFLOP a sample on 128 tokens: what a CPU does in some seconds.
REFERENCE = [
    *PLAIN, "--img_size", "64", "128", "--embed_dim=192", "--depth=6", "--num_heads=6", "--local_batch_size=8",
    "--n_in_channels=20", "--n_out_channels=20", "--plot_channels=None", "--no_residual",
]  # fmt: skip


class Bench:
    """The training step of a configuration, on random data, with a clock at its parts."""

    def __init__(self, flags: list[str], local_rank: int = 0):
        config = load_config(flags)[0].with_batches(1)
        self.config, self.device = config, prepare(config, local_rank)
        fields = Fields.blank(config)
        self.tokens = math.prod(config.img_size) // config.patch_size**2
        self.model = train.build_model(config, fields, self.device).to(self.device)
        self.optimizer = train.build_optimizer(self.model, config)
        self.scaler = train.build_scaler(config, self.device)
        generator = torch.Generator(self.device).manual_seed(1)
        B, (H, W), sizes = config.global_batch_size, config.img_size, fields.sizes[:2]
        inp, target = (torch.randn(B, C, H, W, device=self.device, generator=generator) for C in sizes)
        self.batch = [inp, target[None], inp.new_empty(0, B, 0, H, W)]
        tokens = TokenShard(config.img_size, config.patch_size)
        self.distance = distance(config, fields, tokens, self.device)
        self.marks: list = []
        self.is_timed = True
        self.model.register_forward_pre_hook(self._mark)
        step = partial(train.forward_backward, self.model, scaler=self.scaler, config=config)
        self.step = partial(step, distance=self._distance)
        self.update = partial(train.update_weights, self.optimizer, self.scaler, config)
        if config.enable_jit:
            compile_modules(self.model, config.compile_modules, config.compile_mode)

    def _mark(self, *_: object) -> None:
        if self.is_timed:
            self.marks.append(self.now())

    def now(self) -> "torch.cuda.Event | float":
        """Return the time: on a GPU an event on its stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _distance(self, forecast: Tensor, target: Tensor) -> Tensor:
        loss = self.distance(forecast, target)
        self._mark()
        return loss

    def run_step(self) -> dict[str, float]:
        """Take a step; return the seconds of its parts."""
        self.marks = []
        self._mark()
        self.step(*self.batch)
        self._mark()
        self.update(self.config.lr)
        self._mark()
        synchronize(self.device)
        *passes, trained, updated = self.marks
        started, passes = passes[0], passes[1:]
        forward = sum(self.between(a, b) for a, b in zip(passes[::2], passes[1::2]))
        whole, optimizer = self.between(started, updated), self.between(trained, updated)
        return {"forward": forward, "backward": whole - optimizer - forward, "optimizer": optimizer, "step": whole}

    def between(self, a: object, b: object) -> float:
        """Return the seconds between two times, once the device has come past them."""
        return a.elapsed_time(b) / 1e3 if self.device.type == "cuda" else b - a

    @property
    def dtype(self) -> torch.dtype:
        return train.AMP_DTYPE[self.config.amp_mode] or torch.get_default_dtype()

    def flops(self) -> int:
        """Return the floating point operations of a step: the embedding alone needs no gradient of its input."""
        model, N = self.model, self.tokens
        return self.config.global_batch_size * (3 * model.flops() - 2 * N * model.patch_embed.proj.weight.numel())

    def memory(self) -> dict[str, int]:
        """Return the bytes by part, of a step without compilation: tensors alone, no workspace of a kernel."""
        after_forward = []
        hook = self.model.register_forward_hook(lambda *_: after_forward.append(live.now))
        self.model.zero_grad(set_to_none=True)
        with LiveMemory() as live:
            self.step(*self.batch)
        hook.remove()
        parameters = list(self.model.parameters())
        moments = (x for p in parameters for x in kept_of(self.optimizer, p).values())
        found = {"weights": _bytes(parameters), "optimizer": _bytes(moments)}
        peak = sum(found.values()) + _bytes(self.batch) + live.peak
        gradients = _bytes(p.grad for p in parameters)
        return found | {"gradients": gradients, "activations": after_forward[0], "peak": peak}

    def kernels(self, count: int = 8) -> list[dict]:
        """Return the operations that take longest: name, share of the step's time on the device, calls a step."""
        on_gpu = self.device.type == "cuda"
        use_profiler_once(self.device)
        with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
            for _ in range(3):
                self.run_step()
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        events = sorted(profiler.key_averages(), key=lambda e: -getattr(e, key))
        if on_gpu:  # each kernel stands there itself, and once more under the operation that launched it
            events = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        total = sum(getattr(e, key) for e in events)
        return [{"name": e.key, "share": getattr(e, key) / total, "calls": e.count / 3} for e in events[:count]]

    def attention_seconds(self) -> float:
        """Return the time of all blocks' attention alone, forward and backward, in the kernel and dtype in use."""
        config, N = self.config, self.tokens
        heads, kernel = config.num_heads, self.model.blocks[0].attn.kernel
        q, k, v = (
            torch.randn(config.local_batch_size, N, heads, config.embed_dim // heads, device=self.device)
            .to(self.dtype).transpose(1, 2).requires_grad_() for _ in range(3)
        )  # fmt: skip
        grad, best = torch.randn_like(q), float("inf")
        for _ in range(5):
            synchronize(self.device)
            start = time.perf_counter()
            attention(q, k, v, kernel, 0.0).backward(grad)
            synchronize(self.device)
            best = min(best, time.perf_counter() - start)
        return best * config.depth * config.accumulation_steps


def _bytes(tensors) -> int:
    return sum(t.nbytes for t in tensors)
