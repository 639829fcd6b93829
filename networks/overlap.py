"""Windows that are larger than their patches, so that forecasts have no seams between patches.

Each token reads, and writes, a window that reaches `overlap` grid points beyond its patch on all sides. What several
windows write to a point is weighted, and added: at each border the weights rise from 0 to 1 as sin^2 across the
overlap, and fall as cos^2 in the neighbour's window, so they add up to 1 everywhere. In longitude the last window
meets the first. At the poles there are no neighbours: there the input's outermost rows are repeated, and what would be
written beyond is written on this side of the pole, like in a mirror.

Shapes:  B batch   C channels   P patch size   o overlap, P/2 at most   S = P + 2 o side of a window
         R K rows, columns of patches   W = K P columns of the image
         H + 2 o rows with margins: those of R rows of patches (H = R P), and o more above and below
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def blending_weights(patch_size: int, overlap: int) -> Tensor:
    """Return the weight of each point of a window, [S, S]; at each point of the image they add up to 1."""
    rise = torch.sin((torch.arange(2 * overlap) + 0.5) * torch.pi / (4 * overlap)).square()
    weights = torch.cat([rise, torch.ones(patch_size - 2 * overlap), rise.flip(0)])
    return weights[:, None] * weights


def repeat_at_poles(image: Tensor, overlap: int, north: bool = True, south: bool = True) -> Tensor:
    """Return an image [B, C, H, W] with margins: its outermost rows once more, `overlap` times each."""
    above, below = (image[:, :, row].expand(-1, -1, overlap, -1) for row in (slice(0, 1), slice(-1, None)))
    return torch.cat([*[above] * north, image, *[below] * south], dim=2)


def windows(image: Tensor, patch_size: int, overlap: int) -> Tensor:
    """Cut an image with margins, [B, C, H + 2 o, W], into its windows, [B, R K, C S S]."""
    P, o = patch_size, overlap
    S = P + 2 * o
    image = torch.cat([image[..., -o:], image, image[..., :o]], dim=-1)  # once round the globe, and a little further
    found = image.unfold(2, S, P).unfold(3, S, P)  # B C R K S S
    return found.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class _WindowsLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, image, weight, bias, cut):
        ctx.cut = cut
        ctx.save_for_backward(image, weight)  # where autograd would keep the windows: up to four times as much
        return F.linear(cut(image), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        image, weight = ctx.saved_tensors
        with torch.enable_grad():
            leaf = image.detach().requires_grad_(ctx.needs_input_grad[0])
            x = ctx.cut(leaf)
        grad_image = torch.autograd.grad(x, leaf, grad @ weight)[0] if leaf.requires_grad else None
        rows = grad.flatten(0, -2)
        return grad_image, rows.t() @ x.detach().flatten(0, -2), rows.sum(0), None


def windows_linear(image: Tensor, layer: nn.Linear, cut: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `layer(cut(image))` that keeps the image for the backward pass, and cuts it once more there.

    The compiler decides for itself what it keeps.
    """
    if torch.compiler.is_compiling():
        return layer(cut(image))
    return _WindowsLinear.apply(*map(in_compute_dtype, (image, layer.weight, layer.bias)), cut)


def in_compute_dtype(x: Tensor) -> Tensor:
    """Return `x` in the dtype that autocast will compute in."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):  # of tensors without numbers autocast knows nothing
        return x
    return x.to(torch.get_autocast_dtype(kind))


def overlap_add(parts: Sequence[Tensor], columns: int, patch_size: int, overlap: int) -> Tensor:
    """Add up what windows write, and return an image with margins, [B, C, H + 2 o, W]. The gradient of `windows`.

    A window comes in four parts, [B, R K, C a b] each, of a x b points as `part_slices` has them.
    """
    P, o, K, image = patch_size, overlap, columns, None
    for part, (rows, across) in zip(parts, part_slices(P, o)):
        a, b = rows.stop - rows.start, across.stop - across.start
        x = part.unflatten(-1, (-1, a, b)).unflatten(1, (-1, K))  # B R K C a b
        B, R, _, C = x.shape[:4]
        if image is None:
            image = x.new_zeros(B, C, (R + 1) * P, K * P)
        if across.start:  # it lies on the next patch, the last one's on the first
            x = x.roll(1, dims=2)
        # No `unfold`: where the compiler does without operations in place, what it does not cover becomes 0.
        there = image[:, :, rows.start : rows.start + R * P].unflatten(2, (R, P))[:, :, :, :a]  # B C R a W
        there.unflatten(4, (K, P))[..., :b].add_(x.permute(0, 3, 1, 4, 2, 5))
    return image[:, :, : R * P + 2 * o].roll(-o, dims=-1)  # columns began o to the west


def part_slices(patch_size: int, overlap: int) -> list[tuple[slice, slice]]:
    """Return the rows and columns of a window's parts: as large as a patch, and what lies east, south, south-east."""
    first, rest = slice(0, patch_size), slice(patch_size, patch_size + 2 * overlap)
    return [(first, first), (first, rest), (rest, first), (rest, rest)]


class OverlapHead(nn.Linear):
    """The head whose tokens write windows: [B, R K, D] -> an image with margins, [B, C, H + 2 o, W].

    The windows together are up to four times as large as the image. So they are computed, weighted and added in four
    parts, of which one is in memory at a time.
    """

    def __init__(self, embed_dim: int, out_chans: int, columns: int, patch_size: int, overlap: int):
        super().__init__(embed_dim, out_chans * (patch_size + 2 * overlap) ** 2, bias=False)
        self.columns, self.patch_size, self.overlap = columns, patch_size, overlap
        self.register_buffer("blend", blending_weights(patch_size, overlap)[..., None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        P, o, x = self.patch_size, self.overlap, in_compute_dtype(x)  # cast once for all parts
        weight = self.weight.view(-1, P + 2 * o, P + 2 * o, self.in_features) * self.blend  # C S S D
        parts = (self.project(x, weight[:, rows, columns].flatten(0, 2)) for rows, columns in part_slices(P, o))
        return overlap_add(parts, self.columns, P, o)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return a part of all windows, [B, R K, C a b]."""
        return F.linear(x, weight)


def mirror_at_poles(image: Tensor, overlap: int, north: bool = True, south: bool = True) -> Tensor:
    """Return an image with margins, [B, C, H + 2 o, W], without them: what lies beyond a pole is added before it.

    A margin that ends at no pole, where `north` or `south` is false, stays.
    """
    o = overlap
    if north:
        image = torch.cat([image[:, :, o : 2 * o] + image[:, :, :o].flip(2), image[:, :, 2 * o :]], dim=2)
    if south:
        beyond = image[:, :, -o:].flip(2)
        image = torch.cat([image[:, :, : -2 * o], image[:, :, -2 * o : -o] + beyond], dim=2)
    return image
