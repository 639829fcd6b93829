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

import torch
from torch import Tensor


def blending_weights(patch_size: int, overlap: int) -> Tensor:
    """Return the weight of each point of a window, [S, S]; at each point of the image they add up to 1."""
    if not overlap:
        return torch.ones(patch_size, patch_size)
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


def overlap_add(tokens: Tensor, columns: int, patch_size: int, overlap: int) -> Tensor:
    """Add up what windows write: [B, R K, C S S] -> [B, C, H + 2 o, W], with margins. The gradient of `windows`."""
    P, o, K = patch_size, overlap, columns
    S = P + 2 * o
    x = tokens.unflatten(-1, (-1, S, S)).unflatten(1, (-1, K))  # B R K C S S
    # A window's last 2 o columns lie on the first ones of the next window, the last window's on the first one's.
    first, last = x[..., : 2 * o], x[..., P:].roll(1, dims=2)
    x = torch.cat([first + last, x[..., 2 * o : P]], dim=-1)  # B R K C S P, beginning o columns to the west
    x = x.permute(0, 3, 1, 4, 2, 5).flatten(-2).roll(-o, dims=-1)  # B C R S W
    first, last = x[:, :, :, : 2 * o], x[:, :, :, P:]
    borders = torch.cat([first[:, :, :1], first[:, :, 1:] + last[:, :, :-1], last[:, :, -1:]], dim=2)  # B C R+1 2o W
    body = torch.cat([borders[:, :, :-1], x[:, :, :, 2 * o : P]], dim=3).flatten(2, 3)  # B C H W
    return torch.cat([body, borders[:, :, -1]], dim=2)


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
