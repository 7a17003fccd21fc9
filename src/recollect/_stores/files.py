"""Bytes in files: where they are, and whether they are still what was written.

Files. There are few of them, the segments, each of them large, with mode 0600. They have no name, so that nothing is
left behind whatever happens to the process: where the system can make a file without one (Linux, on most file systems),
there never was any; elsewhere a segment is made in a directory of its own (0700), and file and directory are removed as
soon as it is open. Its room is reserved at once, so that a full disk shows where room is asked for and not later. Room
is used again from step to step.

Bytes. Each write has a page for its header and then the bytes as they are. The header says which write it was, how many
bytes, and their checksum, and has a checksum of its own; it is written last. Nothing is given out that does not match.

Who is done with a place puts it in a queue, without a lock, and who needs one looks there: letting go never waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import shutil
import struct
import tempfile
import threading
import weakref
import zlib
from collections import deque

from torch import Tensor

from recollect import _errors
from recollect._stores.ranges import Ranges

_PAGE = 4096
_SMALLEST, _LARGEST = 2**26, 2**30  # of segments, unless what is asked for is larger still
_PIECE = 2**25  # as much as is read or written at once: between two of them a thread has to wait for the GIL

# Magic, version, which write, how many bytes, their checksum; then the checksum of all this.
_HEADER = struct.Struct("<8sIQQI")
_HEADER_CHECKSUM = struct.Struct("<I")
_MAGIC, _VERSION = b"recollec", 1
_numbers = itertools.count(1)
_NAME = "segment"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


class TornError(Exception):
    """What was read is not what was written."""


# --- Bytes in files ---


def _bytes_of(memory: Tensor) -> memoryview:
    """The bytes of flat memory of the host, which has to outlive them."""
    size = memory.numel()
    return memoryview((ctypes.c_char * size).from_address(memory.data_ptr()) if size else bytearray())


def _pieces(memory: Tensor, begin: int) -> list[tuple[int, memoryview]]:
    """The bytes, and where in the file each piece of them is."""
    view = _bytes_of(memory)
    return [(begin + at, view[at : at + _PIECE]) for at in range(0, len(view), _PIECE)]


def _write_all(descriptor: int, view: memoryview, begin: int) -> None:
    while len(view):
        written = os.pwrite(descriptor, view, begin)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        view, begin = view[written:], begin + written


def _read_all(descriptor: int, view: memoryview, begin: int) -> None:
    while len(view):
        read = os.preadv(descriptor, [view], begin)
        if not read:
            raise TornError(f"the file ends {len(view)} bytes early")
        view, begin = view[read:], begin + read


class _Segment:
    """A file without a name. It is closed when nobody holds it any more."""

    def __init__(self, directory: str, size: int) -> None:
        self.descriptor, private = _without_a_name(directory) or _with_a_name(directory)
        self.ranges = Ranges(size, _PAGE)
        if private is not None:
            try:
                os.unlink(os.path.join(private, _NAME))
                os.rmdir(private)
                private = None
            except OSError:  # not every file system forgets the name of an open file
                pass
        self.close = weakref.finalize(self, _close, self.descriptor, private, os.getpid())
        try:
            _reserve(self.descriptor, size)
        except BaseException:
            self.close()
            raise


def _without_a_name(directory: str) -> tuple[int, None] | None:
    """A file that cannot be given a name later either, open; None where there is no such thing."""
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_EXCL | os.O_CLOEXEC, 0o600), None
    except (AttributeError, OSError):  # what is wrong with the directory is said when a name is tried
        return None


def _with_a_name(directory: str) -> tuple[int, str]:
    """A file, open, and the directory that has nothing else in it."""
    private = tempfile.mkdtemp(prefix="recollect-", dir=directory)
    try:
        path = os.path.join(private, _NAME)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), private
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(private)
        raise


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    os.ftruncate(descriptor, size)


def _close(descriptor: int, private: str | None, process: int) -> None:
    os.close(descriptor)
    if private is not None and os.getpid() == process:  # not in a forked child
        shutil.rmtree(private, ignore_errors=True)


class Place:
    """Where in the files the bytes of one write are, and how it went."""

    __slots__ = ("begin", "error", "is_released", "is_told", "number", "readers", "segment", "size", "written")

    def __init__(self, segment: _Segment, begin: int, size: int) -> None:
        self.segment = segment
        self.begin = begin
        self.size = size
        self.number = next(_numbers)
        self.written = threading.Event()
        self.readers: set[object] = set()
        self.error: BaseException | None = None  # of the write
        self.is_told = False  # whether somebody knows of the error
        self.is_released = False

    def write(self, memory: Tensor) -> None:
        descriptor, checksum = self.segment.descriptor, 0
        for begin, piece in _pieces(memory, self.begin + _PAGE):
            checksum = zlib.crc32(piece, checksum)
            _write_all(descriptor, piece, begin)
        header = _HEADER.pack(_MAGIC, _VERSION, self.number, self.size, checksum)
        header += _HEADER_CHECKSUM.pack(zlib.crc32(header))
        _write_all(descriptor, memoryview(header.ljust(_PAGE, b"\0")), self.begin)

    def read(self, memory: Tensor) -> None:
        descriptor, checksum = self.segment.descriptor, 0
        expected = self._read_header()
        for begin, piece in _pieces(memory, self.begin + _PAGE):
            _read_all(descriptor, piece, begin)
            checksum = zlib.crc32(piece, checksum)
        if checksum != expected:
            raise TornError(f"their checksum is {checksum:08x}, and was {expected:08x}")

    def _read_header(self) -> int:
        """The checksum that the bytes must have."""
        header = memoryview(bytearray(_HEADER.size + _HEADER_CHECKSUM.size))
        _read_all(self.segment.descriptor, header, self.begin)
        magic, version, number, size, checksum = _HEADER.unpack_from(header)
        (of_header,) = _HEADER_CHECKSUM.unpack_from(header, _HEADER.size)
        if magic != _MAGIC or of_header != zlib.crc32(header[: _HEADER.size]):
            raise TornError("the header before them is not one of recollect's")
        if (version, number, size) != (_VERSION, self.number, self.size):
            raise TornError(f"the header before them is that of write {number}, of {size} bytes, not of {self.number}")
        return int(checksum)


class Files:
    """The segments, and which room in them is free."""

    def __init__(self, directory: str | None) -> None:
        self.directory = tempfile.gettempdir() if directory is None else os.path.expanduser(directory)
        self.directory = os.path.abspath(self.directory)
        self.released: deque[Place] = deque()  # some of which are being written or read still
        self._segments: list[_Segment] = []
        self._was_made = False
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return sum(segment.ranges.size for segment in self._segments)

    def prepare(self) -> None:
        """Have the directory there, once: if it vanishes later, something is wrong."""
        if not self._was_made:
            _make(self.directory)
            self._was_made = True

    def take(self, size: int) -> Place:
        with self._lock:
            self._collect()
            for segment in self._segments:
                begin = segment.ranges.take(_PAGE + size)
                if begin is not None:
                    return Place(segment, begin, size)
            segment = self._another(-(-size // _PAGE) * _PAGE + _PAGE)
            self._segments.append(segment)
            begin = segment.ranges.take(_PAGE + size)
            assert begin is not None
            return Place(segment, begin, size)

    def _collect(self) -> None:
        for _ in range(len(self.released)):
            place = self.released.popleft()
            if place.written.is_set() and not place.readers:
                place.segment.ranges.give(place.begin, _PAGE + place.size)
            else:
                self.released.append(place)

    def _another(self, size: int) -> _Segment:
        self.prepare()
        try:
            return _Segment(self.directory, max(size, _SMALLEST, min(self.bytes // 4, _LARGEST)))
        except OSError as error:
            if error.errno not in _FULL:
                raise
        # No more than is needed then, and without the segments in which there is nothing.
        empty = [segment for segment in self._segments if segment.ranges.is_empty()]
        self._segments = [segment for segment in self._segments if segment not in empty]
        for segment in empty:
            segment.close()
        return _Segment(self.directory, size)


def not_written(directory: str, size: int, error: BaseException) -> Exception:
    """What to say if bytes could not be written there."""
    free = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(directory).free
    return _errors.not_written_to_disk(directory, size, free, error)


def _make(directory: str) -> None:
    """With all directories above it, for this user alone."""
    if not os.path.isdir(directory):
        _make(os.path.dirname(directory))
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            if not os.path.isdir(directory):  # else somebody else was faster
                raise
