"""What frameworks leave behind in a process, put back."""

import os

import pytest
import torch


@pytest.fixture
def own_environment():
    """Who joins a process group says so in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def one_rank(own_environment):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _one_thread():
    """Some choose a number of threads for the process, which tests share with others on few cores."""
    yield
    torch.set_num_threads(1)
