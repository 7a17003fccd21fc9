"""Every test runs on one thread and must leave the ambient state as it found it."""

import gc

import pytest
import torch

from tools import CountOperators, ambient_state

torch.set_num_threads(1)


def pytest_collectreport(report):
    """A test file that cannot be imported is an error: pytest, which looks for doctests too, would skip it silently."""
    if report.skipped and "unable to import module" in str(report.longrepr) and report.nodeid.startswith("tests/"):
        raise pytest.UsageError(f"{report.nodeid} cannot be imported")


@pytest.fixture(autouse=True, scope="module")
def _what_was_there_before_is_left_out():
    """When tests collect or look for garbage, they need not go through the million objects that others have loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_no_state_behind():
    before = ambient_state()
    yield
    assert ambient_state() == before


@pytest.fixture
def count_operators():
    """A dispatch mode that counts operators: `with count_operators() as operators: ...; operators.counts["sin"]`."""
    return CountOperators
