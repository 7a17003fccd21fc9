"""Against `checkpoint_schedules` from PyPI, where it is installed."""

from random import Random

import pytest

from recollect.schedules import hrevolve, revolve

peer = pytest.importorskip("checkpoint_schedules")


def counted(schedule):
    """Forwards, and writes to and reads from the slow store, as the peer's actions say."""
    forwards = writes = reads = 0
    for action in schedule:
        if isinstance(action, peer.EndReverse):
            break
        if isinstance(action, peer.Forward):
            forwards += action.n1 - action.n0
            writes += bool(action.write_ics and action.storage == peer.StorageType.DISK)
        elif isinstance(action, (peer.Copy, peer.Move)):
            reads += action.from_storage == peer.StorageType.DISK
    return forwards, writes, reads


def test_revolve_agrees():
    for slots in range(1, 9):
        for length in range(slots + 1, 70):
            assert counted(peer.Revolve(length, slots))[0] == revolve(length, slots).check().forwards


def test_a_thousand_steps_agree():
    assert counted(peer.Revolve(1000, 10))[0] - 1000 == revolve(1000, 10).cost() == 3636


def test_two_tiers_agree():
    random = Random(8)
    for _ in range(100):
        length, near, far = random.randint(2, 40), random.randint(1, 4), random.randint(1, 5)
        write, read = random.choice([0, 1, 2, 5]), random.choice([0, 1, 2, 5])
        forwards, writes, reads = counted(peer.HRevolve(length, near, far, 1, 1, write, read))
        ours = hrevolve(length, {"near": near, "far": far}, write={"far": write}, read={"far": read})
        assert forwards - length + writes * write + reads * read == ours.cost()
