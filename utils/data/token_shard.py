"""The tokens of an image that one rank holds.

Tokens are the patches of an image in row-major order. They are shared out in contiguous chunks of equal length; where
their number does not divide, the last chunks are filled up with padding, and one may hold nothing else.

A chunk is kept as an image of one row of patches, side by side: [C, P, count P]. What works on images point by point,
patch by patch or in sums over points (normalising, the patch embedding, loss, metrics) then works on a shard unchanged.

Where the windows of tokens overlap, an input needs points of other ranks' tokens, too. It is then kept as rows of the
image: the whole rows of patches that the chunk touches, and `overlap` rows more on each side, down to the poles.

Shapes:  C channels   H W rows, columns of the image   P patch size   R K rows, columns of patches
         h rows of an input
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(eq=False)
class TokenShard:
    """One of `shards` chunks of the tokens of an image. With one shard it is the image itself.

    Raises ValueError where the image does not divide into patches.
    """

    img_size: tuple[int, int]  # H, W
    patch_size: int
    shards: int = 1
    index: int = 0  # which chunk
    group: dist.ProcessGroup | None = None  # the ranks that hold the other chunks of the same image
    overlap: int = 0  # points that the window of a token reaches beyond its patch

    def __post_init__(self):
        (H, W), P, shards, index = self.img_size, self.patch_size, self.shards, self.index
        if H % P or W % P:
            raise ValueError(
                f"an image of {H} x {W} does not divide into patches of {P}: "
                f"take a patch_size that divides both, or crop with --img_size"
            )
        self.columns = W // P
        self.total = H // P * self.columns  # tokens of the whole image
        self.length = -(-self.total // shards)  # tokens of every chunk, padding included
        self.first = min(index * self.length, self.total)
        self.count = min(self.length, self.total - self.first)  # tokens of this chunk without padding
        self.shape = (H, W) if shards == 1 else (P, self.count * P)

    def with_overlap(self, overlap: int) -> "TokenShard":
        """Return the same tokens, whose windows reach as far beyond their patches."""
        return replace(self, overlap=overlap)

    @property
    def rows(self) -> range:
        """The rows of the image to read: the whole rows of patches that the tokens touch."""
        if self.shards == 1:
            return range(self.img_size[0])
        K, P = self.columns, self.patch_size
        last = -(-(self.first + self.count) // K)
        return range(self.first // K * P, last * P) if self.count else range(0)

    @property
    def input_rows(self) -> range:
        """The rows of the image to read for an input."""
        rows, o = self.rows, self.overlap if self.count else 0
        return range(max(rows.start - o, 0), min(rows.stop + o, self.img_size[0]))

    @property
    def input_shape(self) -> tuple[int, int]:
        """Rows and columns of an input."""
        return (len(self.input_rows), self.img_size[1]) if self.overlap else self.shape

    def cut_input(self, rows: Tensor) -> Tensor:
        """Return this shard's input [..., *input_shape] of an image of which `input_rows` were read."""
        return rows if self.overlap else self.cut(rows)

    def own(self, x: Tensor) -> Tensor:
        """Return the shard [..., P, count P] itself of an input."""
        if not self.overlap:
            return x
        first = self.rows.start - self.input_rows.start
        return self.cut(x[..., first : first + len(self.rows), :])

    def cut(self, rows: Tensor) -> Tensor:
        """Return this shard [..., P, count P] of an image of which `rows` [..., len(self.rows), W] were read."""
        if self.shards == 1:
            return rows
        K, P = self.columns, self.patch_size
        patches = rows.unflatten(-2, (len(self.rows) // P, P)).unflatten(-1, (K, P))  # ... R P K P
        patches = patches.transpose(-4, -3).flatten(-3, -2)  # ... P R*K P
        start = self.first % K if self.count else 0
        return patches[..., start : start + self.count, :].flatten(-2)  # ... P count*P

    def place_in_rows(self, shard: Tensor) -> Tensor:
        """Return the `input_rows` of an image, [..., h, W]: this shard [..., P, count P] there, zeros elsewhere."""
        K, P, rows, wider = self.columns, self.patch_size, self.rows, self.input_rows
        before = self.first % K if self.count else 0
        after = len(rows) // P * K - before - self.count
        patches = F.pad(shard.unflatten(-1, (self.count, P)), (0, 0, before, after))  # ... P R*K P
        image = patches.unflatten(-2, (len(rows) // P, K)).transpose(-4, -3)  # ... R P K P
        image = image.flatten(-2).flatten(-3, -2)
        return F.pad(image, (0, 0, rows.start - wider.start, wider.stop - rows.stop))

    def place(self, shard: Tensor) -> Tensor:
        """Return an image [..., H, W] with this shard [..., P, count P] in its place, and zeros elsewhere."""
        if self.shards == 1:
            return shard
        (H, _), K, P = self.img_size, self.columns, self.patch_size
        patches = shard.new_zeros(*shard.shape[:-2], P, self.total, P)
        patches[..., self.first : self.first + self.count, :] = shard.unflatten(-1, (self.count, P))
        image = patches.unflatten(-2, (H // P, K)).transpose(-4, -3)  # ... R P K P
        return image.flatten(-2).flatten(-3, -2)

    def sum(self, values: Tensor) -> Tensor:
        """Add up `values` over the shards of the image, in place; without a gradient."""
        if self.shards > 1:
            dist.all_reduce(values, group=self.group)
        return values

    @torch.no_grad()
    def whole(self, shard: Tensor) -> Tensor:
        """Return the whole image [..., H, W], put together from all shards [..., P, count P]."""
        return self.sum(self.place(shard))
