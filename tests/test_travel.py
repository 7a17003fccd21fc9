"""What the way to the host takes, on devices that are none: see lazy_link.py."""

import time

import pytest
import torch

import lazy_link
from recollect import _travel
from recollect._travel import price_of_copies, speeds_of_link

CPU = torch.device("cpu")


class Slow(lazy_link.LazyLink):
    """A device whose work takes longer for the copies beside it: so many seconds each."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.sizes = []

    def copy_out(self, source, host, after):
        time.sleep(self.seconds)
        self.sizes.append(source.numel())
        return super().copy_out(source, host, after)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_what_copies_cost_the_work_beside_them(monkeypatch, seconds):
    link = Slow(seconds)
    monkeypatch.setattr(_travel.links, "_links", {CPU: link})
    monkeypatch.setattr(_travel, "LINK_BYTES", 2**20)
    steps = []
    price = price_of_copies(CPU, lambda: steps.append(1), 1.0, (6e6, 6e6), 3)
    assert link.sizes == [2**20] * 4  # one of them takes nearly a third of a second
    assert len(steps) == 1 + 2 * 3
    if seconds:
        assert price == pytest.approx(seconds / 2**20, rel=0.3)
    else:
        assert price < 0.01 / 2**20


def test_copies_cost_no_more_than_work_that_waits_for_them(monkeypatch):
    monkeypatch.setattr(_travel.links, "_links", {CPU: Slow(0.05)})
    monkeypatch.setattr(_travel, "LINK_BYTES", 2**20)
    assert price_of_copies(CPU, lambda: None, 0.1, (1e9, 1e9), 1) == 2e-9


def test_steps_that_are_over_at_once_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(_travel.links, "_links", {CPU: Slow(0.0)})
    assert price_of_copies(CPU, None, 1e-5, (1e9, 1e9), 3) == 0.0


def test_the_speed_of_the_disk(tmp_path):
    out, back = speeds_of_link(CPU, "disk", str(tmp_path))
    assert out > 1e5
    assert back > 1e5
