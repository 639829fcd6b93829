"""The memory of tensors, counted exactly on any device: what operations make, and what is still alive.

PyTorch has no public name for a mode that sees each operation; tests/measure/test_costs.py compares the counts.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from networks.vit import Block, in_chunks, recomputed


class LiveMemory(TorchDispatchMode):
    """Adds up the bytes of all storages that operations inside it made and that nobody has dropped yet.

    `now` and `peak` are bytes. What a kernel takes and gives back inside one operation is not seen, nor what a compiled
    module allocates.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if id(storage) not in self.alive and id(storage) not in known:
                    self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def dropped(_: weakref.ref) -> None:
            del self.alive[key]
            self.now -= size

        self.alive[key] = weakref.ref(storage, dropped)
        self.now += size
        self.peak = max(self.peak, self.now)


def mlp_peak(chunks: int, training: bool, dim: int = 192, samples: int = 8, tokens: int = 1024) -> int:
    """Return the most bytes in use while tokens pass through norm, MLP and addition of one block, and back."""
    block = Block(dim, num_heads=6, mlp_ratio=4, dropout=0.0, drop_path=0.0, kernel="auto")
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x, grad = torch.zeros(samples, tokens, dim, requires_grad=training), torch.zeros(samples, tokens, dim)
    with LiveMemory() as live, torch.set_grad_enabled(training):
        mlp = recomputed(block.norm_mlp, random=False) if chunks > 1 else block.norm_mlp
        y = x + in_chunks(mlp, x, chunks)
        if training:
            y.backward(grad)
    return live.peak
