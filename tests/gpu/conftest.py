"""What the tests of this folder share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def forget_compiled_code():
    """All tests compile the same lines; torch.compile gives up after eight versions of one."""
    torch.compiler.reset()
