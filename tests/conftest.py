"""Every test runs on one thread and must leave the ambient state as it found it."""

import pytest
import torch

from tools import CountOperators, ambient_state

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _leaves_no_state_behind():
    before = ambient_state()
    yield
    assert ambient_state() == before


@pytest.fixture
def count_operators():
    """A dispatch mode that counts operators: `with count_operators() as operators: ...; operators.counts["sin"]`."""
    return CountOperators
