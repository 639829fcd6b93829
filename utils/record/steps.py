"""Losses and gradient norms on their way from the device to the host, without a wait in the training loop."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.spans import span

KEPT_ON_DEVICE = 10  # iterations whose values travel together


class StepRecords:
    """Keeps each iteration's values on the device; every few iterations they start their way to the host.

    What was sent is read when the next ones leave: by then it has long arrived, and nobody waits for the device.
    All ranks call the same methods at the same iterations.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.kept: list[tuple[int, float, Tensor, Tensor]] = []  # iteration, lr, loss, gradient norm
        self.sent: tuple | None = None

    def keep(self, iteration: int, lr: float, loss: Tensor, grad_norm: Tensor) -> list[dict[str, Any]]:
        """Keep an iteration's loss (mean over this rank's samples) and gradient norm; return what arrived."""
        self.kept.append((iteration, lr, loss.detach(), grad_norm.detach()))
        return self._send() if len(self.kept) == KEPT_ON_DEVICE else []

    def flush(self) -> list[dict[str, Any]]:
        """Wait for all that was kept; return its records."""
        return self._send() + self._receive()

    def _send(self) -> list[dict[str, Any]]:
        arrived = self._receive()
        if self.kept:
            iterations, rates, losses, norms = zip(*self.kept)
            self.kept = []
            # A sum over ranks may be rounded by its place in the tensor: an iteration has its own place, always.
            places = [(i - 1) % KEPT_ON_DEVICE for i in iterations]
            losses, norms = _in_places(places, losses), _in_places(places, norms)
            with span("communication"):
                dist.all_reduce(losses)
                # Equal on all ranks but with --noddp: then the largest counts, so that all ranks judge alike.
                dist.all_reduce(norms, op=dist.ReduceOp.MAX)
            on_host = torch.stack([losses / self.ranks, norms.to(losses.dtype)]).to("cpu", non_blocking=True)
            copied = torch.cuda.Event() if losses.is_cuda else None
            if copied:
                copied.record()
            self.sent = (iterations, rates, places, on_host, copied)
        return arrived

    def _receive(self) -> list[dict[str, Any]]:
        if self.sent is None:
            return []
        (iterations, rates, places, on_host, copied), self.sent = self.sent, None
        if copied:
            copied.synchronize()
        return [
            {"event": "step", "iteration": i, "loss": loss, "grad_norm": norm, "lr": lr}
            for i, lr, loss, norm in zip(iterations, rates, *on_host[:, places].tolist())
        ]


def _in_places(places: list[int], values: tuple[Tensor, ...]) -> Tensor:
    """Return a tensor with each value at its place, and zeros at the others."""
    out = [torch.zeros_like(values[0])] * KEPT_ON_DEVICE
    for place, value in zip(places, values):
        out[place] = value
    return torch.stack(out)
