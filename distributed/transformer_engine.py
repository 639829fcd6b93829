"""Tensor parallel layers whose products are those of NVIDIA's Transformer Engine. Importing this needs the package.

Its own layers can be tensor parallel, too (`tp_group`), but gather tokens along dim 0, and here they lie in dim 1. The
collectives are those of distributed/layers.py, so all that is said and proved there of communication holds.
"""

from torch import Tensor

from distributed.layers import enter_column, leave_row, shard_columns, shard_rows
from networks.transformer_engine import Linear
from utils.comm import Grid


class ColumnParallelLinear(Linear):
    """See distributed/layers.py. `regather` is not known: the layer keeps its whole input for the backward pass."""

    sliced = {"weight": 0, "bias": 0}

    def __init__(self, serial: Linear, grid: Grid, over_tokens: bool, regather: bool = False, parts: int = 1):
        super().__init__(shard_rows(serial.weight, grid, parts), shard_rows(serial.bias, grid, parts), serial.in_8_bits)
        self.ranks, self.over_tokens = grid.get_group("tp"), over_tokens  # te.Linear has tp_group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(enter_column(x, self.ranks, self.over_tokens))


class RowParallelLinear(Linear):
    """See distributed/layers.py."""

    sliced = {"weight": 1}

    def __init__(self, serial: Linear, grid: Grid, over_tokens: bool):
        is_whole = grid.get_size("tp") == 1
        super().__init__(shard_columns(serial.weight, grid), serial.bias, serial.in_8_bits, return_bias=not is_whole)
        self.ranks, self.over_tokens, self.is_whole = grid.get_group("tp"), over_tokens, is_whole

    def forward(self, x: Tensor) -> Tensor:
        if self.is_whole:
            return super().forward(x)
        partial, bias = super().forward(x)
        return leave_row(partial, bias, self.ranks, self.over_tokens)
