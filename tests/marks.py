"""Marks of some cases of a test."""

from functools import partial

import pytest

# A case that waits for `make test-nightly`.
at_night = partial(pytest.param, marks=pytest.mark.nightly)
