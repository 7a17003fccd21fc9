"""The disk as a medium: what comes back, what stays behind, and what a failing disk does.

There are two links here: the plain one, which copies at once and reads files straight into its memory, and one that
copies later, in a thread of its own, as an accelerator does.
"""

import errno
import gc
import itertools
import os
import queue
import random
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest
import torch

import recollect
from recollect import CheckpointError
from recollect._stores import files
from recollect._stores.disk import DiskMedium, _OnDisk
from recollect._stores.links import PlainLink
from recollect._stores.pool import Pool
from recollect._stores.ranges import Ranges
from recollect._stores.store import Store

MIB = 2**20
DEADLINE = 60


def host_memory(size):
    return torch.full((size,), 0xAA, dtype=torch.uint8)


def some_bytes(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class LaterMoment:
    def __init__(self):
        self.past = threading.Event()
        self.time = None

    def pass_by(self):
        self.time = time.perf_counter()
        self.past.set()

    def query(self):
        return self.past.is_set()

    def synchronize(self):
        assert self.past.wait(DEADLINE), "nobody lets the device run"

    def elapsed_time(self, end):
        return (end.time - self.time) * 1000


class LaterLink:
    """A device that does what it is told in order, later, as long as it is allowed to."""

    device = torch.device("cuda")  # by name only

    def __init__(self, jitter=0.0):
        self.may_run = threading.Event()
        self.may_run.set()
        self.abandoned = []
        self._jitter = jitter
        self._work = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        chance = random.Random(0)
        while (entry := self._work.get()) is not None:
            self.may_run.wait()
            if self._jitter:
                time.sleep(chance.random() * self._jitter)
            work, moment = entry
            work()
            moment.pass_by()
            del entry, work, moment

    def end(self):
        self.may_run.set()
        self._work.put(None)
        self._thread.join(DEADLINE)

    def _later(self, work):
        moment = LaterMoment()
        self._work.put((work, moment))
        return moment

    def host_memory(self, size):
        return host_memory(size)

    def empty(self, size):
        return host_memory(size)

    def now(self, stream=None):
        return self._later(lambda: None)

    def copy_out(self, source, host, after):
        return self._later(lambda: host.copy_(source))

    def copy_in(self, host, target, after):
        return self.now(), self._later(lambda: target.copy_(host))

    def use(self, target, moment):
        moment.synchronize()

    def abandon(self, target, moment):
        self.abandoned.append(target)


@pytest.fixture
def later():
    link = LaterLink()
    yield link
    link.end()


@pytest.fixture(params=["plain", "later"])
def link(request):
    if request.param == "plain":
        yield PlainLink()
        return
    link = LaterLink(jitter=0.0005)
    yield link
    link.end()


@pytest.fixture
def medium(tmp_path):
    return DiskMedium(str(tmp_path), MIB, host_memory)


def until(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


def written(held):
    assert held._place.written.wait(DEADLINE)
    return held


def come_back(held, size):
    memory = held.fetch().take()
    assert memory.numel() % 16 == 0
    return memory[:size]


def assert_round_trip(medium, link, size, seed=0):
    source = some_bytes(size, seed)
    held = medium.write(source, link)
    assert torch.equal(come_back(held, size), source)
    held.release()


def assert_all_staging_is_back(medium):
    """Every block can be taken again, so that the whole pool is free."""
    staging = medium._crew.staging

    def is_back():
        with staging._turn:
            staging._collect()
        return not staging._taken

    until(is_back)
    assert medium.pool.used == 0


def open_segments(directory):
    """The descriptors of this process that are files below a directory, removed ones too."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if path.startswith(str(directory)):
            found.append(int(name))
    return found


def worker_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("recollect-")]


def run(script, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE * 2,
        **options,
    )


SCRIPT = """
import os, sys, time, torch
from recollect._stores.disk import DiskMedium, _OnDisk
from recollect._stores.links import PlainLink

link = PlainLink()
medium = DiskMedium(sys.argv[1], 2**20, link.host_memory)
source = torch.arange(200, dtype=torch.uint8)

def round_trip():
    held = medium.write(source, link)
    assert torch.equal(held.fetch().take()[:200], source)
    return held
"""


# --- What comes back ---


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4095, 4096, 4097, 99_999, MIB, MIB + 1, 3 * MIB + 7])
def test_bytes_come_back(medium, link, size):
    assert_round_trip(medium, link, size)


def test_more_than_a_segment_and_than_one_piece_comes_back(medium, link):
    size = files._SMALLEST + 5
    assert size > files._PIECE
    assert_round_trip(medium, link, size)
    assert medium.file_bytes == files._SMALLEST + 2 * 4096


@pytest.mark.parametrize("in_flight", [0, 1, 100, 1000, 3 * MIB])
def test_every_bound_lets_every_size_through(tmp_path, link, in_flight):
    medium = DiskMedium(str(tmp_path), in_flight, host_memory)
    for size in (0, 1, 700, 2 * MIB + 1, 100, 2 * MIB):
        assert_round_trip(medium, link, size)
    assert medium.pool.bytes <= max(in_flight, 4 * MIB)


def test_bytes_come_back_often_and_are_counted(medium, link):
    source = some_bytes(1000)
    held = medium.write(source, link)
    for _ in range(3):
        incoming = held.fetch()
        assert torch.equal(incoming.take()[:1000], source)
        assert incoming.take() is incoming.memory
    assert (medium.bytes_written, medium.bytes_read) == (1000, 3000)


def test_a_write_has_what_the_source_was_then(medium):
    source = some_bytes(1000)
    held = medium.write(source, PlainLink())
    before = source.clone()
    source.zero_()
    assert torch.equal(come_back(held, 1000), before)


def test_short_reads_and_writes_go_on_where_they_ended(medium, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: write(fd, view[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:777]], at))
    assert_round_trip(medium, PlainLink(), 10_001)


def test_2000_random_operations(medium, link):
    chance, live, seeds = random.Random(0), {}, itertools.count()
    for _ in range(2000):
        what = chance.random()
        if what < 0.4 or not live:
            source = some_bytes(chance.choice([0, 1, 5000, chance.randrange(300_000)]), next(seeds))
            live[medium.write(source, link)] = source
        elif what < 0.7:
            held, source = chance.choice(list(live.items()))
            assert torch.equal(come_back(held, source.numel()), source)
        else:
            held = chance.choice(list(live))
            if chance.random() < 0.3:
                held.fetch().abandon()
            held.release()
            del live[held]
        if len(live) > 40:
            live.pop(next(iter(live))).numel()  # let go of without a word: its room is lost, and nothing else
    for held, source in live.items():
        assert torch.equal(come_back(held, source.numel()), source)
    assert_all_staging_is_back(medium)
    assert medium.pool.bytes <= MIB


def test_many_threads_at_once(medium, link):
    errors = []

    def work(seed):
        try:
            chance = random.Random(seed)
            for step in range(25):
                sources = [some_bytes(chance.randrange(200_000), seed * 1000 + step * 10 + n) for n in range(3)]
                held = [medium.write(source, link) for source in sources]
                coming = [one.fetch() for one in held]
                for one, incoming, source in zip(held, coming, sources, strict=True):
                    assert torch.equal(incoming.take()[: source.numel()], source)
                    one.release()
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    finally:
        sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert errors == []
    assert medium.pool.bytes <= MIB
    assert_all_staging_is_back(medium)


# --- Who waits for whom ---


def test_a_write_waits_for_the_device_and_nobody_waits_for_the_write(medium, later):
    later.may_run.clear()
    source = some_bytes(1000)
    held = medium.write(source, later)
    incoming = held.fetch()
    time.sleep(0.02)
    assert not held.left.query()
    assert medium.bytes_written == 0
    assert incoming.journey.milliseconds() is None
    moment = later.now()
    assert incoming.journey.late_by(moment) is None
    later.may_run.set()
    assert torch.equal(incoming.take()[:1000], source)
    assert incoming.journey.milliseconds() > 0
    until(moment.query)
    assert incoming.journey.late_by(moment) == moment.elapsed_time(incoming.journey.arrived)


def test_the_plain_link_measures_too(medium):
    held = medium.write(some_bytes(MIB), PlainLink())
    incoming = held.fetch()
    incoming.take()
    now = PlainLink().now()
    assert incoming.journey.milliseconds() > 0
    assert incoming.journey.late_by(now) < 0


def test_the_host_waits_where_the_bound_is_hit(medium, later):
    later.may_run.clear()
    sources = [some_bytes(MIB // 4, seed) for seed in range(12)]
    held = []
    thread = threading.Thread(target=lambda: held.extend(medium.write(one, later) for one in sources), daemon=True)
    thread.start()
    until(lambda: len(medium._crew.staging.pool._slabs) == 1 and medium.pool.used == MIB)
    time.sleep(0.05)
    assert thread.is_alive()
    assert medium.pool.bytes == medium.pool.used == MIB
    later.may_run.set()
    thread.join(DEADLINE)
    assert medium.pool.bytes == medium.pool.peak == MIB
    for one, source in zip(held, sources, strict=True):
        assert torch.equal(come_back(one, source.numel()), source)


def test_fetching_lets_nobody_wait_and_keeps_to_the_bound(medium, later):
    sources = [some_bytes(MIB // 4, seed) for seed in range(12)]
    held = [medium.write(source, later) for source in sources]
    assert_all_staging_is_back(medium)
    later.may_run.clear()
    coming = [one.fetch() for one in reversed(held)]
    until(lambda: medium.bytes_read == MIB)
    time.sleep(0.05)
    assert medium.bytes_read == medium.pool.bytes == MIB  # the device has to read these before there are others
    later.may_run.set()
    for incoming, source in zip(coming, reversed(sources), strict=True):
        assert torch.equal(incoming.take()[: source.numel()], source)
    assert medium.pool.bytes == MIB
    assert_all_staging_is_back(medium)


def test_memory_grows_for_one_that_is_larger_when_nothing_else_is_there(medium, later):
    small = medium.write(some_bytes(1000), later)
    large = medium.write(some_bytes(5 * MIB, 1), later)
    assert small.left.query()
    assert medium.pool.bytes == 8 * MIB
    assert torch.equal(come_back(small, 1000), some_bytes(1000))
    assert torch.equal(come_back(large, 5 * MIB), some_bytes(5 * MIB, 1))
    assert medium.pool.bytes == 8 * MIB


def test_memory_in_small_slabs_is_given_up_for_a_large_one(tmp_path, later):
    medium = DiskMedium(str(tmp_path), 3 * 2**25, host_memory)
    sources = [some_bytes(3 * 2**23, seed) for seed in range(2)]
    later.may_run.clear()
    held = [medium.write(source, later) for source in sources]
    later.may_run.set()
    assert len(medium.pool._slabs) == 2
    assert_round_trip(medium, later, 2**26)
    assert len(medium.pool._slabs) == 1
    assert medium.pool.bytes == 2**26
    assert torch.equal(come_back(held[1], sources[1].numel()), sources[1])


def test_nobody_wants_what_is_on_its_way(medium, later):
    held = medium.write(some_bytes(1000), later)
    until(lambda: medium.bytes_written)
    abandoned = held.fetch()
    until(lambda: medium.bytes_read)
    abandoned.abandon()
    until(lambda: later.abandoned)
    later.may_run.clear()
    never_read = medium.write(some_bytes(1000), later)
    never_read.fetch().abandon()
    never_read.release()
    held.release()
    later.may_run.set()
    assert_all_staging_is_back(medium)
    until(lambda: not never_read._place.readers)
    assert medium.bytes_read == 1000
    assert all(target is abandoned.memory for target in later.abandoned)


@pytest.fixture
def slow_reads(monkeypatch):
    """Reads wait until this is set."""
    may_read, read = threading.Event(), os.preadv

    def wait_and_read(*arguments):
        assert may_read.wait(DEADLINE)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", wait_and_read)
    yield may_read
    may_read.set()


def test_who_is_abandoned_while_it_is_read_goes_to_the_link_in_the_end(medium, later, slow_reads):
    held = written(medium.write(some_bytes(1000), later))
    incoming = held.fetch()
    until(lambda: medium.pool.used == 1000 and not medium._crew.staging._given.qsize())
    time.sleep(0.02)
    incoming.abandon()
    assert later.abandoned == []
    slow_reads.set()
    until(lambda: later.abandoned)
    assert later.abandoned[0] is incoming.memory


def test_room_is_not_free_before_it_is_written(medium, later):
    later.may_run.clear()
    first = medium.write(some_bytes(1000), later)
    first.release()
    second = medium.write(some_bytes(1000, 1), later)
    assert second._place.begin != first._place.begin
    later.may_run.set()
    written(first)
    third = medium.write(some_bytes(1000, 2), later)
    assert third._place.begin == first._place.begin
    first.release()  # again: of no effect
    fourth = medium.write(some_bytes(1000, 3), later)
    assert fourth._place.begin not in (second._place.begin, third._place.begin)


def test_room_is_not_free_before_it_is_read(medium, link, slow_reads):
    first = written(medium.write(some_bytes(1000), link))
    coming = [first.fetch(), first.fetch()]
    first.release()
    second = medium.write(some_bytes(1000, 1), link)
    assert second._place.begin != first._place.begin
    slow_reads.set()
    for incoming in coming:
        assert torch.equal(incoming.take()[:1000], some_bytes(1000))
    third = medium.write(some_bytes(1000, 2), link)
    assert third._place.begin == first._place.begin


# --- Files ---


def test_room_is_used_again_from_step_to_step(medium, link, monkeypatch):
    monkeypatch.setattr(files, "_SMALLEST", 4 * MIB)
    chance = random.Random(0)
    sizes = [chance.randrange(MIB) for _ in range(40)]
    after = []
    for step in range(20):
        held = [medium.write(torch.full((size,), step, dtype=torch.uint8), link) for size in sizes]
        for one, size in zip(reversed(held), reversed(sizes), strict=True):
            assert come_back(one, size).eq(step).all()
            one.release()
        after.append((medium.file_bytes, medium.pool.bytes, medium.pool.allocations))
    assert medium.file_bytes >= sum(sizes) > 4 * MIB
    assert after[2:] == [after[1]] * 18


def test_where_files_need_no_names_they_never_have_any(tmp_path, monkeypatch):
    try:
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE))
    except (AttributeError, OSError):
        pytest.skip("this system, or this file system, has no such files")
    monkeypatch.setattr("tempfile.mkdtemp", fails(errno.EPERM))  # which would make one
    medium = DiskMedium(str(tmp_path), MIB, host_memory)
    assert_round_trip(medium, PlainLink(), 1000)
    (descriptor,) = open_segments(tmp_path)
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    assert os.fstat(descriptor).st_nlink == 0
    assert not os.get_inheritable(descriptor)
    assert list(tmp_path.iterdir()) == []


def files_have_names(monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)


def test_nobody_else_may_look_and_no_names_are_left(tmp_path, monkeypatch):
    files_have_names(monkeypatch)
    seen, unlink = [], os.unlink

    def look_and_unlink(path, **options):
        parent = os.path.dirname(path)
        seen.append([stat.S_IMODE(os.stat(one).st_mode) for one in (path, parent, os.path.dirname(parent))])
        assert os.path.basename(parent).startswith("recollect-")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", look_and_unlink)
    directory = tmp_path / "made" / "for it"
    medium = DiskMedium(str(directory), MIB, host_memory)
    assert not directory.exists()
    held = medium.write(some_bytes(1000), PlainLink())
    assert seen == [[0o600, 0o700, 0o700]]
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    assert list(directory.iterdir()) == []
    assert torch.equal(come_back(held, 1000), some_bytes(1000))
    assert all(not os.get_inheritable(descriptor) for descriptor in open_segments(directory))


def test_without_a_directory_the_systems_own_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    medium = DiskMedium(None, MIB, host_memory)
    assert_round_trip(medium, PlainLink(), 1000)
    assert len(open_segments(tmp_path)) == 1


def test_a_directory_is_meant_where_it_was_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = DiskMedium("~/scratch", MIB, host_memory)
    monkeypatch.chdir(tmp_path)
    here = DiskMedium("here", MIB, host_memory)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for medium in (at_home, here):
        assert_round_trip(medium, PlainLink(), 1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "here", "scratch"]


def test_threads_and_files_end_with_the_medium(tmp_path, link):
    others = set(worker_threads())  # those of stores that live as long as the process
    medium = DiskMedium(str(tmp_path), MIB, host_memory)
    held = medium.write(some_bytes(1000), link)
    other = medium.write(some_bytes(1000), link)
    other.release()
    assert torch.equal(come_back(other, 1000), some_bytes(1000))
    assert len(open_segments(tmp_path)) == 1
    gc.disable()
    try:
        del medium, other
        assert torch.equal(come_back(held, 1000), some_bytes(1000))  # what is held is there still
        del held
        until(lambda: not open_segments(tmp_path))
        until(lambda: others.issuperset(worker_threads()))
    finally:
        gc.enable()


def keeps_names(monkeypatch):
    files_have_names(monkeypatch)
    unlink = os.unlink

    def refuse(path, *, dir_fd=None):
        if dir_fd is None:
            raise OSError(errno.EBUSY, "is open")
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)


def test_names_that_cannot_be_removed_at_once_are_removed_in_the_end(tmp_path, monkeypatch):
    keeps_names(monkeypatch)
    medium = DiskMedium(str(tmp_path), MIB, host_memory)
    assert_round_trip(medium, PlainLink(), 1000)
    (private,) = tmp_path.iterdir()
    assert [path.name for path in private.iterdir()] == ["segment"]
    del medium
    until(lambda: list(tmp_path.iterdir()) == [])


REFUSE = """
vars(os).pop("O_TMPFILE", None)
unlink = os.unlink
def refuse(path, *, dir_fd=None):
    if dir_fd is None:
        raise OSError(16, "is open")
    unlink(path, dir_fd=dir_fd)
os.unlink = refuse
"""


@pytest.mark.parametrize("refuse", ["", REFUSE])
def test_nothing_is_left_at_exit(tmp_path, refuse):
    result = run(refuse + "held = round_trip(); print(len(os.listdir(sys.argv[1])), flush=True)", tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "1\n" if refuse else "0\n", "")
    assert list(tmp_path.iterdir()) == []


def test_what_is_on_its_way_at_exit_does_no_harm(tmp_path):
    script = "held = [medium.write(source, link) for _ in range(50)]; coming = [one.fetch() for one in held]"
    result = run(script, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_killed_process(tmp_path):
    script = SCRIPT + "held = round_trip(); print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert list(tmp_path.iterdir()) == []
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("refuse", ["", REFUSE])
def test_a_forked_child_has_files_of_its_own(tmp_path, refuse):
    script = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
held = round_trip()
names = os.listdir(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        held.fetch()
    except RuntimeError as error:
        print(error)
    source.fill_(7)
    mine = [round_trip() for _ in range(10)]
    held.release()
    mine += [round_trip() for _ in range(10)]
    print("child", medium.bytes_written, len(os.listdir(sys.argv[1])) - len(names), flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert os.listdir(sys.argv[1]) == names
assert torch.equal(held.fetch().take()[:200], source)
round_trip()
print("parent", medium.bytes_written, flush=True)
"""
    result = run(refuse + script, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    error, child, parent = result.stdout.splitlines()
    assert "200 bytes were offloaded to a file in" in error
    assert "before this process was forked" in error
    assert (child, parent) == (f"child 4000 {int(bool(refuse))}", "parent 400")
    assert list(tmp_path.iterdir()) == []


# --- A disk that fails ---


def fails(code):
    def call(*arguments):
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the quota is used up")]
)
def test_a_full_disk_is_an_error_at_the_door(medium, link, tmp_path, monkeypatch, code, reason):
    kept = medium.write(some_bytes(1000), link)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fails(code))
        for _ in range(3):
            with pytest.raises(OSError, match=reason) as caught:
                medium.write(some_bytes(files._SMALLEST), link)
        assert caught.value.errno == code
        message = str(caught.value)
        assert f"{files._SMALLEST} bytes to a file in {tmp_path}" in message
        assert " bytes are free there" in message
        assert 'recollect.Offload(to="disk", directory=...)' in message
        assert_round_trip(medium, link, 1000)  # in what there is already
    assert len(open_segments(tmp_path)) == 1  # the error holds none
    assert list(tmp_path.iterdir()) == []
    assert_round_trip(medium, link, files._SMALLEST)
    assert torch.equal(come_back(kept, 1000), some_bytes(1000))
    assert_all_staging_is_back(medium)


def test_on_a_disk_that_is_almost_full_no_more_is_taken_than_needed(medium, tmp_path, monkeypatch):
    reserve, capacity, link = os.posix_fallocate, 10 * MIB, PlainLink()

    def reserve_little(descriptor, begin, size):
        if medium.file_bytes + size > capacity:
            raise OSError(errno.ENOSPC, "full")
        reserve(descriptor, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve_little)
    held = [medium.write(some_bytes(2 * MIB, seed), link) for seed in range(4)]
    assert medium.file_bytes == 4 * (2 * MIB + 4096)
    with pytest.raises(OSError, match="the disk is full"):
        medium.write(some_bytes(4 * MIB), link)
    for one in held[1:]:
        written(one).release()
    assert_round_trip(medium, link, 4 * MIB)  # in place of those that are free now
    assert len(open_segments(tmp_path)) == 2
    assert torch.equal(come_back(held[0], 2 * MIB), some_bytes(2 * MIB, 0))


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_where_room_cannot_be_reserved(medium, link, monkeypatch, code):
    monkeypatch.setattr(os, "posix_fallocate", fails(code))
    assert_round_trip(medium, link, 1000)
    assert medium.file_bytes == files._SMALLEST


def test_where_there_is_nothing_to_reserve_with(medium, link, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    assert_round_trip(medium, link, 1000)


def test_an_error_of_a_write_is_raised_by_the_next(medium, later, tmp_path, monkeypatch):
    link = later
    kept = written(medium.write(some_bytes(1000), link))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails(errno.ENOSPC))
        lost = [medium.write(some_bytes(300_000), link)]
        written(lost[0])
        with pytest.raises(OSError, match=f"300000 bytes to a file in {tmp_path}: the disk is full"):
            medium.write(some_bytes(1000), link)
        later.may_run.clear()
        lost += [medium.write(some_bytes(300_000), link) for _ in range(2)]
        later.may_run.set()
        for one in lost:
            written(one)
    with pytest.raises(OSError, match="the disk is full"):
        medium.write(some_bytes(1000), link)
    # Who was told once is not told again, but the bytes are lost.
    assert_round_trip(medium, link, 1000)
    for one in lost:
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is full"):
                one.fetch()
        one.release()
    assert_round_trip(medium, link, 300_000)
    assert torch.equal(come_back(kept, 1000), some_bytes(1000))
    assert_all_staging_is_back(medium)


def test_an_error_of_a_write_is_raised_to_who_asks_for_the_bytes(medium, later, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails(errno.EIO))
        later.may_run.clear()
        held = medium.write(some_bytes(1000), later)
        incoming = held.fetch()
        later.may_run.set()
        for _ in range(2):
            with pytest.raises(OSError, match=r"could not offload 1000 bytes .*Input/output error"):
                incoming.take()
        released = medium.write(some_bytes(1000), later)
        released.release()
        written(released)
    assert incoming.journey.milliseconds() is None
    assert_round_trip(medium, later, 1000)  # nobody will ask for the other
    assert_all_staging_is_back(medium)


def test_a_write_of_nothing_at_all_does_not_go_on_for_ever(medium, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *arguments: 0)
        held = written(medium.write(some_bytes(1000), PlainLink()))
    with pytest.raises(OSError, match="nothing was written"):
        held.fetch()


def test_an_error_that_is_not_the_systems(medium, later):
    class Broken(LaterMoment):
        def synchronize(self):
            raise RuntimeError("the device is gone")

    later.copy_out = lambda source, host, after: Broken()
    held = written(medium.write(some_bytes(1000), later))
    with pytest.raises(CheckpointError, match=r"could not offload 1000 bytes .*: the device is gone"):
        held.fetch()
    assert_all_staging_is_back(medium)


def test_a_copy_that_cannot_be_begun_takes_nothing_with_it(medium, later):
    def broken(source, host, after):
        raise RuntimeError("the device is gone")

    working, later.copy_out = later.copy_out, broken
    for _ in range(10):
        with pytest.raises(RuntimeError, match="the device is gone"):
            medium.write(some_bytes(MIB), later)
    later.copy_out = working
    held = medium.write(some_bytes(MIB), later)
    assert held._place.begin == 0
    working, later.copy_in = later.copy_in, lambda host, target, after: broken(host, target, after)
    incoming = held.fetch()
    with pytest.raises(CheckpointError, match=r"could not bring back 1048576 bytes .*: the device is gone"):
        incoming.take()
    later.copy_in = working
    assert torch.equal(come_back(held, MIB), some_bytes(MIB))
    assert_all_staging_is_back(medium)


def test_a_read_that_fails_can_be_tried_again(medium, link, monkeypatch):
    held = written(medium.write(some_bytes(1000), link))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails(errno.EIO))
        incoming = held.fetch()
        with pytest.raises(OSError, match=r"could not bring back 1000 bytes .*Input/output error"):
            incoming.take()
        incoming.abandon()
    assert torch.equal(come_back(held, 1000), some_bytes(1000))
    assert_all_staging_is_back(medium)


def test_a_vanished_directory(tmp_path, link):
    directory = tmp_path / "there"
    medium = DiskMedium(str(directory), MIB, host_memory)
    held = medium.write(some_bytes(1000), link)
    directory.rmdir()
    assert_round_trip(medium, link, 1000)  # the files that are open are there still
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=f"{directory}: the directory is gone .an unknown number of bytes"):
            medium.write(some_bytes(files._SMALLEST), link)
    assert not directory.exists()
    directory.mkdir()
    assert_round_trip(medium, link, files._SMALLEST)
    assert torch.equal(come_back(held, 1000), some_bytes(1000))


def test_a_file_where_a_directory_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        medium = DiskMedium(str(directory), MIB, host_memory)
        with pytest.raises(OSError, match=f"1000 bytes to a file in {directory}: it is not a directory"):
            medium.write(some_bytes(1000), PlainLink())


def test_a_directory_that_may_not_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("root may write anywhere")
    try:
        for directory in (tmp_path, tmp_path / "below"):
            medium = DiskMedium(str(directory), MIB, host_memory)
            with pytest.raises(PermissionError, match=f"{directory}: it may not be written to"):
                medium.write(some_bytes(1000), PlainLink())
    finally:
        tmp_path.chmod(0o700)


def test_a_directory_that_is_read_only(medium, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "open", fails(errno.EROFS))
    with pytest.raises(OSError, match="the file system is read-only"):
        medium.write(some_bytes(1000), PlainLink())
    assert list(tmp_path.iterdir()) == []


# --- Bytes that are not what they were ---


def torn_bytes(place, other):
    os.pwrite(place.segment.descriptor, b"\x00\x01\x02", place.begin + 4096 + 500)


def torn_header(place, other):
    os.pwrite(place.segment.descriptor, b"\xff", place.begin + 20)


def foreign_header(place, other):
    os.pwrite(place.segment.descriptor, b"something else entirely", place.begin)


def header_of_another(place, other):
    os.pwrite(place.segment.descriptor, os.pread(other.segment.descriptor, 4096, other.begin), place.begin)


def cut_short(place, other):
    os.ftruncate(place.segment.descriptor, place.begin + 4096 + 900)


def cut_in_the_header(place, other):
    os.ftruncate(place.segment.descriptor, place.begin + 10)


@pytest.mark.parametrize(
    ("tear", "what"),
    [
        (torn_bytes, "their checksum is [0-9a-f]{8}, and was"),
        (torn_header, "the header before them is not one of recollect's"),
        (foreign_header, "the header before them is not one of recollect's"),
        (header_of_another, "the header before them is that of write [0-9]+, of 1000 bytes, not of [0-9]+"),
        (cut_short, "the file ends 100 bytes early"),
        (cut_in_the_header, "the file ends 26 bytes early"),
    ],
)
def test_torn_files_are_found(medium, link, tmp_path, tear, what):
    other = written(medium.write(some_bytes(1000, 1), link))
    held = written(medium.write(some_bytes(1000), link))
    tear(held._place, other._place)
    for _ in range(2):
        incoming = held.fetch()
        for _ in range(2):
            with pytest.raises(
                CheckpointError, match=f"1000 bytes .* in {tmp_path} did not come back .*: {what}"
            ) as caught:
                incoming.take()
        assert caught.value.cause in str(caught.value)
    held.release()
    assert torch.equal(come_back(other, 1000), some_bytes(1000, 1))
    assert_round_trip(medium, link, 1000)
    assert_all_staging_is_back(medium)


# --- What the medium rests on ---


def test_a_range_of_nothing_has_a_place_of_its_own():
    ranges = Ranges(4096, 512)
    first, nothing = ranges.take(512), ranges.take(0)
    assert (first, nothing) == (0, 512)
    ranges.give(first, 512)
    ranges.give(nothing, 0)
    assert ranges.is_empty()
    assert ranges.take(4096) == 0
    assert ranges.take(0) is None


def test_a_pool_with_less_room_than_a_place_takes_takes_nothing():
    pool = Pool(100, host_memory)
    assert pool.take(10) is None
    assert pool.take(0) is None
    assert (pool.bytes, pool.allocations) == (0, 0)
    pool.start_over(10)
    assert pool.take(10).size == 10
    with pytest.raises(AssertionError, match="somebody uses a block"):
        pool.start_over(10)


# --- In a store ---


@pytest.fixture
def store(tmp_path):
    return Store(DiskMedium(str(tmp_path), 2**20, host_memory), ("cpu",), 0, None, None)


def test_a_change_after_the_host_has_copied_is_no_concern_of_the_copy(store):
    for step in range(3):
        tensor = torch.randn(100)
        before = tensor.clone()
        ticket = store.put(tensor)
        if step:
            tensor.mul_(2)
        assert torch.equal(store.get(ticket), before)
        del ticket


def test_parts_of_one_memory_that_count_their_changes_apart_are_copied_apart(store):
    whole = torch.randn(3, 100)
    parts = torch.unsafe_chunk(whole, 3)
    tickets = [store.put(part.mul_(2)) for part in parts]
    for ticket, part in zip(tickets, parts, strict=True):
        assert torch.equal(store.get(ticket), part)


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN])
def test_recurrent_networks(kind, tmp_path):
    """They change parts of one memory in place, each with a version counter of its own."""
    network, x = kind(4, 4, num_layers=2), torch.randn(3, 2, 4)
    network(x)[0].sin().sum().backward()
    expected = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    with recollect.offload(to="disk", directory=tmp_path, min_bytes=0):
        loss = network(x)[0].sin().sum()
    loss.backward()
    assert all(map(torch.equal, [parameter.grad for parameter in network.parameters()], expected))


def test_what_fails_ahead_of_its_use_fails_for_who_asks_for_it(store, monkeypatch):
    tensors = [torch.randn(100) for _ in range(2)]
    tickets = [store.put(tensor) for tensor in tensors]

    def fail(_):
        raise OSError(errno.EIO, "no")

    broken, fetch = tickets[0].copy.held, _OnDisk.fetch
    monkeypatch.setattr(_OnDisk, "fetch", lambda held: fail(held) if held is broken else fetch(held))
    assert torch.equal(store.get(tickets[1]), tensors[1])
    with pytest.raises(OSError, match="no"):
        store.get(tickets[0])
