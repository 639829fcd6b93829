"""Layers of NVIDIA's Transformer Engine in the place of PyTorch's, with the same weights under the same names.

Written by its documentation (releases 2.2 to 2.15, user guide, API of PyTorch). Importing this needs the package.
"""

import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common.recipe import Float8CurrentScaling

from networks.vit import ViT

RECIPE = Float8CurrentScaling()
ROWS = 32  # products of 8 bits take multiples of it, of tokens
eight_bits = getattr(te, "autocast", None) or te.fp8_autocast  # its older name


class Linear(te.Linear):
    """A linear layer with the weights [out, in] and [out] of another, in float32; it computes in autocast's dtype.

    With `fp8` its products are of numbers of 8 bits (Micikevicius et al. 2022, FP8 Formats for Deep Learning): the
    tensors of a forward pass in E4M3, gradients in E5M2, each scaled by its own largest value. So there is no state
    from one step to the next, and none to be kept.

    Args:
        return_bias: give [.., out] without the bias, and the bias beside it.
    """

    # The package's own would be in checkpoints, and PyTorch's layers have none.
    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

    def __init__(self, weight: Tensor, bias: Tensor, fp8: bool, return_bias: bool = False):
        out, in_features = weight.shape
        super().__init__(in_features, out, return_bias=return_bias, params_dtype=weight.dtype, device="meta")
        self.weight, self.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
        self.in_8_bits = fp8  # `fp8` is the package's own, and follows its context

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        tokens, rows = x.shape[:-1], x.flatten(0, -2).contiguous()
        padding = -len(rows) % ROWS if self.in_8_bits else 0
        # Here, not around the model: what the backward pass computes once more is then the same.
        with eight_bits(self.in_8_bits, False, RECIPE):
            y = super().forward(F.pad(rows, (0, 0, 0, padding)) if padding else rows)
        y, *bias = y if isinstance(y, tuple) else (y,)
        y = y[: len(rows)].unflatten(0, tokens)
        return (y, *bias) if bias else y


class LayerNorm(te.LayerNorm):
    """A layer norm with the weights of another."""

    get_extra_state, set_extra_state = Linear.get_extra_state, Linear.set_extra_state

    def __init__(self, serial: nn.LayerNorm):
        super().__init__(serial.normalized_shape, eps=serial.eps, dtype=serial.weight.dtype, device="meta")
        self.weight, self.bias = serial.weight, serial.bias


def use_transformer_engine(model: ViT, fp8: bool) -> ViT:
    """Replace the norms, and the linear layers of the blocks, in place, and return the model.

    Embedding and head stay PyTorch's: they are a small part of the products, and the most sensitive to 8 bits.
    """
    for block in model.blocks:
        for part, name in ((block.attn, "qkv"), (block.attn, "proj"), (block.mlp, "fc1"), (block.mlp, "fc2")):
            layer = getattr(part, name)
            setattr(part, name, Linear(layer.weight, layer.bias, fp8))
        block.norm1, block.norm2 = LayerNorm(block.norm1), LayerNorm(block.norm2)
    model.norm = LayerNorm(model.norm)
    return model
