"""Exercise: attention over tokens that lie on several ranks. Fill in TODO 1 to 3; this tells what is next:

    python exercises/check.py exercises/context_attention.py

An image is divided into tokens, and the tokens into equal pieces: rank 0 has the first n, rank 1 the next n, and so on.
Norms and MLPs work on each token alone and notice nothing. But in attention each token's query looks at the keys of all
tokens, and takes of their values.

Think first: the rows of softmax(q k^T) v belong to queries. Which of q, k and v does a rank need whole, to compute the
rows of its own queries? Each rank uses what it gathers with queries of its own: which of the two all-gathers of
chapter 2 is that, and what does its backward do? And if tokens do not divide by the ranks, what is behind the last?

`all_gather(x, dim, group)` of distributed/mappings.py is a mapping: it has a gradient. The `attn_mask` of
`F.scaled_dot_product_attention(q, k, v, attn_mask=mask)` is of bools, and broadcast to [B, heads, queries, keys]: False
hides a key. It has two dims or more: [1, keys] is the same for all queries. (Ours is `ParallelAttention` in
distributed/layers.py.)
"""

import torch  # noqa: F401 - you will need these
import torch.distributed as dist  # noqa: F401
import torch.nn.functional as F  # noqa: F401
from torch import Tensor

from distributed.mappings import all_gather  # noqa: F401


def attend(q: Tensor, k: Tensor, v: Tensor, size: int, tokens: int) -> Tensor:
    """Return what this rank's queries take of all tokens: [B, heads, n, d].

    Args:
        q, k, v: of this rank's tokens, [B, heads, n, d].
        size: how many ranks there are; their group is dist.group.WORLD.
        tokens: how many the image has. size * n may be more: then the last tokens of the last ranks are padding, with
            any numbers in it. What padding itself takes, nobody reads.
    """
    raise NotImplementedError("TODO 1: attention of q over gathered keys and values")
    # TODO 2: hide the keys that are padding
    # TODO 3: one message in place of two: k and v can travel together
