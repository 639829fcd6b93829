"""Any slices in, any slices out: a tensor comes back from a checkpoint however ranks had and have shared it out."""

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from utils.checkpoint.boxes import Boxes, Place
from utils.checkpoint.storage import Reader, Writer


def cut(draw, length: int) -> list[int]:
    """Return the borders of some parts, that may be empty."""
    return [0, *sorted(draw(st.lists(st.integers(0, length), max_size=3))), length]


def boxes(draw, x: torch.Tensor) -> Boxes:
    """Return a tensor as boxes: a grid of them, cut anywhere."""
    borders = [cut(draw, size) for size in x.shape]
    found = []
    for corner in np.ndindex(*(len(b) - 1 for b in borders)):
        slices = tuple(slice(b[i], b[i + 1]) for b, i in zip(borders, corner))
        if (values := x[slices]).numel():
            found.append((tuple(s.start for s in slices), values.clone()))
    return Boxes(x.shape, found, x.dtype)


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_any_slices_in_any_slices_out(tmp_path_factory, data, shape):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]))
    x = torch.arange(float(np.prod(shape))).view(shape).to(dtype)
    folder = tmp_path_factory.mktemp("checkpoint") / "00000001"
    state = {"x": boxes(data.draw, x), "whole": x.clone()}
    dcp.save(state, storage_writer=Writer(folder), no_dist=True)
    there = {"x": boxes(data.draw, torch.zeros_like(x)), "whole": torch.zeros_like(x)}
    dcp.load(there, storage_reader=Reader(folder), no_dist=True)
    assert torch.equal(there["whole"], x)
    for corner, values in there["x"].boxes.items():
        assert torch.equal(values, x[tuple(slice(a, a + n) for a, n in zip(corner, values.shape))])


@given(data=st.data(), stacked=st.integers(1, 3), rows=st.integers(1, 4), columns=st.integers(1, 4))
def test_the_parts_of_all_ranks_make_up_the_whole(data, stacked, rows, columns):
    """Over tensor parallel ranks that cut each matrix, and data parallel ranks that share a parameter out."""
    tp, dp = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    dim, shared = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    own = torch.zeros(stacked * rows, columns)
    filled = None
    for index in range(tp):
        place = Place(tuple(own.shape), stacked, dim, index, tp)
        filled = torch.zeros(place.whole) if filled is None else filled
        length = own.shape[shared]
        each = -(-length // dp)
        for rank in range(dp):
            first = min(rank * each, length)
            part = own.narrow(shared, first, min(each, length - first)) + 1
            for corner, values in place._replace(shared_dim=shared, first=first).boxes(part):
                filled[tuple(slice(a, a + n) for a, n in zip(corner, values.shape))] += values
    assert torch.equal(filled, torch.ones_like(filled))  # each number once
