"""A solution of context_attention.py:

python exercises/check.py exercises/solutions/context_attention.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distributed.mappings import all_gather


def attend(q: Tensor, k: Tensor, v: Tensor, size: int, tokens: int) -> Tensor:
    """Return what this rank's queries take of all tokens: [B, heads, n, d]."""
    k, v = all_gather(torch.stack([k, v]), -2, dist.group.WORLD)
    mask = torch.arange(k.shape[-2], device=q.device)[None] < tokens  # [1, keys]: the same for all queries
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
