"""What one rank finds wrong, every rank knows: none waits for one that left."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from utils.errors import Refused


def first_message(message: str | None) -> str | None:
    """Return the first message that any rank has, on all ranks: all call this at the same point."""
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    found = [(rank, text) for rank, text in enumerate(messages) if text]
    if not found or len(found) == len(messages):
        return messages[0]
    rank, text = found[0]
    return f"rank {rank}: {text}"


def share_error(error: str | None) -> None:
    """End the run on every rank if any rank found an `error`: all ranks call this at the same point.

    Raises Refused with the first rank's message, on all ranks.
    """
    error = first_message(error)
    if error:
        raise Refused(error)


def check_same(views: Mapping[str, Any], remedy: str) -> None:
    """End the run on every rank where one has another view of a thing than rank 0 has: all call this at the same point.

    Raises Refused.
    """
    first: list[Any] = [views]
    dist.broadcast_object_list(first)
    other = next((name for name, mine in views.items() if mine != first[0][name]), None)
    share_error(other and f"it has other {other} than rank 0: {remedy}")


@contextlib.contextmanager
def all_ranks_agree() -> Iterator[None]:
    """Turn what a user can mend, on any rank, into the same error on every rank: none waits for one that left.

    Nothing inside the block may communicate. Raises Refused.
    """
    error = None
    try:
        yield
    except (ValueError, OSError) as found:
        error = str(found) or repr(found)
    share_error(error)
