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


def pytest_collection_finish():
    """What is there before the first test, a million objects, is left out when tests collect or look for garbage."""
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
