"""What the way to the host takes, on devices that are none: see lazy_link.py."""

import time

import pytest
import torch

import lazy_link
import models
from recollect import Offload, Recompute, _travel
from recollect._bench import Bench
from recollect._options import Kind, Option
from recollect._stores.courses import SPARE
from recollect._travel import price_of_copies, speeds_of_link
from recollect.profile import measure

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
    # In half a second there is time for two of them; first it is tried.
    assert link.sizes == [2**20] * 2 * (1 + 3)
    assert len(steps) == 1 + 2 * 3
    if seconds:
        assert price == pytest.approx(seconds / 2**20, rel=0.3)
    else:
        assert _travel._LEAST <= price < 0.01 / 2**20  # nothing is for nothing


def test_copies_cost_no_more_than_work_that_waits_for_them(monkeypatch):
    monkeypatch.setattr(_travel.links, "_links", {CPU: Slow(0.05)})
    monkeypatch.setattr(_travel, "LINK_BYTES", 2**20)
    assert price_of_copies(CPU, lambda: None, 0.1, (1e9, 1e9), 1) == 2e-9


def test_what_is_offloaded_is_paid_for():
    keep, recompute = Option("keep", {}, 0.0, 900, 0, 0), Option("recompute", {"": Recompute()}, 5.0, 100, 0, 0)
    kind = Kind("Layer", (keep, recompute), 1.0, 2.0).with_offloading(Offload(), 0.01)
    seconds = {one.name: (one.seconds, one.out) for one in kind.options[2:]}
    assert seconds == {"offload": (9.0, 900), "recompute, offload the input": (6.0, 100)}


def test_on_paper_a_byte_costs_its_way_through_the_devices_memory():
    with torch.device("meta"):
        model, batch = models.Stack(), torch.randn(2, 8, 32)
    profile = measure(Bench(model, batch, None, "H200"), offload=Offload())
    (offload,) = [one for one in profile.kinds[0].options if one.name == "offload"]
    assert offload.out > 0
    assert offload.seconds == pytest.approx(offload.out * 2 / 4.8e12)
    link = profile.problem(offloading=True).link
    assert (link.out, link.back) == pytest.approx((55e9 / (1 + SPARE),) * 2)  # copies have time to spare


def test_steps_that_are_over_at_once_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(_travel.links, "_links", {CPU: Slow(0.0)})
    assert price_of_copies(CPU, None, 1e-5, (1e9, 1e9), 3) == 0.0


def test_the_speed_of_the_disk(tmp_path):
    out, back = speeds_of_link(CPU, "disk", str(tmp_path))
    assert out > 1e5
    assert back > 1e5
