"""Attention over context parallel ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from exercises.checks.common import Wrong, close, load_counted, say

MINUTES, DEFINES, SIZES = 30, "attend", (2, 4)
AFTER = "2-model-parallel.md#context-parallelism-splitting-tokens"
HINTS = """
A row of the result is one query's. A rank that has all keys and values can compute the rows of its own queries, and
needs no query of another rank.

torch.distributed's own all_gather has no gradient: the keys of other ranks would be constants. The mapping's backward
adds up what all ranks' queries give to a key, and brings it to the rank that has it.

Tokens are the dim before the last: all_gather(k, -2, dist.group.WORLD).

After the gathering the tokens stand in their order, and padding at the end: torch.arange(size * n) < tokens is True for
those that are there. mask[None] adds the dim of the queries.

torch.stack([k, v]) is one tensor with a dim more in front. Gathered along -2, it falls apart again: k, v = ...
"""
CASES = ((12, "tokens that divide by the ranks"), (10, "tokens that do not"))


def check(path: str, rank: int, size: int) -> None:
    """Output, gradients and messages, first where there is no padding."""
    solution, calls = load_counted(path)
    for tokens, told in CASES:
        compare(solution.attend, tokens, told, rank, size, calls)


def compare(attend, tokens: int, told: str, rank: int, size: int, calls: list[str]) -> None:
    torch.manual_seed(0)
    n = -(-tokens // size)
    whole = torch.randn(3, 2, 4, size * n, 8)  # q k v, B, heads, tokens, d; what is behind the last is padding
    weights = torch.randn(2, 4, size * n, 8)  # of a loss
    weights[:, :, tokens:] = 0
    mine = slice(rank * n, (rank + 1) * n)
    real = min(tokens, (rank + 1) * n) - rank * n  # of this rank's tokens
    inputs = whole.clone().requires_grad_()
    expected = F.scaled_dot_product_attention(*inputs[:, :, :, :tokens])
    (expected * weights[:, :, :tokens]).sum().backward()
    q, k, v = (x[:, :, mine].clone().requires_grad_() for x in whole)
    calls.clear()
    out = attend(q, k, v, size, tokens)
    sent = list(calls)
    check_output(out, q, k, v, whole, expected, mine, real)
    say(rank, f"{told}: each query takes of all")
    (out * weights[:, :, mine]).sum().backward()
    for name, x, grad in zip("qkv", (q, k, v), inputs.grad[:, :, :, mine]):
        if x.grad is None or not close(x.grad, grad):
            raise Wrong(
                f"the gradient of {name} is {'missing' if x.grad is None else 'not that of the whole'}: what other "
                "ranks' queries give to this rank's keys and values must come home. Does the gathering have a gradient?"
            )
    say(rank, f"{told}: the gradients are whole")
    if sent != ["all_gather_into_tensor"]:
        raise Wrong(f"the forward sends {', '.join(sent) or 'nothing'}: one all-gather is enough (TODO 3)")
    say(rank, f"{told}: one message")


def check_output(out: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Tensor, expected: Tensor, mine: slice, real: int):
    """Raise Wrong where a rank's rows are not those of the whole, with what they are where that is known."""
    if not isinstance(out, torch.Tensor) or out.shape != q.shape:
        found = list(out.shape) if isinstance(out, torch.Tensor) else out
        more = ": are these the rows of all queries? This rank's are enough, so q stays" if found != out else ""
        raise Wrong(f"attend returns {found}, and {list(q.shape)} was expected{more} (TODO 1)")
    if close(out[:, :, :real], expected[:, :, mine][:, :, :real]):
        return
    if close(out, F.scaled_dot_product_attention(q, k, v)):
        raise Wrong("each query has looked at the keys of its own rank only: it needs those of all (TODO 1)")
    if close(out, F.scaled_dot_product_attention(q, *whole[1:])):
        raise Wrong("queries look at padding, and take of it: hide the keys behind the last token (TODO 2)")
    raise Wrong("what the queries take is not that of the whole: in which order, along which dim are tokens joined?")
